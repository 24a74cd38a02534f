"""Goals: how they are written, which rows meet them, goodput, and exit code 3."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.experiment.goals import parse_goal
from harness.results.goals import judge_goals
from tests.unit.commands.test_commands import command
from traces.request import RequestRecord


def rows(*ttfts_s: float, tokens: int = 1, tpot_s: float = 0.0) -> list[RequestRecord]:
    return [
        RequestRecord(
            id=str(n), scheduled_s=0.0, sent_s=0.0, first_token_s=ttft_s, prompt_tokens=8, output_tokens=tokens,
            last_token_s=ttft_s + tpot_s * (tokens - 1),
        )
        for n, ttft_s in enumerate(ttfts_s)
    ]  # fmt: skip


def judged(goal: str, of: list[RequestRecord], failed: int = 0, **rates: float) -> Any:
    found = judge_goals([parse_goal(goal)], "cpu", of, failed, rates)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "state", "metric", "statistic", "bound"),
    [
        ("ttft_p90<500ms", None, "ttft_s", "p90", 0.5),
        ("ttft_p95<500ms", None, "ttft_s", "p95", 0.5),
        ("disk_cold:e2e_mean <= 2s", "disk_cold", "e2e_s", "mean", 2.0),
        ("tpot_p50<50ms", None, "tpot_s", "p50", 0.05),
        ("throughput>200tokens/s", None, "output_tokens_per_s", None, 200.0),
        ("throughput >= 1.5 requests/s", None, "requests_per_s", None, 1.5),
    ],
)
def test_a_goal_as_people_write_it(text: str, state: Any, metric: str, statistic: Any, bound: float) -> None:
    goal = parse_goal(text)
    assert goal[1:4] == (state, metric, statistic) and goal.bound == pytest.approx(bound)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ttft<500ms", "write it like ttft_p90<500ms"),
        ("ttft_p98<500ms", "write it like"),
        ("ttft_p90>500ms", "write it like"),
        ("ttft_p90<500", "'500' is not a time"),
        ("nvme:ttft_p90<500ms", "'nvme' is no state; use one of recompute"),
        ("throughput>200", "write it like"),
    ],
)
def test_another_is_refused_with_its_cure(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_goal(text)


def test_a_percentile_is_met_missed_or_not_supported() -> None:
    ten = [0.1] * 9 + [0.9]
    assert judged("ttft_p50<0.2s", rows(*ten)).judged[0].verdict == "met"
    assert judged("ttft_p90<0.1s", rows(*ten)).judged[0].verdict == "missed"
    # Of ten values none lies beyond the 99th percentile: even a bound above all of them is not shown to be kept.
    assert judged("ttft_p99<9s", rows(*ten)).judged[0].verdict == "too few"
    assert judged("ttft_mean<9s", rows(0.1, 0.1)).judged[0].verdict == "too few"
    assert judged("ttft_mean<9s", rows()).judged[0].verdict == "not reported"
    assert judged("tpot_mean<9s", rows(0.1, 0.1, 0.1)).judged[0].verdict == "not reported", "one token has none"
    assert judged("tpot_mean<50ms", rows(0.1, 0.1, 0.1, tokens=5, tpot_s=0.04)).judged[0].verdict == "met"


def test_throughput_is_the_whole_loads() -> None:
    found = judged("throughput>200tokens/s", rows(0.1), output_tokens_per_s=250.0)
    assert (found.judged[0].verdict, found.judged[0].value, found.goodput) == ("met", 250.0, None)
    assert judged("throughput>2requests/s", rows(0.1), requests_per_s=1.0).judged[0].verdict == "missed"
    assert judged("throughput>2requests/s", rows(0.1)).judged[0].verdict == "not reported"


def test_goodput_counts_failed_requests_and_every_bound() -> None:
    goals = [parse_goal("ttft_p90<200ms"), parse_goal("tpot_mean<50ms"), parse_goal("throughput>1tokens/s")]
    quick, slow_start, slow_tokens = (
        rows(0.1, tokens=5, tpot_s=0.01), rows(0.3, tokens=5, tpot_s=0.01), rows(0.1, tokens=5, tpot_s=0.09)
    )  # fmt: skip
    found = judge_goals(goals, "load", quick * 2 + slow_start + slow_tokens, 1, {})
    assert found is not None and (found.kept, found.requests, found.goodput) == (2, 5, 0.4)


def test_a_goal_of_another_state_is_not_asked() -> None:
    assert judge_goals([parse_goal("gpu:ttft_mean<1s")], "cpu", rows(1.0), 0, {}) is None


def test_terminal_summary_report_and_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, few = tmp_path / "out", ("--set", "measure.tiers=[recompute, gpu]", "--set", "measure.samples=4")
    goals = ("--goal", "gpu:ttft_p50<200ms", "--goal", "recompute:ttft_mean<200ms")
    assert command("run", "quickstart", "--engine", "sim", *few, *goals, "--out", str(out)) == 3
    said = capsys.readouterr().out
    assert "Goals (simulated): 1 of 2 met." in said and "MISSED; goodput 0.0 % of 4" in said
    assert "gpu: gpu:ttft_p50<200ms: 81.9 ms, met; goodput 100.0 % of 4" in said
    [cell] = json.loads((out / "summary.json").read_text())["cells"]
    verdicts = {tier["tier"]: tier["judged"][0]["verdict"] for tier in cell["goals"]}
    assert verdicts == {"recompute": "missed", "gpu": "met"}
    page = (out / "report.html").read_text()
    assert '<section id="goals">' in page and "MISSED" in page
    met = ("--goal", "gpu:ttft_p50<200ms", "--out", str(tmp_path / "met"))
    assert command("run", "quickstart", "--engine", "sim", *few, *met) == 0
    without = tmp_path / "without"
    assert command("run", "quickstart", "--engine", "sim", *few, "--out", str(without)) == 0
    assert '<section id="goals">' not in (without / "report.html").read_text()
    assert "goals" not in json.loads((without / "summary.json").read_text())["cells"][0]


@pytest.mark.parametrize(
    ("goal", "words"),
    [
        ("fast", "is no goal; write it like"),
        ("throughput>2requests/s", "throughput is a free load's"),
        ("gpu:ttft_mean<1s", "measure.tiers has no gpu"),
    ],
)
def test_a_goal_that_nothing_could_meet_is_refused(goal: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--set", "measure.tiers=[recompute]", "--goal", goal)
    assert command("run", "quickstart", "--engine", "sim", *few) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_a_resumed_run_keeps_its_goals(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("run", "--resume", "x", "--goal", "ttft_mean<1s") == 2
    assert "keeps the goals that it began with" in capsys.readouterr().err
