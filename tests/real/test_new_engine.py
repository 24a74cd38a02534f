"""A new engine is traced by nothing but the seams: its kind says where its files are, its cache server whose they are.

The toys (tests/support/toy) move real bytes in a process of their own.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.blockio import devices
from harness.experiment.storage import DeviceSettings
from harness.records import IoTrace
from harness.results.folder import read_rows, read_samples, read_traces
from harness.results.manifest import read_manifest
from harness.results.traced import TraceFigures, read_io
from tests.support.toy.command import told

MIB = 2**20
# Half of the prompt is a prefix of 8 chunks of 2 MiB.
PREFIX_BYTES = 16 * MIB
EXPERIMENT: dict[str, Any] = {
    "name": "toy",
    "workload": {"kind": "prefix", "prompt_tokens": 1025, "hit_rate": 0.5},
    "measure": {"tiers": ["disk", "disk_cold"], "samples": 3},
    "cache": {"chunk_tokens": 64, "gpu": "512MiB", "cpu": "1GiB", "disk": {"capacity": "256MiB"}},
}
DEVICE = {"bandwidth": "200MiB/s", "size": "512MiB"}
pytestmark = [
    pytest.mark.real,
    pytest.mark.alone,
    pytest.mark.usefixtures("tracefs"),
    pytest.mark.skipif(os.geteuid() != 0, reason="tracing and reference devices need root"),
    pytest.mark.skipif(not shutil.which("bpftrace"), reason="no bpftrace; scripts/test installs it"),
]


@pytest.fixture
def own_device() -> Iterator[devices.Device]:
    name = f"test-toy-{os.getpid()}"
    yield devices.create(name, DeviceSettings.model_validate(DEVICE))
    devices.destroy(name, patience_s=30)


def traced(folder: Path, **config: Any) -> tuple[IoTrace, TraceFigures]:
    """The trace of a run of the toy, and what it came to; every row of the run is proven."""
    done = told(folder, "run", "--engine", "toy", "--out", str(folder / "run"), **EXPERIMENT, **config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row.verdict for row in read_rows(folder / "run")} == {None, "proven"}
    [(_, trace)], io = read_traces(folder / "run"), read_io(folder / "run")
    assert io is not None
    return trace, io.traces[0]


def check_accounts(found: TraceFigures) -> None:
    """Eight chunks are written once and read once a sample, half of the samples from the device: by all accounts."""
    files = found.files
    assert {(each.opens, each.writes, each.reads) for each in files.each} == {(1 + 6, 1, 6)}
    assert files.files == 8 and files.write_bytes == PREFIX_BYTES and files.read_bytes == 6 * PREFIX_BYTES
    assert found.lost_events == 0 and len({check.account for check in found.checks}) == 5
    for check in found.checks:
        assert check.bytes == pytest.approx(3 * PREFIX_BYTES, rel=0.01), check
        assert check.deviation is not None and abs(check.deviation) < 0.01, check


def test_its_process_and_the_device_made_for_the_run_are_traced(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    toy = {"disk": "real", "cores": {"client": [core]}}
    trace, found = traced(tmp_path, storage={"trace": True, "device": DEVICE}, engines={"toy": toy})
    [cell] = read_manifest(tmp_path / "run").cells
    assert cell.device is not None and cell.resolved is not None
    assert trace.path == cell.device.mount and trace.pids == cell.resolved.io_pids
    assert len(trace.pids) == 1 and not Path(f"/proc/{trace.pids[0]}").exists()
    assert (tmp_path / "run/logs/toy-store.log").read_text().splitlines() == [f"runs on cores {core}"]
    check_accounts(found)
    # 16 MiB at 200 MiB/s.
    assert all(part.device_s > 0.9 * 16 / 200 for part in found.requests if part.tier == "disk_cold")
    assert cell.device.name not in devices.left()


def test_the_device_is_that_of_the_folder_which_its_kind_names(tmp_path: Path, own_device: devices.Device) -> None:
    toy = {"disk": "real", "folder": str(own_device.mount)}
    trace, found = traced(tmp_path, storage={"trace": True}, engines={"toy": toy})
    assert trace.path == str(own_device.mount) and trace.device_number == own_device.device_number
    check_accounts(found)
    samples = list(read_samples(tmp_path / "run"))
    assert all(sample.host.taken_share is not None for sample in samples), "engines of real time look before each"
    read_bytes = {sample.tier: sample.host.device_read_bytes for sample in samples}
    assert read_bytes["disk"] == 0 and read_bytes["disk_cold"] == pytest.approx(PREFIX_BYTES, rel=0.01)
    assert not [path for path in own_device.mount.iterdir() if path.name != "lost+found"]
