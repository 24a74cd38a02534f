"""What the machine did while a sample ran: stolen time, CPU time of others, bytes at the storage device."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from harness.results import HostSample

_SECTOR_BYTES = 512


class HostReading(msgspec.Struct, frozen=True):
    """Totals since boot: CPU ticks (all, busy, stolen, ours) and device bytes; None where the kernel is silent."""

    total: int | None
    busy: int | None
    steal: int | None
    ours: int | None
    read_bytes: int | None
    write_bytes: int | None


def read_host(device_path: Path | None) -> HostReading:
    """One reading. device_path: any path on the device of interest."""
    cpu = _cpu_ticks()
    moved = _device_bytes(device_path) if device_path else None
    total, busy, steal = cpu or (None, None, None)
    read_bytes, write_bytes = moved or (None, None)
    return HostReading(total, busy, steal, _own_ticks(), read_bytes, write_bytes)


def between(before: HostReading, after: HostReading) -> HostSample:
    """Shares of all cores' time between two readings."""
    total = _minus(after.total, before.total)
    busy, steal, ours = (
        _minus(getattr(after, n), getattr(before, n)) for n in ("busy", "steal", "ours")
    )  # fmt: skip
    foreign = None if busy is None or ours is None else max(0, busy - ours)
    return HostSample(
        steal_share=_share(steal, total),
        foreign_cpu_share=_share(foreign, total),
        busy_share=_share(busy, total),
        device_read_bytes=_minus(after.read_bytes, before.read_bytes),
        device_write_bytes=_minus(after.write_bytes, before.write_bytes),
    )


def _minus(later: int | None, earlier: int | None) -> int | None:
    return None if later is None or earlier is None else later - earlier


def _share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else round(part / whole, 4)


def _cpu_ticks() -> tuple[int, int, int] | None:
    try:
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields[:8]
    return sum(fields[:8]), user + nice + system + irq + softirq, steal


def _own_ticks() -> int | None:
    """CPU ticks of this process and everything below it, alive or reaped."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    try:
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and (stat := _stat(int(entry.name))):
                parents[int(entry.name)], ticks[int(entry.name)] = stat
    except OSError:
        return None
    own = {os.getpid()}
    grew = True
    while grew:
        below = {pid for pid, parent in parents.items() if parent in own} - own
        own |= below
        grew = bool(below)
    return sum(ticks.get(pid, 0) for pid in own)


def _stat(pid: int) -> tuple[int, int] | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1]), sum(int(x) for x in fields[11:15])


def _device_bytes(path: Path) -> tuple[int, int] | None:
    """Bytes read from and written to the block device below a path, since boot."""
    while not path.exists() and path != path.parent:
        path = path.parent
    device = path.stat().st_dev
    try:
        fields = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    except OSError:
        return None
    return int(fields[2]) * _SECTOR_BYTES, int(fields[6]) * _SECTOR_BYTES
