"""Keeps a folder of chunk files: drops them from the page cache when told to, deletes them when the harness is gone.

    python -I -S keeper.py FOLDER delete|keep       each line in drops the files, and is answered by one

It is a process of its own for both: end-of-file means that the harness has ended, even by SIGKILL, and a trace of the
harness's I/O shows what its storage does and not what a measurement does with it. Such traces follow descendants, so it
is none: its first process ends at once. Needs the standard library only.
"""

import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

# The call's number is the same on all architectures (Linux 6.5; include/uapi/linux/mman.h has its structs).
_CACHESTAT = 451
# Others hold a page for milliseconds: the kernel, to move it.
_PATIENCE_S, _PAUSE_S = 1.0, 0.01


def main() -> None:
    folder, at_end = Path(sys.argv[1]), sys.argv[2]
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for _ in sys.stdin:
        drop_from_page_cache(folder.glob("*.data"))
        print(flush=True)
    if at_end == "delete":
        shutil.rmtree(folder, ignore_errors=True)


def drop_from_page_cache(files: Iterable[Path]) -> None:
    """Writes the files back first (what is dirty stays), in the order in which they were written.

    Blocks are allocated as files are written back. By a listing, thus by hashes of names, chunks of a prompt would lie
    on disk in another order than the one in which they are read, and that order would be our doing.
    The kernel passes over a page that it or a process holds. Such files are dropped again, for up to a second; what
    stays then shows in the bytes that the device reads.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    for file in sorted(files, key=_written):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            while cached_pages(descriptor) and time.monotonic() < deadline_s:
                time.sleep(_PAUSE_S)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_pages(descriptor: int) -> int | None:
    """How many of a file's pages are in the page cache; None: this kernel does not say."""
    whole, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    failed = ctypes.CDLL(None).syscall(_CACHESTAT, descriptor, ctypes.byref(whole), ctypes.byref(found), 0)
    return None if failed else int(found[0])


def _written(file: Path) -> tuple[int, int]:
    """Inode numbers tell files apart that were written in one tick of the kernel's clock."""
    known = file.stat()
    return known.st_mtime_ns, known.st_ino


if __name__ == "__main__":
    main()
