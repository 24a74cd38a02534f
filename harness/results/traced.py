"""io.json: what a run's traces say of its block device and its files.

    io = read_io(folder)                           # None: nothing was traced
    io.traces[0].block.read.d2c_s.p50

Nothing else knows the file's keys. harness/blockio/characterize.py makes the figures, and says how.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from harness.errors import ResultsError
from harness.results.folder import write_atomically
from harness.results.manifest import DeviceEntry

Direction = Literal["read", "write"]


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of many requests. None: there was none."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


class BlockFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The requests of one direction. unseen: those whose completion the trace misses; None in an older trace.

    sizes: count by size, in powers of two, from this many bytes. d2c_s: at the device; q2d_s: before it. split: I/Os
    that the kernel split; split_d2c_s: of each as a whole. busy_s: with a request at the device; depth: of its queue.
    """

    requests: int
    bytes: int
    unseen: int | None = None
    sizes: dict[int, int]
    sequential: int
    random: int
    d2c_s: Spread
    split: int
    split_d2c_s: Spread
    q2d_s: Spread
    busy_s: float
    depth: float | None
    bytes_per_s: float | None


class BothDirections(msgspec.Struct, frozen=True, kw_only=True):
    read: BlockFigures
    write: BlockFigures

    def of(self, direction: Direction) -> BlockFigures:
        return self.read if direction == "read" else self.write


class TracedFile(msgspec.Struct, frozen=True, kw_only=True):
    """The calls on one file, under its last name."""

    name: str
    opens: int
    reads: int
    writes: int
    read_bytes: int
    write_bytes: int


class TracedFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The calls on all files. each: the first files by name."""

    files: int
    opens: int
    reads: int
    writes: int
    read_bytes: int
    write_bytes: int
    sequential: int
    random: int
    each: list[TracedFile]


class BytesTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """A value for each 100 ms with requests. start_s: on the run's clock; depths: the mean number at the device."""

    start_s: list[float]
    read_bytes: list[int]
    read_sequential: list[int]
    read_random: list[int]
    read_depth: list[int | float]
    write_bytes: list[int]
    write_sequential: list[int]
    write_random: list[int]
    write_depth: list[int | float]


class TracedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request from disk, and the four parts of its time to first token. shown: why it is in the file."""

    shown: Literal["first", "slow"]
    id: str
    tier: str | None
    sample: int
    cell: str
    sent_s: float
    ttft_s: float
    engine_s: float
    lookup_s: float
    host_s: float
    device_s: float


class ByteCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes read by one account. deviation: relative, from the traced block requests; None: the account says none."""

    account: str
    bytes: int | None
    deviation: float | None


class TraceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One trace. page_cache_share: of the bytes read by calls; None: no call read any."""

    cells: tuple[str, ...]
    device: DeviceEntry | None
    file_system: str | None
    started_s: float
    seconds: float
    lost_events: int
    block: BothDirections
    page_cache_share: float | None
    syncs: int
    files: TracedFiles
    timeline: BytesTimeline
    requests_from_disk: int
    requests: list[TracedRequest]
    checks: list[ByteCheck]


class IoFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All traces of a run; a run without any has no io.json."""

    run: str
    engine: str
    traces: Annotated[list[TraceFigures], msgspec.Meta(min_length=1)]


def write_io(folder: Path, io: IoFigures) -> None:
    write_atomically(folder / "io.json", msgspec.json.format(msgspec.json.encode(io), indent=1) + b"\n")


def read_io(folder: Path) -> IoFigures | None:
    """What `harness io characterize` found; None where nothing was traced. Raises ResultsError."""
    path = folder / "io.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=IoFigures)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ResultsError(
            f"{path}: cannot be read ({error}); remove it, and make it again with harness io characterize {folder}"
        ) from None
