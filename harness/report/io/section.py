"""The I/O section of a page: charts and tables of what was traced, for a run and for kept evidence alike."""

from __future__ import annotations

from typing import Any

import msgspec

from harness.report.io import html, tables
from harness.report.page import Picture, picture
from harness.results.traced import IoFigures

_MAX_TABLE_ROWS = 500


def io_pictures(found: IoFigures) -> list[Picture]:
    """What was traced at the block device and in the cache server's files."""
    lost, traces = sum(trace.lost_events for trace in found.traces), len(found.traces)
    tell = f" {lost} events were lost: counts are too low." if lost else ""
    if traces > html.MAX_COLUMNS:
        tell += f" The first {html.MAX_COLUMNS} of {traces} traces are drawn."
        found = msgspec.structs.replace(found, traces=found.traces[: html.MAX_COLUMNS])
    parts = "Engine, look-up (cache server), host (file system, page cache, copies) and device, by the traces."
    both = "Bytes at the block device, its queue depth, and the requests that waited for it, on one clock."
    sequence = "Block requests per 100 ms. Sequential: it begins where the one before, of its direction, ended."
    waits = "Reads: from being handed to the block layer to the driver, and from there to their completion."
    powers = "Powers of two, as they reach the device."
    return [
        picture("io-timeline", "I/O and requests", both + tell, html.both_timelines(found)),
        picture("io-order", "Sequential and random I/O", sequence + tell, html.order(found)),
        picture("io-sizes", "Block request sizes", powers + tell, html.sizes(found)),
        picture("io-latency", "Block latencies", waits + tell, html.latencies(found)),
        picture("io-split", "Whose time a request's first token takes", parts + tell, html.whose_time(found)),
    ]


def io_tables(found: IoFigures) -> dict[str, Any]:
    """The tables of what was traced, as io.html.j2 names them."""
    requests, note = tables.request_rows(found), tables.request_note(found)
    if len(requests) > _MAX_TABLE_ROWS:
        note += f" The table has the first {_MAX_TABLE_ROWS} of these; io.json has all."
    return {
        "labels": tables.labels(found),
        "side_by_side": tables.side_by_side(found),
        "request_note": note,
        "requests": requests[:_MAX_TABLE_ROWS],
        "parts": list(tables.PARTS.values()),
        "file_columns": tables.FILE_COLUMNS,
        "files": tables.file_rows(found)[:_MAX_TABLE_ROWS],
        "file_total": sum(trace.files.files for trace in found.traces),
    }
