"""Sim against real, or any two runs: per point and metric a relative error, its interval, and a verdict.

    comparison = compare(read_side([real]), read_side([sim]), margin=0.05)

The error is (candidate - reference) / reference. Machines are slow for seconds on end, and no model predicts when: so
mean and rate are those of a sample, and the mean of the middle third of the samples is compared; of a free load that is
sent again, each request's median over the passes. The error's 90 % interval comes from resampling.py. Two one-sided
tests at 5 % are the same as asking whether that interval lies within the margin: pass; all of it outside: fail;
neither: not resolvable. Counts have no interval: they are equal or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from harness.records import Resolved
from harness.results.provenance import is_simulated
from harness.stats import Equivalence, Values, equivalence, samples_to_resolve, wasserstein
from harness.validation.points import Point, PointKey, Side, axes
from harness.validation.resampling import (
    Statistic,
    Times,
    interval,
    mean_tokens,
    middle_rate,
    quantile,
    rate,
    shared_requests,
    times,
)
from harness.validation.turns import TurnPair, turn_pairs
from simulator.middle import middle_mean

MARGIN = 0.05
# A process also reads pages from its device that are no chunk (its own files, the file system's): up to this share of
# the prompts' KV is none.
_DEVICE_BYTES_SHARE = 0.01


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one point.

    error None: the reference is 0 and the candidate is not. low, high: None where there is no interval. samples: the
    reference's, that the interval rests on; needed: as many would resolve it. gates: whether the verdict counts for
    the whole; reason: why the verdict is not what the interval says.
    """

    metric: str
    reference: float
    candidate: float
    error: float | None
    low: float | None
    high: float | None
    verdict: Equivalence
    samples: int
    needed: int | None = None
    gates: bool = True
    reason: str | None = None


class PointResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One point: where it lies, its times, its counts, and how far the reference agrees with itself (A/A).

    verdict: of all figures that count: fail if one fails, not resolvable if one is not. turns: of conversations, the
    hits by turn; () for other loads, which the file leaves out.
    """

    cell: str
    tier: str
    axes: dict[str, Any]
    figures: tuple[Figure, ...]
    counts: tuple[Figure, ...]
    noise: tuple[Figure, ...]
    wasserstein_s: float | None
    left_out: int
    verdict: Equivalence
    turns: tuple[TurnPair, ...] = ()

    def figure(self, metric: str) -> Figure | None:
        return next((f for f in (*self.figures, *self.counts) if f.metric == metric), None)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All points that both sides have. margin: relative; the intervals' confidence is resampling.CONFIDENCE."""

    reference: str
    candidate: str
    margin: float
    points: tuple[PointResult, ...]

    @property
    def verdict(self) -> Equivalence:
        return worst([point.verdict for point in self.points])


def compare(reference: Side, candidate: Side, margin: float = MARGIN) -> Comparison:
    """Judges every point that both sides measured. That they may be compared at all is comparable.py's to say."""
    shared = [key for key in reference.points if key in candidate.points]
    return Comparison(
        reference=reference.engine,
        candidate=candidate.engine,
        margin=margin,
        points=tuple(_point(key, reference, candidate, margin) for key in shared),
    )


def verdict_of(figures: Sequence[Figure]) -> Equivalence:
    """Of the figures that count."""
    return worst([f.verdict for f in figures if f.gates])


def worst(verdicts: Sequence[Equivalence]) -> Equivalence:
    order: tuple[Equivalence, ...] = ("fail", "not resolvable")
    return next((verdict for verdict in order if verdict in verdicts), "pass")


def _point(key: PointKey, reference: Side, candidate: Side, margin: float) -> PointResult:
    ours, theirs = reference.points[key], candidate.points[key]
    names = shared_requests(ours, theirs) if ours.free else []
    a, b = times(ours, names), times(theirs, names)
    noise = tuple(figures(*halves, margin)) if (halves := a.halves()) else ()
    simulated = is_simulated(reference.engine) or is_simulated(candidate.engine)
    silent = _silent_metrics(a, simulated or ours.paced != theirs.paced)
    judged = tuple(_with_noise(f, noise, margin, gates=f.metric not in silent) for f in figures(a, b, margin))
    if late := ours.lateness() or theirs.lateness():
        judged = tuple(msgspec.structs.replace(f, verdict="not resolvable", needed=None, reason=late) for f in judged)
    counted = tuple(counts(ours, theirs, margin))
    return PointResult(
        cell=key[0],
        tier=key[1],
        axes=axes(ours),
        figures=judged,
        counts=counted,
        noise=noise,
        wasserstein_s=wasserstein(a.ttft.ravel().tolist(), b.ttft.ravel().tolist()),
        left_out=len(ours.left_out) + len(theirs.left_out),
        verdict=verdict_of((*judged, *counted)),
        turns=turn_pairs(ours, theirs, names),
    )


def _silent_metrics(a: Times, without_tail: bool) -> set[str]:
    """Percentiles that say nothing where one prompt is asked again and again: the median of requests that were sent
    together lies between two of them. A model, or an accelerator beside the arithmetic that it stands for, is
    without_tail: it has none of the noise that makes one."""
    if a.free:
        return set()
    return ({"ttft_p50_s"} if a.size > 1 else set()) | ({"ttft_p90_s"} if without_tail else set())


def _with_noise(figure: Figure, noise: Sequence[Figure], margin: float, gates: bool) -> Figure:
    own = next((n for n in noise if n.metric == figure.metric), None)
    changes: dict[str, Any] = {"gates": gates}
    if own is not None and own.verdict == "fail":
        changes |= {"verdict": "not resolvable", "needed": None}
        changes |= {"reason": f"the reference differs from itself by {own.error or 0:+.1%}, more than ± {margin:.0%}"}
    return msgspec.structs.replace(figure, **changes)


def figures(a: Times, b: Times, margin: float) -> list[Figure]:
    """TTFT mean, median and 90th percentile, requests and prompt tokens a second: b against a."""
    if not a.ttft.size or not b.ttft.size:
        return []
    a, b = a.typical(), b.typical()
    centre, per_s = (np.mean, rate) if a.free else (middle_mean, middle_rate)
    samples = (a.units, b.units)
    requests = ([of * a.size for of in a.units], [of * b.size for of in b.units])
    found = [
        _figure("ttft_mean_s", centre, 1.0, a, margin, a.means(), b.means(), samples),
        _figure("ttft_p50_s", quantile(0.5), 1.0, a, margin, a.ttft, b.ttft, requests),
        _figure("ttft_p90_s", quantile(0.9), 1.0, a, margin, a.ttft, b.ttft, requests),
        _figure("requests_per_s", per_s, a.per_duration, a, margin, a.durations, b.durations, samples),
    ]
    scale, last = a.prompt_tokens, found[-1]
    tokens = {"metric": "prompt_tokens_per_s", "reference": last.reference * scale, "candidate": last.candidate * scale}
    return [*found, msgspec.structs.replace(last, **tokens)]


def _figure(
    metric: str,
    statistic: Statistic,
    scale: float,
    a: Times,
    margin: float,
    left: Values,
    right: Values,
    groups: tuple[Sequence[int], Sequence[int]],
) -> Figure:
    """groups: how many values in a row are resampled as one, left and right."""
    reference, candidate = float(statistic(left.ravel())) * scale, float(statistic(right.ravel())) * scale
    error = candidate / reference - 1
    low, high = interval(statistic, a, left, right, groups)
    verdict = equivalence(low, high, margin)
    needed = samples_to_resolve(error, (high - low) / 2, a.clusters, margin) if verdict == "not resolvable" else None
    finite = math.isfinite(low)
    return Figure(
        metric=metric,
        reference=reference,
        candidate=candidate,
        error=error,
        low=low if finite else None,
        high=high if finite else None,
        verdict=verdict,
        samples=a.clusters,
        needed=needed,
    )


# ---- counts


def counts(reference: Point, candidate: Point, margin: float) -> list[Figure]:
    """Tokens and bytes by tier a request: equal, or the model decides otherwise than the engine."""
    ours, theirs = _moved(reference), _moved(candidate)
    resolved = reference.cell.resolved or Resolved()
    prompt_bytes = mean_tokens(reference.rows) * (resolved.kv_bytes_per_token or 0)
    return [
        _count(metric, ours[metric], theirs[metric], margin, prompt_bytes)
        for metric in ours
        if ours[metric] and theirs.get(metric) and None not in (*ours[metric], *theirs[metric])
    ]


def _moved(point: Point) -> dict[str, list[Any]]:
    """What moved a request, once for each pass over a free load, and once for all samples of a warm state; of several
    instances, what each one moved, too."""
    observed = point.observed()
    expected = {name for repeat in point.repeats.values() for s in repeat.samples for name in s.expected.named()}
    requests = len(point.rows) // max(1, len(observed)) if observed else 0
    chunk = _chunk_bytes(point)
    moved = [one.named() for one in observed]
    instances = [[one.named() for one in each] for each in zip(*(one.by_instance for one in observed), strict=True)]
    found: dict[str, list[Any]] = {}
    for name, field, factor in (
        ("computed_tokens", "computed_tokens", 1),
        ("gpu_hit_tokens", "gpu_hit_tokens", 1),
        ("external_hit_tokens", "external_tokens", 1),
        ("cpu_hit_tokens", "cpu_hit_tokens", 1),
        ("pool_hit_tokens", "pool_hit_tokens", 1),
        ("disk_hit_tokens", "disk_hit_tokens", 1),
        ("disk_read_bytes", "disk_loaded_chunks", chunk),
        ("disk_written_bytes", "stores_ended", chunk),
        ("device_read_bytes", "disk_device_read_bytes", 1),
    ):
        # A warm state says which counters mean something for it; a free load uses all.
        told = point.free or field == "stores_ended" or field in expected
        if not told or not factor:
            continue
        found[name] = _per_request(moved, field, factor, requests)
        for number, each in enumerate(instances):
            found[f"instance_{number}_{name}"] = _per_request(each, field, factor, requests)
    return found


def _per_request(moved: Sequence[Mapping[str, int]], field: str, factor: int, requests: int) -> list[Any]:
    values = [one.get(field) for one in moved]
    return [None if value is None else value * factor / max(1, requests) for value in values]


def _chunk_bytes(point: Point) -> int:
    resolved = point.cell.resolved or Resolved()
    return (resolved.chunk_tokens or 0) * (resolved.kv_bytes_per_token or 0)


def _count(metric: str, ours: list[float], theirs: list[float], margin: float, prompt_bytes: float) -> Figure:
    reference, candidate = sum(ours) / len(ours), sum(theirs) / len(theirs)
    error = (candidate - reference) / reference if reference else (0.0 if not candidate else math.inf)
    none = _DEVICE_BYTES_SHARE * prompt_bytes
    allowed = none if metric.endswith("device_read_bytes") else 1e-9 * max(reference, candidate)
    verdict: Equivalence = "pass" if abs(candidate - reference) <= allowed else "fail"
    reason = None
    if verdict == "pass" and abs(error) > _DEVICE_BYTES_SHARE:
        error, reason = 0.0, f"{reference:,.0f} and {candidate:,.0f} bytes are below 1 % of the prompt's KV: none"
    if verdict == "fail" and min(ours) != max(ours) and abs(error) <= margin:
        verdict, reason = "not resolvable", f"the reference's own passes differ: {min(ours):g} to {max(ours):g}"
    return Figure(
        metric=metric,
        reference=reference,
        candidate=candidate,
        error=error if math.isfinite(error) else None,
        low=None,
        high=None,
        verdict=verdict,
        samples=len(ours),
        reason=reason,
    )
