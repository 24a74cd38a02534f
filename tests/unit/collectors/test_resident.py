"""Pages that other processes have are found and read: those that are in memory, each once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from mmap import PAGESIZE

import numpy as np
import pytest

from harness.collectors import resident
from harness.collectors.resident import ResidentPages, _pages_of, _read

_CHILD = """
import ctypes, mmap
pages = 64
private = mmap.mmap(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
private.madvise(mmap.MADV_NOHUGEPAGE)
shared = mmap.mmap(-1, pages * mmap.PAGESIZE)
for memory, touched in ((private, 40), (shared, 64)):
    for page in range(touched):
        memory[page * mmap.PAGESIZE] = 1
print(*(ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (private, shared)), flush=True)
input()
"""


class _Other:
    """A process with 64 private pages, of which it has touched 40, and as many shared ones."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.private, self.shared = map(int, self.process.stdout.readline().split())

    def pages_at(self, start: int) -> list[int]:
        """Those that are found, counted from there."""
        addresses, _ = _pages_of(self.process.pid)
        return [int(at - start) // PAGESIZE for at in addresses if start <= at < start + 64 * PAGESIZE]


@pytest.fixture
def other() -> Iterator[_Other]:
    other = _Other()
    yield other
    other.process.kill()
    other.process.wait()


def test_pages_of_a_process_are_its_private_ones_that_are_in_memory(other: _Other) -> None:
    assert other.pages_at(other.private) == list(range(40))
    assert other.pages_at(other.shared) == []


def test_each_page_is_read(other: _Other) -> None:
    addresses, _ = _pages_of(other.process.pid)
    assert len(addresses) > resident._PAGES_AT_ONCE
    assert _read(other.process.pid, addresses) == len(addresses)


def test_addresses_that_are_gone_are_passed_over(other: _Other) -> None:
    addresses, _ = _pages_of(other.process.pid)
    gone = np.array([0, PAGESIZE], np.uint64)
    mixed = np.concatenate([gone[:1], addresses[:1500], gone, addresses[1500:]])
    assert _read(other.process.pid, mixed) == len(addresses)


def test_a_process_that_has_ended_has_no_pages(other: _Other) -> None:
    addresses, _ = _pages_of(other.process.pid)
    other.process.kill()
    other.process.wait()
    assert len(_pages_of(other.process.pid)[0]) == 0
    assert _read(other.process.pid, addresses) == 0


def test_a_large_mapping_is_a_pool_of_kv_and_left_out(other: _Other, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "_POOL_PAGES", 39)
    assert other.pages_at(other.private) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees which frames two processes share")
def test_a_page_that_two_processes_share_is_read_once(other: _Other, monkeypatch: pytest.MonkeyPatch) -> None:
    second = _Other()
    read: dict[int, int] = {}
    monkeypatch.setattr(resident, "_read", lambda pid, pages: read.update({pid: len(pages)}))
    try:
        pids = [other.process.pid, second.process.pid]
        all_of_second = len(_pages_of(pids[1])[0])
        ResidentPages(lambda: pids).touch()
    finally:
        second.process.kill()
        second.process.wait()
    assert 40 <= read[pids[1]] < all_of_second / 2, "libpython and libc are in the first one's"


def test_a_pass_that_takes_long_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = iter([4.0, 1.5, 0.25, 0.25])
    now_s = [100.0]

    def reads(_pid: int, _pages: object) -> None:
        now_s[0] += next(passes)

    monkeypatch.setattr("harness.collectors.resident.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr(resident, "_read", reads)
    pages = ResidentPages(lambda: [os.getpid()])
    assert pages.touch() == 0.25
    assert list(passes) == [0.25]
