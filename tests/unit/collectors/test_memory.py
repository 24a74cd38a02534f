"""Free memory is held between samples where a virtual machine's host would take it, and let go for a sample."""

import mmap
from pathlib import Path
from typing import ClassVar

import pytest

from harness.collectors import memory

MIB = 2**20


@pytest.mark.parametrize(
    ("order", "taken"), [("9\n", True), ("10\n", True), ("11\n", False), ("4294967295\n", False), (None, False)]
)
def test_a_host_takes_memory_where_the_kernel_reports_it(order: str | None, taken: bool, tmp_path: Path) -> None:
    folder = tmp_path / "module/page_reporting/parameters"
    folder.mkdir(parents=True)
    if order is not None:
        (folder / "page_reporting_order").write_text(order)
    assert memory.host_takes_memory(tmp_path) is taken


class Mapped:
    """A mapping that takes no memory; `made` has those that live."""

    made: ClassVar[list["Mapped"]] = []

    def __init__(self, _file: int, size: int, flags: int) -> None:
        assert flags & mmap.MAP_ANONYMOUS
        self.size, self.touched = size, 0
        self.made.append(self)

    def __len__(self) -> int:
        return self.size

    def close(self) -> None:
        self.made.remove(self)

    def madvise(self, advice: int) -> None:
        assert advice == mmap.MADV_HUGEPAGE, "small pages come from blocks that the host has left"
        raise OSError("a kernel without huge pages")

    def __setitem__(self, pages: slice, value: bytes) -> None:
        assert pages.step == mmap.PAGESIZE
        self.touched += len(value)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A guest whose host takes memory, and has 1 GiB available beside what is held."""
    monkeypatch.setattr(Mapped, "made", [])
    monkeypatch.setattr(mmap, "mmap", Mapped)
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 2**30 - sum(map(len, Mapped.made)))
    monkeypatch.setattr(memory, "host_takes_memory", lambda: True)
    return monkeypatch


@pytest.mark.usefixtures("machine")
def test_memory_is_held_and_touched_page_by_page() -> None:
    held = memory.HeldMemory()
    assert held.hold(0) is None and held.held_bytes == 0
    assert (held.hold(200 * MIB) or 0) > 0
    assert held.held_bytes == 200 * MIB == sum(map(len, Mapped.made))
    assert all(one.touched == one.size // mmap.PAGESIZE for one in Mapped.made)
    assert held.hold(200 * MIB) is None and held.hold(100 * MIB) is None, "it holds that already"
    assert held.hold(900 * MIB) is not None and held.held_bytes == 512 * MIB, "more than half of what is free"


def test_no_memory_is_held_where_no_host_takes_it(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(memory, "host_takes_memory", lambda: False)
    held = memory.HeldMemory()
    assert held.hold(200 * MIB) is None and held.held_bytes == 0 and not Mapped.made


@pytest.mark.usefixtures("machine")
def test_memory_is_let_go_as_far_as_asked() -> None:
    held = memory.HeldMemory()
    held.hold(256 * MIB)
    held.let_go(1)
    assert 0 < held.held_bytes < 256 * MIB
    held.let_go(100 * MIB)
    assert 0 < held.held_bytes <= 156 * MIB
    held.let_go()
    assert held.held_bytes == 0 and not Mapped.made
    held.let_go(100 * MIB)  # nothing is left to let go of


def test_real_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_takes_memory", lambda: True)
    held = memory.HeldMemory()
    before = _resident_bytes()
    assert (held.hold(64 * MIB) or 0) > 0
    assert _resident_bytes() >= before + 60 * MIB, "memory that is not touched is not there"
    held.let_go()
    assert _resident_bytes() < before + 30 * MIB


def _resident_bytes() -> int:
    words = Path("/proc/self/statm").read_text().split()
    return int(words[1]) * mmap.PAGESIZE
