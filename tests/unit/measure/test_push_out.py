"""States that a reset cannot bring about: fillers push the prefix out of what cannot be emptied."""

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.errors import PreflightError
from harness.measure.placing import Way, way_to
from harness.measure.run import run
from harness.records import Capabilities
from harness.results.folder import read_rows, read_samples
from tests.unit.measure import test_run_sim
from tests.unit.measure.test_run_loop import Quiet, measured, request
from traces.tiers import state_named

ALL = frozenset({"gpu", "cpu", "disk"})
# Engine and RAM are emptied together, as by SGLang's /flush_cache.
FLUSH = [["gpu", "cpu"], ["disk"], ["page_cache"]]
SMALL = {"gpu": "64MiB", "cpu": "512MiB", "disk": {"capacity": "4GiB"}}


@pytest.mark.parametrize(
    ("resets", "state", "way"),
    [
        ([["gpu"], ["cpu"], ["disk"]], "cpu", ("gpu", "", "")),
        ([["gpu"], ["cpu"], ["disk"]], "disk", ("gpu cpu", "", "")),
        (FLUSH, "cpu", ("", "gpu", "")),
        (FLUSH, "disk", ("gpu cpu", "", "")),
        (FLUSH, "disk_cold", ("gpu cpu page_cache", "", "")),
        ([["gpu", "disk"]], "cpu", ("gpu disk", "", "")),
        ([["cpu"]], "disk_cold", ("cpu", "gpu", "page_cache")),
        ([], "gpu", ("", "", "")),
        ([], "recompute", ("", "", "gpu cpu disk")),
    ],
)
def test_a_reset_is_used_where_it_keeps_the_states_own_tier(
    resets: list[list[str]], state: str, way: tuple[str, str, str]
) -> None:
    can = Capabilities(tiers=ALL, resets=frozenset(map(frozenset, resets)))
    assert way_to(state_named(state), can) == Way(*(frozenset(names.split()) for names in way))


@pytest.mark.parametrize("resets", [FLUSH, [], [["gpu"]], [["disk"], ["page_cache"]]], ids=str)
def test_the_fake_reaches_every_state_by_pushing_out(tmp_path: Path, resets: list[list[str]]) -> None:
    states = ["recompute", "gpu", "cpu", "disk"]
    measure = {"tiers": states, "samples": 3}
    folder = run(request(tmp_path, measure=measure, cache=SMALL, engines={"fake": {"resets": resets}}), Quiet())
    rows = measured(folder)
    assert Counter(row.expected_tier for row in rows) == dict.fromkeys(states, 3)
    assert {(row.verdict, row.verdict_reason) for row in rows} == {("proven", None)}
    assert any(row.id.startswith("fill-cpu") for row in read_rows(folder)) == (["gpu"] not in resets)


@pytest.mark.parametrize("concurrency", [1, 2])
def test_one_push_serves_as_many_samples_as_the_tier_keeps_prefixes_for(tmp_path: Path, concurrency: int) -> None:
    """Each of them has a prefix of its own, which no earlier sample has brought back up."""
    workload = {"kind": "prefix", "prompt_tokens": 1025, "hit_rate": 0.5, "concurrency": concurrency}
    measure = {"tiers": ["gpu", "disk"], "samples": 8}
    cache = {"gpu": "96MiB", "cpu": "128MiB", "disk": {"capacity": "512MiB"}}
    engines = {"fake": {"resets": [["gpu"]]}}
    folder = run(request(tmp_path, workload=workload, measure=measure, cache=cache, engines=engines), Quiet())
    rows = measured(folder)
    assert {(row.verdict, row.verdict_reason) for row in rows} == {("proven", None)}
    at_once = {1: 5, 2: 2}[concurrency]
    tiers = [row.expected_tier for row in rows[::concurrency]]
    assert tiers[: at_once + 2] == ["gpu", *["disk"] * at_once, "gpu"] and Counter(tiers) == {"gpu": 8, "disk": 8}
    assert len(fills(folder)) == -(-8 // at_once)


def fills(folder: Path) -> list[list[int]]:
    """Cached tokens of the filler prompts, push by push."""
    pushes: dict[str, list[int]] = {}
    for row in read_rows(folder):
        if row.id.startswith("fill-"):
            pushes.setdefault(row.id.rsplit("-", 1)[0], []).append(row.cached_tokens or 0)
    return list(pushes.values())


def test_fillers_of_the_engines_own_cache_come_again_from_the_tier_below(tmp_path: Path) -> None:
    """Computing and storing them anew takes seconds of each push; only the first one does."""
    measure = {"tiers": ["cpu"], "samples": 8}
    workload = {"kind": "prefix", "prompt_tokens": 1025, "hit_rate": 1.0, "concurrency": 2}
    cache, engines = {**SMALL, "gpu": "96MiB"}, {"fake": {"resets": FLUSH}}
    folder = run(request(tmp_path, workload=workload, measure=measure, cache=cache, engines=engines), Quiet())
    assert {(row.verdict, row.verdict_reason) for row in measured(folder)} == {("proven", None)}
    first, *later = fills(folder)
    assert set(first) == {0} and len(later) >= 3
    assert all(cached >= 768 for push in later for cached in push), "of prompts of 1,024 tokens, all but a chunk"


def test_fillers_of_a_tier_below_are_new_ones(tmp_path: Path) -> None:
    """What the tier has already would push nothing out of it."""
    measure, engines = {"tiers": ["disk"], "samples": 14}, {"fake": {"resets": [["gpu"]]}}
    cache = {"gpu": "64MiB", "cpu": "96MiB", "disk": {"capacity": "4GiB"}}
    folder = run(request(tmp_path, measure=measure, cache=cache, engines=engines), Quiet())
    assert {(row.verdict, row.verdict_reason) for row in measured(folder)} == {("proven", None)}
    pushes = fills(folder)
    assert len(pushes) == 3 and {cached for push in pushes for cached in push} == {0}


def test_a_sample_that_was_not_proven_makes_all_sets_new_ones(tmp_path: Path) -> None:
    engines = {"fake": {"resets": [["gpu"]], "fail_every": 13}}
    measure = {"tiers": ["disk"], "samples": 8}
    cache = {"gpu": "64MiB", "cpu": "96MiB", "disk": {"capacity": "4GiB"}}
    folder = run(request(tmp_path, measure=measure, cache=cache, engines=engines), Quiet())
    rows = measured(folder)
    assert {row.verdict for row in rows if row.error is None} == {"proven"} and any(row.error for row in rows)


def test_the_simulator_reaches_every_state_by_pushing_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.engines.sim.engine import SimEngine

    begin = SimEngine.__init__

    def flushing(self: SimEngine, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.capabilities = msgspec.structs.replace(self.capabilities, resets=frozenset(map(frozenset, FLUSH)))

    monkeypatch.setattr(SimEngine, "__init__", flushing)
    config = {**test_run_sim.TIERS, "cache": SMALL}
    config.pop("sweep")
    folder = run(test_run_sim.request(tmp_path, config), Quiet())
    assert {(row.verdict, row.verdict_reason) for row in measured(folder)} == {("proven", None)}
    fillers = [row for row in read_rows(folder) if row.id.startswith("fill-")]
    assert (
        fillers and {row.phase for row in fillers} == {"warm"} and {row.id.split("-")[1] for row in fillers} == {"cpu"}
    )
    assert all(sample.verdict == "proven" for sample in read_samples(folder))


@pytest.mark.parametrize(
    ("resets", "cache", "words"),
    [
        (FLUSH, {"gpu": "1GiB", "cpu": "1GiB", "disk": {"capacity": "4GiB"}}, "enlarge cache.cpu"),
        ([["gpu"], ["cpu"], ["disk"]], SMALL, "cannot empty page_cache; remove the state"),
    ],
)
def test_a_state_that_cannot_be_reached_is_refused_in_one_line(
    tmp_path: Path, resets: list[list[str]], cache: dict[str, Any], words: str
) -> None:
    with pytest.raises(PreflightError, match=words) as told:
        run(request(tmp_path, cache=cache, engines={"fake": {"resets": resets}}), Quiet())
    assert "\n" not in str(told.value) and str(told.value).startswith("measure.tiers ")
    assert not (tmp_path / "out").exists()
