"""What scripts/same_results finds between two checkouts, and what it takes for the same."""

import copy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.same_results_lib import matrix
from scripts.same_results_lib.comparing import (
    Run,
    compare_figures,
    compare_rows,
    figures,
    numbers,
    summary_figures,
)
from scripts.same_results_lib.main import Comparison, Side

ROOT = Path(__file__).resolve().parents[2]
KEY = "engines.sim.instances=2"


def a_row(number: int) -> dict[str, Any]:
    return {
        "id": f"r{number}",
        "cell": KEY,
        "phase": "measure",
        "sample": 0,
        "attempt": 0,
        "expected_tier": None,
        "verdict": None,
        "scheduled_s": 1.0,
        "sent_s": 1.0,
        "first_token_s": 1.25 + number,
        "last_token_s": 2.5 + number,
        "token_s": [1.25 + number, 2.5 + number],
        "prompt_tokens": 96,
        "cached_tokens": 64,
        "tokens_by_tier": {"computed": 32, "gpu": 0, "cpu": 64, "disk": 0, "shared": None},
        "error": None,
    }


def a_run() -> dict[str, Any]:
    """A run of one cell with CPU RAM and no disk: manifest, rows, summary."""
    config = {"cache": {"gpu": 1, "cpu": 1, "disk": None}}
    cell: dict[str, Any] = {"key": KEY, "overrides": {"engines.sim.instances": 2}}
    counters = {"l1_hit_tokens": 192, "l2_hit_tokens": 0, "storage_read_bytes": None}
    load = {"metrics": {"ttft_s": {"n": 3, "mean": 0.25}}, "tokens": {"cpu": 192, "disk": 0}, "counters": counters}
    return {
        "manifest": {"cells": [cell | {"config": config}]},
        "rows": [a_row(number) for number in range(3)],
        "summary": {"run_id": "a", "cells": [cell | {"tiers": {"load": load}}]},
    }


def differences(after: dict[str, Any], wall_clock: bool = False) -> list[str]:
    """Of this run, by rows and summary, from the one above."""
    before, other = Run(**a_run()), Run(**after)
    compared, found = compare_rows(before, other, wall_clock)
    counted, more = compare_figures(summary_figures(before, before.absent), summary_figures(other, before.absent))
    assert compared >= 3 and counted == 4
    return [*found, *more]


def test_a_run_is_equal_to_itself_and_not_to_a_changed_one() -> None:
    assert differences(a_run()) == []
    changes: dict[str, Callable[[dict[str, Any]], object]] = {
        "first_token_s 2.25 -> 2.2500000000000004": lambda run: run["rows"][1].update(first_token_s=2.2500000000000004),
        "token_s [1] 3.5 -> 3.0": lambda run: run["rows"][1].update(token_s=[2.25, 3.0]),
        "cpu tokens 64 -> 63": lambda run: run["rows"][1]["tokens_by_tier"].update(cpu=63),
        "gpu tokens 0 -> None": lambda run: run["rows"][1]["tokens_by_tier"].pop("gpu"),
        "failed False -> True": lambda run: run["rows"][1].update(error="too long"),
        "instance None -> 1": lambda run: run["rows"][1].update(instance=1),
        "request r2: missing in the candidate": lambda run: run["rows"].pop(),
        "request r9: only in the candidate": lambda run: run["rows"].append(a_row(9)),
        "ttft_s/mean: 0.25 -> 0.2501": lambda run: mean_of(run).update(mean=0.2501),
        "ttft_s/n: 3 -> missing": lambda run: mean_of(run).pop("n"),
    }
    for told, change in changes.items():
        after = a_run()
        change(after)
        [line] = differences(after)
        assert told in line, line


def mean_of(run: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = run["summary"]["cells"][0]["tiers"]["load"]["metrics"]["ttft_s"]
    return found


def test_other_names_and_absent_tiers_say_the_same() -> None:
    after = a_run()
    for cell in (after["manifest"]["cells"][0], after["summary"]["cells"][0]):
        cell.update(key="deployment.instances=2", overrides={"deployment.instances": 2})
    for row in after["rows"]:
        row.update(cell="deployment.instances=2", novelty=1, tokens_by_tier={"gpu": 0, "computed": 32, "cpu": 64})
        del row["token_s"][:], row["error"]
    load = after["summary"]["cells"][0]["tiers"]["load"]
    load.update(tokens={"cpu": 192}, counters={"hit_tokens": {"cpu": 192}}, waves=[{"n": 1}])
    lines = differences(after)
    assert len(lines) == 3 and all("token_s" in line for line in lines), "the times that were taken out, nothing else"
    assert differences(after, wall_clock=True) == []
    load["counters"]["hit_tokens"]["cpu"] = 191
    assert "hit_tokens/cpu: 192 -> 191" in differences(after, wall_clock=True)[0]


def test_figures_have_places_and_printed_numbers_too() -> None:
    document = {"points": [{"cell": "a", "tier": "gpu", "verdict": "pass", "figures": [{"metric": "m", "error": 0.5}]}]}
    before = dict(figures(document | {"command": "x 1", "git": {"dirty": True}, "left": None}))
    assert before == {"/points/a gpu#1/verdict": "pass", "/points/a gpu#1/figures/m#1/error": 0.5}
    after = copy.deepcopy(document)
    after["points"][0].update(verdict="fail")
    assert compare_figures(before, dict(figures(after))) == (2, ["/points/a gpu#1/verdict: 'pass' -> 'fail'"])
    assert compare_figures(numbers("reads 1,280\nno"), numbers("loads 1,281"))[1] == [
        "line 1 number 1: '1,280' -> '1,281'"
    ]


def test_keys_are_renamed_where_they_stand_and_in_axes() -> None:
    names = {"engines.sim.routing": "deployment.routing", "engines.sim.shared": "deployment.shared"}
    content = matrix.made({}, matrix.OPEN, matrix.CLUSTER)
    content["engines"]["sim"]["routing"] = "least-loaded"
    found = matrix.renamed(content, names)
    assert found["deployment"] == {"routing": "least-loaded"} and "routing" not in found["engines"]["sim"]
    assert [*found["sweep"]] == ["engines.sim.instances", "deployment.routing", "deployment.shared"]


@pytest.mark.parametrize(("codes", "good"), [((0, 0), True), ((1, 1), True), ((0, 1), False), ((2, 2), False)])
def test_commands_that_end_unlike_or_prove_nothing_are_a_difference(codes: tuple[int, int], good: bool) -> None:
    comparison = Comparison(Side(ROOT, ROOT), Side(ROOT, ROOT))
    done = [subprocess.CompletedProcess([], code, "", "error: what") for code in codes]
    assert comparison.ended("a", done, (0, 1)) is good
    assert bool(sum(comparison.tally.differing.values())) is not good


def test_the_help_names_the_default_commit() -> None:
    told = subprocess.run(["scripts/same_results", "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "8c60978" in told.stdout and "--keep" in told.stdout
    bad = subprocess.run(["scripts/same_results", "no-such"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert bad.returncode == 1 and "no such commit" in bad.stderr
