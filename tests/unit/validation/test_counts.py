"""What a comparison counts, and its verdicts: two sides that are made by hand, exact, quick, without a run."""

from collections.abc import Sequence

import pytest

from harness.records import Counters, Resolved, Sample
from harness.validation.equivalence import Comparison, Figure, compare, worst
from harness.validation.points import Repeat, Side
from tests.unit.validation.test_figures import LEFT_S, judged, named, row, side, single
from traces.request import Verdict

KV = Resolved(kv_bytes_per_token=10, chunk_tokens=64)


def moved(
    observed: dict[str, int], verdict: Verdict | None = "proven", expected: dict[str, int] | None = None
) -> Sample:
    return Sample(
        cell="cell", tier="gpu", index=0, started_s=0.0, ended_s=1.0, verdict=verdict,
        observed=Counters.of(observed), expected=Counters.of(observed if expected is None else expected),
    )  # fmt: skip


def counted(samples: Sequence[Sample], requests: int, tier: str = "gpu", resolved: Resolved | None = KV) -> Side:
    rows = [row(f"r{n}", 1.0, sample=n) for n in range(requests)]
    return side([Repeat(rows=rows, samples=list(samples))], tier, resolved=resolved)


def count_of(left: Side, right: Side, margin: float = 0.05) -> dict[str, Figure]:
    return named(judged(left, right, margin).counts)


ALL = {
    "computed_tokens": 12, "gpu_hit_tokens": 24, "external_tokens": 36, "cpu_hit_tokens": 48, "disk_hit_tokens": 60,
    "disk_loaded_chunks": 6, "stores_ended": 18, "disk_device_read_bytes": 600,
}  # fmt: skip


def test_counts_are_those_of_one_request() -> None:
    """Two samples of three requests each."""
    found = count_of(counted([moved(ALL)] * 2, 6), counted([moved(ALL)] * 2, 6))
    assert {name: (one.reference, one.candidate) for name, one in found.items()} == {
        "computed_tokens": (4, 4),
        "gpu_hit_tokens": (8, 8),
        "external_hit_tokens": (12, 12),
        "cpu_hit_tokens": (16, 16),
        "disk_hit_tokens": (20, 20),
        "disk_read_bytes": (2 * 640, 2 * 640),
        "disk_written_bytes": (6 * 640, 6 * 640),
        "device_read_bytes": (200, 200),
    }
    for one in found.values():
        assert (one.verdict, one.error, one.low, one.high, one.samples, one.needed) == (
            "pass",
            0.0,
            None,
            None,
            2,
            None,
        )
        assert one.gates and one.reason is None


def test_one_sample_of_three_requests_counts_for_each_of_them() -> None:
    one = count_of(counted([moved(ALL)], 3), counted([moved(ALL)], 3))["computed_tokens"]
    assert (one.reference, one.candidate, one.samples) == (4, 4, 1)


def test_a_count_that_a_warm_state_does_not_ask_for_is_left_out_but_not_of_a_load() -> None:
    samples = [moved(ALL, expected={"gpu_hit_tokens": 1})]
    assert list(count_of(counted(samples, 3), counted(samples, 3))) == ["gpu_hit_tokens", "disk_written_bytes"]
    assert len(count_of(counted(samples, 3, "load"), counted(samples, 3, "load"))) == 8
    mixed = [*samples, moved(ALL, expected={"cpu_hit_tokens": 1})]
    assert list(count_of(counted(mixed, 6), counted(mixed, 6))) == [
        "gpu_hit_tokens", "cpu_hit_tokens", "disk_written_bytes",
    ]  # fmt: skip


def test_only_proven_samples_and_what_both_sides_report_count() -> None:
    wrong = moved({"computed_tokens": 99}, "contradicted")
    right = moved({"computed_tokens": 5})
    found = count_of(counted([wrong, right], 1), counted([right], 1))
    assert (found["computed_tokens"].reference, found["computed_tokens"].samples) == (5, 1)
    assert count_of(counted([wrong], 1), counted([right], 1)) == {}
    less = moved({"computed_tokens": 5}, expected={"computed_tokens": 1})
    assert list(count_of(counted([moved(ALL)], 1), counted([less], 1))) == ["computed_tokens"]
    assert list(count_of(counted([less], 1), counted([moved(ALL)], 1))) == ["computed_tokens"]
    # One of two samples does not report it.
    some = [moved({"computed_tokens": 5, "gpu_hit_tokens": 7}), moved({"computed_tokens": 5})]
    assert list(count_of(counted(some, 2), counted(some, 2))) == ["computed_tokens"]


def test_a_sample_without_rows_counts_as_one_request() -> None:
    lone = counted([moved({"computed_tokens": 5, "disk_device_read_bytes": 9})], 0)
    found = count_of(lone, lone)
    assert found["computed_tokens"].reference == 5
    assert found["device_read_bytes"].reference == 9 and found["device_read_bytes"].verdict == "pass"


def test_without_rows_no_byte_of_the_device_is_none() -> None:
    known = Resolved(kv_bytes_per_token=1000)
    left, right = (counted([moved({"disk_device_read_bytes": read})], 0, resolved=known) for read in (0, 9))
    assert count_of(left, right)["device_read_bytes"].verdict == "fail"


def test_a_request_without_its_answer_takes_no_part_of_a_count() -> None:
    """Two samples of four requests, one of which failed: three whole requests a sample."""
    found = count_of(counted([moved(ALL)] * 2, 7), counted([moved(ALL)] * 2, 7))
    assert found["computed_tokens"].reference == 4


@pytest.mark.parametrize("lacks", [Resolved(chunk_tokens=64), Resolved(kv_bytes_per_token=10), None])
def test_chunks_of_unknown_size_are_no_bytes(lacks: Resolved | None) -> None:
    found = count_of(counted([moved(ALL)], 3, resolved=lacks), counted([moved(ALL)], 3))
    assert "disk_read_bytes" not in found and "disk_written_bytes" not in found and "computed_tokens" in found
    same = count_of(counted([moved(ALL)], 3, resolved=lacks), counted([moved(ALL)], 3))["device_read_bytes"]
    assert same.verdict == "pass"
    # Without the size of a token's KV no byte of the device is none.
    more = counted([moved(ALL | {"disk_device_read_bytes": 601})], 3)
    verdict = count_of(counted([moved(ALL)], 3, resolved=lacks), more)["device_read_bytes"].verdict
    assert verdict == ("pass" if lacks == Resolved(kv_bytes_per_token=10) else "fail")


def test_another_count_fails_and_its_error_is_relative() -> None:
    found = count_of(counted([moved({"computed_tokens": 100})], 1), counted([moved({"computed_tokens": 101})], 1))
    one = found["computed_tokens"]
    assert one.verdict == "fail" and one.error == pytest.approx(0.01) and one.reason is None
    # Rounding is no difference: a billionth is allowed.
    big = 10**12
    for less, verdict in ((900, "pass"), (1100, "fail")):
        for left, right in ((big, big - less), (big - less, big)):
            found = count_of(
                counted([moved({"computed_tokens": left})], 1), counted([moved({"computed_tokens": right})], 1)
            )
            assert found["computed_tokens"].verdict == verdict


def test_nothing_against_something_has_no_relative_error() -> None:
    nothing, some = counted([moved({"computed_tokens": 0})], 1), counted([moved({"computed_tokens": 2})], 1)
    one = count_of(nothing, some)["computed_tokens"]
    assert (one.error, one.verdict, one.reference, one.candidate) == (None, "fail", 0, 2)
    neither = count_of(nothing, nothing)["computed_tokens"]
    assert (neither.error, neither.verdict, neither.reason) == (0.0, "pass", None)
    assert count_of(some, nothing)["computed_tokens"].error == -1.0


@pytest.mark.parametrize(("observed", "verdict"), [(10, "pass"), (11, "fail")])
def test_device_bytes_below_a_hundredth_of_the_prompts_kv_are_none(observed: int, verdict: str) -> None:
    """A prompt of 100 tokens of 10 bytes each: 10 bytes are a hundredth."""
    none, some = (
        counted([moved({"disk_device_read_bytes": 0})], 1),
        counted([moved({"disk_device_read_bytes": observed})], 1),
    )
    one = count_of(none, some)["device_read_bytes"]
    assert one.verdict == verdict
    if verdict == "pass":
        assert (one.error, one.reason) == (0.0, f"0 and {observed} bytes are below 1 % of the prompt's KV: none")
    close = counted([moved({"disk_device_read_bytes": 2000})], 1), counted([moved({"disk_device_read_bytes": 2010})], 1)
    near = count_of(*close)["device_read_bytes"]
    assert (near.verdict, near.error, near.reason) == ("pass", 0.005, None), "an error of half a hundredth is told"
    edge = counted([moved({"disk_device_read_bytes": 1000})], 1), counted([moved({"disk_device_read_bytes": 1010})], 1)
    assert count_of(*edge)["device_read_bytes"].error == 0.01


def test_passes_that_differ_among_themselves_leave_a_small_difference_open() -> None:
    def load(*tokens: int) -> Side:
        repeats = [Repeat(rows=[row("a", 1.0)], samples=[moved({"computed_tokens": one}, None)]) for one in tokens]
        return side(repeats, "load", resolved=KV)

    one = count_of(load(90, 110), load(105))["computed_tokens"]
    assert (one.verdict, one.error) == ("not resolvable", 0.05)
    assert one.reason == "the reference's own passes differ: 90 to 110" and one.samples == 2
    assert count_of(load(90, 110), load(106))["computed_tokens"].verdict == "fail"
    assert count_of(load(90, 110), load(94))["computed_tokens"].verdict == "fail"
    assert count_of(load(100, 100), load(105))["computed_tokens"].verdict == "fail"
    same = count_of(load(90, 110), load(100))["computed_tokens"]
    assert (same.verdict, same.reason) == ("pass", None)


# ---- verdicts


def test_the_worst_verdict_is_that_of_the_whole() -> None:
    assert worst(["pass", "not resolvable", "fail"]) == "fail" and worst(["pass", "not resolvable"]) == "not resolvable"
    assert worst(["pass"]) == worst([]) == "pass"


def test_a_figure_that_does_not_count_decides_nothing() -> None:
    """Some samples of the reference are a tail that the simulator has not: the 90th percentile fails, nothing else."""
    left, right = [1.0] * 17 + [1.5] * 3, [1.0] * 20
    point = judged(side([single(left)]), side([single(right)], engine="sim"))
    tail = point.figure("ttft_p90_s")
    assert tail is not None and tail.verdict != "pass" and point.verdict == "pass"
    assert point.figure("ttft_p99_s") is None
    wrong = counted([moved({"computed_tokens": 1})], 12), counted([moved({"computed_tokens": 2})], 12)
    assert judged(*wrong).verdict == "fail" and judged(*wrong).figure("computed_tokens") is not None


def test_only_points_that_both_sides_measured_are_compared() -> None:
    left, right = side([single(LEFT_S)]), side([single(LEFT_S)], engine="sim")
    left.points["other", "gpu"] = left.points["cell", "gpu"]
    right.points["cell", "cpu"] = right.points["cell", "gpu"]
    comparison = compare(left, right)
    assert [(point.cell, point.tier) for point in comparison.points] == [("cell", "gpu")]
    assert (comparison.reference, comparison.candidate, comparison.margin) == ("fake", "sim", 0.05)
    assert comparison.verdict == comparison.points[0].verdict
    assert Comparison(reference="a", candidate="b", margin=0.1, points=()).verdict == "pass"
