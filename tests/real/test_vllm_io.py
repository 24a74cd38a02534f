"""What vLLM with LMCache does to its disk: files written once and read once a repetition, by four accounts alike."""

import os
import shutil
from pathlib import Path

import pytest

from harness.blockio import refdevice
from harness.results import read_io
from harness.run import run
from harness.seal import seal
from tests.real.test_vllm import PYTHON, left_behind, request
from tests.unit.test_run_loop import Quiet, measured

MIB = 2**20
pytestmark = [
    pytest.mark.real,
    pytest.mark.usefixtures("tracefs"),
    pytest.mark.skipif(not PYTHON.exists(), reason="no engine environment; `scripts/engine_env vllm` makes it"),
    pytest.mark.skipif(os.geteuid() != 0, reason="tracing and reference devices need root"),
    pytest.mark.skipif(not shutil.which("bpftrace"), reason="no bpftrace; scripts/test installs it"),
]


def test_sixteen_chunks_are_written_once_and_read_once_a_repetition(tmp_path: Path) -> None:
    asked = request(
        tmp_path,
        workload={"kind": "prefix", "prompt_tokens": 1025},
        measure={"tiers": ["disk_cold"], "samples": 4},
        cache={"block_tokens": 32, "chunk_tokens": 64, "gpu": "512MiB", "cpu": "1GiB", "disk": {"capacity": "768MiB"}},
        storage={"trace": True, "device": {"bandwidth": "200MiB/s", "size": "1GiB"}},
        sweep={"storage.device.file_system": ["ext4", "xfs"]},
    )
    folder = run(asked, Quiet())
    assert {row.verdict for row in measured(folder)} == {"proven"}
    seal(folder)
    io = read_io(folder)
    assert io is not None and [trace["file_system"] for trace in io["traces"]] == ["ext4", "xfs"]
    for trace in io["traces"]:
        files = trace["files"]
        assert files["files"] == 16 and trace["lost_events"] == 0
        for each in files["each"]:
            assert (each["opens"], each["writes"], each["reads"]) == (1 + 4, 1, 4)
            assert (each["write_bytes"], each["read_bytes"]) == (2 * MIB, 4 * 2 * MIB)
        assert len(trace["checks"]) == 5
        for check in trace["checks"]:
            assert abs(check["deviation"]) < 0.01, check
        for part in trace["requests"]:
            assert sum(part[f"{name}_s"] for name in ("engine", "lookup", "host", "device")) == pytest.approx(
                part["ttft_s"]
            )
            # 32 MiB at 200 MiB/s cannot take less at the device.
            assert part["device_s"] > 0.95 * 32 / 200 and min(part["engine_s"], part["host_s"], part["lookup_s"]) >= 0
    assert "Whose time a request" in (folder / "report.html").read_text()
    assert not left_behind(tmp_path) and not [name for name in refdevice.left() if str(os.getpid()) in name]
