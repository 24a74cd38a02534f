"""The page cache: files that are dropped from it are read from the device."""

import mmap
import os
import threading
from pathlib import Path

import pytest

from harness.collectors.host import file_system
from harness.processes.keeper import cached_pages, drop_from_page_cache


def test_pages_that_somebody_holds_are_dropped_once_they_are_free(tmp_path: Path) -> None:
    if file_system(tmp_path) == "tmpfs":
        pytest.skip("tmpfs is page cache alone; set TMPDIR to a folder on a disk")
    file = tmp_path / "chunk.data"
    file.write_bytes(os.urandom(2**20))
    with file.open("rb") as opened:
        if cached_pages(opened.fileno()) is None:
            pytest.skip("this kernel does not say what is cached; Linux 6.5 and later do")
        assert cached_pages(opened.fileno()) == 2**20 // mmap.PAGESIZE
        # The kernel does not drop pages that a process has mapped and touched.
        held = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        assert len(held[:: mmap.PAGESIZE]) == 2**20 // mmap.PAGESIZE
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert cached_pages(opened.fileno())
        release = threading.Timer(0.1, held.close)
        release.start()
        drop_from_page_cache([file])
        release.join()
        assert cached_pages(opened.fileno()) == 0
