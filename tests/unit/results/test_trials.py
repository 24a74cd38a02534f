"""Figures over trials, against values worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.records import CUT_OFF, LoadFacts
from harness.results.folder import write_summary
from harness.results.summary import CellFigures, read_summary, summarize
from tests.support.report_runs import cell, manifest, row, sample
from traces.request import RequestRecord

CELLS = [cell("base", config={"measure": {"trials": 4}})]


def trial(number: int, *ttfts_s: float | None, attempt: int = 0, **fields: Any) -> list[RequestRecord]:
    """Requests that are sent a second after each other, of 100 prompt tokens each."""
    return [
        row(None, ttft_s, at_s=float(at), sample=number, attempt=attempt, prompt_tokens=100, **fields)
        for at, ttft_s in enumerate(ttfts_s)
    ]


def summarized(rows: list[RequestRecord], *ended: tuple[int, int]) -> CellFigures:
    samples = [sample("load", number, None, attempt=attempt) for number, attempt in ended]
    return summarize(manifest(CELLS), rows, samples).cells[0]


def test_each_figure_has_its_median_interval_and_spread_over_trials() -> None:
    rows = [*trial(0, 1.0, 3.0), *trial(1, 2.0, 4.0), *trial(2, 2.0, 8.0), *trial(3, 1.0, 1.0)]
    load = summarized(rows, (0, 0), (1, 0), (2, 0), (3, 0))
    found, rates = load.trials, load.tiers["load"].throughput
    assert rates is not None and rates.prompt_tokens_per_s == pytest.approx(800 / 20), "trials do not run at once"
    assert found is not None and found.counted == (0, 1, 2, 3) and found.left_out == ()
    mean = found.figures["ttft_mean_s"]
    assert mean.values == (2.0, 3.0, 5.0, 1.0) and (mean.median, mean.mean) == (2.5, 2.75)
    # Deviations -0.75, 0.25, 2.25, -1.75: squares sum to 8.75, of three degrees of freedom; t = 3.1824463053.
    assert mean.sd == pytest.approx((8.75 / 3) ** 0.5) and mean.cv == pytest.approx((8.75 / 3) ** 0.5 / 2.75)
    half = 3.1824463053 * (8.75 / 3) ** 0.5 / 2
    assert mean.mean_low == pytest.approx(2.75 - half) and mean.mean_high == pytest.approx(2.75 + half)
    # The second request is sent at 1 s and ends its TTFT later: 200 tokens over 4, 5, 9 and 2 s.
    assert found.figures["prompt_tokens_per_s"].values == pytest.approx((50, 40, 200 / 9, 100))
    assert "hit_rate" not in found.figures, "no row reports its hits"


def test_all_figures_of_the_cell_are_over_complete_trials_alone() -> None:
    rows = [*trial(0, 1.0, 3.0), *trial(1, 9.0, None), *trial(2, 9.0), *trial(2, 2.0, 2.0, attempt=1)]
    found = summarized(rows, (0, 0), (1, 0), (2, 1))
    assert found.trials is not None and found.trials.counted == (0, 2)
    assert [(left.name, left.reason) for left in found.trials.left_out] == [
        ("trial 2", "1 of 2 requests failed: timed out"),
        ("trial 3", "did not end"),
    ]
    load = found.tiers["load"]
    ttft = load.metrics["ttft_s"]
    assert ttft is not None and (ttft.n, ttft.mean, ttft.max, ttft.sample_means) == (4, 2.0, 3.0, (2.0, 2.0))
    assert (load.rows.measured, load.rows.counted, load.rows.errors, load.rows.in_incomplete_trials) == (7, 4, 1, 2)
    # Two trials of 200 tokens in 4 and 3 s: not one span over both.
    assert load.throughput is not None and load.throughput.prompt_tokens_per_s == pytest.approx(400 / 7)


def test_a_request_that_the_budget_ended_leaves_its_trial_complete() -> None:
    rows = [*trial(0, 1.0), *trial(0, None, error=CUT_OFF), *trial(1, 2.0)]
    found = summarized(rows, (0, 0), (1, 0)).trials
    assert found is not None and found.counted == (0, 1) and found.figures["ttft_mean_s"].values == (1.0, 2.0)
    assert found.figures["ttft_mean_s"].mean_low is None, "two trials have no interval"


def test_trials_come_back_from_the_file_and_one_trial_has_no_such_figures(tmp_path: Path) -> None:
    rows = [*trial(0, 1.0, 3.0), *trial(1, 2.0)]
    written = summarize(manifest(CELLS), rows, [sample("load", 0, None)])
    write_summary(tmp_path, written)
    assert read_summary(tmp_path) == written and written.cells[0].trials is not None
    single = summarize(manifest(), trial(0, 1.0, None)).cells[0]
    assert single.trials is None and single.tiers["load"].rows.counted == 1, "its answered rows count"


def test_what_was_asked_of_the_load_is_that_of_complete_trials() -> None:
    rows = [*trial(0, 1.0, 1.0), *trial(1, 1.0, None), *trial(2, 1.0, 1.0)]
    facts = LoadFacts(requests=4, sent=2, unfinished=0, duration_s=2.0, drain=True, asked_per_s=None)
    samples = [sample("load", number, None, load=facts) for number in range(3)]
    found = summarize(manifest(CELLS), rows, samples).cells[0].asked
    assert found is not None and (found.loads, found.requests, found.sent, found.sent_per_s) == (2, 8, 4, 1.0)
