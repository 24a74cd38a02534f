"""How much memory new processes can take on this machine, and memory that a virtual machine's host has taken back."""

from __future__ import annotations

import contextlib
import mmap
import time
from pathlib import Path

# The largest block of the kernel's allocator has 2^10 pages; without a balloon the order is above it.
_LARGEST_ORDER = 10
# Where the kernel gives memory block by block, more is touched than will be read.
_MARGIN = 1.5
_PIECE_BYTES = 2 << 20


def available_memory_bytes() -> int | None:
    """Bytes that new processes can take without swapping; None if the kernel does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def host_takes_memory(system: Path = Path("/sys")) -> bool:
    """Whether this kernel reports free memory to the virtual machine's host, which then takes it back.

    Source: Linux, mm/page_reporting.c. The first touch of such memory waits for the host. Seen on a guest of
    Firecracker: 1 GiB takes 6 s, 1.2 s when the memory was in use two seconds ago.
    """
    try:
        order = int((system / "module/page_reporting/parameters/page_reporting_order").read_text())
    except (OSError, ValueError):
        return False
    return order <= _LARGEST_ORDER


def touch_free_memory(need_bytes: int) -> float | None:
    """Makes the host give memory for a read of need_bytes into the page cache, before the read is timed.

    It takes free memory, at most half of what is available, and frees it at once. It takes huge pages: small ones come
    from blocks that the host has left, so that the read would wait for the others (288 MiB: 0.8 s, and 0.06 s after
    huge ones). Returns the seconds that a GiB took; None where nothing is needed.
    """
    available = available_memory_bytes()
    if not need_bytes or available is None or not host_takes_memory():
        return None
    size = min(int(_MARGIN * need_bytes), available // 2)
    began_s = time.perf_counter()
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        with contextlib.suppress(OSError):  # a kernel that has no huge pages gives small ones
            memory.madvise(mmap.MADV_HUGEPAGE)
        # One byte of each small page, as each may be one of its own; piece by piece, so that other threads go on.
        for start in range(0, size, _PIECE_BYTES):
            end = min(start + _PIECE_BYTES, size)
            memory[start : end : mmap.PAGESIZE] = bytes(-(-(end - start) // mmap.PAGESIZE))
    return (time.perf_counter() - began_s) * 2**30 / size
