"""Which tiers a round samples, and when a tier has enough."""

from collections import Counter

import pytest

from harness.experiment.measure import Measure, Until
from harness.measure.sampling import GIVE_UP_AFTER, Sampler
from harness.stats import median_interval, relative_half_width


def test_a_limited_time_is_shared_out_by_time_and_not_by_samples() -> None:
    until = Until(half_width=0.001, min_samples=3, max_samples=1000)
    sampler = Sampler(Measure.model_validate({"tiers": ("recompute", "gpu", "cpu"), "until": until, "budget": "240s"}))
    costs_s = {"recompute": 4.0, "gpu": 0.1, "cpu": 0.3}
    taken, elapsed_s = Counter[str](), 0.0
    assert sampler.round(0.0) == ["recompute", *["gpu"] * 3, *["cpu"] * 3], "it may be the only round"
    while tiers := sampler.round(elapsed_s):
        assert not taken or tiers == [tier for tier in costs_s if tier in tiers]
        for tier in tiers:
            elapsed_s += costs_s[tier]
            taken[tier] += 1
            sampler.add(tier, [float(taken[tier])], proven=True, took_s=costs_s[tier])
    times_s = [taken[tier] * cost_s for tier, cost_s in costs_s.items()]
    assert max(times_s) < 2.5 * min(times_s) and taken["gpu"] > 15 * taken["recompute"] > 15 * 3


def test_computing_a_prefix_anew_is_time_of_the_tier_that_it_was_moved_down_for() -> None:
    until = Until(half_width=0.001, min_samples=3, max_samples=1000)
    sampler = Sampler(Measure.model_validate({"tiers": ("gpu", "disk_cold"), "until": until, "budget": "240s"}))
    taken, elapsed_s, last = Counter[str](), 0.0, ""
    while tiers := sampler.round(elapsed_s):
        for tier in tiers:
            placing_s = 2.0 if (last, tier) == ("disk_cold", "gpu") else 0.1
            elapsed_s, last = elapsed_s + placing_s + 0.2, tier
            taken[tier] += 1
            sampler.add(tier, [float(taken[tier])], proven=True, placing_s=placing_s, took_s=0.2)
    assert 3 < taken["gpu"] / taken["disk_cold"] < 12


def test_without_a_limit_every_round_has_every_tier() -> None:
    sampler = Sampler(Measure(tiers=("recompute", "gpu"), samples=3))
    for _ in range(3):
        assert sampler.round(1e9) == ["recompute", "gpu"]
        sampler.add("recompute", [1.0], proven=True, took_s=100.0)
        sampler.add("gpu", [1.0], proven=True, took_s=0.1)
    assert sampler.round(0.0) == [] == Sampler(Measure(tiers=("gpu",))).round(0.0)


@pytest.mark.parametrize(("count", "confidence", "ranks"), [(5, 0.9, (1, 5)), (20, 0.95, (6, 15)), (60, 0.9, (24, 37))])
def test_the_medians_interval_lies_between_the_textbooks_ranks(
    count: int, confidence: float, ranks: tuple[int, int]
) -> None:
    values = [float(value) for value in range(count, 0, -1)]
    assert median_interval(values, confidence) == ranks


def test_few_values_have_no_interval_unless_they_are_one() -> None:
    assert median_interval([1.0, 2.0, 3.0, 4.0, 5.0], 0.95) is None and relative_half_width([1.0, 2.0]) is None
    assert median_interval([], 0.95) is None
    assert median_interval([2.0, 2.0], 0.95) == (2.0, 2.0) and relative_half_width([2.0, 2.0]) == 0.0


@pytest.mark.parametrize(("spread", "enough"), [(0.049, True), (0.051, False), (0.099, False)])
def test_sampling_goes_on_until_the_interval_is_as_narrow_as_asked(spread: float, enough: bool) -> None:
    sampler = Sampler(Measure(tiers=("gpu",), until=Until(half_width=0.05, min_samples=6, max_samples=1000)))
    values = [1 - spread, 1.0, 1.0, 1.0, 1.0, 1 + spread]  # six: the interval of the median is the whole range
    for number, value in enumerate(values):
        assert sampler.round(0.0) == ["gpu"], number
        sampler.add("gpu", [value], proven=True)
    assert relative_half_width(values) == pytest.approx(spread)
    assert sampler.round(0.0) == ([] if enough else ["gpu"])


def test_sampling_ends_at_the_most_samples_and_at_a_run_of_failures() -> None:
    until = Until(half_width=0.001, min_samples=3, max_samples=7)
    sampler, wide = Sampler(Measure(tiers=("gpu", "cpu"), until=until)), iter(range(1, 100))
    taken = Counter[str]()
    while tiers := sampler.round(0.0):
        for tier in tiers:
            taken[tier] += 1
            sampler.add(tier, [float(next(wide))] if tier == "gpu" else [], proven=tier == "gpu")
    assert taken == {"gpu": 7, "cpu": 5} and sampler.gave_up() == ["cpu"]


def limited(*tiers: str, budget: str = "240s", **until: float) -> Sampler:
    narrow = Until(half_width=0.001, min_samples=3, max_samples=1000).model_copy(update=until)
    return Sampler(Measure.model_validate({"tiers": tiers, "until": narrow, "budget": budget}))


def test_a_spent_budget_ends_the_run_to_the_second() -> None:
    sampler = limited("gpu", budget="10s")
    assert sampler.round(9.999) == ["gpu"] * 3 and sampler.round(10.0) == []


def test_a_sample_without_stated_times_costs_its_tier_nothing() -> None:
    sampler = limited("gpu", "cpu")
    sampler.add("gpu", [1.0], proven=True)
    sampler.add("cpu", [1.0], proven=True, took_s=0.001)
    assert sampler.round(1.0) == ["gpu"], "twice nothing is still less than any time"


def test_a_tier_sits_out_only_with_more_than_twice_the_least_time() -> None:
    sampler = limited("recompute", "gpu", "cpu")
    for tier, took_s in (("recompute", 2.0), ("gpu", 1.0), ("cpu", 2.001)):
        sampler.add(tier, [1.0], proven=True, took_s=took_s)
    assert sampler.round(1.0) == ["recompute", "gpu"]
    sampler.add("gpu", [1.0], proven=True, took_s=0.1)
    assert sampler.round(1.0) == ["recompute", "gpu", "cpu"]


def test_placing_counts_for_the_lower_of_two_neighbours_whichever_came_first() -> None:
    sampler = limited("gpu", "cpu")
    sampler.add("gpu", [1.0], proven=True, placing_s=1.0)
    sampler.add("cpu", [1.0], proven=True, placing_s=2.0)
    sampler.add("gpu", [3.0], proven=True, placing_s=4.0)
    assert sampler.round(1.0) == ["gpu"], "gpu has 1 s, cpu 2 + 4 s"
    sampler.add("gpu", [9.0], proven=True, placing_s=2.0)
    assert sampler.round(1.0) == ["gpu", "cpu"], "gpu after gpu is gpu's own: 3 s"


def test_the_progress_line_names_the_sample_under_way_and_the_width_once_there_is_one() -> None:
    sampler = Sampler(Measure(tiers=("gpu", "cpu"), samples=9))
    assert sampler.state("gpu") == "gpu #1" and sampler.samples_of("gpu") == 0
    for value in (0.9, 1.0, 1.0, 1.0, 1.0, 1.1):
        sampler.add("gpu", [value], proven=True)
    assert sampler.state("gpu") == "gpu #7 TTFT 1 s ±10.0%" and sampler.state("cpu") == "cpu #1"
    assert sampler.samples_of("gpu") == 6 and sampler.samples_of("cpu") == 0


def test_the_progress_line_holds_the_width_against_its_goal() -> None:
    sampler = Sampler(Measure(tiers=("gpu",), until=Until(metric="e2e_s", half_width=0.05)))
    for value in (0.09, 0.1, 0.1, 0.1, 0.1, 0.11):
        sampler.add("gpu", [value], proven=True)
    assert sampler.state("gpu") == "gpu #7 E2E 100 ms ±10.0% (goal ±5%)"


@pytest.mark.parametrize(
    ("measure", "samples"),
    [
        (Measure(tiers=("recompute", "gpu", "cpu"), samples=4), 12),
        (Measure(tiers=("recompute", "gpu", "cpu"), samples=1), 3),
        (Measure(tiers=("recompute", "gpu", "cpu"), samples=1, budget="9s"), 3),  # type: ignore[arg-type]
        (Measure(tiers=("recompute", "gpu", "cpu"), samples=2, budget="9s"), 6),  # type: ignore[arg-type]
        (Measure(tiers=("recompute", "gpu", "cpu"), samples=4, budget="9s"), 12),  # type: ignore[arg-type]
        (Measure(tiers=("gpu",), until=Until()), None),
    ],
)
def test_what_a_sampler_expects_is_what_it_asks_for(measure: Measure, samples: int | None) -> None:
    sampler, asked = Sampler(measure), 0
    assert sampler.expected() == samples
    while samples is not None and (tiers := sampler.round(0.0)):
        for tier in tiers:
            sampler.add(tier, [1.0], proven=True)
        asked += len(tiers)
    assert asked == (samples or 0)


def test_one_proven_sample_starts_the_count_of_failures_anew() -> None:
    until = Until(half_width=0.001, min_samples=3, max_samples=100)
    sampler = Sampler(Measure(tiers=("gpu",), until=until))
    assert GIVE_UP_AFTER == 5
    for proven in [False] * 4 + [True] + [False] * 4:
        sampler.add("gpu", [], proven=proven)
        assert sampler.round(0.0) == ["gpu"] and sampler.gave_up() == []
    sampler.add("gpu", [], proven=False)
    assert sampler.round(0.0) == [] and sampler.gave_up() == ["gpu"]


def test_the_least_number_of_samples_is_taken_even_where_all_are_equal() -> None:
    sampler = Sampler(Measure(tiers=("gpu",), until=Until(half_width=0.05, min_samples=3, max_samples=10)))
    for count in range(3):
        assert sampler.round(0.0) == ["gpu"], count
        sampler.add("gpu", [2.0], proven=True)
    assert sampler.round(0.0) == []


def test_an_interval_of_exactly_the_asked_width_is_narrow_enough() -> None:
    sampler = Sampler(Measure(tiers=("gpu",), until=Until(half_width=0.25, min_samples=6, max_samples=1000)))
    for value in (0.75, 1.0, 1.0, 1.0, 1.0, 1.25):
        sampler.add("gpu", [value], proven=True)
    assert sampler.round(0.0) == []


def test_a_tier_whose_prefixes_are_placed_together_is_asked_for_in_a_row_in_every_round() -> None:
    sampler = Sampler(Measure(tiers=("gpu", "cpu"), samples=5), {"cpu": 3})
    assert sampler.round(0.0) == ["gpu", "cpu", "cpu", "cpu"]
    for tier in ("gpu", "cpu", "cpu", "cpu"):
        sampler.add(tier, [1.0], proven=True)
    assert sampler.round(0.0) == ["gpu", "cpu", "cpu"], "no more than were asked for"
    without_end = Sampler(Measure(tiers=("gpu", "cpu"), until=Until(half_width=0.01)), {"cpu": 3})
    assert without_end.round(0.0) == ["gpu", "cpu", "cpu", "cpu"]


def test_in_limited_time_the_larger_of_both_numbers_counts() -> None:
    measure = Measure.model_validate({"tiers": ("gpu", "cpu"), "until": Until(half_width=0.01), "budget": "240s"})
    sampler = Sampler(measure, {"gpu": 2, "cpu": 4})
    assert sampler.round(0.0) == ["gpu"] * 3 + ["cpu"] * 4
    sampler.add("gpu", [1.0], proven=True, took_s=1.0)
    sampler.add("cpu", [1.0], proven=True, took_s=1.0)
    assert sampler.round(1.0) == ["gpu"] * 2 + ["cpu"] * 4


def test_a_first_round_reads_a_device_twice_so_that_a_slow_read_is_not_all_there_is() -> None:
    sampler = limited("recompute", "disk_cold", budget="90s")
    assert sampler.round(0.0) == ["recompute", "disk_cold", "disk_cold"], "it may be the only round"
    assert limited("gpu", "disk").round(0.0) == ["gpu"] * 3 + ["disk"] * 6, "of the page cache, reads vary more"
    for tier in ("recompute", "disk_cold", "disk_cold"):
        sampler.add(tier, [1.0], proven=True, took_s=1.0)
    assert sampler.round(3.0) == ["recompute", "disk_cold"]
    assert limited("disk_restart", budget="90s").round(0.0) == ["disk_restart"], "it takes half a minute"


def test_a_state_that_restarts_comes_when_the_others_have_had_their_share_of_the_time() -> None:
    sampler = limited("gpu", "cpu", "disk_restart", budget="90s")
    for tier in ("gpu", "cpu"):
        sampler.add(tier, [1.0, 2.0], proven=True, took_s=1.0)
    assert sampler.round(59.9) == ["gpu", "cpu"]
    assert sampler.round(60.0) == ["disk_restart"]
    sampler.add("disk_restart", [1.0], proven=True, took_s=10.0)
    assert sampler.round(20.0) == ["disk_restart"], "once the engine was restarted, no other state meets it"
    sampler.add("disk_restart", [1.0], proven=True, took_s=10.0)
    assert sampler.round(20.0) == ["disk_restart"]
    sampler.add("disk_restart", [1.0], proven=True, took_s=10.0)
    assert sampler.round(20.0) == [], "it has min_samples"


def test_a_sample_s_value_is_the_mean_of_its_requests() -> None:
    sampler = Sampler(Measure(tiers=("gpu",), samples=9))
    sampler.add("gpu", [0.25, 0.75], proven=True)
    assert sampler.state("gpu") == "gpu #2 TTFT 500 ms"
