"""Tracing for real: a process that writes files once and reads them three times, on each file system, as root."""

import asyncio
import contextlib
import functools
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.blockio.attach import device_number
from harness.blockio.characterize import block_figures, file_figures, page_cache_share
from harness.blockio.devices import Device, create, destroy
from harness.blockio.fio import Job, measure
from harness.collectors.bpf import BpfTrace, read_block, read_files
from harness.collectors.host import read_host
from harness.experiment.storage import DeviceSettings
from tests.support.paths import ROOT

MIB = 2**20
MISSING = [tool for tool in ("bpftrace", "fio", "mkfs.xfs", "mkfs.btrfs") if not shutil.which(tool)]
pytestmark = [
    pytest.mark.real,
    pytest.mark.alone,
    pytest.mark.usefixtures("tracefs"),
    pytest.mark.skipif(os.geteuid() != 0, reason="tracing and reference devices need root"),
    pytest.mark.skipif(bool(MISSING), reason=f"missing {', '.join(MISSING)}; scripts/test installs them"),
]

# As LMCache's fs adapter does it: one open and one call a file, renamed when it is whole.
WORK = """
import os, subprocess, sys, time
folder = sys.argv[1] + "/" + "long" * 50  # longer than a part of a path in the trace
os.makedirs(folder, exist_ok=True)
if len(sys.argv) == 2:
    sys.stdin.readline()
    subprocess.run([sys.executable, __file__, sys.argv[1], "child"], check=True)
    sys.exit()
for number in range(4):
    with open(f"{folder}/{number}.tmp", "wb", buffering=0) as file:
        file.write(bytes(2 << 20))
    os.rename(f"{folder}/{number}.tmp", f"{folder}/{number}.data")
os.sync()
for turn in range(3):
    for number in range(4):
        file = os.open(f"{folder}/{number}.data", os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(file, 0, 0)
        while os.read(file, 2 << 20):
            pass
        os.close(file)
"""


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    name = f"test-io-{os.getpid()}"
    file_system, _, bandwidth = request.param.partition(" ")
    settings = {"file_system": file_system, "bandwidth": bandwidth or "200MiB/s", "size": "512MiB"}
    yield create(name, DeviceSettings.model_validate(settings))
    destroy(name, patience_s=30)


def statistics(device: Device) -> tuple[int, int]:
    """Bytes read and written, by the kernel's own account."""
    assert device.loop is not None
    fields = (Path("/sys/block") / Path(device.loop).name / "stat").read_text().split()
    return int(fields[2]) * 512, int(fields[6]) * 512


@pytest.mark.parametrize("device", ["ext4", "xfs", "btrfs"], indirect=True)
def test_traces_hold_a_process_s_file_calls_and_block_requests(device: Device, tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text(WORK)
    child = subprocess.Popen([sys.executable, str(script), str(device.mount)], stdin=subprocess.PIPE, text=True)
    number = device_number(device.mount)
    assert number == device.device_number

    async def traced() -> tuple[int, float, tuple[int, int]]:
        trace = BpfTrace(tmp_path / "io", device_number=number, pids=[child.pid])
        await trace.start()
        began_s, before = time.monotonic(), statistics(device)
        zero_ns = trace.zero_ns(lambda: 100.0 + time.monotonic() - began_s)
        try:
            await asyncio.to_thread(child.communicate, "go\n", 60)
            after = statistics(device)
        finally:
            assert await trace.stop() == 0
        return zero_ns, time.monotonic() - began_s, (after[0] - before[0], after[1] - before[1])

    zero_ns, took_s, (read_bytes, written_bytes) = asyncio.run(traced())
    calls = [c for c in read_files(tmp_path / "io" / "files.jsonl", zero_ns) if c.path.startswith(str(device.mount))]
    files = file_figures(calls)
    assert files.files == 4 and files.opens == 4 * 4 and files.random == 0
    assert files.write_bytes == 8 * MIB and files.read_bytes == 24 * MIB
    assert {each.name: each.read_bytes // each.write_bytes for each in files.each} == {
        f"{index}.data": 3 for index in range(4)
    }
    assert sum(call.kind == "sync" for call in calls) == 12
    assert all(100 <= call.at_s <= 100 + took_s for call in calls), "not on the run's clock"
    requests = read_block(tmp_path / "io" / "block.jsonl", zero_ns)
    read = block_figures([r for r in requests if not r.write])
    written = block_figures([r for r in requests if r.write])
    assert read.bytes == read_bytes >= 24 * MIB
    assert written.bytes == pytest.approx(written_bytes, rel=0.02, abs=2**18)
    # The kernel lets a device catch up on what it was held back, so that 24 MiB may take a little less than 120 ms.
    assert read.bytes_per_s is not None and read.bytes_per_s <= 1.1 * 200 * MIB and read.sequential > read.random
    assert read_host(device.mount).read_bytes == statistics(device)[0]
    assert page_cache_share([r for r in requests if not r.write], calls) == 0
    assert not _mentioning(str(tmp_path))


@pytest.mark.parametrize("device", ["ext4 40MiB/s", "xfs 40MiB/s"], indirect=True)
def test_a_split_read_takes_the_time_of_all_its_bytes(device: Device, tmp_path: Path) -> None:
    """Into pages that lie apart, 1 MiB is two requests: both are issued at once, and the second waits for the first."""
    count, pages = 12, MIB // mmap.PAGESIZE
    (device.mount / "f").write_bytes(os.urandom(count * MIB))
    subprocess.run(["sync", "-f", str(device.mount)], check=True)
    number = device_number(device.mount)
    memory = mmap.mmap(-1, 64 * MIB)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    for page in random.Random(0).sample(range(64 * pages), 64 * pages):
        memory[page * mmap.PAGESIZE] = 1

    async def traced() -> int:
        trace = BpfTrace(tmp_path / "io", device_number=number, pids=[])
        await trace.start()
        zero_ns, file = trace.zero_ns(time.monotonic), os.open(device.mount / "f", os.O_RDONLY | os.O_DIRECT)
        for index in range(count):
            buffer = memoryview(memory)[index * MIB : (index + 1) * MIB]
            assert os.preadv(file, [buffer], index * MIB) == MIB
            time.sleep(0.06)
        os.close(file)
        assert await trace.stop() == 0
        return zero_ns

    zero_ns = asyncio.run(traced())
    requests = read_block(tmp_path / "io" / "block.jsonl", zero_ns)
    read = block_figures([r for r in requests if not r.write])
    assert read.bytes == count * MIB and read.split >= count - 2 and read.requests >= 2 * read.split
    assert read.split_d2c_s.mean == pytest.approx(MIB / (40 * MIB), rel=0.05)
    assert read.d2c_s.mean is not None and read.d2c_s.mean < 0.9 * MIB / (40 * MIB)


@pytest.mark.parametrize("device", ["ext4", "xfs", "btrfs"], indirect=True)
def test_the_scripts_follow_a_process_tree_by_themselves(device: Device, tmp_path: Path) -> None:
    """The scripts follow a shell; the child of its child reads. The child runs before the trace starts.

    The traces must not hold the calls of an unrelated process that reads in between.
    """
    script, foreign = tmp_path / "work.py", device.mount / "foreign"
    script.write_text(WORK)
    foreign.write_bytes(os.urandom(16 * MIB))
    subprocess.run(["sync", "-f", str(device.mount)], check=True)
    command = f"{sys.executable} {script} {device.mount}; true"
    shell = subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE, text=True)
    _wait_for(lambda: Path(f"/proc/{shell.pid}/task/{shell.pid}/children").read_text() != "")
    running = []
    for name, arguments in (("block", [str(shell.pid), str(device.device_number), "1"]), ("files", [str(shell.pid)])):
        output = ["-f", "json", "-o", str(tmp_path / f"{name}.jsonl")]
        script_path = str(ROOT / "harness/collectors/bpf" / f"{name}.bt")
        running.append(subprocess.Popen(["bpftrace", *output, script_path, *arguments]))
    try:
        for name in ("block", "files"):
            _wait_for(functools.partial(_is_ready, tmp_path / f"{name}.jsonl"))
        before = sum(statistics(device))
        read_foreign = ["dd", f"if={foreign}", "iflag=direct", "bs=1M", "of=/dev/null", "status=none"]
        subprocess.run(read_foreign, check=True)
        shell.communicate("go\n", 60)
        moved = sum(statistics(device)) - before
        time.sleep(0.5)  # until bpftrace has printed the last lines
    finally:
        for process in running:
            _end(process)
    requests = read_block(tmp_path / "block.jsonl", 0)
    # btrfs reads its check sums too.
    assert 24 * MIB <= sum(r.bytes for r in requests if not r.write) <= 24.5 * MIB
    maps = [json.loads(line) for line in _text(tmp_path / "block.jsonl").splitlines() if "@others_bytes" in line]
    others = maps[0]["data"]["@others_bytes"]
    assert others["dd"] >= 15 * MIB
    assert sum(r.bytes for r in requests) + sum(others.values()) == pytest.approx(moved, rel=0.03)
    calls = [call for call in read_files(tmp_path / "files.jsonl", 0) if call.path.startswith(str(device.mount))]
    assert sum(call.bytes for call in calls if call.kind == "read") == 24 * MIB


@pytest.mark.parametrize("name", ["block", "files"])
def test_a_script_without_a_process_tells_its_usage(name: str) -> None:
    script = ROOT / "harness/collectors/bpf" / f"{name}.bt"
    done = subprocess.run(["bpftrace", str(script)], capture_output=True, text=True, timeout=30, check=False)
    assert f"{name}.bt PID" in done.stdout and "ready" not in done.stdout


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _is_ready(path: Path) -> bool:
    return "ready" in _text(path)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Asks again: bpftrace misses a signal that comes while it handles events."""
    for _ in range(10):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
            return
    raise AssertionError(f"process {process.pid} does not end")


def _wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("device", ["ext4", "xfs"], indirect=True)
def test_fio_reaches_what_the_device_has_and_leaves_nothing(device: Device) -> None:
    found = measure(device.mount, Job("psync", "psync", 2**17, 8), seconds=2, file_bytes=128 * MIB)
    assert found.read_bytes_per_s == pytest.approx(200 * MIB, rel=0.1)
    assert not [path for path in device.mount.iterdir() if path.name != "lost+found"]


def test_bpftrace_ends_with_a_killed_harness(tmp_path: Path) -> None:
    program = (
        "import asyncio, os, signal; from pathlib import Path; from harness.collectors.bpf import BpfTrace\n"
        f"trace = BpfTrace(Path({str(tmp_path)!r}), device_number=0, pids=[os.getpid()])\n"
        "asyncio.run(trace.start()); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=False)
    deadline = time.monotonic() + 15
    while (left := _mentioning(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


MANY_FILES = """
import os, sys, time
for number in range(1000):
    file = os.open(f"{sys.argv[1]}/{number:04}", os.O_CREAT | os.O_WRONLY)
    os.write(file, b"x" * 100)
    os.close(file)
    time.sleep(0.0005)
"""


def test_paths_stay_whole_when_a_core_has_more_lines_than_one_turn_prints(tmp_path: Path) -> None:
    """bpftrace prints each core's lines in turns, and a turn may end within a path."""
    folder = tmp_path / ("a" * 100) / ("b" * 100)
    folder.mkdir(parents=True)

    async def traced() -> None:
        trace = BpfTrace(tmp_path / "io", device_number=1, pids=[os.getpid()])
        await trace.start()
        children = [subprocess.Popen([sys.executable, "-c", MANY_FILES, str(folder)]) for _ in range(4)]
        try:
            assert [await asyncio.to_thread(child.wait, 60) for child in children] == [0] * 4
        finally:
            assert await trace.stop() == 0

    asyncio.run(traced())
    calls = [call for call in read_files(tmp_path / "io" / "files.jsonl", 0) if "/aaaa" in call.path]
    for kind in ("open", "write"):
        paths = [call.path for call in calls if call.kind == kind]
        assert sorted(paths) == sorted(4 * [f"{folder}/{number:04}" for number in range(1000)])


def _mentioning(text: str) -> list[bytes]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes()
        except OSError:
            continue
        if text.encode() in words and b"bpftrace" in words:
            found.append(words)
    return found
