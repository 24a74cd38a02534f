"""Reference devices: a real block device with a real file system, whose speed repeats to a percent. Root only.

    device = create("mine", spec)     # spec: the experiment's storage.device
    device.mount                      # a folder on it
    destroy("mine")

    file system under test, on loop device, on PacedFile (paced.py, FUSE), on RAM or a file

The loop device passes each request to the paced file (direct I/O) and completes it when the paced file answers. So
block-layer latency, fio and bpftrace show the modelled device. The device paces all I/O, write-back included, and no
process has to enter a control group.

All state of a device is below one folder, HOME/NAME. From there, the functions find its mounts by their place and its
loop devices by their file. So `destroy` cleans up after a crash at any point and touches only harness's own devices.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from harness.collectors.memory import available_memory_bytes
from harness.errors import DeviceError
from harness.experiment.storage import DeviceSettings
from harness.experiment.units import format_bytes

HOME = Path("/run/kv-harness")
_PACED = Path(__file__).with_name("paced.py")
HOLDING = "holding"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_STATE = "device.json"
_MKFS = {
    "ext4": (["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"], "e2fsprogs"),
    "xfs": (["mkfs.xfs", "-q", "-f", "-K"], "xfsprogs"),
    "btrfs": (["mkfs.btrfs", "-q", "-f", "-K"], "btrfs-progs"),
}
# A device in RAM must leave this much memory to other processes.
_MEMORY_RESERVE_BYTES = 2**30


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """An existing device. mount: a folder on its file system; loop: the block device below, None if it is missing."""

    name: str
    mount: Path
    loop: str | None
    limits: dict[str, float]
    file_system: str
    size_bytes: int
    backing: str
    made_by_pid: int

    @property
    def device_number(self) -> int:
        """The number in the kernel's block events: major << 20 | minor."""
        assert self.loop is not None
        number = Path(self.loop).stat().st_rdev
        return os.major(number) << 20 | os.minor(number)


def check_creatable(spec: DeviceSettings) -> None:
    """Raises DeviceError for every problem that is visible before the device is created."""
    if os.geteuid() != 0:
        raise DeviceError("storage.device: reference devices need root (mount, losetup); use sudo, or cache.disk.path")
    known = kernel_file_systems()
    if spec.file_system not in _MKFS or spec.file_system not in known:
        can = ", ".join(sorted(known & _MKFS.keys())) or "none"
        raise DeviceError(
            f"storage.device.file_system {spec.file_system}: cannot be made here; this kernel and harness have {can}"
        )
    command, package = _MKFS[spec.file_system]
    if not shutil.which(command[0]):
        raise DeviceError(f"{command[0]} is not installed; run: sudo apt-get install -y {package}")
    for needed, cure in (("/dev/fuse", "sudo modprobe fuse"), ("/dev/loop-control", "sudo modprobe loop")):
        if not Path(needed).exists():
            raise DeviceError(f"{needed} is missing; run: {cure} (in a container: --privileged)")
    _check_room(spec)


def _check_room(spec: DeviceSettings) -> None:
    if spec.backing is None:
        free, where = (available_memory_bytes() or 0) - _MEMORY_RESERVE_BYTES, "RAM (1GiB kept for other processes)"
    elif not Path(spec.backing).is_dir():
        raise DeviceError(
            f"storage.device.backing: {spec.backing} is not a folder; make it, or leave backing out for RAM"
        )
    else:
        free, where = shutil.disk_usage(spec.backing).free, spec.backing
    if spec.size > free:
        raise DeviceError(
            f"storage.device.size {format_bytes(spec.size)} exceeds the {format_bytes(max(0, free))} free in {where};"
            " make it smaller, or name another storage.device.backing"
        )


def create(name: str, spec: DeviceSettings, cores: Sequence[int] | None = None) -> Device:
    """Creates a device and mounts its file system. cores: the CPUs of its server.

    Raises DeviceError and then leaves nothing behind.
    """
    if not _NAME.fullmatch(name):
        raise DeviceError(f"device name {name!r}: use lower-case letters, digits, - and _, at most 64")
    check_creatable(spec)
    home = HOME / name
    try:
        home.mkdir(parents=True)
    except FileExistsError:
        raise DeviceError(f"device {name} exists already; remove it: harness device destroy {name}") from None
    try:
        _make(home, spec, cores)
        return _read(home)
    except BaseException:
        destroy(name)
        raise


def _make(home: Path, spec: DeviceSettings, cores: Sequence[int] | None) -> None:
    limits = {
        "read_bytes_per_s": spec.read_bandwidth or spec.bandwidth or 0.0,
        "write_bytes_per_s": spec.write_bandwidth or spec.bandwidth or 0.0,
        "read_iops": spec.read_iops or spec.iops or 0.0,
        "write_iops": spec.write_iops or spec.iops or 0.0,
        "latency_s": spec.latency,
    }
    backing = "-" if spec.backing is None else str(Path(spec.backing).absolute() / f"kv-harness-{home.name}.image")
    if backing != "-" and Path(backing).exists():
        raise DeviceError(f"{backing} exists already; harness does not overwrite it: remove it, or name another folder")
    size = spec.size // 2**20 * 2**20
    state = {"limits": limits, "file_system": spec.file_system, "size_bytes": size, "backing": backing}
    (home / _STATE).write_bytes(msgspec.json.encode(state | {"made_by_pid": os.getpid()}))
    (home / "disk").touch()
    (home / "mount").mkdir()
    with (home / "paced.log").open("wb") as log:
        argv = [sys.executable, "-I", "-S", str(_PACED), str(home / "disk"), backing, str(size)]
        paced = subprocess.Popen(
            [*argv, *(repr(limit) for limit in limits.values()), ",".join(map(str, cores or ())) or "-"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
        )  # fmt: skip
    _wait(lambda: _is_mounted(home / "disk") or paced.poll() is not None, 10)
    if paced.poll() is not None:
        raise DeviceError(f"the paced file did not start: {' '.join((home / 'paced.log').read_text().split())[-300:]}")
    loop = _run("losetup", "--find", "--show", "--direct-io=on", str(home / "disk")).strip()
    # A loop device keeps the queue settings of its previous user.
    queue = Path("/sys/block", Path(loop).name, "queue")
    (queue / "max_sectors_kb").write_text((queue / "max_hw_sectors_kb").read_text())
    command, _ = _MKFS[spec.file_system]
    _run(*command, loop)
    _run("mount", "-t", spec.file_system, "-o", "noatime", loop, str(home / "mount"))
    os.kill(paced.pid, signal.SIGUSR1)


def devices() -> list[Device]:
    """All existing devices."""
    return [_read(HOME / name) for name in left() if (HOME / name / _STATE).is_file()]


def left() -> list[str]:
    """Names of all devices, including the remains of a crash."""
    return sorted(home.name for home in HOME.glob("*"))


def _read(home: Path) -> Device:
    loops = list(_loops_below(home))
    state = msgspec.json.decode((home / _STATE).read_bytes())
    return Device(name=home.name, mount=home / "mount", loop=loops[0] if loops else None, **state)


def destroy(name: str, patience_s: float = 5.0) -> None:
    """Unmounts, detaches and deletes a device.

    Raises DeviceError if harness has no device of that name, or if the device stays in use for patience_s.
    """
    home = HOME / name
    if not _NAME.fullmatch(name) or not home.is_dir():
        raise DeviceError(f"{name}: harness made no such device; `harness device list` shows its devices")
    state = home / _STATE
    backing = msgspec.json.decode(state.read_bytes())["backing"] if state.is_file() else "-"
    _unmount(home / "mount", patience_s)
    for loop in _loops_below(home):
        _run("losetup", "--detach", loop)
    _wait(lambda: not list(_loops_below(home)), patience_s)
    _end_server(home, patience_s)
    if backing != "-":
        Path(backing).unlink(missing_ok=True)
    shutil.rmtree(home)
    with contextlib.suppress(OSError):
        HOME.rmdir()


def _end_server(home: Path, patience_s: float) -> None:
    """Waits for the paced file's server, which ends when unmounted; a starting server mounts itself first."""
    deadline = time.monotonic() + patience_s
    while True:
        _unmount(home / "disk", patience_s)
        servers = _servers(home)
        if not servers:
            return
        if time.monotonic() > deadline:
            raise DeviceError(f"{home.name}: the server of its paced file (process {servers[0]}) does not end; kill it")
        time.sleep(0.01)


def kernel_file_systems() -> set[str]:
    """Block file systems that this kernel supports."""
    lines = [line.split() for line in Path("/proc/filesystems").read_text().splitlines()]
    return {words[0] for words in lines if len(words) == 1}


def hold(name: str) -> None:
    """Waits for SIGTERM, then destroys the device. A run starts this process to clean up its device.

    The process misses no SIGTERM once it has printed HOLDING.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    print(HOLDING, flush=True)
    signal.sigwait({signal.SIGTERM})
    if (HOME / name).is_dir():
        # The engine that uses the device is ending too: it gets 15 s before it is killed.
        destroy(name, patience_s=40.0)


# ---- the kernel's side


def _unmount(place: Path, patience_s: float) -> None:
    """Unmounts in every mount namespace: a new namespace (container, unshare) copies the mount, and holds it too."""
    deadline = time.monotonic() + patience_s
    while holders := _namespaces_with(place):
        refused = ""
        for pid in holders:
            command = ["nsenter", f"--mount=/proc/{pid}/ns/mnt", "umount", str(place)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            refused = refused or " ".join(done.stderr.split())
        if refused and time.monotonic() > deadline:
            raise DeviceError(f"{place} is in use ({refused}); find and end its users: fuser -vm {place}")
        time.sleep(0.05 if refused else 0)


def _namespaces_with(place: Path) -> list[int]:
    """One process of each mount namespace with a mount at this place."""
    found: dict[str, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            namespace = str((entry / "ns" / "mnt").readlink())
            if namespace not in found and _is_mounted(place, entry.name):
                found[namespace] = int(entry.name)
    return list(found.values())


def _is_mounted(place: Path, process: str = "self") -> bool:
    mounts = Path(f"/proc/{process}/mountinfo").read_text().splitlines()
    return any(line.split()[4] == str(place) for line in mounts)


def _loops_below(home: Path) -> Iterator[str]:
    """Loop devices whose file is this device's paced file."""
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if backing.read_text().strip() == str(home / "disk"):
                yield f"/dev/{backing.parts[3]}"


def _servers(home: Path) -> list[int]:
    """Processes that serve the device's paced file."""
    wanted = [str(_PACED).encode(), str(home / "disk").encode()]
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if set(wanted) <= set((entry / "cmdline").read_bytes().split(b"\0")):
                found.append(int(entry.name))
    return found


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split())[-300:]
        raise DeviceError(f"{command[0]} failed: {words}; `harness doctor` shows what is missing")
    return done.stdout


def _wait(done: Callable[[], bool], patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while not done() and time.monotonic() < deadline:
        time.sleep(0.01)


if __name__ == "__main__":
    hold(sys.argv[1])
