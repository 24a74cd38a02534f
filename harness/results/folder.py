"""Run folders: the manifest, rows, samples and summary of a run. Nothing else writes or reads them.

results/<run id>/
  manifest.json      what was asked, on what machine, with which versions; status started, complete or failed
  rows.jsonl         one RequestRecord a line, appended as they complete
  samples.jsonl      one Sample a line: the counters and the host around each measured batch
  summary.json       made from the rows, can be made again
  requests.parquet   the rows as a table
  report.html        for people
  io/N/              one trace of block requests and file calls: trace.json, and bpftrace's lines
  io.json            made from the traces, can be made again
  logs/              what the engines said
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import msgspec
from msgspec import UNSET

from harness.errors import EngineError, ResultsError
from harness.records import IoTrace, Sample
from harness.results.manifest import Manifest, encode_manifest, read_manifest
from harness.results.summary import Summary, encode_summary
from traces.request import RequestRecord
from traces.tiers import sources

_T = TypeVar("_T", bound=msgspec.Struct)
_CELLS_EVERY_S = 1.0


class RunFolder:
    """One run's folder, open for appending by one process at a time."""

    def __init__(self, path: Path, manifest: Manifest, lock: int | None) -> None:
        self.path, self.manifest, self._lock = path, manifest, lock
        self._files: dict[str, int] = {}
        self._again: dict[str, Iterator[bytes]] = {}
        self._saved_s = 0.0

    @classmethod
    def create(cls, path: Path, manifest: Manifest) -> RunFolder:
        """Makes a new folder. Raises ResultsError where one exists: nothing is written over."""
        try:
            path.mkdir(parents=True)
            (path / "logs").mkdir()
        except FileExistsError:
            raise ResultsError(f"{path}: exists already; choose another --out, or go on with --resume {path}") from None
        except OSError as error:
            raise ResultsError(f"{path}: cannot be made ({error.strerror}); choose a writable --out") from None
        folder = cls(path, manifest, _take_lock(path))
        folder.save_manifest()
        return folder

    @classmethod
    def resume(cls, path: Path) -> RunFolder:
        """Opens an unfinished run to append to it; a line torn by a crash is cut off."""
        folder = cls(path, read_manifest(path), _take_lock(path))
        try:
            for name in ("rows.jsonl", "samples.jsonl"):
                _cut_torn_line(path / name)
        except ResultsError:
            folder.close()
            raise
        return folder

    def save_manifest(self) -> None:
        """Writes the manifest, as it was changed in place. Raises EngineError."""
        try:
            write_atomically(self.path / "manifest.json", encode_manifest(self.manifest))
        except OSError as error:
            raise self._refused(error) from None
        self._saved_s = time.monotonic()

    def save_cells(self) -> None:
        """The same, of what its cells have come to. A deterministic engine begins again, whatever the manifest says of
        them, so that it may be some time behind: a sweep's manifest is long."""
        if not self._again or time.monotonic() - self._saved_s >= _CELLS_EVERY_S:
            self.save_manifest()

    def append_rows(self, rows: Iterable[RequestRecord]) -> None:
        """Appends rows in one write: a killed process, or a full disk (EngineError), leaves all of them or none."""
        self._append("rows.jsonl", rows)

    def append_sample(self, sample: Sample) -> None:
        self._append("samples.jsonl", [sample])

    def expect_again(self) -> None:
        """Lets a deterministic engine begin again: what is appended is compared with the lines that are there first."""
        if not self._again:
            self._again = {name: _lines(self.path / name) for name in ("rows.jsonl", "samples.jsonl")}

    def append_encoded(self, rows: bytes, samples: bytes) -> None:
        """Appends what an UnwrittenFolder has kept of a whole cell."""
        for name, data in (("rows.jsonl", rows), ("samples.jsonl", samples)):
            self._append_lines(name, data.splitlines(keepends=True) if self._again else [data])

    def _append(self, name: str, records: Iterable[msgspec.Struct]) -> None:
        self._append_lines(name, [msgspec.json.encode(record) + b"\n" for record in records])

    def _append_lines(self, name: str, lines: Iterable[bytes]) -> None:
        new = []
        for line in lines:
            known = next(self._again.get(name, iter(())), None)
            if known is None:
                new.append(line)
            elif known != line:
                raise ResultsError(
                    f"{self.path}/{name}: the resumed run gives other rows than the first one; was the code, the config"
                    " or the trace changed? Start a new run"
                )
        self._write(name, b"".join(new))

    def _write(self, name: str, data: bytes) -> None:
        size = None
        try:
            if name not in self._files:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._files[name] = os.open(self.path / name, flags, 0o644)
            size = os.fstat(self._files[name]).st_size
            view = memoryview(data)
            while view:
                view = view[os.write(self._files[name], view) :]
        except OSError as error:
            if size is not None:
                os.ftruncate(self._files[name], size)
            raise self._refused(error) from None

    def _refused(self, error: OSError) -> EngineError:
        return EngineError(f"{self.path}: cannot be written ({error.strerror}); make room there, or make it writable")

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class UnwrittenFolder(RunFolder):
    """A cell's part of a run that another process writes: it keeps what it would append, and writes nothing."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path, manifest, None)
        self._kept: dict[str, list[bytes]] = {"rows.jsonl": [], "samples.jsonl": []}

    def save_manifest(self) -> None:
        """The other process does, from the cell's entry."""

    def _append_lines(self, name: str, lines: Iterable[bytes]) -> None:
        self._kept[name].extend(lines)

    def encoded(self) -> tuple[bytes, bytes]:
        """Rows and samples, as RunFolder.append_encoded takes them."""
        return b"".join(self._kept["rows.jsonl"]), b"".join(self._kept["samples.jsonl"])


def read_rows(path: Path) -> Iterator[RequestRecord]:
    return _read_lines(path / "rows.jsonl", RequestRecord)


def read_samples(path: Path) -> Iterator[Sample]:
    return _read_lines(path / "samples.jsonl", Sample, _with_counters_by_tier)


# Counters of schema 1, which had LMCache's names, and where they stand now.
_COUNTERS_OF_OLD_SAMPLES = {
    "gpu_hit_tokens": ("hit_tokens", "gpu"),
    "l1_hit_tokens": ("hit_tokens", "cpu"),
    "l2_hit_tokens": ("hit_tokens", "disk"),
    "l2_loaded_chunks": ("loaded_chunks", "disk"),
    "storage_read_bytes": ("device_read_bytes", "disk"),
}


def _with_counters_by_tier(sample: Any) -> Any:
    """A line of samples.jsonl as this version writes it; one that already is stays as it is."""
    for side in ("observed", "expected"):
        counters = sample.get(side) if isinstance(sample, dict) else None
        if not isinstance(counters, dict):
            continue
        for old, (field, tier) in _COUNTERS_OF_OLD_SAMPLES.items():
            value = counters.pop(old, None)
            if value is not None:
                counters.setdefault(field, {})[tier] = value
    return sample


def new_trace_folder(path: Path) -> Path:
    """Where the next trace of a run goes."""
    return path / "io" / str(sum(1 for _ in (path / "io").glob("*")))


def write_io_trace(folder: Path, trace: IoTrace) -> None:
    write_atomically(folder / "trace.json", msgspec.json.encode(trace))


def read_traces(path: Path) -> list[tuple[Path, IoTrace]]:
    """The folders of all traces that were ended, with what they are about."""
    found = sorted((path / "io").glob("*/trace.json"), key=lambda file: int(file.parent.name))
    return [(file.parent, msgspec.json.decode(file.read_bytes(), type=IoTrace)) for file in found]


def write_summary(path: Path, summary: Summary) -> None:
    write_atomically(path / "summary.json", encode_summary(summary))


def write_parquet(path: Path, rows: Sequence[RequestRecord]) -> None:
    """The rows as a table, one column a field; tokens_by_tier becomes one column a tier."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    temporary = path / "requests.parquet.tmp"
    # Column by column: of a long run, a dict a row would be many times the table.
    columns = {name: pa.array([value(row) for row in rows]) for name, value in _columns(rows).items()}
    pq.write_table(pa.table(columns), temporary)
    temporary.replace(path / "requests.parquet")


def _columns(rows: Sequence[RequestRecord]) -> dict[str, Callable[[RequestRecord], Any]]:
    """By name, what a row has there."""
    fields = (name for name in RequestRecord.__struct_fields__ if name not in ("tokens_by_tier", "client"))
    found: dict[str, Callable[[RequestRecord], Any]] = {name: attrgetter(name) for name in fields}
    if any(row.client is not UNSET for row in rows):
        found["client"] = lambda row: None if row.client is UNSET else row.client
    found |= {f"{source}_tokens": _tokens_of(source) for source in sources()}
    return found | {name: attrgetter(name) for name in ("ttft_s", "e2e_s", "tpot_s")}


def _tokens_of(source: str) -> Callable[[RequestRecord], int | None]:
    return lambda row: row.tokens_by_tier.get(source)


def row_fields(row: RequestRecord) -> dict[str, Any]:
    """The fields that a row has, and one a source for its tokens."""
    fields = {name: value for name, value in msgspec.structs.asdict(row).items() if value is not UNSET}
    by_source = fields.pop("tokens_by_tier")
    return fields | {f"{source}_tokens": by_source.get(source) for source in sources()}


def flat_row(row: RequestRecord) -> dict[str, Any]:
    """A row as one line of a table: its fields, and the times that follow from them."""
    times = {"ttft_s": row.ttft_s, "e2e_s": row.e2e_s, "tpot_s": row.tpot_s}
    return row_fields(row) | {"token_s": list(row.token_s)} | times


def make_folder(folder: Path) -> None:
    """A new folder for what is not a run. Raises ResultsError where it exists, or cannot be made."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ResultsError(f"{folder}: exists already; choose another --out") from None
    except OSError as error:
        raise ResultsError(f"{folder}: cannot be made ({error.strerror}); choose a writable --out") from None


def write_atomically(path: Path, data: bytes) -> None:
    """A reader sees the old content or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def _read_lines(path: Path, kind: type[_T], upgrade: Callable[[Any], Any] | None = None) -> Iterator[_T]:
    """Lines of a file that a crash may have cut: a torn last line is left out, a torn other one is an error.

    upgrade: makes a decoded line of an older version one of this version.
    """
    file = _opened(path)
    if file is None:
        return
    decoder, raw = msgspec.json.Decoder(kind), msgspec.json.Decoder()
    with file as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line) if upgrade is None else msgspec.convert(upgrade(raw.decode(line)), kind)
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise ResultsError(f"{path}:{number}: not a {kind.__name__} ({error}); restore the file") from None


def _lines(path: Path) -> Iterator[bytes]:
    file = _opened(path)
    if file is not None:
        with file:
            yield from file


def _cut_torn_line(path: Path) -> None:
    file = _opened(path, "rb+")
    if file is not None:
        with file:
            data = file.read()
            file.truncate(data.rfind(b"\n") + 1)


def _opened(path: Path, mode: str = "rb") -> IO[bytes] | None:
    """The file, None where there is none. Raises ResultsError where it cannot be opened."""
    try:
        return cast("IO[bytes]", path.open(mode))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ResultsError(f"{path}: cannot be opened ({error.strerror}); make it a readable file") from None


def _take_lock(path: Path) -> int:
    """One writer a folder; the lock goes with the process."""
    try:
        descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ResultsError(f"{path}: cannot be written ({error.strerror}); make it writable, or copy it") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ResultsError(f"{path}: another process is writing to it; wait until it ends") from None
    return descriptor
