"""Free memory that a virtual machine's host does not take: one page of each block is kept, so that none is reported."""

import mmap
import time
from pathlib import Path
from typing import ClassVar

import pytest

from harness.collectors import memory
from harness.collectors.memory import OwnMemory, RestedPages, Zone, free_memory, in_small_blocks

MIB = 2**20
BLOCK_PAGES = 512


@pytest.mark.parametrize(
    ("order", "found"), [("9\n", 9), ("10\n", 10), ("11\n", None), ("4294967295\n", None), (None, None)]
)
def test_a_host_takes_memory_where_the_kernel_reports_it(order: str | None, found: int | None, tmp_path: Path) -> None:
    folder = tmp_path / "module/page_reporting/parameters"
    folder.mkdir(parents=True)
    if order is not None:
        (folder / "page_reporting_order").write_text(order)
    assert memory.reporting_order(tmp_path) == found


@pytest.mark.parametrize(("counted", "found"), [("3\n", 3072), (None, None)])
def test_what_a_kernel_has_offered_its_host_is_known_where_it_counts_that(
    counted: str | None, found: int | None, tmp_path: Path
) -> None:
    folder = tmp_path / "module/page_reporting/parameters"
    folder.mkdir(parents=True)
    if counted is not None:
        (folder / "reported_kib").write_text(counted)
    assert memory.reported_bytes(tmp_path) == found


BUDDYINFO = """\
Node 0, zone      DMA      0      0      0      0      0      0      0      0      1      1      3
Node 0, zone   Normal      7      5      0      0      0      0      0      0      0      2      1
"""
PAGETYPEINFO = """\
Page block order: 9
Pages per block:  512

Free pages count per migrate type at order       0      1      2      3      4      5      6      7      8      9     10
Node 0, zone      DMA, type    Unmovable      0      0      0      0      0      0      0      0      1      0      0
Node 0, zone      DMA, type      Movable      0      0      0      0      0      0      0      0      0      1      3
Node 0, zone   Normal, type    Unmovable      3      3      0      0      0      0      0      0      0      0      0
Node 0, zone   Normal, type      Movable      4      2      0      0      0      0      0      0      0      2      1
Node 0, zone  Movable, type      Movable >100000      0      0      0      0      0      0      0      0      0      0

Number of blocks type     Unmovable      Movable  Reclaimable   HighAtomic      Isolate
Node 0, zone   Normal          364         9931          457            0            0
"""


def test_free_memory_is_read_zone_by_zone_the_highest_first(tmp_path: Path) -> None:
    (tmp_path / "buddyinfo").write_text(BUDDYINFO)
    large = Zone(0, 4096 * (512 + 3 * 1024))
    assert free_memory(9, tmp_path) == [
        Zone(4096 * 17, 4096 * 2048),
        Zone(4096 * 256, large.large),
    ]
    (tmp_path / "pagetypeinfo").write_text(PAGETYPEINFO)
    assert free_memory(9, tmp_path) == [Zone(4096 * 100_000, 0), Zone(4096 * 8, 4096 * 2048), large]
    assert free_memory(10, tmp_path)[1] == Zone(4096 * (8 + 1024), 4096 * 1024)


@pytest.mark.parametrize(
    ("zones", "enough"),
    [
        ([Zone(100, 900)], True),
        ([Zone(99, 900)], False),
        ([Zone(99, 900), Zone(900, 0)], False),
        ([Zone(60, 5), Zone(40, 900)], True),
        ([Zone(60, 7), Zone(40, 900)], False),
        ([Zone(60, 0), Zone(39, 0)], False),
        ([], False),
    ],
)
def test_a_zone_with_large_blocks_gives_them_before_the_next_zone(zones: list[Zone], enough: bool) -> None:
    assert in_small_blocks(zones, 100) is enough


class Mapped:
    """A mapping that takes no memory; `made` has those that live. Its page frames follow those of the others."""

    made: ClassVar[list["Mapped"]] = []

    def __init__(self, _file: int, size: int, flags: int) -> None:
        assert flags & mmap.MAP_ANONYMOUS
        self.size, self.touched = size, 0
        self.first = sum(map(len, self.made)) // mmap.PAGESIZE
        self.kept = set(range(size // mmap.PAGESIZE))
        self.made.append(self)

    def __len__(self) -> int:
        return self.size

    def close(self) -> None:
        self.made.remove(self)

    def madvise(self, advice: int, start: int = 0, length: int | None = None) -> None:
        if advice == mmap.MADV_DONTNEED:
            assert length and start % mmap.PAGESIZE == length % mmap.PAGESIZE == 0
            pages = range(start // mmap.PAGESIZE, (start + length) // mmap.PAGESIZE)
            assert self.kept.issuperset(pages), "freed twice, or not there"
            self.kept -= set(pages)
        elif advice == mmap.MADV_NOHUGEPAGE:
            raise OSError("a kernel without huge pages")

    def __setitem__(self, pages: slice, value: bytes) -> None:
        assert pages.step == mmap.PAGESIZE
        self.touched += len(value)


class Machine:
    """A guest whose host takes memory."""

    zones: ClassVar[list[Zone]] = [Zone(8 * MIB, 1024 * MIB), Zone(4 * MIB, 0)]
    order: ClassVar[int | None] = 9


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> type[Machine]:
    class Here(Machine):
        pass

    monkeypatch.setattr(Mapped, "made", [])
    monkeypatch.setattr(mmap, "mmap", Mapped)
    monkeypatch.setattr(memory, "_SPARE_BYTES", 64 * MIB)
    monkeypatch.setattr(memory, "free_memory", lambda _order: Here.zones)
    monkeypatch.setattr(memory, "reporting_order", lambda: Here.order)
    monkeypatch.setattr(memory, "_frames", lambda piece: range(piece.first, piece.first + len(piece) // mmap.PAGESIZE))
    return Here


@pytest.mark.usefixtures("machine")
def test_memory_is_touched_page_by_page_and_one_page_of_each_block_is_kept() -> None:
    own = OwnMemory()
    assert own.have(0) is None and not Mapped.made
    assert (own.have(192 * MIB) or 0) > 0
    assert sum(map(len, Mapped.made)) == 256 * MIB, "what was asked for, and some to spare"
    assert all(one.touched == one.size // mmap.PAGESIZE for one in Mapped.made)
    kept = {one.first + page for one in Mapped.made for page in one.kept}
    assert kept == set(range(0, 256 * MIB // mmap.PAGESIZE, BLOCK_PAGES))
    own.let_go()
    assert not Mapped.made


def test_it_is_touched_again_only_where_small_blocks_have_become_few(machine: type[Machine]) -> None:
    own = OwnMemory()
    machine.zones = [Zone(300 * MIB, 1024 * MIB), Zone(100 * MIB, 0)]
    assert own.have(100 * MIB) is not None, "the host may have had what others left"
    assert sum(map(len, Mapped.made)) == (400 + 64) * MIB
    assert own.have(300 * MIB) is None and own.have(100 * MIB) is None
    assert own.have(301 * MIB) is not None
    assert sum(map(len, Mapped.made)) == (400 + 64 + 301 + 64) * MIB


def test_most_of_what_is_free_is_left_to_others(machine: type[Machine]) -> None:
    machine.zones = [Zone(100 * MIB, 500 * MIB), Zone(100 * MIB, 100 * MIB)]
    assert OwnMemory().have(9000 * MIB) is not None
    assert sum(map(len, Mapped.made)) == 320 * MIB


def test_nothing_is_kept_where_no_host_takes_memory(machine: type[Machine]) -> None:
    machine.order = None
    assert OwnMemory().have(200 * MIB) is None and not Mapped.made


def test_real_memory_is_given_back_but_for_a_page_of_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "reporting_order", lambda: 9)
    monkeypatch.setattr(memory, "free_memory", lambda _order: [Zone(0, 1024 * MIB)])
    monkeypatch.setattr(memory, "_SPARE_BYTES", 0)
    own, before = OwnMemory(), _resident_bytes()
    assert (own.have(128 * MIB) or 0) > 0
    assert before < _resident_bytes() < before + 100 * MIB
    own.let_go()


def _resident_bytes() -> int:
    words = Path("/proc/self/statm").read_text().split()
    return int(words[1]) * mmap.PAGESIZE


def test_a_page_that_the_host_has_taken_is_one_that_is_slow_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the pages: each is read once before one is read again."""
    rested = RestedPages()
    now_s, read = [0.0], list[int]()

    class Taken:
        def __getitem__(self, page: int) -> int:
            read.append(page)
            now_s[0] += 1e-4 if page // mmap.PAGESIZE % 4 == 0 else 1e-6
            return 1

    monkeypatch.setattr(rested, "_memory", Taken())
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    pages = memory._RESTED_BYTES // mmap.PAGESIZE
    shares = [rested.taken_share() for _ in range(pages // memory._LOOKS_AT_PAGES)]
    assert sorted(read) == list(range(0, memory._RESTED_BYTES, mmap.PAGESIZE))
    assert sum(shares) / len(shares) == pytest.approx(0.25)
    own = OwnMemory(rested)
    assert own.taken_share() == shares[0]
    own.let_go()
    assert own.taken_share() is None and OwnMemory().taken_share() is None


def test_pages_in_use_are_not_taken() -> None:
    rested = RestedPages()
    looks = memory._RESTED_BYTES // mmap.PAGESIZE // memory._LOOKS_AT_PAGES
    for _ in range(looks):
        rested.taken_share()
    assert min(rested.taken_share() for _ in range(looks)) < memory.MAX_TAKEN_SHARE
