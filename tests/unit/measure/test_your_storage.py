"""The storage vendor's experiment: every point passes its preflight on the machine that its size names, and the
simulator answers all of them."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.experiment.read import load_experiment
from harness.experiment.workloads import PrefixWorkload
from harness.measure.run import RunRequest, preflight, run
from harness.results.manifest import read_manifest
from simulator.calibration import load_calibration, with_disk_of
from simulator.models import load_model
from tests.unit.measure.test_run_loop import Quiet, measured

EXPERIMENT, GIB = Path("your_storage"), 2**30
# Free memory of the machines that the sizes name: one of 2 cores and 24 GiB, and a server.
SIZES = {None: 21 * GIB, "70b": 21 * GIB, "server": 240 * GIB, "server_70b": 240 * GIB}
KV_BYTES = {None: 128 * 1024, "70b": 320 * 1024, "server": 128 * 1024, "server_70b": 320 * 1024}


def asked(folder: Path, size: str | None, engine: str) -> RunRequest:
    plan = load_experiment(EXPERIMENT, [f"engines.vllm.python={sys.executable}"], size)
    return RunRequest(name="s", cells=plan.cells(), engine=engine, experiment=plan.origin(), folder=folder)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_point_passes_its_preflight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str | None) -> None:
    monkeypatch.setattr("harness.collectors.room.available_memory_bytes", lambda: SIZES[size])
    monkeypatch.setattr("harness.collectors.room.shutil.disk_usage", lambda _: SimpleNamespace(free=100 * GIB))
    monkeypatch.setattr("harness.collectors.room.os.sched_getaffinity", lambda _: set(range(4 if size else 2)))
    monkeypatch.setattr("harness.blockio.attach.check_creatable", lambda _: None)  # takes root
    request = asked(tmp_path / "vllm", size, "vllm")
    preflight(request)
    model = load_model(request.cells[0].experiment.model)
    assert model.kv_bytes_per_token == KV_BYTES[size]
    loads = [cell.experiment.workload for cell in request.cells]
    assert all(isinstance(load, PrefixWorkload) and load.hit_rate == 1.0 for load in loads)
    if size != "70b":
        assert {load.concurrency for load in loads} == {1, 2, 4, 8}  # type: ignore[union-attr]
    else:
        assert min(load.prompt_tokens for load in loads) > 4096  # type: ignore[union-attr]
    for cell in request.cells:
        device = cell.experiment.storage.device if cell.experiment.storage else None
        assert (device is not None) == (cell.overrides["device"] == "reference")


@pytest.mark.parametrize("size", [None, "70b"], ids=str)
def test_the_simulator_answers_all_of_it(tmp_path: Path, size: str | None) -> None:
    request = asked(tmp_path / "sim", size, "sim")
    folder = run(request, Quiet())
    rows = measured(folder)
    assert {row.verdict for row in rows} == {"proven"} and {row.cell for row in rows} == {c.key for c in request.cells}
    resolved = read_manifest(folder).cells[0].resolved
    assert resolved is not None and resolved.preset is not None
    assert resolved.preset.name.endswith(" with the disk of rtx-4000ada-ssd")
    for cell in request.cells:
        load = cell.experiment.workload
        assert isinstance(load, PrefixWorkload)
        nbytes = load.concurrency * (load.prompt_tokens - 1) * KV_BYTES[size]
        if cell.overrides["device"] == "reference":
            cold = [row.ttft_s or 0.0 for row in rows if (row.cell, row.expected_tier) == (cell.key, "disk_cold")]
            assert max(cold) > nbytes / GIB, "a device of 1 GiB/s answered earlier than it can"


def test_a_gpu_before_another_machine_s_disk() -> None:
    gpu, ssd = load_calibration("h100-llama-3.1-8b"), load_calibration("rtx-4000ada-ssd")
    both = with_disk_of(gpu, ssd)
    for name, value in both.constants.items():
        assert value == (ssd if name.startswith(("disk", "page_cache")) else gpu).constants[name], name
    assert both.machine.startswith(gpu.machine) and both.machine.endswith(f"the disk of {ssd.machine}")
    assert (both.synchronous_loads, both.serial_chunks) == (gpu.synchronous_loads, ssd.serial_chunks)
    assert gpu.constants["disk.read.bytes_per_s"] is None
