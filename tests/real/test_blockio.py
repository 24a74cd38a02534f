"""Tracing for real: a process that writes files once and reads them three times, on each file system, as root."""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.blockio.characterize import block_figures, file_figures
from harness.blockio.fio import Job, measure
from harness.blockio.refdevice import Device, create, destroy
from harness.blockio.session import device_numbers
from harness.collectors.bpf import BpfTrace, read_block, read_files
from harness.strict import Device as DeviceSpec

ROOT = Path(__file__).parents[2]
MIB = 2**20
MISSING = [tool for tool in ("bpftrace", "fio", "mkfs.xfs", "mkfs.btrfs") if not shutil.which(tool)]
pytestmark = [
    pytest.mark.real,
    pytest.mark.usefixtures("tracefs"),
    pytest.mark.skipif(os.geteuid() != 0, reason="tracing and reference devices need root"),
    pytest.mark.skipif(bool(MISSING), reason=f"missing {', '.join(MISSING)}; scripts/test installs them"),
]

# As LMCache's fs adapter does it: one open and one call a file, renamed when it is whole.
WORK = """
import os, subprocess, sys, time
folder = sys.argv[1] + "/" + "long" * 50  # longer than one line of the trace holds
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
    settings = {"file_system": request.param, "bandwidth": "200MiB/s", "size": "512MiB"}
    yield create(name, DeviceSpec.model_validate(settings))
    destroy(name, patience_s=30)


def statistics(device: Device) -> tuple[int, int]:
    """Bytes read and written, by the kernel's own account."""
    assert device.loop is not None
    fields = (Path("/sys/block") / Path(device.loop).name / "stat").read_text().split()
    return int(fields[2]) * 512, int(fields[6]) * 512


@pytest.mark.parametrize("device", ["ext4", "xfs", "btrfs"], indirect=True)
def test_what_a_process_does_is_seen_at_its_files_and_at_the_device(device: Device, tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text(WORK)
    child = subprocess.Popen([sys.executable, str(script), str(device.mount)], stdin=subprocess.PIPE, text=True)
    number, system = device_numbers(device.mount)
    assert number == device.device_number

    async def traced() -> tuple[int, float, tuple[int, int]]:
        trace = BpfTrace(tmp_path / "io", device_number=number, file_system_number=system, pids=[child.pid])
        await trace.start()
        zero_ns, began_s, before = trace.zero_ns(100.0), time.monotonic(), statistics(device)
        try:
            await asyncio.to_thread(child.communicate, "go\n", 60)
            after = statistics(device)
        finally:
            assert await trace.stop() == 0
        return zero_ns, time.monotonic() - began_s, (after[0] - before[0], after[1] - before[1])

    zero_ns, took_s, (read_bytes, written_bytes) = asyncio.run(traced())
    calls = [c for c in read_files(tmp_path / "io" / "files.jsonl", zero_ns) if c.path.startswith(str(device.mount))]
    files = file_figures(calls)
    assert files["files"] == 4 and files["opens"] == 4 * 4 and files["random"] == 0
    assert files["write_bytes"] == 8 * MIB and files["read_bytes"] == 24 * MIB
    assert {each["name"]: each["read_bytes"] // each["write_bytes"] for each in files["each"]} == {
        f"{index}.data": 3 for index in range(4)
    }
    assert sum(call.kind == "sync" for call in calls) == 12
    assert all(100 <= call.at_s <= 100 + took_s for call in calls), "not on the run's clock"
    requests, pages = read_block(tmp_path / "io" / "block.jsonl", zero_ns)
    read = block_figures([r for r in requests if not r.write])
    written = block_figures([r for r in requests if r.write])
    assert read["bytes"] == pytest.approx(read_bytes, rel=0.01) and read_bytes >= 24 * MIB
    assert written["bytes"] == pytest.approx(written_bytes, rel=0.02, abs=2**18)
    assert read["bytes_per_s"] <= 1.02 * 200 * MIB and read["sequential"] > read["random"]
    if device.file_system != "btrfs":  # its files have no device number of their own
        assert sum(count for _, count in pages) * 4096 >= 24 * MIB
    assert not _mentioning(str(tmp_path))


@pytest.mark.parametrize("device", ["ext4", "xfs"], indirect=True)
def test_fio_reaches_what_the_device_has_and_leaves_nothing(device: Device) -> None:
    found = measure(device.mount, Job("psync", "psync", 2**17, 8), seconds=2, file_bytes=128 * MIB)
    assert found.read_bytes_per_s == pytest.approx(200 * MIB, rel=0.1)
    assert not [path for path in device.mount.iterdir() if path.name != "lost+found"]


def test_bpftrace_ends_with_a_killed_harness(tmp_path: Path) -> None:
    program = (
        "import asyncio, os, signal; from pathlib import Path; from harness.collectors.bpf import BpfTrace\n"
        f"trace = BpfTrace(Path({str(tmp_path)!r}), device_number=0, file_system_number=0, pids=[os.getpid()])\n"
        "asyncio.run(trace.start()); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=False)
    deadline = time.monotonic() + 15
    while (left := _mentioning(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


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
