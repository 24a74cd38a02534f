"""Memory of other processes that a virtual machine's host has taken although it is in use: reading it gets it back."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.collectors.memory import FRAME_BITS

_PAGES_AT_ONCE = 1024  # IOV_MAX
_LISTED_S = 20.0
# Pages that are read first rest while the others are read. A host takes what has rested for a second.
_QUICK_S = 1.0
_PASSES = 3
# Of an entry of /proc/PID/pagemap, beside the frame's bits.
_PRESENT = np.uint64(1 << 63)
# What holds KV is as large as it is rarely read.
_POOL_PAGES = (256 << 20) // mmap.PAGESIZE
# A larger mapping is a reservation of addresses; its entries alone would be 32 MiB and more.
_MAPPED_PAGES = (16 << 30) // mmap.PAGESIZE

_Addresses = NDArray[np.uint64]


class ResidentPages:
    """Private memory of other processes, and the files that are mapped into them: every page that they have.

    An engine waits 0.13 ms for each page that the host has taken (seen on a guest of Firecracker). To read one that is
    there takes 0.7 us; nothing of the processes changes. Pools of KV are left out: shared memory, and more than 256 MiB
    in one mapping.

    pids: of the processes, asked anew every 20 seconds. Another user's, or one that has ended, has no pages.
    """

    def __init__(self, pids: Callable[[], Sequence[int]]) -> None:
        self._pids = pids
        self._pages: list[tuple[int, _Addresses]] = []
        self._listed_s = -_LISTED_S

    def touch(self) -> float:
        """Reads one byte of each page, again while a pass takes so long that the host may have taken some anew.

        Returns the seconds of the last pass.
        """
        if time.monotonic() - self._listed_s >= _LISTED_S:
            self._list()
        for _ in range(_PASSES):
            began_s = time.monotonic()
            for pid, pages in self._pages:
                _read(pid, pages)
            if (took_s := time.monotonic() - began_s) < _QUICK_S:
                break
        return took_s

    def _list(self) -> None:
        """A page that several processes have, e.g. of a library, is read once."""
        self._pages, self._listed_s = [], time.monotonic()
        known = np.empty(0, np.uint64)
        for pid in self._pids():
            pages, frames = _pages_of(pid)
            if np.any(frames):  # who may not see the frames gets 0
                new = ~np.isin(frames, known)
                pages, known = pages[new], np.concatenate([known, frames[new]])
            self._pages.append((pid, pages))


def _pages_of(pid: int) -> tuple[_Addresses, NDArray[np.uint64]]:
    """Addresses and frames of the pages that are in memory."""
    addresses, frames = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    with contextlib.suppress(OSError), Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as pagemap:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, mode, *_ = line.split(maxsplit=2)
            first, end = (int(at, 16) // mmap.PAGESIZE for at in span.split("-"))
            if mode[0] != "r" or mode[3] != "p" or line.endswith(("[vsyscall]", "[vvar]", "[vdso]")):
                continue
            if end - first > _MAPPED_PAGES:
                continue
            pagemap.seek(first * 8)
            entries = np.frombuffer(pagemap.read((end - first) * 8), np.uint64)
            at = np.flatnonzero(entries & _PRESENT)
            if len(at) <= _POOL_PAGES:
                addresses.append((at.astype(np.uint64) + np.uint64(first)) * np.uint64(mmap.PAGESIZE))
                frames.append(entries[at] & np.uint64(FRAME_BITS))
    return np.concatenate(addresses), np.concatenate(frames)


@cache
def _process_vm_readv() -> Callable[..., int]:
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    many = ctypes.c_void_p, ctypes.c_ulong
    call.argtypes = (ctypes.c_int, *many, *many, ctypes.c_ulong)
    call.restype = ctypes.c_ssize_t
    return call


def _read(pid: int, pages: _Addresses) -> int:
    """Reads one byte of each page, but for those that are no longer there (process_vm_readv(2)); returns how many."""
    remote = np.ones((len(pages), 2), np.uint64)
    remote[:, 0] = pages
    into = ctypes.create_string_buffer(_PAGES_AT_ONCE)
    local = np.array([ctypes.addressof(into), _PAGES_AT_ONCE], np.uint64)
    at = count_read = 0
    while at < len(pages):
        asked = min(_PAGES_AT_ONCE, len(pages) - at)
        got = _process_vm_readv()(pid, local.ctypes.data, 1, remote[at:].ctypes.data, asked, 0)
        if got < 0 and ctypes.get_errno() != errno.EFAULT:
            break
        count_read += max(got, 0)
        at += got if got == asked else max(got, 0) + 1
    return count_read
