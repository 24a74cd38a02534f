"""Why points may miss: the known limits of the model, and the host's disturbance of the reference, from its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from statistics import fmean, median
from typing import Any

import numpy as np

from harness.collectors.memory import MAX_TAKEN_SHARE
from harness.engines import ENGINES
from harness.records import Sample
from harness.results.summary import core_slower
from harness.validation.equivalence import Comparison, PointResult
from harness.validation.points import Point, Side
from simulator.policies import LMCACHE

Axes = Mapping[str, Any]

# Timestamps within vLLM 0.32 and LMCache 0.5.6 showed them (ARCHITECTURE.md); each with the points it concerns.
LIMITS: tuple[tuple[str, Callable[[Axes], bool]], ...] = (
    (
        "requests sent at once race on an engine, e.g. the cache server answers for the second request before or after"
        " the engine schedules the first; the simulator varies all of the host's tasks alike (host_spread), or none",
        lambda axes: axes["workload"] == "prefix" and (axes["concurrency"] or 1) > 1,
    ),
    (
        "a store takes a load's time, not a time of its own, and writes do not slow reads",
        lambda axes: axes["workload"] != "prefix",
    ),
    (
        "two starts of an engine differ, by up to 7 % in prefill and a quarter in decoding where this was seen; a load"
        " runs on another start than the calibration",
        lambda axes: axes["workload"] != "prefix",
    ),
)
_TICKS = "LMCache evicts at ticks of unknown phase, and a tick within the milliseconds of a store drops other chunks"
_LEAST_SAMPLES = 8


def notes(comparison: Comparison, reference: Side) -> list[str]:
    """Sentences for a report: none if no point misses, and none on the host if the run did not time its core."""
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
    if count := sum(p.axes["workload"] != "prefix" and _behind_lmcache(p, reference) for p in unequal):
        found.append(f"The model lacks: {_TICKS}. {count} of {len(unequal)} points with unequal counts.")
    return found + (_host(reference) + _memory(reference) + _drift(reference) if missed else [])


def _behind_lmcache(point: PointResult, side: Side) -> bool:
    """Whether LMCache, or the simulator's pack for it, served this point."""
    cell, kind = side.points[point.cell, point.tier].cell, ENGINES.get(side.engine)
    packs = kind.packs(cell.experiment) if kind is not None else None
    return packs is not None and packs.tier_policy == LMCACHE.name and cell.experiment.cache.cpu is not None


def _host(side: Side) -> list[str]:
    pairs = [_timed(point) for point in side.points.values()]
    slower = [share for share in core_slower([sample for pair in pairs for sample, _ in pair]) if share is not None]
    if not slower:
        return []
    said = (
        f"The host: in half of the samples the engine's core took at least {np.median(slower):.0%} longer than at its"
        f" best, in one of ten at least {np.quantile(slower, 0.9):.0%}"
    )
    return [f"{said}{_followed([[(sample.host.core_loop_s, ttft_s) for sample, ttft_s in pair] for pair in pairs])}."]


def _followed(points: Iterable[Sequence[tuple[float | None, float]]]) -> str:
    """How well the times of one point's samples follow what was seen beside them; nothing where neither changed."""
    beside = [np.array([both for both in point if both[0] is not None], dtype=float) for point in points]
    telling = [pair for pair in beside if len(pair) >= _LEAST_SAMPLES and all(np.ptp(pair, axis=0) > 0)]
    follow = [float(np.corrcoef(pair.T)[0, 1]) for pair in telling]
    if not follow:
        return ""
    return f"; samples of one point follow it (correlation with TTFT {median(follow):.2f}, median over points)"


def _memory(side: Side) -> list[str]:
    """What a virtual machine's host takes: of memory that is in use, and to give a GiB of memory that is not."""
    samples = [each for point in side.points.values() for repeat in point.repeats.values() for each in repeat.samples]
    touched_s = [each.host.touch_s_per_gib for each in samples if each.host.touch_s_per_gib is not None]
    taken = [each.host.taken_share for each in samples if each.host.taken_share is not None]
    said = []
    if len(touched_s) >= _LEAST_SAMPLES:
        least_s, middle_s, most_s = np.quantile(touched_s, (0.0, 0.5, 0.9))
        said.append(
            f"The host: a GiB of new memory took {least_s:.2g} s at best, {middle_s:.2g} s in half of the samples that"
            f" touched some, and at least {most_s:.2g} s in one of ten."
        )
    if taken and np.quantile(taken, 0.9) > MAX_TAKEN_SHARE:
        beside = [
            [(sample.host.taken_share, ttft_s) for sample, ttft_s in _timed(point)] for point in side.points.values()
        ]
        said.append(
            f"The host had taken {np.median(taken):.0%} of memory in use that had rested before half of the samples,"
            f" and at least {np.quantile(taken, 0.9):.0%} before one of ten: engines wait for it{_followed(beside)}."
        )
    return said


def _drift(side: Side) -> list[str]:
    """How much longer the later half of a point's samples took than the earlier: what no model can know."""
    drifts = []
    for point in side.points.values():
        by_time = [ttft_s for _, ttft_s in _timed(point)]
        if len(by_time) >= _LEAST_SAMPLES:
            half = len(by_time) // 2
            drifts.append(median(by_time[-half:]) / median(by_time[:half]) - 1)
    if not drifts:
        return []
    return [
        f"The reference against itself: medians of the later half of a point's samples are {min(drifts):+.0%} to"
        f" {max(drifts):+.0%} beside those of the earlier half, {median(drifts):+.0%} in the middle of {len(drifts)}"
        " points."
    ]


def _timed(point: Point) -> list[tuple[Sample, float]]:
    """The samples that count, with their mean TTFT, in the order measured: folder by folder, each on its own clock."""
    found = []
    for (folder, _), repeat in point.repeats.items():
        rows = repeat.by_sample()
        for sample in repeat.samples:
            ttfts_s = [row.ttft_s for row in rows.get((sample.index, sample.attempt), []) if row.ttft_s is not None]
            if ttfts_s:
                found.append(((folder, sample.attempt, sample.started_s), sample, fmean(ttfts_s)))
    return [(sample, ttft_s) for _, sample, ttft_s in sorted(found, key=itemgetter(0))]
