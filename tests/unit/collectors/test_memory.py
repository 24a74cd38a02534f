"""Free memory that a virtual machine's host takes back is touched before a cold read, and nowhere else."""

import mmap
from pathlib import Path
from typing import Self

import pytest

from harness.collectors import memory


@pytest.mark.parametrize(
    ("order", "taken"), [("9\n", True), ("10\n", True), ("11\n", False), ("4294967295\n", False), (None, False)]
)
def test_a_host_takes_memory_where_the_kernel_reports_it(order: str | None, taken: bool, tmp_path: Path) -> None:
    folder = tmp_path / "module/page_reporting/parameters"
    folder.mkdir(parents=True)
    if order is not None:
        (folder / "page_reporting_order").write_text(order)
    assert memory.host_takes_memory(tmp_path) is taken


def test_memory_is_touched_only_where_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    touched: list[int] = []

    class Mapped:
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            asked.append(-1)

        def madvise(self, advice: int) -> None:
            assert advice == mmap.MADV_HUGEPAGE, "small pages come from blocks that the host has left"
            raise OSError("a kernel without huge pages")

        def __setitem__(self, pages: slice, value: bytes) -> None:
            assert pages.step == mmap.PAGESIZE
            touched.append(len(value))

    def mapped(_file: int, size: int, flags: int) -> Mapped:
        assert flags & mmap.MAP_ANONYMOUS
        asked.append(size)
        return Mapped()

    monkeypatch.setattr(mmap, "mmap", mapped)
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 1000)
    monkeypatch.setattr(memory, "host_takes_memory", lambda: False)
    assert memory.touch_free_memory(200) is None
    monkeypatch.setattr(memory, "host_takes_memory", lambda: True)
    assert memory.touch_free_memory(0) is None and asked == []
    per_gib_s = memory.touch_free_memory(200)
    assert asked == [300, -1] and per_gib_s is not None and per_gib_s > 0
    assert memory.touch_free_memory(900) is not None and asked[2:] == [500, -1], "more than half of what is free"
    assert touched == [1, 1]


def test_real_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_takes_memory", lambda: True)
    before = memory.available_memory_bytes()
    assert before is not None
    assert (memory.touch_free_memory(64 * 2**20) or 0) > 0
    after = memory.available_memory_bytes()
    assert after is not None and after > before - 2**30
