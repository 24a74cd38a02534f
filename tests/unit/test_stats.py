"""Every figure of harness/stats.py at its edges, against scipy's own or a count by hand: quick, and exact."""

import math

import numpy as np
import pytest
from scipy import stats as reference

from harness.stats import (
    TOO_FEW,
    TOO_FEW_REQUESTS,
    coefficient_of_variation,
    equivalence,
    expanded_interval,
    mean_interval,
    median_interval,
    paired_ratio,
    percentile,
    ratio_interval,
    relative_half_width,
    resampled_blocks,
    resampled_groups,
    samples_needed,
    samples_to_resolve,
    wasserstein,
)

FEW = [3.0, 1.0, 2.0]
SOME = [float(value) for value in (9, 4, 7, 5, 6, 8, 11, 10, 12, 13)]


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.25, 1.5), (0.5, 2.0), (1.0, 3.0)])
def test_a_percentile_is_interpolated(share: float, expected: float) -> None:
    assert percentile(FEW, share) == expected
    assert percentile([], share) is None and percentile([5.0], share) == 5.0


def test_the_coefficient_of_variation_takes_the_samples_deviation() -> None:
    assert coefficient_of_variation(FEW) == 0.5
    assert coefficient_of_variation([1.0, 3.0]) == pytest.approx(math.sqrt(2) / 2)
    assert (
        coefficient_of_variation([]) is coefficient_of_variation([1.0]) is coefficient_of_variation([-1.0, 1.0]) is None
    )


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95])
def test_the_means_interval_is_students(confidence: float) -> None:
    for values in ([1.0, 3.0], FEW, SOME):
        exact = reference.t.interval(confidence, len(values) - 1, np.mean(values), reference.sem(values))
        assert mean_interval(values, confidence) == pytest.approx(exact)
    assert mean_interval(SOME) == mean_interval(SOME, 0.95)
    assert mean_interval([1.0]) is mean_interval([]) is None


@pytest.mark.parametrize(("confidence", "ranks"), [(0.95, (1, 8)), (0.9, (1, 8)), (0.5, (3, 6)), (0.999, None)])
def test_the_medians_interval_holds_as_few_values_as_it_may(confidence: float, ranks: tuple[int, int] | None) -> None:
    """Ten values: at most 1 of 10 may lie outside at either end at 90 and 95 %, 3 at 50 %, none at 99.9 %."""
    ordered = sorted(SOME)
    expected = None if ranks is None else (ordered[ranks[0]], ordered[ranks[1]])
    assert median_interval(SOME, confidence) == expected
    for outside, allowed in ((0, 0.001), (1, 0.0107), (2, 0.0547), (3, 0.1719)):
        assert reference.binom.cdf(outside, 10, 0.5) == pytest.approx(allowed, abs=1e-4)


def test_the_medians_interval_of_equal_values_is_one_point_and_95_percent_is_the_default() -> None:
    assert median_interval(SOME) == median_interval(SOME, 0.95) != median_interval(SOME, 0.85)
    assert median_interval([2.0]) == (2.0, 2.0)
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0]) is None is median_interval([])
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == (1.0, 6.0)
    # One of two heads in one toss has just this share.
    assert median_interval([1.0, 2.0], 0.5) == (1.0, 2.0)


def test_the_relative_width_is_half_of_the_interval_over_the_median() -> None:
    low, high = median_interval(SOME) or (0.0, 0.0)
    assert relative_half_width(SOME) == (high - low) / 2 / 8.5 == 7 / 2 / 8.5
    assert relative_half_width(SOME, 0.5) == (10 - 7) / 2 / 8.5
    assert relative_half_width(FEW) is None and relative_half_width([0.0] * 10) is None
    assert relative_half_width([-1.0] * 10) is None and relative_half_width([0.5] * 10) == 0.0


def test_how_many_samples_a_width_takes() -> None:
    assert samples_needed(FEW, 0.1) == math.ceil((1.959964 * 0.5 / 0.1) ** 2) == 97
    assert samples_needed(FEW, 0.1, 0.9) == math.ceil((1.644854 * 0.5 / 0.1) ** 2) == 68
    assert samples_needed(FEW, 10.0) == 2 and samples_needed([1.0], 0.1) is None
    # 1.96 x 0.5 / 0.7 squared is 1.96: two; / 0.5 it is 3.84: four.
    assert samples_needed(FEW, 0.7) == 2 and samples_needed(FEW, 0.5) == 4


class Drawn:
    """Gives the numbers that it was made with, and notes what it was asked for."""

    def __init__(self, *numbers: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> None:
        self.numbers, self.asked = list(numbers), list[tuple[int, int, object]]()

    def integers(self, low: int, high: int, size: object) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
        self.asked.append((low, high, size))
        return self.numbers.pop(0)


def test_groups_follow_each_other_whole_from_the_one_that_was_drawn() -> None:
    """Groups 0-2, 3 and 4-5. Drawn first: 2, 0, 1; then at each place one a row, taken where a group has ended."""
    later = [np.array(draw) for draw in ([0, 0, 2], [1, 0, 0], [0, 1, 1], [0, 2, 0], [0, 0, 2], [1, 1, 1])]
    rng = Drawn(np.array([2, 0, 1]), *later)
    index = resampled_groups(rng, [3, 1, 2], 3)  # type: ignore[arg-type]
    assert index.tolist() == [[4, 5, 3, 0, 1, 2], [0, 1, 2, 3, 4, 5], [3, 4, 5, 3, 0, 1]]
    assert set(rng.asked) == {(0, 3, 3)} and len(rng.asked) == 7


def test_blocks_wrap_around_and_the_last_is_cut_off() -> None:
    rng = Drawn(np.array([[[3], [1]], [[0], [4]]]))
    index = resampled_blocks(rng, 5, 3, 2)  # type: ignore[arg-type]
    assert index.tolist() == [[3, 4, 0, 1, 2], [0, 1, 2, 4, 0]]
    assert rng.asked == [(0, 5, (2, 2, 1))]
    exact = Drawn(np.array([[[3], [1]]]))
    assert resampled_blocks(exact, 6, 3, 1).tolist() == [[3, 4, 5, 1, 2, 3]]  # type: ignore[arg-type]
    assert exact.asked == [(0, 6, (1, 2, 1))]


@pytest.mark.parametrize("clusters", [2, 3, 10])
def test_an_interval_is_widened_by_students_quantile_and_the_missing_degree(clusters: int) -> None:
    estimates = np.linspace(-1.0, 3.0, 4001)
    quantile = reference.t.ppf(0.05, clusters - 1) * math.sqrt(clusters / (clusters - 1))
    tail = reference.norm.cdf(quantile)
    low, high = expanded_interval(estimates, clusters, 0.9)
    assert (low, high) == pytest.approx((-1 + 4 * tail, 3 - 4 * tail))
    assert expanded_interval(estimates, 1, 0.9) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.5, 0.5, "pass"),
        (-0.5, 0.25, "pass"),
        (-0.75, 0.5, "not resolvable"),
        (-0.5, 0.75, "not resolvable"),
        (0.5, 0.75, "not resolvable"),
        (0.75, 1.0, "fail"),
        (-0.75, -0.5, "not resolvable"),
        (-1.0, -0.75, "fail"),
    ],
)
def test_a_bound_on_the_margin_is_within_it(low: float, high: float, verdict: str) -> None:
    assert equivalence(low, high, 0.5) == verdict


def test_samples_to_leave_one_end_of_the_margin() -> None:
    assert samples_to_resolve(0.25, 0.5, 10, 0.5) == 40 == samples_to_resolve(-0.25, 0.5, 10, 0.5)
    assert samples_to_resolve(0.75, 0.5, 10, 0.5) == 40 and samples_to_resolve(0.0, 0.25, 10, 0.5) == 10
    assert samples_to_resolve(0.0, 1.0, 7, 0.75) == 13
    assert samples_to_resolve(0.5, 0.5, 10, 0.5) is None is samples_to_resolve(0.0, math.inf, 10, 0.5)
    # More than one whole unit of room is room as well, and so is exactly one.
    assert samples_to_resolve(1.0, 2.0, 3, 2.0) == 12


def test_the_area_between_two_distributions() -> None:
    assert wasserstein([1.0, 2.0], [4.0, 5.0]) == pytest.approx(3.0) and wasserstein([1.0], [1.0]) == 0.0
    assert wasserstein([], [1.0]) is wasserstein([1.0], []) is wasserstein([], []) is None


def each(values: "list[float]") -> list[list[float]]:
    """Samples of one request."""
    return [[value] for value in values]


def test_a_ratio_has_welchs_interval_on_logs() -> None:
    slow, fast = [2.0, 2.5, 1.6, 2.2], [0.5, 0.4, 0.7]
    found = ratio_interval(each(slow), each(fast))
    welch = reference.ttest_ind(np.log(slow), np.log(fast), equal_var=False).confidence_interval(0.95)
    assert found is not None and found.reason is None and found.samples == (4, 3)
    assert (found.low, found.high) == pytest.approx((math.exp(welch.low), math.exp(welch.high)))
    assert (found.reference_s, found.typical_s) == pytest.approx((reference.gmean(slow), reference.gmean(fast)))
    assert found.ratio == pytest.approx(found.reference_s / found.typical_s) and found.distinct
    back = ratio_interval(each(fast), each(slow))
    assert back is not None and back.distinct
    assert (1 / back.high, 1 / back.low) == pytest.approx((found.low, found.high))  # type: ignore[operator]


def test_a_ratio_of_two_samples_has_no_interval_and_says_why() -> None:
    """54 times slower, of two samples that spread: neither 'no difference' nor an interval below 0."""
    few = ratio_interval(each([2.8, 4.6]), each([0.0677] * 9))
    assert few is not None and few.reason == TOO_FEW and few.ratio == pytest.approx(53.0, rel=0.01)
    assert few.low is few.high is None and not few.distinct and few.samples == (2, 9)
    assert ratio_interval([], each([1.0])) is None is ratio_interval(each([0.0]), each([1.0]))


def test_a_ratio_of_times_that_do_not_vary_is_exact() -> None:
    same = ratio_interval(each([0.1] * 3), each([0.1] * 5))
    assert same is not None and (same.low, same.ratio, same.high) == (1.0, 1.0, 1.0) and not same.distinct
    twice = ratio_interval(each([0.3] * 3), each([0.15] * 3))
    assert twice is not None and twice.low == twice.high == pytest.approx(2.0) and twice.distinct


def test_requests_of_one_sample_count_once() -> None:
    """A slot that serves two requests one after the other gives two levels: that is no spread of the samples."""
    pairs = ratio_interval([[0.854, 1.6]] * 3, [[0.427, 0.8]] * 3)
    assert pairs is not None and pairs.samples == (3, 3) and pairs.low == pairs.high == pytest.approx(2.0)


@pytest.mark.parametrize(("n", "m", "spread"), [(3, 3, (0.3, 0.3)), (3, 9, (0.6, 0.05)), (12, 12, (0.2, 0.5))])
def test_a_ratios_interval_covers_the_truth_where_samples_share_their_noise(
    n: int, m: int, spread: tuple[float, float]
) -> None:
    """1 000 synthetic runs with samples of 4 requests: 95 % of the intervals hold the true ratio; those of an interval
    that takes each request for a sample of its own do far less often."""
    rng = np.random.default_rng(20)
    runs, hits, naive_hits = 1000, 0, 0
    for _ in range(runs):
        sides = [
            np.exp(level + rng.normal(0, noise, (count, 1)) + rng.normal(0, 0.05, (count, 4)))
            for level, noise, count in ((math.log(3.0), spread[0], n), (0.0, spread[1], m))
        ]
        found = ratio_interval(sides[0].tolist(), sides[1].tolist())
        naive = ratio_interval(each(sides[0].ravel().tolist()), each(sides[1].ravel().tolist()))
        hits += found.low <= 3.0 <= found.high  # type: ignore[union-attr, operator]
        naive_hits += naive.low <= 3.0 <= naive.high  # type: ignore[union-attr, operator]
    assert 0.93 <= hits / runs <= 0.985 and naive_hits / runs < 0.8


def test_a_simulation_that_repeats_needs_one_sample() -> None:
    one = ratio_interval([[0.3]], [[0.1]], repeats=True)
    assert one is not None and one.basis == "repeats exactly" and one.low == one.high == one.ratio == pytest.approx(3.0)
    assert one.reason is None and one.distinct and one.turned.basis == "repeats exactly"
    rounding = ratio_interval(each([0.3, 0.3 * (1 + 1e-13)]), each([0.1]), repeats=True)
    assert rounding is not None and rounding.basis == "repeats exactly"
    varying = ratio_interval(each([0.3, 0.31]), each([0.1]), repeats=True)
    assert varying is not None and varying.reason == TOO_FEW and varying.basis == "samples"


def test_a_paired_ratio_is_the_median_of_each_requests_own() -> None:
    reference = [2.0, 8.0, 30.0]
    found = paired_ratio(reference, [1.0, 2.0, 10.0])
    assert found is not None and found.ratio == pytest.approx(3.0) and found.basis == "requests"
    assert (found.reference_s, found.typical_s, found.samples) == (8.0, 2.0, (3, 3))
    assert found.low is None and found.reason == TOO_FEW_REQUESTS
    assert paired_ratio([], []) is None and paired_ratio([0.0], [1.0]) is None
    equal = paired_ratio([3.0] * 100, [1.0] * 100)
    assert equal is not None and equal.low == equal.high == equal.ratio == pytest.approx(3.0)
    assert paired_ratio([3.0] * 99, [1.0] * 99).low is None  # type: ignore[union-attr]


def test_a_paired_interval_is_woodruffs_over_ten_blocks() -> None:
    # Ties at the median count half; the blocks differ in how many values are below it.
    values = [float(1 + (i * i) % 7 + i // 40) for i in range(110)]
    found = paired_ratio([*values, 0.0, 4.0], [*[1.0] * 110, 1.0, 0.0])
    assert found is not None and found.low is not None and found.high is not None
    assert found.samples == (110, 110) and found.typical_s == 1.0
    middle = float(np.median(values))
    below = [1.0 if value < middle else 0.5 if value == middle else 0.0 for value in values]
    shares = [sum(below[at : at + 11]) / 11 for at in range(0, 110, 11)]
    spread = math.sqrt(sum((share - sum(shares) / 10) ** 2 for share in shares) / 9)
    half = reference.t.ppf(0.975, 9) * spread / math.sqrt(10)
    ends = np.exp(np.quantile(np.log(values), [0.5 - half, 0.5 + half]))
    assert found.low == pytest.approx(ends[0]) and found.high == pytest.approx(ends[1])
    assert found.low < found.ratio < found.high


def test_a_paired_interval_ends_with_the_values() -> None:
    # Whole blocks lie on one side of the median, so that the error exceeds all shares.
    values = [float(i % 10 + 100 * (i // 50)) + 1 for i in range(100)]
    found = paired_ratio(values, [1.0] * 100, 0.999)
    assert found is not None
    assert found.low == pytest.approx(1.0) and found.high == pytest.approx(110.0)


def test_a_ratio_turned_is_its_other_sides() -> None:
    times = [[[0.4], [0.44], [0.36], [0.42]], [[0.1], [0.12], [0.11]]]
    one, other = ratio_interval(times[0], times[1]), ratio_interval(times[1], times[0])
    assert one is not None and other is not None and one.low is not None
    assert one.turned.ratio == pytest.approx(other.ratio)
    assert one.turned.low == pytest.approx(other.low) and one.turned.high == pytest.approx(other.high)
    assert (one.turned.reference_s, one.turned.typical_s) == (other.reference_s, other.typical_s)
    assert one.turned.samples == other.samples == (3, 4)
    few = ratio_interval(times[0][:2], times[1])
    assert few is not None and (few.turned.low, few.turned.high) == (None, None)


def queued(rng: np.random.Generator, n: int, memory: float) -> np.ndarray:
    """n values of unit variance of which neighbours are correlated by `memory` (an AR(1) process)."""
    values = rng.standard_normal(n)
    for i in range(1, n):
        values[i] = memory * values[i - 1] + math.sqrt(1 - memory**2) * values[i]
    return values


@pytest.mark.parametrize(("n", "memory"), [(100, 0.0), (200, 0.5), (300, 0.8), (1000, 0.9)])
def test_a_paired_interval_covers_the_truth_where_neighbours_are_slow_together(n: int, memory: float) -> None:
    """600 synthetic loads: some 95 % of the intervals hold the true ratio of 1.5, which the distribution-free interval
    of independent values does far less often where neighbours are correlated."""
    rng = np.random.default_rng(20)
    loads, hits, naive_hits = 600, 0, 0
    for _ in range(loads):
        ours = np.exp(math.log(1.5) + 0.3 * queued(rng, n, memory))
        found = paired_ratio(ours.tolist(), [1.0] * n)
        hits += found.low <= 1.5 <= found.high  # type: ignore[union-attr, operator]
        naive = median_interval(ours.tolist())
        naive_hits += naive[0] <= 1.5 <= naive[1]  # type: ignore[index]
    assert 0.91 <= hits / loads <= 0.98
    assert naive_hits / loads > 0.91 if memory == 0 else naive_hits / loads < (0.85 if memory < 0.8 else 0.7)
