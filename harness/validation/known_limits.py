"""Why points may miss: what the model is known to lack, and what the host did to the reference, from its samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean, median
from typing import Any

import numpy as np

from harness.records import Sample
from harness.results.summary import core_slower
from harness.validation.equivalence import Comparison
from harness.validation.points import Point, Side

Axes = Mapping[str, Any]

# Found by timestamps within vLLM 0.32 and LMCache 0.5.6 (ARCHITECTURE.md); each with the points that it concerns.
LIMITS: tuple[tuple[str, Callable[[Axes], bool]], ...] = (
    (
        "the order of requests sent at once is a race on an engine, e.g. whether the cache server has answered for the"
        " second when the first is scheduled; here host work takes its mean time, and of the orders there is one",
        lambda axes: axes["workload"] == "prefix" and (axes["concurrency"] or 1) > 1,
    ),
    (
        "stores take what loads take, not a time of their own, and reads are not slowed by writes",
        lambda axes: axes["workload"] != "prefix",
    ),
    (
        "starts of an engine minutes apart differ, by up to 7 % in prefill and a quarter in decoding where this was"
        " seen, and a load runs on another start than the calibration",
        lambda axes: axes["workload"] != "prefix",
    ),
)
_TICKS = (
    "LMCache evicts at ticks whose phase nobody knows, and one that falls into the milliseconds of a store drops other"
    " chunks"
)
_LEAST_SAMPLES = 8


def notes(comparison: Comparison, reference: Side) -> list[str]:
    """Sentences for a report; none where nothing misses, and none on the host where nobody timed its core."""
    margin = comparison.margin
    missed = [
        point.axes
        for point in comparison.points
        if any(f.gates and (f.verdict == "fail" or abs(f.error or 0.0) > margin) for f in point.figures)
    ]
    found, far = [], f"{len(missed)} points with an error beyond ± {margin:.0%}"
    for text, concerns in LIMITS:
        if count := sum(concerns(axes) for axes in missed):
            found.append(f"The model lacks: {text}. {count} of {far}.")
    unequal = [p for p in comparison.points if any(f.verdict != "pass" for f in p.counts)]
    if count := sum(point.axes["workload"] != "prefix" for point in unequal):
        found.append(f"The model lacks: {_TICKS}. {count} of {len(unequal)} points with unequal counts.")
    return found + (_host(reference) if missed else [])


def _host(side: Side) -> list[str]:
    pairs = [_beside(point) for point in side.points.values()]
    slower = [share for share in core_slower([sample for pair in pairs for sample, _ in pair]) if share is not None]
    if not slower:
        return []
    said = (
        f"The host: around half of the samples the engine's core took {np.median(slower):.0%} longer or more than at"
        f" its best, around one in ten {np.quantile(slower, 0.9):.0%}"
    )
    beside = [np.array([(sample.host.core_loop_s, ttft_s) for sample, ttft_s in pair]) for pair in pairs]
    telling = [pair for pair in beside if len(pair) >= _LEAST_SAMPLES and all(np.ptp(pair, axis=0) > 0)]
    follow = [float(np.corrcoef(pair.T)[0, 1]) for pair in telling]
    if follow:
        said += f"; samples of one point follow it (correlation with TTFT {median(follow):.2f}, median over points)"
    return [f"{said}."]


def _beside(point: Point) -> list[tuple[Sample, float]]:
    """Samples that count, around which the core was timed, and their mean TTFT."""
    found = []
    for repeat in point.repeats.values():
        rows = repeat.by_sample()
        for sample in repeat.samples:
            ttfts_s = [row.ttft_s for row in rows.get((sample.index, sample.attempt), []) if row.ttft_s is not None]
            if ttfts_s and sample.host.core_loop_s is not None:
                found.append((sample, fmean(ttfts_s)))
    return found
