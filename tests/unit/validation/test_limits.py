"""Why points miss: what the model is known to lack where it matters, and what the host did, from the samples."""

from typing import Any

import msgspec
import pytest

from harness.records import HostSample
from harness.results.manifest import CellEntry
from harness.stats import Equivalence
from harness.validation.equivalence import Comparison, Figure, PointResult, verdict_of
from harness.validation.known_limits import notes
from harness.validation.points import Point, Repeat, Side
from tests.support.report_runs import manifest, row, sample


def figure(metric: str, error: float, verdict: Equivalence) -> Figure:
    return Figure(metric=metric, reference=1.0, candidate=1 + error, error=error, low=error, high=error,
                  verdict=verdict, samples=9)  # fmt: skip


def point(workload: str, concurrency: int, error: float, counts: Equivalence = "pass") -> PointResult:
    axes: dict[str, Any] = {"workload": workload, "concurrency": concurrency}
    time = figure("ttft_mean_s", error, "pass" if abs(error) < 0.05 else "not resolvable")
    count = figure("gpu_hit_tokens", 0.0, counts)
    return PointResult(cell="c", tier="gpu", axes=axes, figures=(time,), counts=(count,), noise=(), wasserstein_s=None,
                       left_out=0, verdict=verdict_of((time, count)))  # fmt: skip


def said(*points: PointResult, side: Side | None = None) -> list[str]:
    comparison = Comparison(reference="vllm", candidate="sim", margin=0.05, points=points)
    return notes(comparison, side or Side((), (), {}))


def side(*beside: tuple[float | None, float], touch_s: float | None = None, taken: float | None = None) -> Side:
    """Of one point: the core's loop around each sample, and its TTFT; what a GiB of memory took before the first, and
    the share of memory that the host had taken: more before each further sample."""
    repeat = Repeat()
    for index, (loop_s, ttft_s) in enumerate(beside):
        host = HostSample(
            core_loop_s=loop_s,
            touch_s_per_gib=None if touch_s is None else touch_s * (index + 1),
            taken_share=None if taken is None else taken * (index + 1),
        )
        repeat.samples.append(sample("gpu", index, host=host))
        repeat.rows.append(row("gpu", ttft_s, sample=index))
    return Side((), (), {("c", "gpu"): Point("gpu", CellEntry(key="c"), {(0, "c"): repeat})})


def test_what_the_model_lacks_is_told_of_the_points_that_miss() -> None:
    assert said(point("prefix", 1, 0.01), point("prefix", 4, -0.04)) == []
    alone, together, load = point("prefix", 1, 0.2), point("prefix", 2, -0.06), point("trace", 2, 0.07)
    assert said(alone) == []
    race, stores, starts = said(alone, together, load)
    assert "sent at once race on an engine" in race and race.endswith("1 of 3 points with an error beyond ± 5%.")
    assert "a store takes" in stores and "1 of 3 points" in stores
    assert "starts of an engine" in starts and "1 of 3 points" in starts


@pytest.mark.parametrize(
    ("engine", "section", "cpu", "ticks"),
    [
        ("vllm", {}, "1GiB", True),
        ("vllm", {"connector": "in_process"}, "1GiB", True),
        ("vllm", {}, None, False),
        ("sim", {}, "1GiB", True),
        ("sim", {"tier_policy": "sglang-hicache-0.5.15"}, "1GiB", False),
        ("openai", {"url": "http://127.0.0.1:1", "model": "m"}, "1GiB", True),
        ("an engine of another version", {}, "1GiB", False),
    ],
)
def test_lmcaches_ticks_are_told_only_where_lmcache_serves(
    engine: str, section: dict[str, Any], cpu: str | None, ticks: bool
) -> None:
    config = {
        "name": "x",
        "workload": {"kind": "trace", "trace": "tiny_conversation", "block_tokens": 32, "concurrency": 2},
        "cache": {"gpu": "64MiB", "cpu": cpu, "chunk_tokens": 64},
        "engines": {engine: section} if section else {},
    }
    cell = CellEntry(key="c", config=config)
    both = Side((), (manifest([cell], engine=engine),), {("c", "gpu"): Point("gpu", cell)})
    found = said(point("synthetic", 1, 0.0, counts="fail"), point("prefix", 1, 0.0, counts="fail"), side=both)
    assert [text.endswith("1 of 2 points with unequal counts.") for text in found if "ticks" in text] == [True] * ticks


def test_the_host_is_told_where_its_core_was_timed_and_something_misses() -> None:
    slow = side(*[(1e-4 * (1 + i / 10), 0.02 * (1 + i / 10)) for i in range(10)])
    host, _ = said(point("prefix", 1, 0.2), side=slow)
    assert "took at least 45% longer" in host and "one of ten at least 81%" in host
    assert "correlation with TTFT 1.00" in host
    assert said(point("prefix", 1, 0.0), side=slow) == []
    assert said(point("prefix", 1, 0.2), side=side((None, 0.1), (None, 0.2))) == []


def test_a_sample_that_was_measured_again_counts_by_its_last_attempt() -> None:
    again = side(*[(1e-4 * (1 + i / 10), 0.02 * (1 + i / 10)) for i in range(10)])
    again.points["c", "gpu"].repeats[0, "c"].samples.append(
        sample("gpu", 0, "contradicted", attempt=1, host=HostSample(core_loop_s=1e-5))
    )
    host, _ = said(point("prefix", 1, 0.2), side=again)
    assert "took at least 45% longer" in host and "correlation with TTFT 1.00" in host


@pytest.mark.filterwarnings("error")
def test_too_few_samples_or_a_core_that_never_changed_tell_of_no_correlation() -> None:
    for few in (side((1e-4, 0.1), (2e-4, 0.2)), side(*[(1e-4, 0.1 + i) for i in range(9)])):
        host = said(point("prefix", 1, 0.2), side=few)[0]
        assert "correlation" not in host


def test_memory_that_the_host_gives_slowly_is_told() -> None:
    times = [(None, 0.02)] * 10
    memory, _ = said(point("prefix", 1, 0.2), side=side(*times, touch_s=0.2))
    assert memory == (
        "The host: a GiB of new memory took 0.2 s at best, 1.1 s in half of the samples that touched some, and at least"
        " 1.8 s in one of ten."
    )
    assert len(said(point("prefix", 1, 0.2), side=side(*times))) == 1


def test_memory_that_the_host_takes_from_what_is_in_use_is_told() -> None:
    slower = [(None, 0.02 + i / 1000) for i in range(10)]
    memory, _ = said(point("prefix", 1, 0.2), side=side(*slower, taken=0.04))
    assert memory == (
        "The host had taken 22% of memory in use that had rested before half of the samples, and at least 36% before"
        " one of ten: engines wait for it; samples of one point follow it (correlation with TTFT 1.00, median over"
        " points)."
    )
    assert len(said(point("prefix", 1, 0.2), side=side(*slower, taken=0.004))) == 1, "a host that keeps it"


@pytest.mark.parametrize("in_another_folder", [False, True])
def test_a_reference_that_became_slower_is_told(in_another_folder: bool) -> None:
    """Folder by folder, and by each one's clock, in whatever order the samples were written."""
    slower = side(*[(None, 0.02)] * 4, *[(None, 0.03)] * 5)
    both = slower.points["c", "gpu"].repeats
    both[0, "c"].samples.reverse()
    if in_another_folder:
        early, late = [[each for each in both[0, "c"].samples if (each.index < 4) is first] for first in (True, False)]
        late = [msgspec.structs.replace(each, started_s=each.started_s - 4) for each in late]
        both[0, "c"].samples, both[1, "c"] = early, Repeat(samples=late, rows=both[0, "c"].rows[4:])
    (drift,) = said(point("prefix", 1, 0.2), side=slower)
    assert "are +50% to +50% beside those of the earlier half, +50% in the middle of 1 points" in drift
