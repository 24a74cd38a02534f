"""The search for a capacity: exact on every threshold and peak, in few loads; and a whole one on the simulator."""

import json
from pathlib import Path

import pytest

from harness.commands.capacity import capacity
from harness.commands.output import OutputChoice
from harness.measure.search import Found, Search, highest, most_within
from harness.results.folder import read_rows

MOST = 300


def searched(search: Search, found: dict[int, Found]) -> tuple[int | None, list[int]]:
    loads = []
    try:
        load, _, _ = next(search)
        while True:
            loads.append(load)
            load, _, _ = search.send(found[load])
    except StopIteration as end:
        return end.value, loads


@pytest.mark.parametrize("start", [1, 7, MOST])
def test_the_most_within_a_target_is_exact(start: int) -> None:
    for threshold in range(MOST + 1):
        found = {load: Found(met=load <= threshold, rate=None) for load in range(1, MOST + 1)}
        answer, loads = searched(most_within(start, MOST, 0.001), found)
        assert answer == (threshold or None) and len(loads) == len(set(loads)) <= 20


def test_a_wider_tolerance_asks_less_and_stays_within_it() -> None:
    found = {load: Found(met=load <= 201, rate=None) for load in range(1, MOST + 1)}
    answer, loads = searched(most_within(8, MOST, 0.1), found)
    exact, more = searched(most_within(8, MOST, 0.001), found)
    assert exact == 201 and answer is not None and 0.9 * 201 <= answer <= 201 and len(loads) < len(more)


@pytest.mark.parametrize("start", [1, 10])
def test_the_highest_throughput_is_found_within_the_tolerance(start: int) -> None:
    for peak in range(start, MOST, 13):
        found = {load: Found(met=True, rate=1000.0 - abs(load - peak)) for load in range(1, MOST + 1)}
        answer, loads = searched(highest(start, MOST, 0.02), found)
        assert answer is not None and abs(answer - peak) <= max(1, 0.02 * peak) and len(loads) <= 30


EXPERIMENT = """
name: users
workload: {kind: sessions, sessions: 40, turns: 3, user_tokens: 512, output_tokens: 32, think: 1s, active_sessions: 2}
cache: {gpu: 256MiB, cpu: 1GiB}
"""


def test_a_search_on_the_simulator_has_its_answers_neighbours_and_goes_on_from_its_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "users.yaml", tmp_path / "out"
    path.write_text(EXPERIMENT)
    asked = {
        "engine": "sim",
        "goals": ["ttft_p90<1s"],
        "key": "workload.active_sessions",
        "most": 12,
        "tolerance": 0.01,
    }
    assert capacity(path, out=out, answer=OutputChoice(as_json=True), **asked) == 0  # type: ignore[arg-type]
    told = json.loads(capsys.readouterr().out)
    assert 0 < told["answer"] < 12 and {step["load"] for step in told["steps"]} >= {told["answer"], told["answer"] + 1}
    assert all(step["met"] is (step["load"] <= told["answer"]) for step in told["steps"])
    first = sorted(out.glob("*/rows.jsonl"))
    before = [each.stat().st_mtime_ns for each in first]
    assert capacity(path, out=out, answer=OutputChoice(as_json=True), **asked) == 0  # type: ignore[arg-type]
    assert json.loads(capsys.readouterr().out) == told and [each.stat().st_mtime_ns for each in first] == before
    assert all(list(read_rows(each.parent)) for each in first)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"goals": None}, "needs a target"),
        ({"key": "workload.turns.x"}, "no whole number"),
        ({"key": "name"}, "no whole number"),
        ({"most": 1}, "give a larger one"),
        ({"tolerance": 2.0}, "give a larger one"),
        ({"goals": ["ttft_p95<5"]}, "units"),
    ],
)
def test_what_cannot_be_searched_is_refused_on_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], words: str
) -> None:
    path = tmp_path / "users.yaml"
    path.write_text(EXPERIMENT)
    asked = {"engine": "sim", "goals": ["ttft_p90<1s"], "key": "workload.active_sessions", "out": tmp_path / "out"}
    assert capacity(path, **{**asked, **changes}) == 2  # type: ignore[arg-type]
    said = capsys.readouterr().err.strip()
    assert words in said and len(said.splitlines()) == 1 and not (tmp_path / "out").exists()
