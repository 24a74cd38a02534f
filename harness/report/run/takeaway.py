"""What leaves the page with its reader: every request as CSV, in the page while it stays small enough to forward."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import msgspec
from markupsafe import Markup

from harness.report.page import packed
from harness.report.words import plural
from harness.results.folder import flat_row
from traces.request import RequestRecord

# Arrival times of single tokens are in rows.jsonl; as a column they would be longer than all others together.
_LEFT_OUT = {"token_s", "first_chunk_s"}
# Packed bytes that the page may carry, by how many rows it is about.
_LEAST_BYTES, _BYTES_PER_ROW = 400_000, 34


class TakeAway(msgspec.Struct, frozen=True):
    """rows: how many, in words. csv: packed, for the page's script to unpack; '' where it would be too large."""

    rows: str
    csv: Markup


def take_away(rows: Sequence[RequestRecord]) -> TakeAway | None:
    """None for a run without rows."""
    if not rows:
        return None
    content = packed(requests_csv(rows).encode())
    fits = len(content) <= max(_LEAST_BYTES, _BYTES_PER_ROW * len(rows))
    return TakeAway(plural(len(rows), "row"), content if fits else Markup(""))


def requests_csv(rows: Sequence[RequestRecord]) -> str:
    """A heading and a line a request; times in seconds, to the microsecond; what is unknown is empty."""
    lines = [{key: value for key, value in flat_row(row).items() if key not in _LEFT_OUT} for row in rows]
    text = io.StringIO()
    names = dict.fromkeys(name for line in lines for name in line)
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for line in lines:
        writer.writerow({key: round(value, 6) if isinstance(value, float) else value for key, value in line.items()})
    return text.getvalue()
