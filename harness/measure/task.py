"""What a worker does: measures computed cells, and hands back what the run's own process writes of them.

    outcomes = decode_outcomes(work(encode_batch(Batch(engine="sim", folder=str(folder), cells=entries))))

Batches and outcomes are bytes, so that any executor can carry them. A worker keeps the last loads that it has made.
"""

from __future__ import annotations

import asyncio
import pickle
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import msgspec

from harness.engines.kind import EngineName
from harness.experiment.loads import FreeLoad, Loads, load_key
from harness.experiment.read import Cell
from harness.measure.group import Running, run_group
from harness.records import CellRecord, Resolved, TraceOrigin
from harness.results.folder import UnwrittenFolder
from harness.results.manifest import CellEntry, Manifest

_LOADS = Loads()


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Cells for one worker. folder: the run's, for messages; a worker writes nothing there."""

    engine: EngineName
    folder: str
    cells: list[CellEntry]


class CellOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one cell. resolved, start_s, trace, record: of its manifest entry. rows, samples: lines of files.

    advanced, notes: what its progress told. took_s: on the worker. error: what ended it, pickled; None: it is complete.
    """

    key: str
    resolved: Resolved | None
    start_s: float | None
    trace: TraceOrigin | None
    record: CellRecord | None
    rows: bytes
    samples: bytes
    advanced: int
    notes: list[str]
    took_s: float
    error: bytes | None


class _Told:
    """A progress that keeps what it is told."""

    def __init__(self) -> None:
        self.advanced, self.notes = 0, list[str]()

    def start(self, total: int | None, label: str) -> None: ...

    def advance(self, n: int = 1) -> None:
        self.advanced += n

    def state(self, text: str) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


def work(batch: bytes, loads: Mapping[str, bytes] | None = None) -> bytes:
    """Measures a batch's cells in their order, up to the first that fails.

    loads: by load_key, encoded loads that this worker need not make itself."""
    asked = msgspec.msgpack.decode(batch, type=Batch)
    outcomes = []
    for entry in asked.cells:
        outcomes.append(_measured(asked, entry, loads or {}))
        if outcomes[-1].error is not None:
            break
    return msgspec.msgpack.encode(outcomes)


def _measured(asked: Batch, entry: CellEntry, loads: Mapping[str, bytes]) -> CellOutcome:
    told, began_s, error = _Told(), time.perf_counter(), None
    folder = UnwrittenFolder(Path(asked.folder), _manifest_of(asked, entry))
    try:
        cell = Cell(entry.key, entry.overrides, entry.experiment)
        key = load_key(cell.experiment)
        if key in loads:
            _LOADS.keep(key, lambda: msgspec.msgpack.decode(loads[key], type=FreeLoad))
        running = Running(asked.engine, cell.experiment, folder.path, time.perf_counter)
        asyncio.run(run_group(running, [cell], folder, _LOADS, {cell.key: 0.0}, told))
    except Exception as caught:
        error = _pickled(caught)
    rows, samples = folder.encoded()
    return CellOutcome(
        key=entry.key,
        resolved=entry.resolved,
        start_s=entry.start_s,
        trace=entry.trace,
        record=entry.record,
        rows=rows,
        samples=samples,
        advanced=told.advanced,
        notes=told.notes,
        took_s=time.perf_counter() - began_s,
        error=error,
    )


def _manifest_of(asked: Batch, entry: CellEntry) -> Manifest:
    """As much of the run's as measuring one cell reads and changes."""
    return Manifest(run_id="", name="", status="started", engine=asked.engine, cells=[entry])


def _pickled(error: Exception) -> bytes:
    """The error itself, so that the run's process tells it as its own; of a bug, with the worker's traceback."""
    where = "".join(traceback.format_exception(error))
    error.add_note(where)
    try:
        return pickle.dumps(error)
    except Exception:
        return pickle.dumps(RuntimeError(where))


def encode_batch(batch: Batch) -> bytes:
    return msgspec.msgpack.encode(batch)


def encode_load(load: FreeLoad) -> bytes:
    return msgspec.msgpack.encode(load)


def decode_outcomes(answer: bytes) -> list[CellOutcome]:
    return msgspec.msgpack.decode(answer, type=list[CellOutcome])
