"""How the cache used the disk: relates the block requests and file calls of a run's traces to its samples and rows.

    io = characterize(folder)         # the contents of io.json; None if the run was not traced

A request is sequential if it begins where the preceding one of the same direction and device ended. A call is
sequential if it begins where the preceding call on that file ended. Queue depth follows Little's law: the summed time
at the device over the time with work. If the kernel split one I/O into several requests, each of them counts. The
whole I/O lasts from the first part's issue to the last part's completion.

A request's time to first token has four shares. The device's share is the time with a read at the device. The host's
share is the other time within file calls (file system, page cache, copies). The look-up's share is the remaining time
between the first and the last file call (the cache server). The engine's share is the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from harness.collectors.bpf import BlockRequest, FileCall, read_block, read_files
from harness.records import IoTrace, Resolved, Sample
from harness.results.folder import read_rows, read_samples, read_traces
from harness.results.manifest import CellEntry, Manifest, read_manifest
from harness.results.traced import (
    BlockFigures,
    BothDirections,
    ByteCheck,
    BytesTimeline,
    IoFigures,
    Spread,
    TracedFile,
    TracedFiles,
    TracedRequest,
    TraceFigures,
)
from harness.stats import percentile
from traces.request import RequestRecord
from traces.tiers import all_states, from_storage

BIN_S = 0.1
_MAX_REQUESTS, _MAX_FILES = 100, 100
_IN_A_BIN = [f"{side}_{what}" for side in ("read", "write") for what in ("bytes", "sequential", "random", "depth")]
Interval = tuple[float, float]


def characterize(folder: Path) -> IoFigures | None:
    """Returns all figures of all traces of a run. Raises ResultsError."""
    traces = read_traces(folder)
    if not traces:
        return None
    manifest = read_manifest(folder)
    samples, rows = list(read_samples(folder)), list(read_rows(folder))
    found = [_trace(place, about, manifest, samples, rows) for place, about in traces]
    return IoFigures(run=manifest.run_id, engine=manifest.engine, traces=found)


def _trace(
    place: Path, about: IoTrace, manifest: Manifest, samples: Sequence[Sample], rows: Sequence[RequestRecord]
) -> TraceFigures:
    requests = read_block(place / "block.jsonl", about.zero_ns)
    calls = [call for call in read_files(place / "files.jsonl", about.zero_ns) if call.path.startswith(about.path)]
    cells = [cell for cell in manifest.cells if cell.key in about.cells]
    mine = [s for s in samples if s.cell in about.cells and s.attempt == about.attempt]
    sent = [r for r in rows if r.cell in about.cells and r.attempt == about.attempt and r.phase == "measure"]
    reads = [request for request in requests if not request.write]
    writes = [request for request in requests if request.write]
    from_disk = _from_disk(sent)
    return TraceFigures(
        cells=about.cells,
        device=cells[0].device if cells else None,
        file_system=_file_system(cells[0]) if cells else None,
        started_s=about.started_s,
        seconds=about.ended_s - about.started_s,
        lost_events=about.lost_events,
        block=BothDirections(read=block_figures(reads), write=block_figures(writes)),
        page_cache_share=page_cache_share(reads, calls),
        syncs=sum(call.kind == "sync" for call in calls),
        files=file_figures(calls),
        timeline=bytes_timeline(requests, about),
        requests_from_disk=len(from_disk),
        requests=_first_and_slowest(from_disk, reads, calls),
        checks=byte_checks(reads, calls, mine, cells),
    )


def _file_system(cell: CellEntry) -> str | None:
    known = cell.resolved.disk_file_system if cell.resolved else None
    return known or (cell.device.file_system if cell.device else None)


# ---- the block device


def block_figures(requests: Sequence[BlockRequest]) -> BlockFigures:
    """Sizes, order and times of one direction's requests."""
    follows = sum(map(_follows, pairwise(_by_issue(requests))))
    split_s = _split_s(requests)
    at_device = _at_device(requests)
    d2c_s = [end - begin for begin, end in at_device]
    busy_s = covered_s(at_device)
    timed_bytes = sum(r.bytes for r in requests if r.completed_s is not None)
    return BlockFigures(
        requests=len(requests),
        bytes=sum(r.bytes for r in requests),
        unseen=len(requests) - len(at_device),
        sizes=_sizes(r.bytes for r in requests),
        sequential=follows,
        random=max(0, len(requests) - 1 - follows),
        d2c_s=_spread(d2c_s),
        split=len(split_s),
        split_d2c_s=_spread(split_s),
        q2d_s=_spread([r.issued_s - r.queued_s for r in requests if r.queued_s is not None]),
        busy_s=busy_s,
        depth=sum(d2c_s) / busy_s if busy_s else None,
        bytes_per_s=timed_bytes / busy_s if busy_s else None,
    )


def _at_device(requests: Iterable[BlockRequest]) -> list[Interval]:
    """(issue, completion) of each request whose completion the trace holds."""
    return [(r.issued_s, r.completed_s) for r in requests if r.completed_s is not None]


def _by_issue(requests: Iterable[BlockRequest]) -> list[BlockRequest]:
    return sorted(requests, key=lambda request: request.issued_s)


def _follows(pair: tuple[BlockRequest, BlockRequest]) -> bool:
    return pair[1].sector == pair[0].sector + pair[0].bytes // 512


def _split_s(requests: Iterable[BlockRequest]) -> list[float]:
    """Durations of the I/Os that the kernel split; the parts of one I/O share one time of queueing.

    Leaves out an I/O if the trace misses the completion of a part.
    """
    whole: dict[float, list[BlockRequest]] = {}
    for request in requests:
        if request.queued_s is not None:
            whole.setdefault(request.queued_s, []).append(request)
    parts = [_at_device(each) for each in whole.values() if len(each) > 1 and len(_at_device(each)) == len(each)]
    return [max(end for _, end in each) - min(begin for begin, _ in each) for each in parts]


def _sizes(sizes: Iterable[int]) -> dict[int, int]:
    """Histogram of sizes by powers of two: lower bound in bytes → count."""
    counts: dict[int, int] = {}
    for size in sizes:
        low = 1 << max(0, size.bit_length() - 1)
        counts[low] = counts.get(low, 0) + 1
    return {low: counts[low] for low in sorted(counts)}


def _spread(values: Sequence[float]) -> Spread:
    mean = sum(values) / len(values) if values else None
    return Spread(mean=mean, p50=percentile(values, 0.5), p90=percentile(values, 0.9), p99=percentile(values, 0.99))


def covered_s(intervals: Iterable[Interval]) -> float:
    """Length of the intervals' union."""
    total, end = 0.0, float("-inf")
    for begin, finish in sorted(intervals):
        total += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return total


def bytes_timeline(requests: Sequence[BlockRequest], about: IoTrace) -> BytesTimeline:
    """Per 100 ms with requests: bytes completed, sequential and random requests, mean depth.

    start_s is on the run's clock. A request without a traced completion counts in the bin of its issue, and does not
    count towards the depth.
    """
    bins: dict[int, dict[str, float]] = {}

    def held(index: int) -> dict[str, float]:
        return bins.setdefault(index, dict.fromkeys(_IN_A_BIN, 0))

    for side, name in ((False, "read"), (True, "write")):
        last: BlockRequest | None = None
        for request in _by_issue(r for r in requests if r.write == side):
            begin_s = request.issued_s - about.started_s
            end_s = begin_s if request.completed_s is None else request.completed_s - about.started_s
            held(int(end_s // BIN_S))[f"{name}_bytes"] += request.bytes
            held(int(end_s // BIN_S))[f"{name}_{'sequential' if last and _follows((last, request)) else 'random'}"] += 1
            for index in range(int(begin_s // BIN_S), int(end_s // BIN_S) + 1):
                within_s = min(end_s, (index + 1) * BIN_S) - max(begin_s, index * BIN_S)
                held(index)[f"{name}_depth"] += within_s / BIN_S
            last = request
    order = sorted(bins)
    columns: dict[str, list[Any]] = {key: [bins[index][key] for index in order] for key in _IN_A_BIN}
    return BytesTimeline(start_s=[about.started_s + index * BIN_S for index in order], **columns)


# ---- files


def file_figures(calls: Sequence[FileCall]) -> TracedFiles:
    """Calls and bytes of each file under its last name; totals, and the first files by name."""
    files: dict[str, dict[str, int]] = {}
    position: dict[tuple[str, int], int] = {}
    sequential = moved = 0
    order: list[str] = []
    for call in sorted(calls, key=lambda call: call.at_s):
        if call.kind == "rename":
            if call.old_path in files:
                files[call.path] = _merged(files.pop(call.old_path), files.get(call.path))
            continue
        held = files.setdefault(call.path, _nothing())
        if call.kind == "open":
            held["opens"] += 1
            position[call.path, call.pid] = 0
        elif call.kind in ("read", "write") and call.bytes:
            at = call.offset if call.offset >= 0 else position.get((call.path, call.pid), 0)
            sequential += at == position.get((call.path, call.pid), 0)
            moved += 1
            position[call.path, call.pid] = at + call.bytes
            held[f"{call.kind}s"] += 1
            held[f"{call.kind}_bytes"] += call.bytes
            if call.kind == "read" and (not order or order[-1] != call.path):
                order.append(call.path)
    names = sorted(files)
    total = {key: sum(files[name][key] for name in names) for key in _nothing()}
    shown = [TracedFile(name=Path(name).name, **files[name]) for name in names[:_MAX_FILES]]
    return TracedFiles(files=len(names), **total, sequential=sequential, random=moved - sequential, each=shown)


def _nothing() -> dict[str, int]:
    return {"opens": 0, "reads": 0, "writes": 0, "read_bytes": 0, "write_bytes": 0}


def _merged(one: dict[str, int], other: dict[str, int] | None) -> dict[str, int]:
    return one if other is None else {key: one[key] + other[key] for key in one}


def page_cache_share(reads: Sequence[BlockRequest], calls: Sequence[FileCall]) -> float | None:
    """Share of the bytes read by calls that came from the page cache: the device did not read them.

    The tracepoint filemap would count the pages, but it has 7,000 events for 32 MiB read cold; the block layer has 40.
    """
    asked = sum(call.bytes for call in calls if call.kind == "read")
    return max(0.0, 1 - sum(r.bytes for r in reads) / asked) if asked else None


# ---- requests


def _from_disk(rows: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [
        row
        for row in rows
        if (row.expected_tier is None or from_storage(row.expected_tier)) and row.first_token_s is not None
    ]


def _first_and_slowest(
    rows: Sequence[RequestRecord], reads: Sequence[BlockRequest], calls: Sequence[FileCall]
) -> list[TracedRequest]:
    """The requests that a report shows, in the order sent."""
    first, rest = rows[:_MAX_REQUESTS], rows[_MAX_REQUESTS:]
    limit_s = sorted((row.ttft_s or 0.0 for row in rest), reverse=True)[:_MAX_REQUESTS]
    slow = [row for row in rest if (row.ttft_s or 0.0) >= limit_s[-1]][:_MAX_REQUESTS]
    return [*(split(row, reads, calls, "first") for row in first), *(split(row, reads, calls, "slow") for row in slow)]


def split(
    row: RequestRecord, reads: Sequence[BlockRequest], calls: Sequence[FileCall], shown: Literal["first", "slow"]
) -> TracedRequest:
    """Splits a request's time to first token. If other requests are in flight, their I/O counts too."""
    assert row.first_token_s is not None
    begin, end = row.sent_s, row.first_token_s
    device = _within(_at_device(reads), begin, end)
    in_calls = _within([(c.at_s, c.at_s + c.took_s) for c in calls if c.kind != "write"], begin, end)
    device_s, busy_s = covered_s(device), covered_s([*device, *in_calls])
    both = [*device, *in_calls]
    span_s = max(b for _, b in both) - min(a for a, _ in both) if both else 0.0
    return TracedRequest(
        shown=shown,
        id=row.id,
        tier=row.expected_tier,
        sample=row.sample,
        cell=row.cell,
        sent_s=row.sent_s,
        ttft_s=end - begin,
        engine_s=end - begin - span_s,
        lookup_s=span_s - busy_s,
        host_s=busy_s - device_s,
        device_s=device_s,
    )


def _within(intervals: Sequence[Interval], begin: float, end: float) -> list[Interval]:
    return [(max(a, begin), min(b, end)) for a, b in intervals if a < end and b > begin]


# ---- is the trace complete?


def byte_checks(
    reads: Sequence[BlockRequest], calls: Sequence[FileCall], samples: Sequence[Sample], cells: Sequence[CellEntry]
) -> list[ByteCheck]:
    """Bytes read in the samples from cold disk, from four sources: the trace (two), the kernel and the cache server."""
    from_device = {state.name for state in all_states() if state.from_device}
    cold = [sample for sample in samples if sample.tier in from_device]
    if not cold:
        return []
    resolved = cells[0].resolved or Resolved()
    chunk_bytes = (resolved.chunk_tokens or 0) * (resolved.kv_bytes_per_token or 0)
    windows = [(s.started_s, s.ended_s) for s in cold]

    def inside(moment_s: float) -> bool:
        return any(begin <= moment_s <= end for begin, end in windows)

    accounts: dict[str, int | None] = {
        "block requests traced": sum(r.bytes for r in reads if inside(r.issued_s)),
        "file reads traced": sum(c.bytes for c in calls if c.kind == "read" and inside(c.at_s)),
        "block layer's statistics": _sum(s.host.device_read_bytes for s in cold),
        "cache server's process": _sum(s.observed.device_read_bytes.get("disk") for s in cold),
        "cache server's chunks": (_sum(s.observed.loaded_chunks.get("disk") for s in cold) or 0) * chunk_bytes,
    }
    reference = accounts["block requests traced"]
    return [
        ByteCheck(account=name, bytes=value, deviation=value / reference - 1 if value and reference else None)
        for name, value in accounts.items()
    ]


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
