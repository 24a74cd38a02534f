"""What vLLM with LMCache does to its disk: files written once and read once a repetition, by four accounts alike.

And the simulator with a real disk and a file a chunk, which has to do the same.
"""

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from harness.blockio import devices as refdevice
from harness.blockio.paced import PATH_S
from harness.measure.run import run
from harness.report.io.tables import DIRECTIONS
from harness.report.refresh import seal
from harness.results.traced import Direction, TraceFigures, read_io
from tests.contract.cases import ONE_PROCESS
from tests.real.test_vllm import PYTHON, request
from tests.support.real_runs import left_behind
from tests.unit.measure.test_run_loop import Quiet, measured

MIB = 2**20
pytestmark = [
    pytest.mark.real,
    pytest.mark.usefixtures("tracefs"),
    pytest.mark.skipif(not PYTHON.exists(), reason="no engine environment; `scripts/engine_env vllm` makes it"),
    pytest.mark.skipif(os.geteuid() != 0, reason="tracing and reference devices need root"),
    pytest.mark.skipif(not shutil.which("bpftrace"), reason="no bpftrace; scripts/test installs it"),
]


@pytest.fixture
def small_requests() -> Iterator[None]:
    """Requests of 256 KiB at most on the devices of this process.

    The kernel cuts a buffered read where the memory that it fills is in pieces (a segment a page, 128 of them): of one
    file, read twice by one process, in 2 requests or in 4. Below 512 KiB memory has no say.
    """
    ended = threading.Event()

    def limit() -> None:
        while not ended.wait(0.05):
            with contextlib.suppress(OSError, msgspec.DecodeError):  # one that is being made or removed
                for device in refdevice.devices():
                    if str(os.getpid()) in device.name and device.loop is not None:
                        Path(f"/sys/block/{Path(device.loop).name}/queue/max_sectors_kb").write_text("256")

    thread = threading.Thread(target=limit)
    thread.start()
    yield
    ended.set()
    thread.join()


def block_figures(trace: TraceFigures, way: Direction) -> dict[str, float]:
    """Of one direction at the device: what has to agree."""
    block = trace.block.of(way)
    large = sum(count for size, count in block.sizes.items() if size >= 2**17)
    return {
        "bytes": block.bytes,
        "requests of 128 KiB and more": large,
        "bytes a request": block.bytes / block.requests,
        "sequential share": block.sequential / (block.sequential + block.random),
    }


def of_files(trace: TraceFigures) -> list[tuple[int, ...]]:
    """The calls on each file, without its name."""
    return sorted((each.opens, each.reads, each.writes, each.read_bytes, each.write_bytes) for each in trace.files.each)


@pytest.mark.usefixtures("small_requests")
def test_sixteen_chunks_are_written_once_and_read_once_a_repetition(tmp_path: Path) -> None:
    simulated = {"mode": "storage", "storage": {"layout": "files", "compute": "none", "reserve": "0B"}}
    asked = request(
        tmp_path,
        workload={"kind": "prefix", "prompt_tokens": 513},
        measure={"tiers": ["disk_cold"], "samples": 4},
        cache={"block_tokens": 32, "chunk_tokens": 32, "gpu": "512MiB", "cpu": "1GiB", "disk": {"capacity": "768MiB"}},
        # One file system, as each takes a start of vLLM; the kept evidence in results/io has three.
        storage={"trace": True, "device": {"bandwidth": "200MiB/s", "size": "1GiB", "file_system": "ext4"}},
        engines={"vllm": {"python": str(PYTHON), **ONE_PROCESS}, "sim": simulated},
    )
    folder = run(asked, Quiet())
    assert {row.verdict for row in measured(folder)} == {"proven"}
    seal(folder)
    io = read_io(folder)
    assert io is not None and [trace.file_system for trace in io.traces] == ["ext4"]
    for trace in io.traces:
        files = trace.files
        assert files.files == 16 and trace.lost_events == 0
        for each in files.each:
            assert (each.opens, each.writes, each.reads) == (1 + 4, 1, 4)
            assert (each.write_bytes, each.read_bytes) == (MIB, 4 * MIB)
        assert len(trace.checks) == 5
        for check in trace.checks:
            assert check.deviation is not None and abs(check.deviation) < 0.01, check
        for part in trace.requests:
            assert part.engine_s + part.lookup_s + part.host_s + part.device_s == pytest.approx(part.ttft_s)
            # 16 MiB at 200 MiB/s take no less, counted from where a turn of the device may begin: PATH_S before its
            # request arrives, which is then still in the host's hands.
            before_s = min(part.host_s, 16 * 4 * PATH_S)
            assert part.device_s + before_s > 0.95 * 16 / 200
            assert min(part.engine_s, part.host_s, part.lookup_s) >= 0
    assert "Whose time a request" in (folder / "report.html").read_text()
    assert not left_behind(tmp_path) and not [name for name in refdevice.left() if str(os.getpid()) in name]

    same = run(msgspec.structs.replace(asked, engine="sim", folder=tmp_path / "sim"), Quiet())
    assert {row.verdict for row in measured(same)} == {"proven"}
    seal(same)
    simulator = read_io(same)
    assert simulator is not None
    for real, ours in zip(io.traces, simulator.traces, strict=True):
        assert of_files(ours) == of_files(real)
        counts = [(files.files, files.sequential, files.random) for files in (ours.files, real.files)]
        assert counts[0] == counts[1]
        for way in DIRECTIONS:
            theirs = block_figures(real, way)
            for name, value in block_figures(ours, way).items():
                print(f"{real.file_system} {way} {name}: vLLM + LMCache {theirs[name]:.4g}, simulator {value:.4g}")
                assert value == pytest.approx(theirs[name], rel=0.05), (real.file_system, way, name)
    assert not list(same.glob("kv-harness-*")) and not [name for name in refdevice.left() if str(os.getpid()) in name]
