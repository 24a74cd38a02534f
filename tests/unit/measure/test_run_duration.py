"""Free loads with a duration, from the file to the report: what was asked, sent and unfinished is kept and told."""

from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError, PreflightError
from harness.experiment.read import load_experiment
from harness.measure.run import run
from harness.report.asked import asked_lines
from harness.report.axes import cell_labels
from harness.report.refresh import seal
from harness.results.folder import read_rows, read_samples
from harness.results.summary import Summary, read_summary
from tests.unit.measure.test_run_loop import Quiet, measured, request
from traces.errors import SpecError

CACHE = {"gpu": "1GiB", "cpu": "1GiB"}
QA: dict[str, Any] = {
    "kind": "qa",
    "users": 4,
    "rounds": 5,
    "rate_per_s": 2.0,
    "history_tokens": 256,
    "output_tokens": 8,
    "system_tokens": 128,
    "duration": "30s",
    "warm_up_requests": 3,
}
SESSIONS = {"kind": "sessions", "sessions": 8, "turns": 3, "concurrency": 2, "duration": "4s"}


def told(folder: Path) -> tuple[Summary, list[str]]:
    seal(folder)
    summary = read_summary(folder)
    return summary, asked_lines(summary, cell_labels(summary.cells))


def asked(tmp_path: Path, workload: dict[str, Any], engine: str = "sim", **changes: Any) -> Path:
    measure = changes.pop("measure", {})
    tmp_path.mkdir(exist_ok=True)
    cache = changes.pop("cache", CACHE)
    return run(request(tmp_path, engine=engine, workload=workload, measure=measure, cache=cache, **changes), Quiet())


@pytest.mark.parametrize("engine", ["sim", "fake"])
def test_users_are_asked_at_the_loads_rate_and_the_summary_says_so(tmp_path: Path, engine: str) -> None:
    folder = asked(tmp_path, QA, engine)
    rows = list(read_rows(folder))
    assert [row.phase for row in rows[:3]] == ["warm"] * 3 and {row.prompt_tokens for row in rows[:3]} == {100}
    loaded = measured(folder)
    assert {row.error for row in loaded} == {None} and max(row.turn for row in loaded) == 4
    [sample] = read_samples(folder)
    assert sample.load is not None
    assert (sample.load.requests, sample.load.sent, sample.load.duration_s) == (len(loaded), len(loaded), 30.0)
    summary, lines = told(folder)
    found = summary.cells[0].asked
    assert found is not None and found.keeps_up and found.asked_per_s == found.sent_per_s == len(loaded) / 30
    assert found.asked_per_s == pytest.approx(2 * 5 / 4, rel=0.02)
    assert lines[0] == "The engine keeps up: users sent 2.47 requests/s, and the load asks for 2.47."


def test_an_engine_that_cannot_keep_up_is_named_and_what_is_unfinished_counted(tmp_path: Path) -> None:
    slow = QA | {"rate_per_s": 40.0, "history_tokens": 4096, "duration": "5s", "warm_up_requests": 0}
    for drain in (True, False):
        folder = asked(tmp_path / str(drain), slow | {"drain": drain})
        rows, (summary, lines) = measured(folder), told(folder)
        found = summary.cells[0].asked
        assert found is not None and not found.keeps_up and found.unfinished > 0
        assert found.sent == len(rows) < found.requests and found.sent_per_s == len(rows) / 5
        start_s = min(row.scheduled_s for row in rows)
        assert all(row.sent_s < start_s + 5 for row in rows)
        late = [row for row in rows if row.last_token_s is None or row.last_token_s > start_s + 5]
        assert len(late) == found.unfinished
        cut = summary.cells[0].tiers["load"].rows.cut_off
        assert (cut, summary.rows.errors) == (0 if drain else found.unfinished, 0)
        assert lines[0].startswith("The engine cannot keep up: users sent ")
        assert f"{found.unfinished} requests unfinished when the time was over" in lines[1]
        assert ("in their own time" if drain else "in no figure") in lines[1]
        assert "cannot keep up" in (folder / "report.html").read_text()


def test_of_several_points_each_that_is_too_fast_is_named(tmp_path: Path) -> None:
    axis = {"workload.rate_per_s": [0.5, 1.0, 30.0, 40.0, 50.0, 60.0]}
    slow = QA | {"history_tokens": 4096, "duration": "4s", "warm_up_requests": 0}
    summary, lines = told(asked(tmp_path, slow, sweep=axis))
    assert [line.split(":")[0] for line in lines[:3]] == [
        f"The engine cannot keep up at rate_per_s={rate}" for rate in ("30.0", "40.0", "50.0")
    ]
    assert lines[3] == "It cannot keep up at 1 further point either."
    sent = min(one.asked.sent / one.asked.requests for one in summary.cells if one.asked and one.asked.keeps_up)
    assert lines[4] == (
        f"The engine keeps up at 2 of 6 points: users sent at least {100 * sent:.1f} % of the requests/s asked for."
    )
    assert lines[5].endswith("requests unfinished when the time was over: they ended in their own time.")


def test_a_closed_load_ends_with_its_time_too(tmp_path: Path) -> None:
    whole = asked(tmp_path / "whole", {key: value for key, value in SESSIONS.items() if key != "duration"})
    rows = measured(asked(tmp_path / "part", SESSIONS))
    assert [row.id for row in rows] == [row.id for row in measured(whole)][: len(rows)] and 0 < len(rows) < 24
    assert told(whole)[0].cells[0].asked is None
    summary, lines = told(tmp_path / "part" / "out")
    assert lines[0] == f"{24 - len(rows)} requests of 24 were not sent: the time of 4.00 s was over."
    assert summary.cells[0].asked is not None and summary.cells[0].asked.asked_per_s is None


def test_a_load_with_a_duration_does_not_go_on_after_an_interruption(tmp_path: Path) -> None:
    folder = asked(tmp_path, SESSIONS, "fake")
    manifest = (folder / "manifest.json").read_text().replace('"complete"', '"started"')
    (folder / "manifest.json").write_text(manifest)
    again = request(tmp_path, engine="fake", resume=folder, workload=SESSIONS, measure={}, cache=CACHE)
    with pytest.raises(PreflightError, match=r"cell base: .* its time cannot be stopped and go on; start a new run"):
        run(again, Quiet())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"duration": "0s"}, "workload.duration must be longer than 0 s"),
        ({"duration": "20"}, "workload.duration: '20' is not a time; write it like 30s"),
        ({"duration": "-1s"}, "is negative"),
        ({"rounds": 1}, "workload.rounds: 1 is refused"),
        ({"rate_per_s": 0}, "workload.rate_per_s: 0 is refused"),
        ({"history_tokens": None}, "workload.history_tokens"),
        ({"drain": "no"}, "workload.drain: 'no' is refused"),
        ({"kind": "sessions"}, "unknown key here"),
    ],
)
def test_settings_that_cannot_be_are_one_line(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        request(tmp_path, workload=QA | changes, measure={}, cache=CACHE)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_drain_needs_a_duration_and_a_budget_is_no_duration(tmp_path: Path) -> None:
    plain = {key: value for key, value in SESSIONS.items() if key != "duration"}
    with pytest.raises(ConfigError, match=r"workload.drain false needs workload.duration"):
        request(tmp_path, workload=plain | {"drain": False}, measure={}, cache=CACHE)
    with pytest.raises(PreflightError, match=r"measure.budget: a free load .* set workload.duration instead"):
        asked(tmp_path, plain, measure={"budget": "1s"})
    assert load_experiment(tmp_path / "experiment.yaml").experiment.measure.budget == 1.0


def test_a_conversation_that_outgrows_the_engine_is_refused_with_a_cure_of_its_kind(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"request .* the engine takes \d+; ask for fewer turns"):
        asked(tmp_path, QA | {"history_tokens": 40_000})


def test_a_session_ends_at_the_models_length_and_its_turns_are_counted(tmp_path: Path) -> None:
    # 30,000 tokens a turn: the third prompt exceeds the model's 65,536.
    rounds = {"kind": "rounds", "clients": 3, "rounds": 4, "first_tokens": 30_000, "parallel": 3, "answers": "none"}
    folder = asked(tmp_path / "ends", rounds, cache={"gpu": "8GiB"})
    assert sorted(row.turn for row in measured(folder)) == [0, 0, 0, 1, 1, 1]
    [sample] = read_samples(folder)
    assert sample.load is not None and (sample.load.requests, sample.load.sent, sample.load.beyond_model) == (6, 6, 6)
    summary, lines = told(folder)
    assert summary.cells[0].beyond_model == 6
    assert lines == ["6 turns not asked: the sessions ended before them, at the model's length."]
    with pytest.raises(
        SpecError, match=r"request .* has 70000 \+ 1 tokens, the model takes 65536; ask for fewer tokens"
    ):
        asked(tmp_path / "none", rounds | {"first_tokens": 70_000}, cache={"gpu": "8GiB"})
