"""How much memory new processes can take on this machine, and free memory that a virtual machine's host leaves here."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import random
import re
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# The largest block of the kernel's allocator has 2^10 pages; without a balloon the order is above it.
_LARGEST_ORDER = 10
_PIECE_BYTES = 64 << 20
_AT_ONCE_BYTES = 2 << 20
# More than asked, so that not every sample asks again.
_SPARE_BYTES = 1 << 30
# Large blocks of at most this share of what is asked do no harm.
_LARGE_SHARE = 1 / 16
# The rest of what is free is for others that grow meanwhile: without it, the kernel gives up what is in the page cache,
# and then ends a process.
_FREE_SHARE = 0.4
# Pages that rest, of which a look reads some. To read one takes about 1 us where the host has kept it, and about 130 us
# where it has taken it (seen on a guest of Firecracker).
_RESTED_BYTES = 32 << 20
_LOOKS_AT_PAGES = 256
_KEPT_S = 10e-6
# A host that keeps its guests' memory takes none; an interrupt makes one page or two of a look slow.
MAX_TAKEN_SHARE = 0.05
# Bits of an entry of /proc/PID/pagemap that number the page frame (Linux, Documentation/admin-guide/mm/pagemap.rst).
FRAME_BITS = (1 << 55) - 1


def available_memory_bytes() -> int | None:
    """Bytes that new processes can take without swapping; None if the kernel does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def reporting_order(system: Path = Path("/sys")) -> int | None:
    """Blocks of 2^order free pages are reported to the virtual machine's host, which then takes them back; None: none
    are.

    Source: Linux, mm/page_reporting.c. The first touch of such memory waits for the host. Seen on a guest of
    Firecracker: 1 GiB takes 6 s, 1.2 s when the memory was in use two seconds ago.
    """
    try:
        order = int((system / "module/page_reporting/parameters/page_reporting_order").read_text())
    except (OSError, ValueError):
        return None
    return order if order <= _LARGEST_ORDER else None


def reported_bytes(system: Path = Path("/sys")) -> int | None:
    """Free memory that the kernel has offered to the machine's host since boot; None: no such kernel counts it.

    Upstream has no such counter (Linux 6.18, mm/page_reporting.c); kernels of some providers do.
    """
    try:
        return int((system / "module/page_reporting/parameters/reported_kib").read_text()) << 10
    except (OSError, ValueError):
        return None


def taken_in_words(share: float) -> str:
    return (
        f"this machine's host had taken {share:.0%} of memory that was in use and had rested for a second or more:"
        " engines wait for theirs, page by page, and their times vary"
    )


class Zone(NamedTuple):
    """Free bytes of one of the kernel's zones: in blocks that are too small to be reported, and in others."""

    small: int
    large: int


def free_memory(order: int, proc: Path = Path("/proc")) -> list[Zone]:
    """What processes and files get, in the order in which the kernel gives it: of each zone, small blocks come first.

    Without the right to read which memory is movable, as theirs is: all of each zone. The kernel counts no further than
    100,000 blocks of a size.
    """
    try:
        lines = re.findall(r"type +Movable +(>?\d.*)", (proc / "pagetypeinfo").read_text())
    except OSError:
        lines = re.findall(r"zone +\S+ +(\d.*)", (proc / "buddyinfo").read_text())
    zones = []
    for line in reversed(lines):
        sizes = [int(count.lstrip(">")) * mmap.PAGESIZE << at for at, count in enumerate(line.split())]
        zones.append(Zone(sum(sizes[:order]), sum(sizes[order:])))
    return zones


def in_small_blocks(zones: Sequence[Zone], size_bytes: int) -> bool:
    """Whether so much is given before a large block is broken up, but for a few."""
    missing = size_bytes
    for zone in zones:
        missing -= zone.small
        if missing <= 0 or zone.large > size_bytes * _LARGE_SHARE:
            return missing <= 0
    return False


class OwnMemory:
    """Free memory that the machine's host does not take: this process keeps one page of each block.

    The kernel reports whole blocks only. It does so every two seconds, and a report beside a sample costs up to 0.2 s
    (seen: 8 prefixes at once from a device, 1.19 s for 1.00 s). So nothing may be freed just before a sample that
    makes whole blocks. Elsewhere it keeps nothing.
    """

    def __init__(self, rested: RestedPages | None = None) -> None:
        """rested: says how much the host takes of memory that is in use; None: this object is not asked."""
        self._pieces: list[mmap.mmap] = []
        self._blocks: set[int] = set()
        self._rested = rested

    def taken_share(self) -> float | None:
        return None if self._rested is None else self._rested.taken_share()

    def have(self, size_bytes: int) -> float | None:
        """Sees to so much free memory, as far as that much is free: no file leaves the page cache for it.

        Returns the seconds that a GiB took of what it had to touch; None where that is nothing.
        """
        order = reporting_order()
        if size_bytes <= 0 or order is None:
            return None
        zones = free_memory(order)
        if self._pieces and in_small_blocks(zones, size_bytes):
            return None
        # The host may have any of the small blocks that others have left: at first, they are touched as far as may be.
        found = 0 if self._pieces else sum(zone.small for zone in zones)
        size = min(max(found, size_bytes) + _SPARE_BYTES, int(sum(map(sum, zones)) * _FREE_SHARE))
        if size <= 0:
            return None
        began_s = time.perf_counter()
        touched = [_touched(min(_PIECE_BYTES, size - start)) for start in range(0, size, _PIECE_BYTES)]
        for piece in touched:
            if self._thin(piece, order):
                self._pieces.append(piece)
            else:
                piece.close()
        return (time.perf_counter() - began_s) * 2**30 / size

    def let_go(self) -> None:
        while self._pieces:
            self._pieces.pop().close()
        self._blocks.clear()
        self._rested = None

    def _thin(self, piece: mmap.mmap, order: int) -> bool:
        """Frees the piece but for one page of each block that has none yet. False: nothing of it is left."""
        kept = -1
        for at, frame in enumerate(_frames(piece)):
            if (block := frame >> order) not in self._blocks:
                self._blocks.add(block)
                _free(piece, kept + 1, at)
                kept = at
        _free(piece, kept + 1, len(piece) // mmap.PAGESIZE)
        return kept >= 0


class RestedPages:
    """Memory of this process that rests: how much of it a virtual machine's host takes meanwhile.

    A host that lacks memory takes what its guests have not touched for a second. An engine then waits for its own
    memory, page by page, and no counter of the guest shows it (seen: lone GPU hits of 37 ms for 18 ms, no time stolen).
    """

    def __init__(self) -> None:
        self._memory = _touched(_RESTED_BYTES)
        self._pages = list(range(0, _RESTED_BYTES, mmap.PAGESIZE))
        # Of neighbours a host gives several at once.
        random.Random(0).shuffle(self._pages)
        self._next = 0

    def taken_share(self) -> float:
        """Reads some pages, other ones than the last times, and returns the share that the host had to give back."""
        at, self._next = self._next, (self._next + _LOOKS_AT_PAGES) % len(self._pages)
        taken = 0
        for page in self._pages[at : at + _LOOKS_AT_PAGES]:
            began_s = time.perf_counter()
            self._memory[page]
            taken += time.perf_counter() - began_s > _KEPT_S
        return taken / _LOOKS_AT_PAGES


def _free(piece: mmap.mmap, first: int, end: int) -> None:
    if end > first:
        piece.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE)


def _frames(piece: mmap.mmap) -> Sequence[int]:
    """The page frame of each page. Without the right to read them: as if the pages were one after another."""
    count = len(piece) // mmap.PAGESIZE
    start = ctypes.addressof(ctypes.c_char.from_buffer(piece))
    entries = array("Q")
    with contextlib.suppress(OSError), Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(start // mmap.PAGESIZE * entries.itemsize)
        entries.frombytes(pagemap.read(count * entries.itemsize))
    if len(entries) == count and entries[0] & FRAME_BITS:
        return [entry & FRAME_BITS for entry in entries]
    return range(start // mmap.PAGESIZE, start // mmap.PAGESIZE + count)


def _touched(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel that has no huge pages gives small ones anyway
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    with contextlib.suppress(OSError):  # a child has no use for them
        memory.madvise(mmap.MADV_DONTFORK)
    # One byte of each page; piece by piece, so that other threads go on.
    for start in range(0, size, _AT_ONCE_BYTES):
        end = min(start + _AT_ONCE_BYTES, size)
        memory[start : end : mmap.PAGESIZE] = bytes(-(-(end - start) // mmap.PAGESIZE))
    return memory
