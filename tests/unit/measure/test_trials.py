"""measure.trials: a free load sent several times, each time from fresh caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.engines.fake.engine import FakeEngine
from harness.errors import ConfigError, EngineError, PreflightError
from harness.experiment.read import load_experiment
from harness.measure.run import RunRequest, run
from harness.report.refresh import seal
from harness.results.folder import read_rows, read_samples
from harness.results.trials import TrialFigures
from harness.validation.points import read_side
from harness.validation.resampling import shared_requests
from tests.unit.measure.test_run_loop import Quiet
from traces.tiers import PAGE_CACHE

# Two conversations of three rounds: six requests a trial.
ROUNDS = {"kind": "rounds", "clients": 2, "rounds": 3, "first_tokens": 512, "parallel": 1, "order": "fifo"}
EXPERIMENT: dict[str, Any] = {
    "name": "trials",
    "seed": 1,
    "workload": ROUNDS,
    "measure": {"trials": 3},
    "cache": {"gpu": "1GiB", "cpu": "1GiB", "disk": {"capacity": "4GiB"}},
}


class StopsAt(Quiet):
    """A progress that ends the run when so many requests are done, as a signal would."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def advance(self, n: int = 1) -> None:
        super().advance(n)
        if n and self.done >= self._number:
            raise EngineError("stopped by the test")


def request(tmp_path: Path, *, engine: Any = "fake", resume: bool = False, **changes: Any) -> RunRequest:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump({**EXPERIMENT, **changes}))
    plan = load_experiment(path)
    cells, origin, out = plan.cells(), plan.origin(), tmp_path / "out"
    return RunRequest(name="trials", cells=cells, engine=engine, experiment=origin, folder=out, resume=resume)


def trials_of(folder: Path) -> TrialFigures:
    found = seal(folder).cells[0].trials
    assert found is not None
    return found


# The second one empties its own tier alone, so that only a start anew gives fresh caches.
@pytest.mark.parametrize("fake", [{}, {"resets": [["gpu"]]}])
def test_every_trial_begins_with_fresh_caches(tmp_path: Path, fake: dict[str, Any]) -> None:
    progress = Quiet()
    folder = run(request(tmp_path, engines={"fake": fake}), progress)
    rows = list(read_rows(folder))
    assert (progress.total, progress.done) == (18, 18)
    by_trial = [[(row.id, row.cached_tokens) for row in rows if row.sample == trial] for trial in range(3)]
    assert by_trial[0] == by_trial[1] == by_trial[2]
    assert [hits for _, hits in by_trial[0]] == [0, 0, 512, 512, 512, 512]
    assert [sample.index for sample in read_samples(folder)] == [0, 1, 2]


def test_trials_empty_the_page_cache_too_and_one_load_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[bool] = []
    reset = FakeEngine.reset

    async def seen(engine: FakeEngine, what: frozenset[str]) -> None:
        emptied.append(PAGE_CACHE in what)
        await reset(engine, what)

    monkeypatch.setattr(FakeEngine, "reset", seen)
    run(request(tmp_path, measure={"trials": 2}), Quiet())
    assert emptied == [True, True]
    (tmp_path / "one").mkdir()
    run(request(tmp_path / "one", measure={"trials": 1}), Quiet())
    assert emptied == [True, True, False]


def test_a_trial_with_a_failed_request_is_named_and_in_no_figure(tmp_path: Path) -> None:
    """Every 11th request fails: the 5th of trial 2."""
    folder = run(request(tmp_path, engines={"fake": {"fail_every": 11}}), Quiet())
    summary = seal(folder)
    [cell], rows = summary.cells, summary.rows
    assert cell.trials is not None and (cell.trials.asked, cell.trials.counted) == (3, (0, 2))
    [left] = cell.trials.left_out
    assert (left.name, left.requests) == ("trial 2", 6)
    assert left.reason == "1 of 6 requests failed: the fake fails every so often"
    assert (rows.measured, rows.counted, rows.errors, rows.in_incomplete_trials) == (18, 12, 1, 5)
    load = cell.tiers["load"]
    assert load.metrics["ttft_s"] is not None and load.metrics["ttft_s"].n == 12
    assert load.left_out_reasons == {f"trial 2: {left.reason}": 6}
    assert [(turn.n, turn.left_out) for turn in cell.turns] == [(4, 2)] * 3


def test_a_stopped_run_goes_on_with_the_trials_that_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="stopped by the test"):
        run(request(tmp_path), StopsAt(8))
    assert trials_of(tmp_path / "out").counted == (0,)
    progress = Quiet()
    folder = run(request(tmp_path, resume=True), progress)
    assert (progress.total, progress.done) == (18, 18)
    found = trials_of(folder)
    assert found.counted == (0, 1, 2)
    assert [(left.name, left.requests, left.reason) for left in found.left_out] == [("trial 2", 2, "did not end")]
    assert [(row.sample, row.attempt) for row in read_rows(folder)] == (
        [(0, 0)] * 6 + [(1, 0)] * 2 + [(1, 1)] * 6 + [(2, 1)] * 6
    )


def test_a_simulation_that_repeats_exactly_is_made_once(tmp_path: Path) -> None:
    progress = Quiet()
    folder = run(request(tmp_path, engine="sim", workload={**ROUNDS, "first_tokens": 2048}), progress)
    assert (progress.total, progress.done, len(list(read_rows(folder)))) == (6, 6, 6)
    found = trials_of(folder)
    assert (found.asked, found.counted, found.once) == (3, (0,), True)
    assert found.figures["ttft_mean_s"].mean_low is None


def test_a_comparison_takes_each_complete_trial_for_a_pass_over_the_load(tmp_path: Path) -> None:
    folder = run(request(tmp_path, engines={"fake": {"fail_every": 11}}), Quiet())
    [point] = read_side([folder]).points.values()
    assert [(len(each.rows), len(each.samples)) for each in point.repeats.values()] == [(6, 1), (6, 1)]
    assert {row.sample for row in point.rows} == {0, 2} and len(point.left_out) == 6
    assert len(shared_requests(point, point)) == 6


def test_each_trial_has_its_own_figures_of_a_real_device(tmp_path: Path) -> None:
    """Storage alone: every trial finds it empty, writes 8 chunks of 64 tokens, and reads what earlier rounds wrote."""
    cache = {"chunk_tokens": 64, "gpu": "0B", "disk": {"capacity": "64MiB"}}
    settings = {"mode": "tiers", "storage": {"device": "ram", "reserve": "0B"}}
    load = {"kind": "rounds", "clients": 2, "rounds": 2, "first_tokens": 128, "parallel": 1, "order": "fifo"}
    folder = run(request(tmp_path, engine="sim", workload=load, cache=cache, engines={"sim": settings}), Quiet())
    [cell] = seal(folder).cells
    chunk = 64 * 32768
    assert cell.trials is not None and cell.trials.counted == (0, 1, 2)
    assert cell.trials.figures["storage_write_bytes"].values == (8 * chunk,) * 3
    read = cell.trials.figures["storage_read_bytes"].values
    assert read[0] == read[1] == read[2] and read[0] > 0
    assert cell.storage is not None and cell.storage.write.moved_bytes == 8 * chunk, "of the last trial, not of all"


def test_what_cannot_give_fresh_caches_is_refused(tmp_path: Path) -> None:
    server = {"openai": {"url": "http://127.0.0.1:9", "model": "m"}}
    with pytest.raises(PreflightError, match=r"measure\.trials 3: engine openai, .* runs already"):
        run(request(tmp_path, engine="openai", engines=server), Quiet())
    prefix = {"kind": "prefix", "prompt_tokens": 1025, "hit_rate": 0.5}
    with pytest.raises(ConfigError, match="use that"):
        request(tmp_path, workload=prefix, measure={"trials": 2, "tiers": ["gpu"], "samples": 1})
