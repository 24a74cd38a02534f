"""What the machine did during a sample: stolen time, other processes' CPU time, bytes at the storage device."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec
import psutil

from harness.collectors.cores import core_loop_s
from harness.collectors.memory import reported_bytes
from harness.records import HostSample

_SECTOR_BYTES = 512


class HostReading(msgspec.Struct, frozen=True):
    """Totals since boot: CPU seconds (all, busy, stolen, ours) and device bytes; None if the kernel does not say.

    core_loop_s, client_loop_s: what cores.py's loop took at this reading; None if it did not run. reported_bytes: of
    free memory, to a virtual machine's host (memory.py).
    """

    total_s: float
    busy_s: float
    steal_s: float
    ours_s: float
    read_bytes: int | None
    write_bytes: int | None
    core_loop_s: float | None = None
    client_loop_s: float | None = None
    reported_bytes: int | None = None


def read_host(device_path: Path | None, core: int | None = None, client: int | None = None) -> HostReading:
    """Takes one reading. device_path: any path on the device; core, client: the engine's core and the client's, which
    are idle now."""
    cpu = psutil.cpu_times()
    busy_s = cpu.user + cpu.nice + cpu.system + cpu.irq + cpu.softirq
    read_bytes, write_bytes = (_device_bytes(device_path) if device_path else None) or (None, None)
    total_s = busy_s + cpu.idle + cpu.iowait + cpu.steal
    loop_s, client_s = (None if each is None else core_loop_s(each) for each in (core, client))
    return HostReading(
        total_s, busy_s, cpu.steal, _own_cpu_s(), read_bytes, write_bytes, loop_s, client_s, reported_bytes()
    )


def between(before: HostReading, after: HostReading) -> HostSample:
    """Shares of all cores' time between two readings."""
    total_s = after.total_s - before.total_s
    busy_s = after.busy_s - before.busy_s
    foreign_s = max(0.0, busy_s - (after.ours_s - before.ours_s))
    return HostSample(
        steal_share=_share(after.steal_s - before.steal_s, total_s),
        foreign_cpu_share=_share(foreign_s, total_s),
        busy_share=_share(busy_s, total_s),
        core_loop_s=_between(before.core_loop_s, after.core_loop_s),
        client_loop_s=_between(before.client_loop_s, after.client_loop_s),
        device_read_bytes=_minus(after.read_bytes, before.read_bytes),
        device_write_bytes=_minus(after.write_bytes, before.write_bytes),
        reported_bytes=_minus(after.reported_bytes, before.reported_bytes),
    )


def file_system(path: Path) -> str | None:
    """The type of a path's file system, e.g. 'ext4'; None if the kernel does not say."""
    mount = mount_of(path)
    return mount[1] if mount else None


def mount_of(path: Path) -> tuple[str, str] | None:
    """Source and type of a path's mount; None if the kernel does not say."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return None
    resolved = path.resolve()
    found = [(source, where, kind) for source, where, kind, *_ in mounts if resolved.is_relative_to(where)]
    if not found:
        return None
    # The last of several mounts at one place hides the others.
    source, _, kind = max(reversed(found), key=lambda mount: len(mount[1]))
    return source, kind


def device_name(path: Path) -> str | None:
    """The whole block device below a path, with its model where it has one: 'nvme0n1 (Samsung SSD 980)'."""
    block = _block_device(path)
    if block is None:
        return None
    block = block.resolve()
    whole = block.parent if (block / "partition").exists() else block
    model = whole / "device" / "model"
    return f"{whole.name} ({model.read_text().strip()})" if model.is_file() else whole.name


def _between(before_s: float | None, after_s: float | None) -> float | None:
    return None if before_s is None or after_s is None else (before_s + after_s) / 2


def _minus(later: int | None, earlier: int | None) -> int | None:
    return None if later is None or earlier is None else later - earlier


def _share(part_s: float, whole_s: float) -> float | None:
    """Returns None if the time is too short for the kernel's clock of 10 ms."""
    return round(part_s / whole_s, 4) if whole_s > 0 else None


def _own_cpu_s() -> float:
    """CPU seconds of this process and its descendants, alive or reaped."""
    ours = psutil.Process()
    total_s = 0.0
    for process in [ours, *ours.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            total_s += sum(process.cpu_times()[:4])
    return total_s


def _device_bytes(path: Path) -> tuple[int, int] | None:
    """Bytes read from and written to a path's block device since boot."""
    block = _block_device(path)
    if block is None:
        return None
    fields = (block / "stat").read_text().split()
    return int(fields[2]) * _SECTOR_BYTES, int(fields[6]) * _SECTOR_BYTES


def _block_device(path: Path) -> Path | None:
    """What the kernel says of the block device below a path; None where there is none."""
    while not path.exists() and path != path.parent:
        path = path.parent
    device = path.stat().st_dev
    # btrfs gives its files a device number that belongs to no block device.
    if os.major(device) == 0 and (mount := mount_of(path)) and Path(mount[0]).is_block_device():
        device = Path(mount[0]).stat().st_rdev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    return block if (block / "stat").exists() else None
