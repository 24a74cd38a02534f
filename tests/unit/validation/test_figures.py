"""Every figure of two sides that are made by hand: exact, quick, without a run."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.records import AcceleratorFacts, Resolved
from harness.results.manifest import CellEntry, Manifest
from harness.stats import expanded_interval, resampled_blocks, resampled_groups
from harness.validation.equivalence import Figure, PointResult, compare
from harness.validation.points import Point, Repeat, Side
from simulator.middle import middle_mean
from traces.request import RequestRecord

LEFT_S = [1.0, 1.05, 1.3, 1.22, 0.9, 0.95, 1.1, 1.08, 1.2, 1.15, 1.02, 0.97]
RIGHT_S = [1.1, 1.2, 1.0, 1.15, 1.02, 1.25, 0.99, 1.12, 1.04, 1.3, 0.92, 1.01]


def row(
    name: str, ttft_s: float, sample: int = 0, sent_s: float = 10.0, tokens: int = 100, more_s: float | None = 1.0
) -> RequestRecord:
    """more_s: from the first token to the last; None: the last token's time is unknown."""
    first_s = sent_s + ttft_s
    return RequestRecord(
        id=name,
        sample=sample,
        scheduled_s=0.0,
        sent_s=sent_s,
        first_token_s=first_s,
        last_token_s=None if more_s is None else first_s + more_s,
        prompt_tokens=tokens,
    )


def single(values_s: Sequence[float], first: int = 0) -> Repeat:
    """Samples of one request each."""
    return Repeat(rows=[row(f"r{n}", value_s, sample=first + n) for n, value_s in enumerate(values_s)])


def passed(values_s: Sequence[float]) -> Repeat:
    """One pass over a free load: a request a second, each of which ends half a second after its first token."""
    return Repeat(rows=[row(f"r{n}", value, sent_s=float(n), more_s=0.5) for n, value in enumerate(values_s)])


def side(repeats: Sequence[Repeat], tier: str = "gpu", engine: str = "fake", resolved: Resolved | None = None) -> Side:
    point = Point(tier, CellEntry(key="cell", resolved=resolved), {(n, "cell"): one for n, one in enumerate(repeats)})
    manifest = Manifest(run_id="run", name="run", status="complete", engine=engine, cells=[point.cell])
    return Side((Path("run"),), (manifest,), {("cell", tier): point})


def judged(reference: Side, candidate: Side, margin: float = 0.05) -> PointResult:
    [point] = compare(reference, candidate, margin).points
    return point


def named(figures: Sequence[Figure]) -> dict[str, Figure]:
    return {one.metric: one for one in figures}


def interval(
    statistic: Callable[..., Any],
    left: Any,
    right: Any,
    sizes: tuple[Sequence[int], Sequence[int]],
    independent: int,
) -> tuple[float, float]:
    """Of a warm state: both sides are drawn, each by itself."""
    rng = np.random.default_rng(20)
    one, other = (resampled_groups(rng, of, 2000) for of in sizes)
    ratios = statistic(np.take(right, other), axis=1) / statistic(np.take(left, one), axis=1)
    return expanded_interval(ratios - 1, independent, 0.9)


# ---- warm states


def test_samples_of_one_request_each() -> None:
    point = judged(side([single(LEFT_S)]), side([single(RIGHT_S)]))
    found = named(point.figures)
    assert list(found) == ["ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "requests_per_s", "prompt_tokens_per_s"]
    mean, rate = found["ttft_mean_s"], found["requests_per_s"]
    assert (mean.reference, mean.candidate) == pytest.approx((middle_mean(LEFT_S), middle_mean(RIGHT_S)))
    assert mean.error == pytest.approx(middle_mean(RIGHT_S) / middle_mean(LEFT_S) - 1)
    assert (mean.low, mean.high) == pytest.approx(interval(middle_mean, LEFT_S, RIGHT_S, ([1] * 12, [1] * 12), 12))
    assert mean.samples == 12 and mean.gates and mean.reason is None
    tail = found["ttft_p90_s"]
    assert (tail.reference, tail.candidate) == pytest.approx((np.quantile(LEFT_S, 0.9), np.quantile(RIGHT_S, 0.9)))
    middle = found["ttft_p50_s"]
    assert (middle.reference, middle.candidate) == pytest.approx((np.median(LEFT_S), np.median(RIGHT_S)))
    assert middle.gates and tail.gates
    # A request lasts one second beyond its first token.
    assert rate.reference == pytest.approx(1 / (middle_mean(LEFT_S) + 1))
    assert rate.candidate == pytest.approx(1 / (middle_mean(RIGHT_S) + 1))
    lasts = np.array(LEFT_S) + 1, np.array(RIGHT_S) + 1
    expected = interval(lambda values, axis: 1 / middle_mean(values, axis=axis), *lasts, ([1] * 12, [1] * 12), 12)
    assert (rate.low, rate.high) == pytest.approx(expected)
    tokens = found["prompt_tokens_per_s"]
    assert (tokens.reference, tokens.candidate) == pytest.approx((100 * rate.reference, 100 * rate.candidate))
    assert (tokens.error, tokens.low, tokens.high, tokens.verdict) == (rate.error, rate.low, rate.high, rate.verdict)


def test_requests_that_were_sent_together_are_one_sample() -> None:
    """Three samples of two: the mean of each, the median of these; the span from the first send to the last token."""

    def pairs(factor: float) -> Repeat:
        rows = []
        for sample, (one_s, other_s) in enumerate(zip(LEFT_S[::2], LEFT_S[1::2], strict=True)):
            rows.append(row(f"a{sample}", factor * one_s, sample, tokens=100))
            rows.append(row(f"b{sample}", factor * other_s, sample, sent_s=10.5, tokens=300))
        return Repeat(rows=[*rows, row("alone", 50.0, 99)])

    point = judged(side([pairs(1.0)]), side([pairs(1.1)]))
    found = named(point.figures)
    means = [(one + other) / 2 for one, other in zip(LEFT_S[::2], LEFT_S[1::2], strict=True)]
    assert found["ttft_mean_s"].reference == pytest.approx(np.median(means))
    assert found["ttft_mean_s"].samples == 6, "a sample that is not whole counts for nothing"
    expected = interval(np.median, np.array(means), 1.1 * np.array(means), ([1] * 6, [1] * 6), 6)
    assert (found["ttft_mean_s"].low, found["ttft_mean_s"].high) == pytest.approx(expected)
    tail = found["ttft_p90_s"]
    assert tail.reference == pytest.approx(np.quantile(LEFT_S, 0.9))
    expected = interval(partial(np.quantile, q=0.9), np.array(LEFT_S), 1.1 * np.array(LEFT_S), ([2] * 6, [2] * 6), 6)
    assert (tail.low, tail.high) == pytest.approx(expected)
    spans = [max(one, other + 0.5) + 1 for one, other in zip(LEFT_S[::2], LEFT_S[1::2], strict=True)]
    rate = found["requests_per_s"]
    slower = [max(1.1 * one, 1.1 * other + 0.5) + 1 for one, other in zip(LEFT_S[::2], LEFT_S[1::2], strict=True)]
    assert (rate.reference, rate.candidate) == pytest.approx((2 / np.median(spans), 2 / np.median(slower)))
    assert found["prompt_tokens_per_s"].reference == pytest.approx(200 * 2 / np.median(spans))
    assert not found["ttft_p50_s"].gates and found["ttft_p90_s"].gates
    assert point.wasserstein_s == pytest.approx(0.1 * np.mean(LEFT_S))


def test_without_a_last_token_a_request_ends_with_its_send() -> None:
    rows = [
        row(f"{n}{name}", 1.0, n, sent_s, more_s=None) for n in range(3) for name, sent_s in (("a", 5.0), ("b", 9.0))
    ]
    found = named(judged(side([Repeat(rows=rows)]), side([Repeat(rows=rows)])).figures)
    assert found["requests_per_s"].reference == pytest.approx(2 / 4.0)


@pytest.mark.parametrize(("count", "resolvable"), [(4, False), (5, True)])
def test_fewer_than_five_samples_have_no_interval(count: int, resolvable: bool) -> None:
    point = judged(side([single(LEFT_S[:count])]), side([single(LEFT_S[:count])]), margin=0.9)
    mean = named(point.figures)["ttft_mean_s"]
    assert (mean.low is not None, mean.high is not None) == (resolvable, resolvable)
    assert mean.verdict == point.verdict == ("pass" if resolvable else "not resolvable") and mean.needed is None
    assert mean.samples == count


def test_five_turns_are_drawn_as_wholes_and_four_are_not() -> None:
    """Turns of 3, 2, 2, 2 and 3 samples on the left; one of 12 on the right."""

    def mean_of(sizes: Sequence[int]) -> Figure:
        ends = np.cumsum(sizes).tolist()
        starts = [0, *ends[:-1]]
        turns = [single(LEFT_S[start:end]) for start, end in zip(starts, ends, strict=True)]
        return named(judged(side(turns), side([single(RIGHT_S)])).figures)["ttft_mean_s"]

    whole = [3, 2, 2, 2, 3]
    five, four = mean_of(whole), mean_of([3, 3, 3, 3])
    assert (five.low, five.high) == pytest.approx(interval(middle_mean, LEFT_S, RIGHT_S, (whole, [1] * 12), 5))
    assert (four.low, four.high) == pytest.approx(interval(middle_mean, LEFT_S, RIGHT_S, ([1] * 12, [1] * 12), 12))
    assert five.samples == four.samples == 12


def test_how_many_samples_would_do() -> None:
    mean = named(judged(side([single(LEFT_S)]), side([single(RIGHT_S)]), margin=0.03).figures)["ttft_mean_s"]
    assert (
        mean.verdict == "not resolvable" and mean.low is not None and mean.high is not None and mean.error is not None
    )
    half = (mean.high - mean.low) / 2
    assert mean.needed == math.ceil(12 * (half / abs(0.03 - abs(mean.error))) ** 2) > 12
    wide = named(judged(side([single(LEFT_S)]), side([single(RIGHT_S)]), margin=0.9).figures)["ttft_mean_s"]
    assert wide.verdict == "pass" and wide.needed is None


def test_a_point_without_rows_has_no_figures_and_passes() -> None:
    for left, right in (([], LEFT_S), (LEFT_S, []), ([], [])):
        point = judged(side([single(left)]), side([single(right)]))
        assert point.figures == () and point.wasserstein_s is None and point.verdict == "pass"


def test_a_simulated_side_has_no_tail_of_its_own() -> None:
    for engines, counts in ((("fake", "sim"), False), (("sim", "fake"), False), (("fake", "fake"), True)):
        left, right = side([single(LEFT_S)], engine=engines[0]), side([single(LEFT_S)], engine=engines[1])
        found = named(judged(left, right).figures)
        assert found["ttft_p90_s"].gates is counts and found["ttft_p50_s"].gates and found["ttft_mean_s"].gates


@pytest.mark.parametrize(("paced", "counts"), [((True, False), False), ((False, True), False), ((True, True), True)])
def test_nor_has_an_accelerator_beside_the_arithmetic_that_it_stands_for(
    paced: tuple[bool, bool], counts: bool
) -> None:
    facts = AcceleratorFacts(name="h9", machine="m", date="d", standing="s", link="paced", fitted_on="f")
    sides = [side([single(LEFT_S)]) for _ in paced]
    for one, is_paced in zip(sides, paced, strict=True):
        for point in one.points.values():
            point.cell.resolved = Resolved(accelerator=facts if is_paced else None)
    left, right = sides
    assert named(judged(left, right).figures)["ttft_p90_s"].gates is counts


# ---- a reference against itself


def test_odd_and_even_samples_are_held_against_each_other() -> None:
    point = judged(side([single(LEFT_S)]), side([single(RIGHT_S)]))
    own = named(point.noise)["ttft_mean_s"]
    even, odd = LEFT_S[::2], LEFT_S[1::2]
    assert (own.reference, own.candidate) == pytest.approx((np.median(even), np.median(odd))) and own.samples == 6
    assert (own.low, own.high) == pytest.approx(interval(np.median, even, odd, ([1] * 6, [1] * 6), 6))
    rate = named(point.noise)["requests_per_s"]
    assert rate.candidate == pytest.approx(1 / (np.median(odd) + 1))
    assert judged(side([single(LEFT_S[:9])]), side([single(RIGHT_S)])).noise == ()
    assert len(judged(side([single(LEFT_S[:10])]), side([single(RIGHT_S)])).noise) == 5


def test_pairs_stay_together_in_the_halves_and_turns_do_not_count_there() -> None:
    def turn(samples: Sequence[int]) -> Repeat:
        return Repeat(
            rows=[row(f"{n}{place}", LEFT_S[n] * (1 + place), n) for n in samples for place in range(2)]
        )  # fmt: skip

    turns = [turn(range(start, start + 2)) for start in range(0, 12, 2)]
    own = named(judged(side(turns), side(turns)).noise)["ttft_mean_s"]
    assert own.reference == pytest.approx(1.5 * np.median(LEFT_S[::2]))
    assert own.candidate == pytest.approx(1.5 * np.median(LEFT_S[1::2]))
    sizes = ([1] * 6, [1] * 6)
    left, right = 1.5 * np.array(LEFT_S[::2]), 1.5 * np.array(LEFT_S[1::2])
    assert (own.low, own.high) == pytest.approx(interval(np.median, left, right, sizes, 6))


def test_a_reference_that_differs_from_itself_resolves_nothing() -> None:
    drifting = side([single([1.0 + n / 1000 + 0.2 * (n % 2) for n in range(12)])])
    point = judged(drifting, drifting)
    assert [one.verdict for one in point.noise if one.metric == "ttft_mean_s"] == ["fail"]
    mean = named(point.figures)["ttft_mean_s"]
    assert mean.verdict == point.verdict == "not resolvable" and mean.needed is None
    assert mean.reason == "the reference differs from itself by +20.0%, more than ± 5%"
    slower = [row(f"r{n}", value_s, n, more_s=1.0 + n % 2) for n, value_s in enumerate(LEFT_S)]
    of_rates = judged(side([Repeat(rows=slower)]), side([Repeat(rows=slower)]))
    assert [one.metric for one in of_rates.figures if one.reason] == ["requests_per_s", "prompt_tokens_per_s"]
    steady = judged(side([single([1.0 + n / 1000 for n in range(12)])]), drifting)
    assert named(steady.figures)["ttft_mean_s"].reason is None


# ---- free loads


def test_passes_over_a_load_are_one_by_each_requests_median() -> None:
    passes = [[factor * value for value in LEFT_S] for factor in (1.0, 1.5, 1.02)]
    other = [1.03 * value for value in LEFT_S]
    point = judged(
        side([passed(values) for values in passes], "load"), side([passed(other)], "load", "sim")
    )  # fmt: skip
    found = named(point.figures)
    middle = 1.02 * np.array(LEFT_S)
    mean = found["ttft_mean_s"]
    assert (mean.reference, mean.candidate) == pytest.approx((np.mean(middle), np.mean(other)))
    # Twelve requests in blocks of round(12 ** (1/3)) = 2 neighbours, the same ones on both sides: six are independent.
    index = resampled_blocks(np.random.default_rng(20), 12, 2, 2000)
    ratios = np.array(other)[index].mean(axis=1) / middle[index].mean(axis=1) - 1
    assert (mean.low, mean.high) == pytest.approx(expanded_interval(ratios, 6, 0.9), abs=1e-12)
    assert mean.samples == 12 and all(one.gates for one in point.figures)
    gaps = np.median([completion_gaps(values) for values in passes], axis=0)
    rate = found["requests_per_s"]
    assert rate.reference == pytest.approx(1 / np.mean(gaps))
    assert rate.candidate == pytest.approx(1 / np.mean(completion_gaps(other)))
    theirs = np.array(completion_gaps(other))
    ratios = gaps[index].mean(axis=1) / theirs[index].mean(axis=1) - 1
    assert (rate.low, rate.high) == pytest.approx(expanded_interval(ratios, 6, 0.9))
    # The first and the third pass against the second.
    own = named(point.noise)["ttft_mean_s"]
    assert own.reference == pytest.approx(1.01 * np.mean(LEFT_S)) and own.candidate == pytest.approx(
        1.5 * np.mean(LEFT_S)
    )
    assert own.verdict == "fail" and mean.verdict == "not resolvable"


def completion_gaps(values_s: Sequence[float]) -> list[float]:
    """The load begins at 0; its ends are in order of time."""
    ends_s = sorted(n + value_s + 0.5 for n, value_s in enumerate(values_s))
    return [end_s - start_s for start_s, end_s in zip([0.0, *ends_s], ends_s, strict=False)]


def test_eleven_requests_are_five_blocks_of_two() -> None:
    mean = named(judged(side([passed(LEFT_S[:11])], "load"), side([passed(RIGHT_S[:11])], "load")).figures)[
        "ttft_mean_s"
    ]
    index = resampled_blocks(np.random.default_rng(20), 11, 2, 2000)
    ratios = np.array(RIGHT_S)[index].mean(axis=1) / np.array(LEFT_S)[index].mean(axis=1) - 1
    assert (mean.low, mean.high) == pytest.approx(expanded_interval(ratios, 5, 0.9))


def test_of_five_passes_the_second_and_the_fourth_are_one_half() -> None:
    passes = [passed([factor * value for value in LEFT_S]) for factor in (1.0, 1.2, 1.1, 1.6, 1.3)]
    own = named(judged(side(passes, "load"), side([passed(RIGHT_S)], "load")).noise)["ttft_mean_s"]
    assert (own.reference, own.candidate) == pytest.approx((1.1 * np.mean(LEFT_S), 1.4 * np.mean(LEFT_S)))


def test_one_pass_has_nothing_to_be_held_against() -> None:
    assert judged(side([passed(LEFT_S)], "load"), side([passed(RIGHT_S)], "load")).noise == ()
    assert len(judged(side([passed(LEFT_S)] * 2, "load"), side([passed(RIGHT_S)], "load")).noise) == 5


def test_requests_that_a_pass_did_not_answer_are_left_out_on_both_sides() -> None:
    ours, theirs = passed(LEFT_S), passed(LEFT_S)
    ours.left_out.append(ours.rows.pop(1))
    theirs.left_out.append(theirs.rows.pop(4))
    theirs.left_out.append(theirs.rows.pop(7))
    point = judged(side([ours], "load"), side([theirs], "load"))
    mean = named(point.figures)["ttft_mean_s"]
    both = [value for n, value in enumerate(LEFT_S) if n not in (1, 4, 8)]
    assert mean.samples == 9 and mean.reference == mean.candidate == pytest.approx(np.mean(both))
    assert point.left_out == 3


def test_neighbours_are_those_that_were_sent_after_each_other() -> None:
    """The order of the rows is that of their ends; the blocks go by the order of their sends, then by id."""
    ours, theirs = passed(LEFT_S), passed([1.2 * value if n < 6 else value for n, value in enumerate(LEFT_S)])
    told = judged(side([ours], "load"), side([theirs], "load"))
    ours.rows.reverse()
    assert named(judged(side([ours], "load"), side([theirs], "load")).figures) == named(told.figures)
    for one in (ours, theirs):
        one.rows = [row(r.id, r.ttft_s or 0.0) for r in one.rows]
    at_once = named(judged(side([ours], "load"), side([theirs], "load")).figures)["ttft_mean_s"]
    ours.rows.reverse()
    assert named(judged(side([ours], "load"), side([theirs], "load")).figures)["ttft_mean_s"] == at_once


def test_of_a_few_requests_each_is_its_own_block() -> None:
    """Three: blocks of round(3 ** (1/3)) = 1, and three are too few. Nine make blocks of two, and four are too few."""
    for count, resolvable in ((3, False), (5, False), (9, False), (10, True), (12, True)):
        values = LEFT_S[:count]
        mean = named(judged(side([passed(values)], "load"), side([passed(values)], "load")).figures)["ttft_mean_s"]
        assert (mean.low is not None) is resolvable, count
