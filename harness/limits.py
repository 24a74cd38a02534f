"""Why points may miss: what the model is known to lack, and what the host did to the reference, from its samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import numpy as np

from harness.compare import Comparison
from harness.sides import Point, Side

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
    loops_s = [loop_s for pair in pairs for loop_s, _ in pair]
    if not loops_s:
        return []
    slower = np.array(loops_s) / min(loops_s) - 1
    said = (
        f"The host: around half of the samples the engine's core took {np.median(slower):.0%} longer or more than at"
        f" its best, around one in ten {np.quantile(slower, 0.9):.0%}"
    )
    telling = [pair for pair in pairs if len(pair) >= _LEAST_SAMPLES and all(np.ptp(np.array(pair), axis=0) > 0)]
    follow = [float(np.corrcoef(np.array(pair).T)[0, 1]) for pair in telling]
    if follow:
        said += f"; samples of one point follow it (correlation with TTFT {median(follow):.2f}, median over points)"
    return [f"{said}."]


def _beside(point: Point) -> list[tuple[float, float]]:
    """The core's loop around each proven sample, and its mean TTFT."""
    found = []
    for repeat in point.repeats.values():
        for sample in repeat.samples:
            ttfts_s = [r.ttft_s for r in repeat.rows if r.sample == sample.index and r.ttft_s is not None]
            if ttfts_s and sample.host.core_loop_s is not None:
                found.append((sample.host.core_loop_s, sum(ttfts_s) / len(ttfts_s)))
    return found
