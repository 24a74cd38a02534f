"""One comparison of tests whose tiers are real: a row a test, in the columns that the benchmark's users expect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.experiment.units import format_bytes
from harness.report.io.storage_words import storage_lines
from harness.report.words import NOT_REPORTED, digits, duration, percent
from harness.results.summary import CellFigures, Summary
from harness.storage_records import StorageFigures

COLUMNS = {
    "test": "test",
    "requests": "requests",
    "output_tokens_per_s": "output tok/s",
    "per_io_time_tokens_per_s": "tok/s of I/O time",
    "kv_tokens_per_s": "KV tok/s",
    "decode_read_bytes": "decode read",
    "prefill_write_bytes": "prefill written",
    "hit_rate": "found",
    "end_to_end_p95_s": "E2E p95",
    "read_p95_s": "read p95",
}
# Which figures to compare, by whether memory stands above the device.
_TELLS_ALONE = (
    "Storage alone: compare decode read and output tok/s, the benchmark's primary figures. Its tok/s of I/O time"
    " differed by 1.1 where bytes differed by 2.6; here users wait for devices only, and it follows the device as well."
)
_TELLS_BELOW = "Storage below memory: tok/s of I/O time is the benchmark's primary figure."


def suite_rows(summary: Summary, axis: str) -> list[dict[str, Any]]:
    """Of each test that finished requests, by COLUMNS; None: not reported."""
    return [
        _row(cell, cell.storage) | {"test": str(cell.overrides.get(axis, cell.key))}
        for cell in summary.cells
        if cell.storage and cell.storage.requests_finished
    ]


def tests_section(summary: Summary, labels: Mapping[str, str]) -> dict[str, Any] | None:
    """What a run's page shows of cells whose tiers are real: a line a cell, and each cell's sentences behind it. None
    with fewer than two."""
    cells = [cell for cell in summary.cells if cell.storage and cell.storage.kv and cell.storage.requests_finished]
    if len(cells) < 2:
        return None
    rows = [(cell, _row(cell, cell.storage)) for cell in cells if cell.storage]
    return {
        "columns": list(COLUMNS.values()),
        "rows": [[_name(cell, labels), *in_words(row)[1:]] for cell, row in rows],
        "lines": storage_lines(summary, labels),
        "words": list(_what_tells([row for _, row in rows])),
    }


def _name(cell: CellFigures, labels: Mapping[str, str]) -> str:
    """The names of a named axis say enough by themselves."""
    values = list(cell.overrides.values())
    return ", ".join(values) if values and all(isinstance(value, str) for value in values) else labels[cell.key]


def suite_words(rows: Sequence[Mapping[str, Any]], skipped: Mapping[str, str]) -> Iterator[str]:
    """What to read in the table, and what is not in it."""
    yield from _what_tells(rows)
    yield "The search for the most users is its own command: harness capacity."
    for name, reason in skipped.items():
        yield f"skipped: {name}: {reason}"


def _what_tells(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    alone = any(row["tiers"] == ["disk"] for row in rows)
    below = any("disk" in row["tiers"] and len(row["tiers"]) > 1 for row in rows)
    yield from [_TELLS_ALONE] * alone + [_TELLS_BELOW] * below


def in_words(row: Mapping[str, Any]) -> list[str]:
    """A row's cells as text, in the order of COLUMNS."""
    return [NOT_REPORTED if row[name] is None else _text(name, row[name]) for name in COLUMNS]


def _text(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_per_s"):
        return digits(value)
    if name.endswith("_s"):
        return duration(value)
    return percent(value) if name == "hit_rate" else f"{value:,}" if isinstance(value, int) else str(value)


def _row(cell: CellFigures, found: StorageFigures) -> dict[str, Any]:
    rates = {name: rate.tokens_per_s for name, rate in (found.throughput or {}).items()}
    kv = found.kv
    hits = [] if kv is None else [one for kind, one in kv.hits.items() if kind != "new"]
    asked = sum(one.asked for one in hits)
    return {
        "test": cell.key,
        "tiers": [] if kv is None else list(kv.by_tier),
        "requests": found.requests_finished,
        "output_tokens_per_s": rates.get("wall_clock"),
        "per_io_time_tokens_per_s": rates.get("per_io_time"),
        "kv_tokens_per_s": rates.get("storage"),
        "decode_read_bytes": None if kv is None else kv.decode_read_bytes,
        "prefill_write_bytes": None if kv is None else kv.prefill_write_bytes,
        "hit_rate": sum(one.hit for one in hits) / asked if asked else None,
        "end_to_end_p95_s": None if kv is None else kv.end_to_end_s.get("p95"),
        "read_p95_s": found.read.transfer_s.get("p95"),
    }
