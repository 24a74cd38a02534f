"""Hit-rate ceilings: the most of a free load's prompt tokens that any cache could have served, beside its hit rate.
Computed, also for a measured run: no cache is run.

    write_ceilings(folder, find_ceilings(manifest, rows, samples))
    read_ceilings(folder)["base"].of_size

Nothing else knows the keys of ceiling.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from harness.errors import ResultsError
from harness.experiment.loads import FreeLoad, free_load
from harness.records import HitCeiling, Sample
from harness.results.folder import write_atomically
from harness.results.manifest import CellEntry, Manifest
from harness.results.paired import asked_of
from harness.results.summary import FREE_LOAD, counted
from harness.results.trials import TrialKey, ended_trials, split_trials, trials_asked
from simulator.ceiling import UNLIMITED_TOKENS, most_hits
from traces.errors import UserError
from traces.request import Request, RequestRecord, Segment, reply_stream
from traces.tiers import all_tiers

FILE = "ceiling.json"
# Some two seconds of computing each. The public conversation trace has 12,031 requests of 288,500 segments.
MAX_REQUESTS, MAX_SEGMENTS = 150_000, 5_000_000


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    cells: dict[str, HitCeiling]


class _NoCeilingError(Exception):
    """Why there is none: a clause."""


class _Loads:
    """Loads made again from the manifest, each once."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[FreeLoad, dict[str, Request]]] = {}

    def of(self, cell: CellEntry) -> tuple[FreeLoad, dict[str, Request]]:
        """A cell's load, and its requests by id."""
        chunk_tokens = cell.cache.chunk_tokens if cell.cache else 0
        key = f"{asked_of(cell)} {chunk_tokens}"
        if key not in self._made:
            try:
                load = free_load(cell.experiment)
            except (ResultsError, UserError) as error:
                raise _NoCeilingError(f"the load cannot be made again: {error}") from None
            if load.trace != cell.trace:
                raise _NoCeilingError("the load cannot be made again: its trace is another one now")
            self._made[key] = load, {request.id: request for request in load.requests}
        return self._made[key]


class _Sent(NamedTuple):
    """Prompts in the order in which they were sent, with what was decoded behind them. counted_tokens: each one's
    prompt tokens; 0 where its row does not count."""

    prompts: list[tuple[Segment, ...]]
    counted_tokens: list[int]


def find_ceilings(
    manifest: Manifest, rows: Iterable[RequestRecord], samples: Iterable[Sample]
) -> dict[str, HitCeiling]:
    """By cell that has ended, of free loads alone."""
    loads, ended = _Loads(), ended_trials(samples, FREE_LOAD)
    by_cell: dict[str, list[RequestRecord]] = {}
    for row in rows:
        if row.phase == "measure" and row.expected_tier is None:
            by_cell.setdefault(row.cell, []).append(row)
    return {
        cell.key: _ceiling(cell, by_cell[cell.key], ended.get(cell.key, set()), loads)
        for cell in manifest.cells
        if cell.key in by_cell and cell.status == "complete" and not (cell.record and cell.record.storage)
    }


def _ceiling(cell: CellEntry, rows: Sequence[RequestRecord], ended: set[TrialKey], loads: _Loads) -> HitCeiling:
    try:
        passes = _passes(cell, rows, ended, loads)
        unlimited = _share(passes, UNLIMITED_TOKENS)
    except _NoCeilingError as reason:
        return HitCeiling(reason=str(reason))
    try:
        size = _size_tokens(cell)
    except _NoCeilingError as reason:
        return HitCeiling(of_any_size=unlimited, reason=str(reason))
    return HitCeiling(of_size=_share(passes, size), size_tokens=size, of_any_size=unlimited)


def _passes(cell: CellEntry, rows: Sequence[RequestRecord], ended: set[TrialKey], loads: _Loads) -> list[_Sent]:
    """What was sent to caches that were empty before, pass by pass."""
    if len(rows) > MAX_REQUESTS:
        raise _NoCeilingError(f"more than {MAX_REQUESTS:,} requests were sent ({len(rows):,}): it would take long")
    load, asked = loads.of(cell)
    complete = rows if trials_asked(cell.config) == 1 else split_trials(rows, ended).complete
    by_pass: dict[TrialKey, list[RequestRecord]] = {}
    for row in complete:
        request = asked.get(row.id)
        if request is None or request.prompt_tokens != row.prompt_tokens:
            raise _NoCeilingError(f"this version makes another load: request {row.id} is not the one that was sent")
        by_pass.setdefault((row.sample, row.attempt), []).append(row)
    segments = sum(len(asked[row.id].prompt) for row in complete)
    if segments > MAX_SEGMENTS:
        raise _NoCeilingError(f"the prompts have {segments:,} segments, more than {MAX_SEGMENTS:,}: it would take long")
    named = {segment.hash_id for request in load.requests for segment in request.prompt}
    warm = [request.prompt for request in load.warmers]
    found = []
    for own in by_pass.values():
        own.sort(key=lambda row: row.sent_s)
        prompts = warm + [_with_reply(asked[row.id], named) for row in own]
        found.append(_Sent(prompts, [0] * len(warm) + [row.prompt_tokens if counted(row) else 0 for row in own]))
    return found


def _with_reply(request: Request, named: set[int]) -> tuple[Segment, ...]:
    """The prompt; where another one quotes the answer, with what was decoded behind it: never the last token's KV."""
    reply, decoded = reply_stream(request.id), request.output_tokens - 1
    return (*request.prompt, Segment(reply, decoded)) if decoded and reply in named else request.prompt


def _share(passes: Sequence[_Sent], capacity_tokens: int) -> float:
    """Of the prompt tokens that count, those that the best cache of that size holds."""
    hits = sum(
        min(found, tokens)
        for sent in passes
        for found, tokens in zip(most_hits(sent.prompts, capacity_tokens), sent.counted_tokens, strict=True)
    )
    asked = sum(sum(sent.counted_tokens) for sent in passes)
    if not asked:
        raise _NoCeilingError("no request was answered")
    return hits / asked


def _size_tokens(cell: CellEntry) -> int:
    """The room of all the cell's tiers together."""
    found, asked = cell.resolved, cell.cache
    if found is None or asked is None or not found.kv_bytes_per_token:
        raise _NoCeilingError("the engine does not say how large a token's KV is")
    sizes = {tier.label: found.bytes_of(tier.name) for tier in all_tiers() if getattr(asked, tier.name) is not None}
    for label, size in sizes.items():
        if size is None:
            raise _NoCeilingError(f"the size of the tier {label} is not reported")
    return sum(size or 0 for size in sizes.values()) // found.kv_bytes_per_token


def write_ceilings(folder: Path, run: str, cells: dict[str, HitCeiling]) -> None:
    """Of runs that have free loads. What cannot be found any more, for the trace is gone, stays as it was."""
    if cells:
        before = read_ceilings(folder)
        kept = {key: before[key] for key, one in cells.items() if one.of_any_size is None and key in before}
        document = _Document(run=run, cells=cells | kept)
        write_atomically(folder / FILE, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def read_ceilings(folder: Path) -> dict[str, HitCeiling]:
    """By cell; none in a folder of an older version, or while the run goes on. Raises ResultsError."""
    path = folder / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Document).cells
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise ResultsError(f"{path}: cannot be read ({error}); remove it, and run harness report {folder}") from None
