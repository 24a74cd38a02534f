"""The numbers under a verdict, against scipy and against simulated truth."""

import math

import numpy as np
import pytest
from scipy import stats as reference

from harness.stats import (
    equivalence,
    expanded_interval,
    resampled_blocks,
    resampled_groups,
    samples_to_resolve,
    wasserstein,
)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.05, 0.05, "pass"),
        (0.01, 0.02, "pass"),
        (0.0501, 0.2, "fail"),
        (-0.2, -0.0501, "fail"),
        (0.04, 0.06, "not resolvable"),
        (-0.06, 0.0, "not resolvable"),
        (-math.inf, math.inf, "not resolvable"),
    ],
)
def test_the_whole_interval_decides(low: float, high: float, verdict: str) -> None:
    assert equivalence(low, high, 0.05) == verdict


@pytest.mark.parametrize(("n", "within"), [(5, 0.08), (10, 0.04), (40, 0.03)])
def test_the_interval_of_a_mean_is_as_wide_as_students(n: int, within: float) -> None:
    """Of normal values the bootstrap with its correction gives what the t interval gives, over many draws. Means of
    five values have no tails to speak of: there it stays 6 % narrower."""
    rng = np.random.default_rng(1)
    ratios = []
    for _ in range(200):
        values = rng.normal(10, 1, n)
        means = values[resampled_groups(rng, [1] * n, 1000)].mean(axis=1)
        low, high = expanded_interval(means, n, 0.9)
        exact = reference.t.interval(0.9, n - 1, loc=values.mean(), scale=reference.sem(values))
        ratios.append((high - low) / (exact[1] - exact[0]))
    assert np.mean(ratios) == pytest.approx(1.0, abs=within)


@pytest.mark.parametrize("n", [5, 20])
def test_nine_of_ten_intervals_hold_the_truth(n: int) -> None:
    rng = np.random.default_rng(2)
    held = 0
    for _ in range(600):
        values = rng.gamma(20, 0.05, n)  # mean 1, CV 22 %: skewed, as times are
        means = values[resampled_groups(rng, [1] * n, 500)].mean(axis=1)
        low, high = expanded_interval(means, n, 0.9)
        held += low <= 1.0 <= high
    assert 0.85 <= held / 600 <= 0.94


def test_requests_of_one_sample_stay_together() -> None:
    """Four requests that share one fate are one observation: an interval that takes them for four is half as wide."""
    rng = np.random.default_rng(3)
    values = np.repeat(rng.normal(10, 1, 25), 4)
    together = values[resampled_groups(rng, [4] * 25, 2000)].mean(axis=1).std()
    apart = values[resampled_groups(rng, [1] * 100, 2000)].mean(axis=1).std()
    assert together / apart == pytest.approx(2.0, rel=0.1)


def test_turns_of_unlike_lengths_are_drawn_alike_and_keep_their_order() -> None:
    rng = np.random.default_rng(7)
    index = resampled_groups(rng, [3, 1, 2], 6000)
    assert index.shape == (6000, 6) and set(index[:, 0]) == {0, 3, 4}
    assert np.bincount(index[:, 0], minlength=6)[[0, 3, 4]] == pytest.approx(np.full(3, 2000), rel=0.1)
    assert (
        index[:, 1:][np.isin(index[:, :-1], [0, 1, 4])] == index[:, :-1][np.isin(index[:, :-1], [0, 1, 4])] + 1
    ).all()
    assert set(index[:, 1:][np.isin(index[:, :-1], [2, 3, 5])]) == {0, 3, 4}, "a turn ends, and any comes next"


def test_an_interval_of_turns_holds_the_truth_where_samples_of_a_turn_are_off_together() -> None:
    """Eight turns of six samples, each turn off by 5 %, each sample by 8 % more: taken for 48 independent samples, they
    give intervals of which every third misses."""
    rng, held = np.random.default_rng(8), {"turns": 0, "samples": 0}
    for _ in range(400):
        values = (rng.normal(1, 0.05, 8)[:, None] + rng.normal(0, 0.08, (8, 6))).ravel()
        for by, sizes in (("turns", [6] * 8), ("samples", [1] * 48)):
            means = values[resampled_groups(rng, sizes, 400)].mean(axis=1)
            low, high = expanded_interval(means, len(sizes), 0.9)
            held[by] += low <= 1.0 <= high
    assert 0.85 <= held["turns"] / 400 <= 0.95 and held["samples"] / 400 < 0.8


def test_blocks_keep_neighbours_and_all_places_are_drawn_alike() -> None:
    rng = np.random.default_rng(4)
    index = resampled_blocks(rng, 10, 4, 5000)
    assert index.shape == (5000, 10)
    assert ((index[:, 1] - index[:, 0]) % 10 == 1).all() and ((index[:, 5] - index[:, 4]) % 10 == 1).all()
    assert np.bincount(index.ravel(), minlength=10) == pytest.approx(np.full(10, 5000), rel=0.05)


def test_blocks_see_the_dependence_that_single_values_miss() -> None:
    """Of an autoregressive series the mean varies more than independent values of its spread would."""
    rng = np.random.default_rng(5)
    series = np.zeros(1000)
    for place in range(1, 1000):
        series[place] = 0.8 * series[place - 1] + rng.normal()
    truth = 1 / (1 - 0.8) / math.sqrt(1000)
    blocks = series[resampled_blocks(rng, 1000, 30, 2000)].mean(axis=1).std()
    single = series[resampled_blocks(rng, 1000, 1, 2000)].mean(axis=1).std()
    assert blocks == pytest.approx(truth, rel=0.25) and single < 0.5 * truth


def test_equal_sides_pass_and_a_true_difference_is_rarely_called_equal() -> None:
    """Two one-sided tests at 5 %: where the true error is just at the margin, at most about 5 % pass."""
    rng = np.random.default_rng(6)
    verdicts = {1.0: 0, 1.05: 0, 1.15: 0}
    for truth in verdicts:
        for _ in range(200):
            values = rng.normal(truth, 0.1, 30)
            means = values[resampled_groups(rng, [1] * 30, 500)].mean(axis=1)
            low, high = expanded_interval(means, 30, 0.9)
            verdicts[truth] += equivalence(low - 1, high - 1, 0.05) == "pass"
    assert verdicts[1.0] > 130 and verdicts[1.05] <= 20 and verdicts[1.15] == 0


def test_how_many_samples_would_resolve() -> None:
    assert samples_to_resolve(0.0, 0.10, 20, 0.05) == 80
    assert samples_to_resolve(0.04, 0.02, 20, 0.05) == 80
    assert samples_to_resolve(0.05, 0.02, 20, 0.05) is None
    assert samples_to_resolve(0.0, math.inf, 3, 0.05) is None


def test_wasserstein_is_scipys_and_unknown_without_values() -> None:
    assert wasserstein([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]) == pytest.approx(1.0)
    assert wasserstein([], [1.0]) is None


def test_one_cluster_has_no_interval() -> None:
    assert expanded_interval(np.ones(100), 1, 0.9) == (-math.inf, math.inf)
