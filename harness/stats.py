"""Percentiles and intervals: pure functions of numbers. Random generators are arguments; nothing reads a clock."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

Values = np.ndarray[Any, np.dtype[np.float64]]
Indices = np.ndarray[Any, np.dtype[np.int64]]
Equivalence = Literal["pass", "fail", "not resolvable"]


def percentile(values: Sequence[float], share: float) -> float | None:
    """Linearly interpolated percentile, share in 0..1; None without values."""
    return float(np.quantile(values, share)) if len(values) else None


def coefficient_of_variation(values: Sequence[float]) -> float | None:
    """Sample standard deviation over the mean; None with fewer than two values or a mean of 0."""
    if len(values) < 2 or not (mean := float(np.mean(values))):
        return None
    return float(np.std(values, ddof=1)) / mean


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Student's t interval of the mean; None with fewer than two values."""
    if len(values) < 2:
        return None
    from scipy.special import stdtrit

    mean = float(np.mean(values))
    quantile = float(stdtrit(len(values) - 1, (1 + confidence) / 2))
    half = quantile * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean - half, mean + half


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Distribution-free interval of the median, between two order statistics; None for too few values."""
    from scipy.special import bdtr, bdtrik

    if not len(values):
        return None
    ordered = sorted(values)
    if ordered[0] == ordered[-1]:
        return ordered[0], ordered[-1]
    # The count of values below the median is binomial with p = 0.5, like a fair coin's heads. Each tail gives up
    # half of 1 - confidence.
    tail = (1 - confidence) / 2
    outside = int(bdtrik(tail, len(ordered), 0.5))
    if bdtr(outside, len(ordered), 0.5) > tail:
        return None
    return ordered[outside], ordered[-1 - outside]


def relative_half_width(values: Sequence[float], confidence: float = 0.95) -> float | None:
    """Half the median's interval over the median: sampling stops when this is small. None while it is undefined."""
    interval = median_interval(values, confidence)
    if interval is None or (middle := float(np.median(values))) <= 0:
        return None
    return (interval[1] - interval[0]) / 2 / middle


def samples_needed(values: Sequence[float], half_width: float, confidence: float = 0.95) -> int | None:
    """Number of samples with this spread that give ± half_width (relative); None if the spread is unknown."""
    spread = coefficient_of_variation(values)
    if spread is None:
        return None
    from scipy.special import ndtri

    quantile = float(ndtri((1 + confidence) / 2))
    return max(2, math.ceil((quantile * spread / half_width) ** 2))


# ---- ratios: how many times faster is one side?

FEWEST_SAMPLES = 3
TOO_FEW = "too few samples to compare"
TOO_FEW_REQUESTS = "too few requests to compare"
# Of a load's requests, for the interval of a paired ratio; a block has as many requests at least.
_BLOCKS, _FEWEST_IN_BLOCK = 10, 10
# Logs of times that a simulation repeats agree to this: its clock's sums differ in the last digits.
_REPEATED = 1e-9
Basis = Literal["samples", "requests", "sessions", "repeats exactly"]


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """How many times faster one side is than its reference. ratio: reference_s / typical_s, above 1 where it is faster.

    reference_s, typical_s: geometric means over samples, whose quotient the ratio is. low, high: the ratio's own
    interval; None where `reason` says why there is none. samples: how many each side has, the reference's first.
    basis: what the interval rests on: samples; the requests of a load, or its sessions, in pairs; nothing, where both
    sides are simulations that repeat exactly, so that low and high are the ratio itself.
    """

    ratio: float
    low: float | None
    high: float | None
    reference_s: float
    typical_s: float
    samples: tuple[int, int]
    reason: str | None = None
    basis: Basis = "samples"

    @property
    def turned(self) -> Ratio:
        """The ratio as it is seen from its other side."""
        return Ratio(
            ratio=1 / self.ratio,
            low=None if self.high is None else 1 / self.high,
            high=None if self.low is None else 1 / self.low,
            reference_s=self.typical_s,
            typical_s=self.reference_s,
            samples=(self.samples[1], self.samples[0]),
            reason=self.reason,
            basis=self.basis,
        )

    @property
    def distinct(self) -> bool:
        """Whether the interval lies on one side of 1: one of the two is faster."""
        return self.low is not None and self.high is not None and (self.low > 1 or self.high < 1)


def ratio_interval(
    reference: Sequence[Sequence[float]],
    compared: Sequence[Sequence[float]],
    confidence: float = 0.95,
    *,
    repeats: bool = False,
) -> Ratio | None:
    """The ratio of two sides' typical times, with an interval of its own; None if a side has no times above 0.

    Each side is a list of samples, each with the times of its requests. Requests that were sent together depend on
    each other, so a sample gives one value: the mean of its logs. Welch's t interval of the difference of these
    values, turned back from logs, is the ratio's interval. On logs a ratio is symmetric and never below 0, and skewed
    times come near to normal. Student's quantile keeps its coverage at three samples, where a bootstrap has 27
    resamples and its percentile interval is far too narrow. Fewer than three samples a side: no interval.

    repeats: both sides are deterministic simulations, of which one sample says all; not where their samples differ.
    """
    sides = [_log_means(reference), _log_means(compared)]
    if not all(len(logs) for logs in sides):
        return None
    centers = [float(logs.mean()) for logs in sides]
    counts = (len(sides[0]), len(sides[1]))
    difference = centers[0] - centers[1]
    low = high = None
    basis: Basis = "samples"
    if repeats and all(np.ptp(logs) < _REPEATED for logs in sides):
        low = high = math.exp(difference)
        basis = "repeats exactly"
    elif min(counts) >= FEWEST_SAMPLES:
        half = _welch_half_width(sides[0], sides[1], confidence)
        low, high = math.exp(difference - half), math.exp(difference + half)
    return Ratio(
        ratio=math.exp(difference),
        low=low,
        high=high,
        reference_s=math.exp(centers[0]),
        typical_s=math.exp(centers[1]),
        samples=counts,
        reason=TOO_FEW if low is None else None,
        basis=basis,
    )


def paired_ratio(reference: Sequence[float], compared: Sequence[float], confidence: float = 0.95) -> Ratio | None:
    """The median over requests of one request's ratio, both sides having sent the same requests in this order.

    None where a side has no times, or none above 0 in a pair. reference_s and typical_s are the sides' medians, whose
    quotient is near the ratio and not equal to it.

    The interval is Woodruff's (JASA 47, 1952): the share of requests below the median has a standard error, and the
    quantiles at 0.5 plus and minus Student's t times that error are the interval's ends. Requests of one load wait for
    each other, so that neighbours are slow together; taken singly they would give too small an error. The error is that
    of the means of ten blocks of consecutive requests, which hardly depend on each other where a block is longer than
    a queue lives (batch means; Schmeiser, Operations Research 30, 1982, finds 10 to 30 blocks enough). The interval
    speaks for requests of this load, on these two starts of an engine: how starts differ, one load does not show.
    """
    pairs = np.array([(a, b) for a, b in zip(reference, compared, strict=True) if a > 0 and b > 0]).reshape(-1, 2)
    if not len(pairs):
        return None
    logs = np.log(pairs[:, 0] / pairs[:, 1])
    middle = float(np.median(logs))
    low = high = None
    if len(logs) >= _BLOCKS * _FEWEST_IN_BLOCK:
        low, high = (math.exp(end) for end in _blocked_median_interval(logs, middle, confidence))
    return Ratio(
        ratio=math.exp(middle),
        low=low,
        high=high,
        reference_s=float(np.median(pairs[:, 0])),
        typical_s=float(np.median(pairs[:, 1])),
        samples=(len(logs), len(logs)),
        reason=TOO_FEW_REQUESTS if low is None else None,
        basis="requests",
    )


def ratio_of_means(groups: Sequence[Sequence[tuple[float, float]]], confidence: float = 0.95) -> Ratio | None:
    """Mean over mean of paired times, the reference's over the compared side's. None without times above 0.

    groups: of pairs (reference, compared) that depend on each other, such as a conversation's; one group alone is cut
    into ten of neighbours. Few late rounds weigh as much in a mean as many early ones, which a median of the requests'
    ratios would hide. The interval is that of a ratio estimator (Cochran, Sampling Techniques, 3rd ed., 6.4): the
    groups' residuals reference - ratio × compared give its standard error, on the log with Student's t. It speaks for
    other conversations in these two loads. What slows all conversations of a load at once, a busy moment or a start, is
    not in it: only trials show that.
    """
    basis: Basis = "sessions"
    if len(groups) == 1:
        basis, pairs = "requests", groups[0]
        size = len(pairs) / _BLOCKS
        groups = [pairs[round(block * size) : round((block + 1) * size)] for block in range(_BLOCKS)]
        groups = [group for group in groups if len(group) >= _FEWEST_IN_BLOCK] or [pairs]
    sums = np.array([np.sum(group, axis=0) for group in groups if len(group)]).reshape(-1, 2)
    total = sums.sum(axis=0)
    if not (total > 0).all():
        return None
    ratio, count = float(total[0] / total[1]), len(sums)
    pairs_in_all = sum(len(group) for group in groups)
    low = high = None
    if count >= _BLOCKS:
        from scipy.special import stdtrit

        residuals = sums[:, 0] - ratio * sums[:, 1]
        error = math.sqrt(count / (count - 1) * float(residuals @ residuals)) / float(total[0])
        half = float(stdtrit(count - 1, (1 + confidence) / 2)) * error
        low, high = ratio * math.exp(-half), ratio * math.exp(half)
    return Ratio(
        ratio=ratio,
        low=low,
        high=high,
        reference_s=float(total[0]) / pairs_in_all,
        typical_s=float(total[1]) / pairs_in_all,
        samples=(count, count),
        reason=TOO_FEW_REQUESTS if low is None else None,
        basis=basis,
    )


def _blocked_median_interval(values: Values, middle: float, confidence: float) -> tuple[float, float]:
    """Of ordered, correlated values. A value at the median is half below it, so that equal values have no error."""
    from scipy.special import stdtrit

    below = (values < middle) + 0.5 * (values == middle)
    shares = np.array([float(block.mean()) for block in np.array_split(below, _BLOCKS)])
    half = float(stdtrit(_BLOCKS - 1, (1 + confidence) / 2)) * float(shares.std(ddof=1)) / math.sqrt(_BLOCKS)
    low, high = np.quantile(values, [max(0.0, 0.5 - half), min(1.0, 0.5 + half)])
    return float(low), float(high)


def _log_means(samples: Sequence[Sequence[float]]) -> Values:
    """One value a sample, of its times above 0; a sample without any is left out."""
    positive = [[value for value in sample if value > 0] for sample in samples]
    return np.array([float(np.log(sample).mean()) for sample in positive if sample])


def _welch_half_width(a: Values, b: Values, confidence: float) -> float:
    """Half of the interval of mean(a) - mean(b), where the sides may spread unequally; 0 where neither spreads."""
    from scipy.special import stdtrit

    errors = [float(side.var(ddof=1)) / len(side) for side in (a, b)]
    total = sum(errors)
    # Equal logs have a variance of some 1e-32 in place of 0.
    if total < 1e-24:
        return 0.0
    degrees = total**2 / sum(error**2 / (len(side) - 1) for error, side in zip(errors, (a, b), strict=True))
    return float(stdtrit(degrees, (1 + confidence) / 2)) * math.sqrt(total)


def crossing(places: Sequence[float], ratios: Sequence[float | None]) -> float | None:
    """Where a ratio passes 1, on straight lines between neighbours on log axes. None: nowhere, or more than once.

    places: ascending and above 0, one a ratio.
    """
    logs = [(math.log(place), math.log(ratio)) for place, ratio in zip(places, ratios, strict=True) if ratio]
    passed = [pair for pair in itertools.pairwise(logs) if (pair[0][1] > 0) != (pair[1][1] > 0)]
    if len(passed) != 1:
        return None
    (left, below), (right, above) = passed[0]
    return math.exp(left + (right - left) * -below / (above - below))


# ---- equivalence: are two sides equal within a margin?


def resampled_groups(rng: np.random.Generator, sizes: Sequence[int], resamples: int) -> Indices:
    """Bootstrap indices of whole groups of neighbours; shape (resamples, sum of sizes).

    Each resample draws groups until it has as many values as the original. If groups differ in size, the last group
    drawn may be cut off.
    """
    ends = np.cumsum(sizes)
    starts, is_last = ends - sizes, np.zeros(ends[-1], dtype=bool)
    is_last[ends - 1] = True
    chosen = np.empty((resamples, int(ends[-1])), dtype=np.int64)
    at = starts[rng.integers(0, len(starts), resamples)]
    for place in range(chosen.shape[1]):
        chosen[:, place] = at
        at = np.where(is_last[at], starts[rng.integers(0, len(starts), resamples)], at + 1)
    return chosen


def resampled_blocks(rng: np.random.Generator, n: int, length: int, resamples: int) -> Indices:
    """Circular block bootstrap indices of n ordered values: correlated neighbours stay together."""
    starts = rng.integers(0, n, size=(resamples, -(-n // length), 1))
    return ((starts + np.arange(length)) % n).reshape(resamples, -1)[:, :n]


def expanded_interval(estimates: Values, clusters: int, confidence: float) -> tuple[float, float]:
    """Percentile interval of bootstrap estimates, widened for few clusters.

    The plain percentile interval of n clusters is too narrow by sqrt((n-1)/n). It also uses a normal quantile in place
    of Student's. This function cuts off a smaller share at either end to correct both (Hesterberg, The American
    Statistician 2015).
    """
    from scipy.special import ndtr, stdtrit

    if clusters < 2:
        return -math.inf, math.inf
    quantile = float(stdtrit(clusters - 1, (1 - confidence) / 2))
    tail = float(ndtr(quantile * math.sqrt(clusters / (clusters - 1))))
    low, high = np.quantile(estimates, [tail, 1 - tail])
    return float(low), float(high)


def equivalence(low: float, high: float, margin: float) -> Equivalence:
    """'pass' if the interval lies within ± margin, 'fail' if it lies outside, otherwise 'not resolvable'."""
    if -margin <= low and high <= margin:
        return "pass"
    return "fail" if low > margin or high < -margin else "not resolvable"


def samples_to_resolve(error: float, half_width: float, samples: int, margin: float) -> int | None:
    """Number of samples that would shrink this half width until the interval no longer holds an end of the margin.

    None if no number of samples would do so.
    """
    room = abs(margin - abs(error))
    if room == 0 or not math.isfinite(half_width):
        return None
    return max(samples, math.ceil(samples * (half_width / room) ** 2))


def wasserstein(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Area between the two cumulative distributions, in the values' unit; None if a side is empty."""
    if not len(left) or not len(right):
        return None
    from scipy.stats import wasserstein_distance

    return float(wasserstein_distance(left, right))
