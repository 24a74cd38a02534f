"""What a run's traces say of its I/O, as rows of text: for the report, for the terminal, for evidence in Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from harness.experiment.units import format_bytes
from harness.report.words import UNKNOWN, digits, duration, percent
from harness.results.traced import BlockFigures, Direction, IoFigures, Spread, TracedFiles, TraceFigures

DIRECTIONS: tuple[Direction, ...] = ("read", "write")
# Of a request's time to first token; the order is that in which it passes through them.
PARTS = {"engine_s": "engine", "lookup_s": "look-up", "host_s": "file system, host", "device_s": "device"}
_EACH = {
    "opens": "opened",
    "writes": "writes",
    "write_bytes": "bytes written",
    "reads": "reads",
    "read_bytes": "bytes read",
}
FILE_COLUMNS = tuple(_EACH.values())


class RequestRow(msgspec.Struct, frozen=True):
    """One request from disk. times: TTFT and its parts, in ms, as text; shown: why it is in the table."""

    id: str
    trace: str
    tier: str
    shown: str
    sent_s: str
    times_ms: tuple[str, ...]


class FileRow(msgspec.Struct, frozen=True):
    """One file: opened how often, calls and bytes each way."""

    trace: str
    name: str
    counts: tuple[str, ...]


def labels(io: IoFigures) -> list[str]:
    """A name for each trace: its cells', with the last words of their keys, or the file system's."""
    found = [", ".join(t.cells) if t.cells != ("base",) else str(t.file_system) for t in io.traces]
    return [re.sub(r"[\w.]+\.(\w+)=", r"\1=", name) for name in found]


def side_by_side(io: IoFigures) -> list[tuple[str, list[str]]]:
    """(what, a text for each trace) of all that traces are compared by."""
    rows: list[tuple[str, Callable[[TraceFigures], str]]] = [("file system", lambda t: t.file_system or UNKNOWN)]
    for side in DIRECTIONS:
        rows += [(f"{side}: {name}", _of_side(tell, side)) for name, tell in _BLOCK.items()]
    rows += [(f"each file: {name}", _of_files(key)) for key, name in _EACH.items()]
    rows += [
        ("files", lambda t: f"{t.files.files:,}"),
        ("file calls in sequence", lambda t: _share(t.files)),
        ("read from the page cache", lambda t: percent(t.page_cache_share)),
        ("syncs", lambda t: f"{t.syncs:,}"),
        ("requests from disk", lambda t: f"{t.requests_from_disk:,}"),
        ("their mean TTFT", lambda t: duration(mean_parts(t).get("ttft_s"))),
        *((f"of it {name}", _of_parts(part)) for part, name in PARTS.items()),
        ("bytes read by other accounts", _accounts),
        ("requests not seen to complete", _unseen),
        ("events lost", lambda t: f"{t.lost_events:,}"),
    ]
    return [(name, [tell(trace) for trace in io.traces]) for name, tell in rows]


def _unseen(trace: TraceFigures) -> str:
    """Traces of before this was counted do not say."""
    read, write = trace.block.read.unseen, trace.block.write.unseen
    return UNKNOWN if read is None or write is None else f"{read + write:,}"


def _of_side(tell: Callable[[BlockFigures], str], side: Direction) -> Callable[[TraceFigures], str]:
    return lambda trace: tell(trace.block.of(side)) if trace.block.of(side).requests else UNKNOWN


def _of_parts(part: str) -> Callable[[TraceFigures], str]:
    return lambda trace: duration(mean_parts(trace).get(part))


def _of_files(key: str) -> Callable[[TraceFigures], str]:
    def tell(trace: TraceFigures) -> str:
        seen = sorted({getattr(each, key) for each in trace.files.each})
        texts = [format_bytes(count) if key.endswith("bytes") else f"{count:,}" for count in seen]
        return UNKNOWN if not texts else texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"

    return tell


def _percentiles(held: Spread) -> str:
    return " / ".join(map(duration, (held.p50, held.p90, held.p99)))


def _split(held: BlockFigures) -> str:
    return f"{held.split:,}, {duration(held.split_d2c_s.p50)}" if held.split else "0"


def _size_shares(held: BlockFigures) -> str:
    """The sizes that most requests have, by powers of two."""
    largest = sorted(held.sizes.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{format_bytes(low)} {count / held.requests:.0%}" for low, count in largest)


def sequential_share(held: BlockFigures | TracedFiles) -> float | None:
    steps = held.sequential + held.random
    return held.sequential / steps if steps else None


def _share(held: BlockFigures | TracedFiles) -> str:
    share = sequential_share(held)
    return UNKNOWN if share is None else f"{share:.1%}"


_BLOCK: dict[str, Callable[[BlockFigures], str]] = {
    "requests": lambda held: f"{held.requests:,}",
    "bytes": lambda held: format_bytes(held.bytes),
    "sequential": _share,
    "sizes from": _size_shares,
    "Q2D p50 / p90 / p99": lambda held: _percentiles(held.q2d_s),
    "D2C p50 / p90 / p99": lambda held: _percentiles(held.d2c_s),
    "split by the kernel; D2C as a whole, p50": _split,
    "queue depth": lambda held: UNKNOWN if held.depth is None else digits(held.depth),
    "bandwidth while busy": lambda held: _rate(held.bytes_per_s),
}


def mean_parts(trace: TraceFigures) -> dict[str, float]:
    """Mean TTFT and parts of the first requests: the slowest of the others would not stand for all."""
    first = [request for request in trace.requests if request.shown == "first"]
    return {key: sum(getattr(r, key) for r in first) / len(first) for key in ("ttft_s", *PARTS)} if first else {}


def _accounts(trace: TraceFigures) -> str:
    found = [check.deviation for check in trace.checks[1:] if check.deviation is not None]
    return f"{min(found):+.2%} to {max(found):+.2%}" if found else UNKNOWN


def request_rows(io: IoFigures) -> list[RequestRow]:
    """The first and the slowest requests of each trace."""
    return [
        RequestRow(r.id, name, r.tier or UNKNOWN, r.shown, f"{r.sent_s:.3f}",
                   tuple(f"{getattr(r, key) * 1000:.2f}" for key in ("ttft_s", *PARTS)))
        for name, trace in zip(labels(io), io.traces, strict=True)
        for r in trace.requests
    ]  # fmt: skip


def request_note(io: IoFigures) -> str:
    """Which of the requests are in the table."""
    total, shown = sum(t.requests_from_disk for t in io.traces), sum(len(t.requests) for t in io.traces)
    first = max(sum(r.shown == "first" for r in t.requests) for t in io.traces)
    if shown == total:
        return f"All {total:,} requests served from disk."
    return f"{shown:,} of {total:,} requests served from disk: the first {first:,} of each trace, and its slowest."


def file_rows(io: IoFigures) -> list[FileRow]:
    """The first files of each trace, by name."""
    return [
        FileRow(name, each.name, tuple(
            format_bytes(getattr(each, key)) if key.endswith("bytes") else f"{getattr(each, key):,}" for key in _EACH
        ))
        for name, trace in zip(labels(io), io.traces, strict=True)
        for each in trace.files.each
    ]  # fmt: skip


def render_traces(ios: Sequence[IoFigures]) -> str:
    """Traces of runs beside each other, one a column block of lines: for the terminal."""
    lines = []
    for io in ios:
        for name, trace in zip(labels(io), io.traces, strict=True):
            lines += [f"{io.run} · {io.engine} · {name} · {trace.file_system}", *_lines(trace), ""]
    return "\n".join(lines)


def _lines(trace: TraceFigures) -> list[str]:
    lines = []
    for side in DIRECTIONS:
        held = trace.block.of(side)
        share, d2c_s = sequential_share(held), held.d2c_s
        if held.requests:
            lines.append(
                f"  {side:5} {held.requests:>6} requests {format_bytes(held.bytes):>9}"
                f"  {'' if share is None else f'{share:.0%} sequential'}  D2C {_ms(d2c_s.p50)} ms (p99"
                f" {_ms(d2c_s.p99)})  depth {UNKNOWN if held.depth is None else f'{held.depth:.1f}'}"
                f"  {_rate(held.bytes_per_s)} while busy"
            )
    files = trace.files
    lines.append(
        f"  files {files.files:>6} opened {files.opens} times, {format_bytes(files.write_bytes)} written,"
        f" {format_bytes(files.read_bytes)} read; {trace.syncs} syncs"
    )
    if parts := mean_parts(trace):
        shown = " + ".join(f"{part.removesuffix('_s')} {parts[part] * 1000:.1f}" for part in PARTS)
        mean_of = sum(request.shown == "first" for request in trace.requests)
        lines.append(f"  TTFT  {parts['ttft_s'] * 1000:.1f} ms = {shown} (means of {mean_of} requests)")
    for check in trace.checks:
        deviation = "" if check.deviation is None else f"{check.deviation:+.2%}"
        count = UNKNOWN if check.bytes is None else format_bytes(check.bytes)
        lines.append(f"  read  {count:>9} by {check.account}  {deviation}")
    lost = trace.lost_events
    return lines + ([f"  {lost} events were lost: the counts above are too low"] if lost else [])


def _rate(bytes_per_s: float | None) -> str:
    return UNKNOWN if bytes_per_s is None else f"{format_bytes(bytes_per_s)}/s"


def _ms(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{seconds * 1000:.2f}"
