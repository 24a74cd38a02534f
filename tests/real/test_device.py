"""Reference devices as root: each request takes the time of the given limits, and no device leaves anything behind."""

import ctypes
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.blockio import devices as refdevice
from harness.blockio.devices import create, destroy
from harness.errors import DeviceError
from harness.experiment.storage import DeviceSettings
from tests.support.paths import ROOT

MIB = 2**20
TOOLS = ("losetup", "fio", "mkfs.ext4", "mkfs.xfs", "mkfs.btrfs")
MISSING = [tool for tool in TOOLS if not shutil.which(tool)]
pytestmark = [
    pytest.mark.real,
    pytest.mark.alone,
    pytest.mark.skipif(os.geteuid() != 0, reason="reference devices need root"),
    pytest.mark.skipif(bool(MISSING), reason=f"missing {', '.join(MISSING)}; scripts/test installs them"),
]


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{os.getpid()}"
    yield name
    if name in refdevice.left():
        destroy(name, patience_s=30)
    assert not traces(name)


def traces(name: str) -> list[str]:
    """Mounts, loop devices, processes and files that mention the device."""
    text = Path("/proc/mounts").read_text().splitlines()
    text += [path.read_text() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text.append(entry.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    home = refdevice.HOME / name
    return [line for line in text if str(home) in line] + ([str(home)] if home.exists() else [])


def spec(file_system: str = "ext4", **limits: str) -> DeviceSettings:
    return DeviceSettings.model_validate({"size": "512MiB", "file_system": file_system, **limits})


def fio(folder: Path, *options: str) -> dict[str, float]:
    """Bandwidth in bytes/s and median completion latency in s of one fio job's reads (or writes)."""
    command = ["fio", "--name=job", f"--directory={folder}", "--filename=f", "--direct=1", "--output-format=json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    job = json.loads(done.stdout)["jobs"][0]
    side = job["read"] if job["read"]["io_bytes"] else job["write"]
    percentiles = side["clat_ns"]["percentile"]
    return {"bytes_per_s": side["bw_bytes"], "p50_s": percentiles["50.000000"] / 1e9}


@pytest.mark.parametrize("file_system", ["ext4", "xfs", "btrfs"])
def test_bandwidth_and_latency_are_those_of_the_limit(name: str, file_system: str) -> None:
    device = create(name, spec(file_system, bandwidth="40MiB/s"))
    rate = 40 * MIB
    fio(device.mount, "--rw=write", "--bs=1M", "--size=120M", "--ioengine=psync")
    asked = ("--rw=read", "--bs=1M", "--size=120M", "--ioengine=io_uring", "--iodepth=16")
    assert is_kept(device, rate, 0.02, *asked)
    assert single_reads_d2c_s(device, 16) == pytest.approx(MIB / rate, rel=0.05)


def is_kept(device: refdevice.Device, bytes_per_s: float, within: float, *options: str) -> bool:
    """Whether a fio job moves so much a second, by a relative error, while the device has work: on a busy machine fio
    does not keep its queue filled.

    A job that was slower runs again, twice at most: a machine that takes its cores away for a moment makes a device
    slower, and never faster.
    """
    for _ in range(3):
        before = block_statistics(device)
        fio(device.mount, *options)
        moved = [b - a for a, b in zip(before, block_statistics(device), strict=True)]
        found = (moved[2] + moved[6]) * 512 / (moved[9] / 1000)
        print(f"{found / MIB:.2f} MiB/s of {bytes_per_s / MIB:.2f}")
        if found >= (1 - within) * bytes_per_s:
            return found <= (1 + within) * bytes_per_s
    return False


def block_statistics(device: refdevice.Device) -> list[int]:
    """Reads, merged, sectors, ms waited; the same for writes; in flight, ms with work, …"""
    assert device.loop is not None
    return [int(field) for field in (Path("/sys/block") / Path(device.loop).name / "stat").read_text().split()]


def single_reads_d2c_s(device: refdevice.Device, count: int) -> float:
    """Mean time of a read at the outer block device, for direct reads of 1 MiB with a pause between them.

    Into a huge page: a request of the block layer takes 128 pieces of memory, which of scattered pages are 512 KiB.
    """
    memory = mmap.mmap(-1, 4 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % (2 * MIB)
    memory[begin] = 1
    buffer = memoryview(memory)[begin : begin + MIB]
    file = os.open(device.mount / "f", os.O_RDONLY | os.O_DIRECT)
    before = block_statistics(device)
    for index in range(count):
        assert os.preadv(file, [buffer], index * MIB) == MIB
        time.sleep(0.04)
    os.close(file)
    requests, _, sectors, waited_ms, *_ = (b - a for a, b in zip(before, block_statistics(device), strict=True))
    # btrfs reads check sums too, and splits a read where an extent ends: so by the bytes.
    assert requests == count or (device.file_system == "btrfs" and requests == pytest.approx(count, abs=4))
    return waited_ms / 1000 * MIB / (sectors * 512)


def test_each_limit_is_kept_for_itself(name: str) -> None:
    limits = {"read_bandwidth": "80MiB/s", "write_bandwidth": "40MiB/s", "read_iops": "500", "latency": "4ms"}
    limited = DeviceSettings.model_validate({"size": "512MiB", **limits, "read_iops": 500})
    device = create(name, limited)
    deep = ["--ioengine=io_uring", "--iodepth=32"]
    assert is_kept(device, 40 * MIB, 0.03, "--rw=write", "--bs=1M", "--size=80M", *deep)
    assert is_kept(device, 80 * MIB, 0.05, "--rw=read", "--bs=1M", "--size=80M", *deep)
    assert is_kept(device, 500 * 4096, 0.03, "--rw=randread", "--bs=4k", "--size=80M", "--number_ios=500", *deep)
    alone = fio(device.mount, "--rw=randread", "--bs=4k", "--number_ios=50", "--size=80M", "--thinktime=5ms")
    assert alone["p50_s"] == pytest.approx(0.006, rel=0.1)  # 1/500 s at the device and 4 ms on the way


def test_buffered_writes_are_paced_when_they_are_written_back(name: str) -> None:
    device = create(name, spec(bandwidth="50MiB/s"), cores=[1])
    (server,) = refdevice._servers(refdevice.HOME / name)
    assert os.sched_getaffinity(server) == {1}
    began = time.monotonic()
    with (device.mount / "file").open("wb") as file:
        file.write(os.urandom(50 * MIB))
        os.fsync(file.fileno())
    assert 0.97 < time.monotonic() - began < 2.0


def test_a_file_can_hold_the_bytes(name: str, tmp_path: Path) -> None:
    device = create(name, spec(bandwidth="400MiB/s", backing=str(tmp_path)))
    data = os.urandom(8 * MIB)
    (device.mount / "file").write_bytes(data)
    subprocess.run(["sync", "-f", str(device.mount)], check=True)
    [image] = tmp_path.iterdir()
    assert image.stat().st_size == device.size_bytes and data[: 2**16] in image.read_bytes()
    destroy(name)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_harness_leaves_is_removed_by_destroy_all(name: str) -> None:
    program = (
        "import sys, time; from harness.blockio.devices import create;"
        "from harness.experiment.storage import DeviceSettings;"
        f"create({name!r}, DeviceSettings(bandwidth='100MiB/s', size='512MiB'));"
        "print('up', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert traces(name)
    (refdevice.HOME / name / "mount" / "file").write_text("in use a moment ago")
    done = subprocess.run([sys.executable, "-m", "harness", "device", "destroy", "--all"], cwd=ROOT, timeout=60,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{name}: removed" in done.stdout and not traces(name)


def test_a_killed_run_s_device_removes_itself(tmp_path: Path) -> None:
    program = f"""
import asyncio, os, signal
from pathlib import Path
from harness.blockio.attach import run_device
from harness.experiment.read import load_experiment
from harness.results.folder import RunFolder
from harness.results.manifest import CellEntry, Manifest

async def scenario():
    cells = load_experiment(Path({str(tmp_path / "e.yaml")!r})).cells()
    manifest = Manifest(run_id="x", name="x", status="started", engine="vllm", cells=[CellEntry(key=cells[0].key)])
    folder = RunFolder.create(Path({str(tmp_path / "Killed run")!r}), manifest)
    async with run_device(cells, "vllm", folder) as placed:
        print(placed[0].experiment.cache.disk.path, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(scenario())
"""
    storage = "storage: {device: {bandwidth: 100MiB/s, size: 512MiB}}"
    (tmp_path / "e.yaml").write_text(
        "name: x\nworkload: {kind: prefix, prompt_tokens: 257}\nmeasure: {tiers: [disk], samples: 1}\n"
        f"cache: {{gpu: 64MiB, cpu: 1GiB, disk: {{capacity: 256MiB}}}}\n{storage}\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    name = Path(done.stdout.strip()).parent.name
    assert name.startswith("run-killed-run-")
    deadline = time.monotonic() + 30
    while (seen := traces(name)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not seen


# At the first look for the mount, the paced file's server is still starting.
@pytest.mark.parametrize(
    ("step", "at"), [("_is_mounted", 1), ("_is_mounted", 2), ("_run", 1), ("_run", 2), ("_run", 3)]
)
def test_a_device_that_fails_half_way_leaves_nothing(
    name: str, step: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(refdevice, step)
    calls = 0

    def failing(*arguments: str) -> object:
        nonlocal calls
        calls += 1
        if calls == at:
            raise DeviceError("pulled out")
        return real(*arguments)

    monkeypatch.setattr(refdevice, step, failing)
    with pytest.raises(DeviceError, match="pulled out"):
        create(name, spec(bandwidth="100MiB/s"))
    assert not traces(name)


def test_only_own_devices_are_touched(name: str) -> None:
    for foreign in ("loop0", "../mnt", "/dev/vda", "nothing-here"):
        with pytest.raises(DeviceError, match="harness made no such device"):
            destroy(foreign)
    create(name, spec(bandwidth="100MiB/s"))
    with pytest.raises(DeviceError, match=f"harness device destroy {name}"):
        create(name, spec(bandwidth="100MiB/s"))
    with (refdevice.HOME / name / "mount" / "file").open("w"), pytest.raises(DeviceError, match="in use"):
        destroy(name, patience_s=0.2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"file_system": "f2fs"}, "this kernel and harness have"),
        ({"size": "64TiB"}, "make it smaller"),
        ({"backing": "/no/such/folder"}, "is not a folder; make it"),
    ],
)
def test_what_cannot_be_made_is_refused_on_one_line(name: str, change: dict[str, str], words: str) -> None:
    with pytest.raises(DeviceError, match=words) as refused:
        create(name, DeviceSettings.model_validate({"size": "512MiB", "bandwidth": "100MiB/s", **change}))
    assert "\n" not in str(refused.value)


def test_a_missing_mkfs_names_its_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DeviceError, match="apt-get install -y xfsprogs"):
        create(name, spec("xfs", bandwidth="100MiB/s"))
