"""The search for a capacity: exact on every threshold and peak, in few loads; and a whole one on the simulator."""

import functools
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.commands.capacity import capacity
from harness.commands.output import OutputChoice
from harness.errors import EngineError
from harness.measure.search import Search, highest, most_within
from harness.results.capacity import Capacity, CapacityAnswer, Found, Step, found_in, read_capacity, search_agreement
from harness.results.folder import read_rows, read_samples
from harness.results.manifest import read_manifest

MOST = 300


def asked(search: Search, measure: Callable[[int], Found]) -> tuple[CapacityAnswer, list[int]]:
    loads = []
    try:
        load, _, _ = next(search)
        while True:
            loads.append(load)
            load, _, _ = search.send(measure(load))
    except StopIteration as end:
        return end.value, loads


def searched(search: Search, found: dict[int, Found]) -> tuple[int | None, list[int]]:
    answer, loads = asked(search, found.__getitem__)
    return answer.load, loads


@pytest.mark.parametrize("start", [1, 7, MOST])
def test_the_most_within_a_target_is_exact(start: int) -> None:
    for threshold in range(MOST + 1):
        found = {load: Found(met=load <= threshold, strain=None, rate=None) for load in range(1, MOST + 1)}
        answer, loads = searched(most_within(start, MOST, 0.001), found)
        assert answer == (threshold or None) and len(loads) == len(set(loads)) <= 20


def test_a_wider_tolerance_asks_less_and_stays_within_it() -> None:
    found = {load: Found(met=load <= 201, strain=None, rate=None) for load in range(1, MOST + 1)}
    answer, loads = searched(most_within(8, MOST, 0.1), found)
    exact, more = searched(most_within(8, MOST, 0.001), found)
    assert exact == 201 and answer is not None and 0.9 * 201 <= answer <= 201 and len(loads) < len(more)


@pytest.mark.parametrize("start", [1, 10])
def test_the_highest_throughput_is_found_within_the_tolerance(start: int) -> None:
    for peak in range(start, MOST, 13):
        found = {load: Found(met=True, strain=None, rate=1000.0 - abs(load - peak)) for load in range(1, MOST + 1)}
        answer, loads = searched(highest(start, MOST, 0.02), found)
        assert answer is not None and abs(answer - peak) <= max(1, 0.02 * peak) and len(loads) <= 30


def strained(load: int, threshold: float, noise: random.Random | None = None) -> Found:
    """Times that grow with the square of the load, and noise of 3 %."""
    strain = (load / threshold) ** 2 * (1 if noise is None else noise.lognormvariate(0, 0.03))
    return Found(met=strain <= 1, strain=strain, rate=float(load))


@pytest.mark.parametrize("threshold", [3.5, 40.5, 177.5, 250.5])
def test_strains_lead_to_the_answer_in_fewer_loads_than_halves(threshold: float) -> None:
    by_strain, few = asked(most_within(8, MOST, 0.005), lambda load: strained(load, threshold))
    known = {load: Found(met=load <= threshold, rate=None, strain=None) for load in range(1, MOST + 1)}
    by_halves, many = searched(most_within(8, MOST, 0.005), known)
    assert by_strain.load == by_halves == int(threshold) and len(few) <= len(many)
    assert by_strain == CapacityAnswer(load=int(threshold), low=int(threshold), high=int(threshold) + 1)


def test_only_the_loads_at_the_edge_are_measured_again_and_noise_is_told() -> None:
    within = 0
    for seed in range(200):
        noise = random.Random(seed)
        measure = functools.partial(strained, threshold=100.5, noise=noise)
        answer, loads = asked(most_within(8, MOST, 0.02, repeats=5), measure)
        counts = {load: loads.count(load) for load in loads}
        assert answer.load is not None and max(counts.values()) <= 5
        assert all(abs(load - 100.5) < 15 for load, count in counts.items() if count > 1)
        assert (answer.low or 0) <= answer.load < (answer.high or MOST)
        within += (answer.low or 0) <= 100 and (answer.high or MOST) >= 101
    assert within >= 180, "low and high hold what is true between them, but for few searches"


def test_the_peak_and_its_neighbours_are_measured_as_often_as_asked() -> None:
    noise = random.Random(1)
    rates = {load: 1000.0 - abs(load - 90) for load in range(1, MOST + 1)}
    answer, loads = asked(
        highest(10, MOST, 0.05, repeats=3),
        lambda load: Found(met=True, strain=None, rate=rates[load] + noise.gauss(0, 1)),
    )
    assert answer.load is not None and answer.low is not None and answer.high is not None
    assert [loads.count(load) for load in (answer.low, answer.load, answer.high)] == [3, 3, 3]
    assert answer.low < answer.load < answer.high and abs(answer.load - 90) <= 9


def kept_search(engine: str, answer: tuple[int | None, int | None, int | None], rates: dict[int, float]) -> Capacity:
    load, low, high = answer
    steps = [
        Step(load=at, trial=0, action="more", reason="", found=Found(met=True, strain=0.5, rate=rate, e2e_p95_s=1.0))
        for at, rate in rates.items()
    ]
    return Capacity(
        mode="slo", key="workload.users", engine=engine, goals=("e2e_p95<2s",), tolerance=0.05, complete=True,
        answer=CapacityAnswer(load=load, low=low, high=high), steps=tuple(steps),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ((98, 98, 99), "within 5%"),
        ((80, 70, 110), "not resolved: 100 to 101 and 70 to 110"),
        ((60, 60, 61), "at 64 both were measured: E2E p95 s 1 and 1, output tokens/s 640 and 320"),
        ((None, None, 1), "no load of one of them keeps the targets"),
    ],
)
def test_two_searches_agree_or_the_measurements_say_why_not(
    other: tuple[int | None, int | None, int | None], words: str
) -> None:
    own = kept_search("vllm", (100, 100, 101), {64: 640.0, 100: 900.0})
    told = search_agreement(own, kept_search("sim", other, {32: 300.0, 64: 320.0}))
    assert words in told and told.startswith("workload.users on vllm and on sim: 100 and ")


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
    words = {
        "engine": "sim",
        "goals": ["ttft_p90<1s"],
        "key": "workload.active_sessions",
        "most": 12,
        "tolerance": 0.01,
    }
    assert capacity(path, out=out, answer=OutputChoice(as_json=True), **words) == 0  # type: ignore[arg-type]
    told = json.loads(capsys.readouterr().out)
    load, loads = told["answer"]["load"], [step["load"] for step in told["steps"]]
    assert 0 < load < 12 and {load, load + 1} <= set(loads) and len(loads) == len(set(loads))
    assert told["answer"] == {"load": load, "low": load, "high": load + 1} and told["complete"]
    assert all(step["found"]["met"] is (step["load"] <= load) for step in told["steps"])
    found = read_capacity(out)
    assert found is not None and [step.found.requests for step in found.steps] == [120] * len(loads)
    assert [cell.overrides["workload.active_sessions"] for cell in read_manifest(out).cells] == loads
    assert Counter(row.cell for row in read_rows(out)) == {cell.key: 120 for cell in read_manifest(out).cells}
    page = (out / "report.html").read_text()
    assert f"Most within the targets: workload.active_sessions = {load}" in page and 'id="capacity"' in page
    before = (out / "rows.jsonl").read_bytes()
    assert capacity(path, out=out, against=out, **words) == 0  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert (out / "rows.jsonl").read_bytes() == before and "0.0% apart: within 5%" in said and "█" in said
    words["goals"] = ["ttft_p90<1ms"]
    assert capacity(path, out=tmp_path / "none", **words) == 1  # type: ignore[arg-type]
    assert "Not even workload.active_sessions = 1 keeps the targets" in capsys.readouterr().out


def test_an_interrupted_search_measures_only_what_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "users.yaml", tmp_path / "out"
    path.write_text(EXPERIMENT)
    words = {"goals": ["e2e_p90<1s"], "key": "workload.active_sessions", "most": 8, "out": out, "repeats": 2}
    calls = []

    def breaks_off(*given: object) -> Found:
        calls.append(given)
        if len(calls) == 3:
            raise EngineError("the engine is gone; start it again")
        return found_in(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("harness.measure.capacity.found_in", breaks_off)
    assert capacity(path, engine="fake", **words) == 1  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert "the engine is gone" in said and f"--out {out} goes on" in said
    kept, before = read_capacity(out), (out / "rows.jsonl").read_bytes()
    assert kept is not None and not kept.complete and len(kept.steps) == 2
    assert capacity(path, engine="fake", **words) in (0, 1)  # type: ignore[arg-type]
    assert (out / "rows.jsonl").read_bytes().startswith(before)
    found, ended = read_capacity(out), Counter((sample.cell, sample.index) for sample in read_samples(out))
    assert found is not None and found.complete and found.steps[:2] == kept.steps
    assert set(ended.values()) == {1}, "nothing was measured twice"
    assert ended.keys() == {(f"workload.active_sessions={step.load}", step.trial) for step in found.steps}
    capsys.readouterr()
    assert capacity(path, engine="sim", **words) == 2  # type: ignore[arg-type]
    assert "holds another run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"goals": None}, "needs a target"),
        ({"key": "workload.turns.x"}, "no whole number"),
        ({"key": "name"}, "no whole number"),
        ({"key": "cache.block_tokens"}, "no whole number of this workload"),
        ({"repeats": 1}, "2 repeats or more"),
        ({"against": Path("/none")}, "no such folder"),
        ({"most": 1}, "give a --most above it"),
        ({"tolerance": 2.0}, "a share above 0"),
        ({"goals": ["ttft_p95<5"]}, "units"),
    ],
)
def test_what_cannot_be_searched_is_refused_on_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], words: str
) -> None:
    path = tmp_path / "users.yaml"
    path.write_text(EXPERIMENT)
    good = {"engine": "sim", "goals": ["ttft_p90<1s"], "key": "workload.active_sessions", "out": tmp_path / "out"}
    assert capacity(path, **{**good, **changes}) == 2  # type: ignore[arg-type]
    said = capsys.readouterr().err.strip()
    assert words in said and len(said.splitlines()) == 1 and not (tmp_path / "out").exists()
