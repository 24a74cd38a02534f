"""Keeps a folder of chunk files: drops them from the page cache when told to, deletes them when the harness is gone.

    python -I -S keeper.py FOLDER delete|keep       each line in drops the files, and is answered by one

It is a process of its own for both: end-of-file means that the harness has ended, even by SIGKILL, and a trace of the
harness's I/O shows what its storage does and not what a measurement does with it. Such traces follow descendants, so it
is none: its first process ends at once. Needs the standard library only.
"""

import os
import shutil
import signal
import sys
from collections.abc import Iterable
from pathlib import Path


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
    """
    for file in sorted(files, key=_written):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _written(file: Path) -> tuple[int, int]:
    """Inode numbers tell files apart that were written in one tick of the kernel's clock."""
    known = file.stat()
    return known.st_mtime_ns, known.st_ino


if __name__ == "__main__":
    main()
