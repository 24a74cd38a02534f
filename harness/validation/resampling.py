"""A point's seconds, laid out so that what is independent can be drawn again; and the interval that this gives.

    ours = times(point, names)
    low, high = interval(middle_rate, ours, left, right, groups)

Independent are: samples; whole turns where a point was measured in turns, since samples taken together are off
together; of free loads blocks of neighbouring requests, the same ones on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from harness.stats import Indices, Values, expanded_interval, resampled_blocks, resampled_groups
from harness.validation.points import Point
from simulator.middle import middle_mean
from traces.request import RequestRecord

CONFIDENCE = 0.90
FEWEST_CLUSTERS = 5
_MAX_RESAMPLES, _MAX_VALUES = 2000, 20_000_000
_SEED = 20
Statistic = Callable[..., Any]


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

    @property
    def independent(self) -> int:
        """How many independent groups an interval rests on."""
        return self.clusters // _block_length(self.clusters) if self.free else len(self.units)

    def means(self) -> Values:
        """Of TTFT, over the requests of each cluster."""
        means: Values = self.ttft.reshape(len(self.ttft), self.clusters, self.size).mean(axis=2)
        return means

    def typical(self) -> Times:
        """Passes over a load as one: each request's median over them, and that of the gaps between completions."""
        if not self.free:
            return self
        ttft, durations = (np.median(values, axis=0, keepdims=True) for values in (self.ttft, self.durations))
        return msgspec.structs.replace(self, ttft=ttft, durations=durations)

    def halves(self) -> tuple[Times, Times] | None:
        """Two parts: passes over a load, or odd and even samples, which are of the same turns. None where there is too
        little to split."""
        if self.free:
            return None if len(self.ttft) < 2 else (self._passes(slice(0, None, 2)), self._passes(slice(1, None, 2)))
        if self.clusters < 2 * FEWEST_CLUSTERS:
            return None
        return self._samples(slice(0, None, 2)), self._samples(slice(1, None, 2))

    def _passes(self, which: slice) -> Times:
        return msgspec.structs.replace(self, ttft=self.ttft[which], durations=self.durations[which])

    def _samples(self, which: slice) -> Times:
        by_cluster = self.ttft.reshape(self.clusters, self.size)
        ttft, durations = by_cluster[which].reshape(1, -1), self.durations[:, which]
        return msgspec.structs.replace(self, ttft=ttft, durations=durations, turns=())


def times(point: Point, names: Sequence[str]) -> Times:
    """The seconds of a point's rows that count; of a free load those of the requests named, in that order."""
    return _load_times(point, names) if point.free else _sample_times(point.turns())


def shared_requests(ours: Point, theirs: Point) -> list[str]:
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
    return Times(_array([_ttft(rows)]), _array([spans]), size, size, mean_tokens(rows), free=False, turns=lengths)


def _load_times(point: Point, names: Sequence[str]) -> Times:
    passes = [{row.id: row for row in repeat.rows} for repeat in point.repeats.values()]
    chosen = [[rows[name] for name in names] for rows in passes]
    return Times(
        _array([_ttft(rows) for rows in chosen]),
        _array([_completion_gaps(rows) for rows in chosen]),
        size=1,
        per_duration=1,
        prompt_tokens=mean_tokens(chosen[0]),
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


def mean_tokens(rows: Sequence[RequestRecord]) -> float:
    """Of a prompt; 0 without rows."""
    return sum(row.prompt_tokens for row in rows) / len(rows) if rows else 0.0


def quantile(share: float) -> Statistic:
    return lambda values, **axis: np.quantile(values, share, **axis)


def rate(values: Values, **axis: Any) -> Values:
    return 1.0 / np.mean(values, **axis)  # type: ignore[no-any-return]


def middle_rate(values: Values, **axis: Any) -> Values:
    return 1.0 / middle_mean(values, **axis)  # type: ignore[no-any-return]


def _block_length(n: int) -> int:
    """Of the block bootstrap: the cube root of n, the rate that is best for a variance (Künsch 1989)."""
    return max(1, round(math.cbrt(n)))


def interval(
    statistic: Statistic, a: Times, left: Values, right: Values, groups: tuple[Sequence[int], Sequence[int]]
) -> tuple[float, float]:
    """Low and high end of a statistic's relative error, right against left; infinite where too little is independent.

    groups: how many values in a row are drawn as one, left and right. A free load has blocks instead.
    """
    if a.independent < FEWEST_CLUSTERS:
        return -math.inf, math.inf
    rng = np.random.default_rng(_SEED)
    n, m = left.shape[1], right.shape[1]
    resamples = max(200, min(_MAX_RESAMPLES, _MAX_VALUES // max(left.size, right.size)))
    indices: tuple[Indices, Indices]
    if a.free and n == m:
        both = resampled_blocks(rng, n, _block_length(n), resamples)
        indices = (both, both)
    else:
        indices = (resampled_groups(rng, groups[0], resamples), resampled_groups(rng, groups[1], resamples))
    drawn = [_resampled(statistic, side, index) for side, index in zip((left, right), indices, strict=True)]
    return expanded_interval(drawn[1] / drawn[0] - 1, a.independent, CONFIDENCE)


def _resampled(statistic: Statistic, values: Values, index: Indices) -> Values:
    """The statistic of each resample, over all repeats at the drawn places."""
    drawn = values[:, index].transpose(1, 0, 2).reshape(len(index), -1)
    return statistic(drawn, axis=1)  # type: ignore[no-any-return]
