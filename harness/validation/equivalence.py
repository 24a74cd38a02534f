"""Sim against real, or any two runs: per point and metric a relative error, its interval, and a verdict.

    comparison = compare(read_side([real]), read_side([sim]), margin=0.05)

The error is (candidate - reference) / reference. Machines are slow for seconds on end, and no model foretells when: so
mean and rate are those of a sample, and the median over samples is compared; of a free load that is sent again, each
request's median over the passes. The error's 90 % interval comes from resampling what is independent: samples; whole
turns where a point was measured in turns, since samples taken together are off together; of free loads blocks of
neighbouring requests, the same ones on both sides. Two one-sided tests at 5 % are the same as asking whether that
interval lies within the margin: pass; all of it outside: fail; neither: not resolvable. Counts have no interval: they
are equal or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from harness.records import Counters, Resolved
from harness.results.provenance import is_simulated
from harness.stats import (
    Equivalence,
    Indices,
    Values,
    equivalence,
    expanded_interval,
    resampled_blocks,
    resampled_groups,
    samples_to_resolve,
    wasserstein,
)
from harness.validation.points import Point, PointKey, Side, axes
from traces.request import RequestRecord

CONFIDENCE = 0.90
MARGIN = 0.05
FEWEST_CLUSTERS = 5
# A process also reads pages from its device that are no chunk (its own files, the file system's): up to this share of
# the prompts' KV is none.
_DEVICE_BYTES_SHARE = 0.01
_MAX_RESAMPLES, _MAX_VALUES = 2000, 20_000_000
_SEED = 20
Statistic = Callable[..., Any]


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


class PointResult(msgspec.Struct, frozen=True, kw_only=True):
    """One point: where it lies, its times, its counts, and how far the reference agrees with itself (A/A).

    verdict: of all figures that count: fail if one fails, not resolvable if one is not.
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

    def figure(self, metric: str) -> Figure | None:
        return next((f for f in (*self.figures, *self.counts) if f.metric == metric), None)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All points that both sides have. margin: relative; the intervals' confidence is CONFIDENCE."""

    reference: str
    candidate: str
    margin: float
    points: tuple[PointResult, ...]

    @property
    def verdict(self) -> Equivalence:
        return worst([point.verdict for point in self.points])


class Times(msgspec.Struct, frozen=True):
    """Seconds of one side of a point, laid out for resampling.

    ttft: (repeats, n), in clusters of `size` neighbours; durations: (repeats, k), each of `per_duration` requests.
    free: neighbours depend on each other. turns: how many clusters of each turn, in order.
    """

    ttft: Values
    durations: Values
    size: int
    per_duration: int
    prompt_tokens: float
    free: bool
    turns: tuple[int, ...] = ()

    @property
    def clusters(self) -> int:
        return int(self.ttft.shape[1]) // self.size

    @property
    def units(self) -> tuple[int, ...]:
        """What is resampled as a whole, as numbers of clusters: turns, if they are enough to tell a spread by."""
        return self.turns if len(self.turns) >= FEWEST_CLUSTERS else (1,) * self.clusters


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
    names = _shared_requests(ours, theirs) if ours.free else []
    a, b = times(ours, names), times(theirs, names)
    noise = tuple(figures(*halves, margin)) if (halves := _halves(a)) else ()
    silent = _silent_metrics(a, is_simulated(reference.engine) or is_simulated(candidate.engine))
    judged = tuple(_with_noise(f, noise, margin, gates=f.metric not in silent) for f in figures(a, b, margin))
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
    )


def _silent_metrics(a: Times, simulated: bool) -> set[str]:
    """Percentiles that say nothing where one prompt is asked again and again: the median of requests that were sent
    together lies between two of them, and a model without the machine's noise has no tail of its own."""
    if a.free:
        return set()
    return ({"ttft_p50_s"} if a.size > 1 else set()) | ({"ttft_p90_s"} if simulated else set())


def _with_noise(figure: Figure, noise: Sequence[Figure], margin: float, gates: bool) -> Figure:
    own = next((n for n in noise if n.metric == figure.metric), None)
    changes: dict[str, Any] = {"gates": gates}
    if own is not None and own.verdict == "fail":
        changes |= {"verdict": "not resolvable", "needed": None}
        changes |= {"reason": f"the reference differs from itself by {own.error or 0:+.1%}, more than ± {margin:.0%}"}
    return msgspec.structs.replace(figure, **changes)


# ---- times


def times(point: Point, names: Sequence[str]) -> Times:
    """The seconds of a point's rows that count; of a free load those of the requests named, in that order."""
    return _load_times(point, names) if point.free else _sample_times(point.turns())


def _shared_requests(ours: Point, theirs: Point) -> list[str]:
    """Ids that every pass over a free load answered, in the order in which the reference first sent them."""
    passes = [{row.id for row in repeat.rows} for point in (ours, theirs) for repeat in point.repeats.values()]
    first = next(iter(ours.repeats.values())).rows
    return [row.id for row in sorted(first, key=lambda row: (row.sent_s, row.id)) if all(row.id in p for p in passes)]


def _sample_times(turns: Sequence[Sequence[Sequence[RequestRecord]]]) -> Times:
    size = max((len(rows) for turn in turns for rows in turn), default=1)
    kept = [[rows for rows in turn if len(rows) == size] for turn in turns]
    whole = [rows for turn in kept for rows in turn]
    spans = [max(r.last_token_s or r.sent_s for r in rows) - min(r.sent_s for r in rows) for rows in whole]
    rows = [row for cluster in whole for row in cluster]
    lengths = tuple(len(turn) for turn in kept if turn)
    return Times(_array([_ttft(rows)]), _array([spans]), size, size, _mean_tokens(rows), free=False, turns=lengths)


def _load_times(point: Point, names: Sequence[str]) -> Times:
    passes = [{row.id: row for row in repeat.rows} for repeat in point.repeats.values()]
    chosen = [[rows[name] for name in names] for rows in passes]
    return Times(
        _array([_ttft(rows) for rows in chosen]),
        _array([_completion_gaps(rows) for rows in chosen]),
        size=1,
        per_duration=1,
        prompt_tokens=_mean_tokens(chosen[0]),
        free=True,
    )


def _completion_gaps(rows: Sequence[RequestRecord]) -> list[float]:
    """Seconds from one completion to the next, the first from the first send: their sum is the load's duration."""
    ends = sorted(row.last_token_s or row.sent_s for row in rows)
    return list(np.diff([min(row.sent_s for row in rows), *ends]))


def _ttft(rows: Sequence[RequestRecord]) -> list[float]:
    return [row.ttft_s if row.ttft_s is not None else math.nan for row in rows]


def _array(values: Sequence[Sequence[float]]) -> Values:
    return np.asarray(values, dtype=np.float64)


def _mean_tokens(rows: Sequence[RequestRecord]) -> float:
    return sum(row.prompt_tokens for row in rows) / len(rows) if rows else 0.0


def figures(a: Times, b: Times, margin: float) -> list[Figure]:
    """TTFT mean, median and 90th percentile, requests and prompt tokens a second: b against a."""
    if not a.ttft.size or not b.ttft.size:
        return []
    a, b = _typical(a), _typical(b)
    centre, rate = (np.mean, _rate) if a.free else (np.median, _median_rate)
    samples = (a.units, b.units)
    requests = ([of * a.size for of in a.units], [of * b.size for of in b.units])
    found = [
        _figure("ttft_mean_s", centre, 1.0, a, margin, _means(a), _means(b), samples),
        _figure("ttft_p50_s", _quantile(0.5), 1.0, a, margin, a.ttft, b.ttft, requests),
        _figure("ttft_p90_s", _quantile(0.9), 1.0, a, margin, a.ttft, b.ttft, requests),
        _figure("requests_per_s", rate, a.per_duration, a, margin, a.durations, b.durations, samples),
    ]
    scale, last = a.prompt_tokens, found[-1]
    tokens = {"metric": "prompt_tokens_per_s", "reference": last.reference * scale, "candidate": last.candidate * scale}
    return [*found, msgspec.structs.replace(last, **tokens)]


def _typical(a: Times) -> Times:
    """Passes over a load as one: each request's median over them, and that of the gaps between completions."""
    if not a.free:
        return a
    ttft, durations = (np.median(values, axis=0, keepdims=True) for values in (a.ttft, a.durations))
    return msgspec.structs.replace(a, ttft=ttft, durations=durations)


def _means(a: Times) -> Values:
    """Over the requests of each cluster."""
    means: Values = a.ttft.reshape(len(a.ttft), a.clusters, a.size).mean(axis=2)
    return means


def _quantile(share: float) -> Statistic:
    return lambda values, **axis: np.quantile(values, share, **axis)


def _rate(values: Values, **axis: Any) -> Values:
    return 1.0 / np.mean(values, **axis)  # type: ignore[no-any-return]


def _median_rate(values: Values, **axis: Any) -> Values:
    return 1.0 / np.median(values, **axis)  # type: ignore[no-any-return]


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
    independent = _independent(a)
    low, high = -math.inf, math.inf
    if independent >= FEWEST_CLUSTERS:
        low, high = _interval(statistic, a.free, left, right, groups, independent)
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


def _independent(a: Times) -> int:
    """How many independent groups an interval rests on."""
    return a.clusters // _block_length(a.clusters) if a.free else len(a.units)


def _block_length(n: int) -> int:
    """Of the block bootstrap: the cube root of n, the rate that is best for a variance (Künsch 1989)."""
    return max(1, round(math.cbrt(n)))


def _interval(
    statistic: Statistic,
    paired: bool,
    left: Values,
    right: Values,
    groups: tuple[Sequence[int], Sequence[int]],
    independent: int,
) -> tuple[float, float]:
    rng = np.random.default_rng(_SEED)
    n, m = left.shape[1], right.shape[1]
    resamples = max(200, min(_MAX_RESAMPLES, _MAX_VALUES // max(left.size, right.size)))
    indices: tuple[Indices, Indices]
    if paired and n == m:
        both = resampled_blocks(rng, n, _block_length(n), resamples)
        indices = (both, both)
    else:
        indices = (resampled_groups(rng, groups[0], resamples), resampled_groups(rng, groups[1], resamples))
    drawn = [_resampled(statistic, side, index) for side, index in zip((left, right), indices, strict=True)]
    return expanded_interval(drawn[1] / drawn[0] - 1, independent, CONFIDENCE)


def _resampled(statistic: Statistic, values: Values, index: Indices) -> Values:
    """The statistic of each resample, over all repeats at the drawn places."""
    drawn = values[:, index].transpose(1, 0, 2).reshape(len(index), -1)
    return statistic(drawn, axis=1)  # type: ignore[no-any-return]


def _halves(a: Times) -> tuple[Times, Times] | None:
    """The reference as two: passes over a load, or odd and even samples, which are of the same turns. None where there
    is too little to split."""
    if a.free:
        return None if len(a.ttft) < 2 else (_passes(a, slice(0, None, 2)), _passes(a, slice(1, None, 2)))
    if a.clusters < 2 * FEWEST_CLUSTERS:
        return None
    by_cluster = a.ttft.reshape(a.clusters, a.size)
    return tuple(  # type: ignore[return-value]
        msgspec.structs.replace(
            a, ttft=by_cluster[start::2].reshape(1, -1), durations=a.durations[:, start::2], turns=()
        )
        for start in (0, 1)
    )


def _passes(a: Times, which: slice) -> Times:
    return msgspec.structs.replace(a, ttft=a.ttft[which], durations=a.durations[which])


# ---- counts


def counts(reference: Point, candidate: Point, margin: float) -> list[Figure]:
    """Tokens and bytes by tier a request: equal, or the model decides otherwise than the engine."""
    ours, theirs = _moved(reference), _moved(candidate)
    resolved = reference.cell.resolved or Resolved()
    prompt_bytes = _mean_tokens(reference.rows) * (resolved.kv_bytes_per_token or 0)
    return [
        _count(metric, ours[metric], theirs[metric], margin, prompt_bytes)
        for metric in ours
        if ours[metric] and theirs.get(metric) and None not in (*ours[metric], *theirs[metric])
    ]


def _moved(point: Point) -> dict[str, list[Any]]:
    """What moved a request, once for each pass over a free load, and once for all samples of a warm state."""
    observed = point.observed()
    expected = [s.expected for repeat in point.repeats.values() for s in repeat.samples]
    requests = len(point.rows) // max(1, len(observed)) if observed else 0
    chunk = _chunk_bytes(point)
    found: dict[str, list[Any]] = {}
    for name, field, factor in (
        ("computed_tokens", "computed_tokens", 1),
        ("gpu_hit_tokens", "gpu_hit_tokens", 1),
        ("external_hit_tokens", "external_tokens", 1),
        ("cpu_hit_tokens", "cpu_hit_tokens", 1),
        ("disk_hit_tokens", "disk_hit_tokens", 1),
        ("disk_read_bytes", "disk_loaded_chunks", chunk),
        ("disk_written_bytes", "stores_ended", chunk),
        ("device_read_bytes", "disk_device_read_bytes", 1),
    ):
        # A warm state says which counters mean something for it; a free load uses all.
        told = point.free or field == "stores_ended" or any(field in one.named() for one in expected)
        found[name] = _per_request(observed, field, factor, requests) if told and factor else []
    return found


def _per_request(observed: Sequence[Counters], field: str, factor: int, requests: int) -> list[Any]:
    values = [one.named().get(field) for one in observed]
    return [None if value is None else value * factor / max(1, requests) for value in values]


def _chunk_bytes(point: Point) -> int:
    resolved = point.cell.resolved or Resolved()
    return (resolved.chunk_tokens or 0) * (resolved.kv_bytes_per_token or 0)


def _count(metric: str, ours: list[float], theirs: list[float], margin: float, prompt_bytes: float) -> Figure:
    reference, candidate = sum(ours) / len(ours), sum(theirs) / len(theirs)
    error = (candidate - reference) / reference if reference else (0.0 if not candidate else math.inf)
    allowed = _DEVICE_BYTES_SHARE * prompt_bytes if metric == "device_read_bytes" else 1e-9 * max(reference, candidate)
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
