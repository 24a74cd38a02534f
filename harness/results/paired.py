"""Free loads held against each other request by request, where both sent the same requests.

A load is one sample, for its requests wait for each other, so two loads have no ratio over samples. They have one over
requests: each request against itself on the other side (stats.paired_ratio).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from harness.results.manifest import CellEntry
from harness.stats import Ratio, paired_ratio, percentile
from traces.request import RequestRecord

# How a load is paced does not change what it asks.
_PACING = ("concurrency", "time_scale")


class PairedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A free load's TTFT against that of the run's quickest load, by request. cell: the quickest one's key.

    ratio below 1: this load is slower. Both loads sent the same requests, and both answered so many of them.
    """

    cell: str
    requests: int
    ratio: Ratio


class Answered(NamedTuple):
    """A load: what it asks, as `asked_of` says, and the rows that count."""

    asked: str
    rows: Sequence[RequestRecord]


def asked_of(cell: CellEntry) -> str:
    """The same text for cells whose loads ask the same of an engine, whatever the engine is."""
    workload = {name: value for name, value in (cell.config.get("workload") or {}).items() if name not in _PACING}
    seed = cell.config.get("seed", 0)
    return msgspec.json.encode([workload, seed, cell.trace], order="sorted").decode()


def paired_times(
    ours: Sequence[RequestRecord], theirs: Sequence[RequestRecord], name: str
) -> list[tuple[float, float]]:
    """A time (a field of a row) of the requests that both answered, matched by id and prompt, in order of our sends.

    Of a load that was sent several times, each request has its median over the passes.
    """
    left, right = _by_request(ours, name), _by_request(theirs, name)
    return [(left[request], right[request]) for request in left if request in right]


def _by_request(rows: Sequence[RequestRecord], name: str) -> dict[tuple[str, int], float]:
    passes: dict[tuple[str, int], list[float]] = {}
    for row in sorted(rows, key=lambda row: (row.sent_s, row.id)):
        if (value := getattr(row, name)) is not None:
            passes.setdefault((row.id, row.prompt_tokens), []).append(value)
    return {request: median(values) for request, values in passes.items()}


def paired_loads(loads: Mapping[str, Answered]) -> dict[str, PairedLoad]:
    """By cell: each load against the one with the least median TTFT, where the two ask the same."""
    medians = {
        key: percentile([r.ttft_s for r in load.rows if r.ttft_s is not None], 0.5) for key, load in loads.items()
    }
    known = {key: median_s for key, median_s in medians.items() if median_s is not None}
    found: dict[str, PairedLoad] = {}
    if not known:
        return found
    quickest = min(known, key=known.__getitem__)
    for key in known:
        if key == quickest or loads[key].asked != loads[quickest].asked:
            continue
        pairs = paired_times(loads[quickest].rows, loads[key].rows, "ttft_s")
        if ratio := paired_ratio([a for a, _ in pairs], [b for _, b in pairs]):
            found[key] = PairedLoad(cell=quickest, requests=len(pairs), ratio=ratio)
    return found
