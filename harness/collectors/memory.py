"""How much memory new processes can take on this machine, and memory that a virtual machine's host has taken back."""

from __future__ import annotations

import contextlib
import mmap
import time
from pathlib import Path

# The largest block of the kernel's allocator has 2^10 pages; without a balloon the order is above it.
_LARGEST_ORDER = 10
_PIECE_BYTES = 64 << 20
_AT_ONCE_BYTES = 2 << 20


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


class HeldMemory:
    """Free memory that this process holds between samples, so that the machine's host does not take it back.

    `hold` before a sample, `let_go` at once before it is timed, and `hold` what is left as soon as it has ended: the
    kernel reports free memory every two seconds, and gives first what was freed last. Seen on a guest of Firecracker: a
    GiB that the host has taken takes 3 to 6 s, one that was let go a second ago 0.2 s. Elsewhere it holds nothing.
    """

    def __init__(self) -> None:
        self._pieces: list[mmap.mmap] = []

    @property
    def held_bytes(self) -> int:
        return sum(map(len, self._pieces))

    def hold(self, size_bytes: int) -> float | None:
        """Holds at least so much, but at most half of what is available.

        Returns the seconds that a GiB took of what it did not hold yet; None where that is nothing.
        """
        held, available = self.held_bytes, available_memory_bytes()
        if size_bytes <= held or available is None or not host_takes_memory():
            return None
        missing = min(size_bytes, (available + held) // 2) - held
        began_s = time.perf_counter()
        for start in range(0, missing, _PIECE_BYTES):
            self._pieces.append(_touched(min(_PIECE_BYTES, missing - start)))
        return (time.perf_counter() - began_s) * 2**30 / missing if missing > 0 else None

    def let_go(self, size_bytes: int | None = None) -> None:
        """Lets go of at least so much, if it holds that; None: of all."""
        keep_bytes = 0 if size_bytes is None else max(0, self.held_bytes - size_bytes)
        while self.held_bytes > keep_bytes:
            self._pieces.pop().close()


def _touched(size: int) -> mmap.mmap:
    """It takes huge pages: small ones come from blocks that the host has left, so that a read would wait for the others
    (288 MiB: 0.8 s, and 0.06 s after huge ones)."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel that has no huge pages gives small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    # One byte of each small page, as each may be one of its own; piece by piece, so that other threads go on.
    for start in range(0, size, _AT_ONCE_BYTES):
        end = min(start + _AT_ONCE_BYTES, size)
        memory[start : end : mmap.PAGESIZE] = bytes(-(-(end - start) // mmap.PAGESIZE))
    return memory
