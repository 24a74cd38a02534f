"""Cells against a named one: which is held against which, and the ratios, worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.experiment.read import load_experiment
from harness.experiment.report import reference_cells
from harness.records import LoadFacts
from harness.report.run.break_even import break_even_lines, break_even_rows
from harness.report.run.loads import against_lines, against_rows, change
from harness.results.folder import write_summary
from harness.results.summary import Summary, read_summary, summarize
from harness.stats import crossing, ratio_interval, ratio_of_means
from tests.support.report_runs import cell, manifest, row, sample
from traces.request import RequestRecord

GRID = {f"{tier},{rate}": {"cache": tier, "rate": rate} for tier in ("gpu", "pool") for rate in (1, 8)}


def test_each_cell_is_held_against_the_one_that_differs_in_the_named_value_alone() -> None:
    assert reference_cells(GRID, "gpu") == {"pool,1": "gpu,1", "pool,8": "gpu,8"}
    assert reference_cells(GRID, "8") == {"gpu,1": "gpu,8", "pool,1": "pool,8"}
    assert reference_cells(GRID, "gpu,1") == {"gpu,8": "gpu,1", "pool,1": "gpu,1", "pool,8": "gpu,1"}
    assert reference_cells(GRID, "disk") == {}
    assert reference_cells({"a": {"x": "1", "y": "1"}, "b": {"x": "2", "y": "1"}}, "1") == {}, "of which axis?"


def test_a_cell_that_the_sweep_lacks_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(
        "name: a\nworkload: {kind: rounds}\ncache: {gpu: 1GiB, cpu: 1GiB}\nsweep: {cache.cpu: [1GiB, 2GiB]}\n"
        "report:\n  against: gpu_only\n"
    )
    with pytest.raises(ConfigError, match=r"yaml:6: report\.against: gpu_only is no cell's key .* e\.g\. 1GiB, 2GiB"):
        load_experiment(path)
    assert load_experiment(path, ["report.against=1GiB"]).experiment.report.against == "1GiB"
    with pytest.raises(ConfigError, match=r"report\.against is for free loads"):
        load_experiment(Path("quickstart"), ["report.against=a"])
    assert load_experiment(path, ["sweep.cache.cpu=null"]).cells(), "a run of one point compares nothing"


def test_the_ratio_of_means_and_its_interval_over_conversations() -> None:
    """Ten conversations of two requests: sums 4 against 2, but 5 against 2 for one and 3 against 2 for another."""
    groups = [[(1.0, 0.5), (3.0, 1.5)]] * 8 + [[(2.0, 1.0), (3.0, 1.0)], [(1.0, 1.0), (2.0, 1.0)]]
    found = ratio_of_means(groups)
    assert found is not None and (found.ratio, found.basis, found.samples) == (2.0, "sessions", (10, 10))
    # Residuals against twice the other side: 1 and -1, else 0. Student's t of nine degrees of freedom is 2.262157.
    half = 2.262157 * math.sqrt(10 / 9 * 2) / 40
    assert found.low == pytest.approx(2 * math.exp(-half), rel=1e-6)
    assert found.high == pytest.approx(2 * math.exp(half), rel=1e-6)
    assert (found.reference_s, found.typical_s) == (2.0, 1.0)


def test_a_load_without_conversations_is_cut_into_neighbours_and_few_give_no_interval() -> None:
    pairs = [(2.0 + 0.1 * (at % 3), 1.0) for at in range(100)]
    many, few = ratio_of_means([pairs]), ratio_of_means([pairs[:99]])
    assert many is not None and (many.basis, many.samples) == ("requests", (10, 10)) and many.low is not None
    assert few is not None and (few.low, few.reason) == (None, "too few requests to compare")
    assert ratio_of_means([]) is None and ratio_of_means([[(0.0, 0.0)]]) is None


def summary_of(rows: list[RequestRecord], *samples: Any, trials: int = 1) -> Summary:
    config = {"report": {"against": "gpu"}, "measure": {"trials": trials}}
    cells = [cell(f"cache={name}", {"cache": name}, config=config) for name in ("gpu", "pool")]
    return summarize(manifest(cells), rows, samples)


def conversations(name: str, factor: float) -> list[RequestRecord]:
    """Twelve conversations of two turns; later ones are slower."""
    return [
        row(
            None, factor * (1 + session / 100 + turn), cell=f"cache={name}", at_s=10.0 * turn + session / 10,
            id=f"{session}-{turn}", session=str(session), turn=turn, prompt_tokens=100, sample=0,
        )
        for turn in range(2) for session in range(12)
    ]  # fmt: skip


def test_one_load_each_has_an_interval_for_ttft_from_its_conversations_alone(tmp_path: Path) -> None:
    found = summary_of([*conversations("gpu", 1.0), *conversations("pool", 0.5)])
    reference, pool = found.cells
    assert reference.against is None and pool.against is not None and pool.against.cell == "cache=gpu"
    ttft, rate = pool.against.ttft, pool.against.rates["prompt_tokens_per_s"]
    assert ttft is not None and ttft.ratio == pytest.approx(2) and ttft.basis == "sessions"
    assert ttft.low == pytest.approx(2) and change(ttft).startswith("\N{MINUS SIGN}50 %")
    # 24 prompts of 100 tokens: from 0 s to 11.1 + 2.11 s, and to 11.1 + 1.055 s.
    assert rate.ratio == pytest.approx((11.1 + 2.11) / (11.1 + 1.055)) and rate.low is None
    [line] = against_lines(found)
    assert line.startswith("cache=pool against cache=gpu: mean TTFT \N{MINUS SIGN}50 %")
    assert against_rows(found)[0].basis == "12 conversations, in pairs"
    write_summary(tmp_path, found)
    assert read_summary(tmp_path) == found


def test_three_trials_each_give_every_ratio_an_interval() -> None:
    rows, samples = [], []
    for name, ttfts_s in (("gpu", (4.0, 4.4, 4.2)), ("pool", (2.0, 2.2, 2.1))):
        for trial, ttft_s in enumerate(ttfts_s):
            rows.append(row(None, ttft_s, cell=f"cache={name}", sample=trial, prompt_tokens=100))
            samples.append(sample("load", trial, None, cell=f"cache={name}"))
    pool = summary_of(rows, *samples, trials=3).cells[1].against
    assert pool is not None and pool.ttft is not None
    welch = ratio_interval([[4.0], [4.4], [4.2]], [[2.0], [2.2], [2.1]])
    assert welch is not None and pool.ttft == welch and pool.ttft.basis == "samples"
    assert pool.rates["prompt_tokens_per_s"].ratio == pytest.approx(welch.ratio), "one request: its time is the load's"
    assert pool.rates["prompt_tokens_per_s"].low is not None


def test_the_same_requests_with_unlike_token_counts_have_no_rate_of_tokens() -> None:
    """An engine that ended an answer early looks quicker by tokens of the prompt, slower by those of the answer."""

    def load(name: str, last: int) -> list[RequestRecord]:
        sizes = (16, 16, 16, last)
        known: dict[str, Any] = {"cell": f"cache={name}", "prompt_tokens": 100}
        return [row(None, 1.0, at_s=float(n), output_tokens=size, **known) for n, size in enumerate(sizes)]

    rows, cut, equal = load("gpu", 16), load("pool", 15), load("pool", 16)
    unlike, like = (summary_of([*rows, *others]) for others in (cut, equal))
    found = unlike.cells[1].against
    assert found is not None and found.unlike_tokens is not None and set(found.rates) == {"requests_per_s"}
    assert [tokens.output for tokens in found.unlike_tokens] == [64, 63]
    [line] = against_lines(unlike)
    assert "no rate of tokens compares: prompt and output tokens are 400 and 63 against 400 and 64" in line
    found = like.cells[1].against
    assert found is not None and found.unlike_tokens is None and found.rates["total_tokens_per_s"].ratio == 1.0


def test_a_load_that_ends_by_the_clock_may_have_other_counts() -> None:
    facts = LoadFacts(requests=9, sent=2, unfinished=0, duration_s=2.0, drain=True, asked_per_s=None)
    keys = ("cache=gpu", "cache=pool")
    rows = [row(None, 1.0, cell=key, at_s=at) for key, sent in zip(keys, (1, 2), strict=True) for at in range(sent)]
    found = summary_of(rows, *(sample("load", 0, None, cell=key, load=facts) for key in keys)).cells[1].against
    assert found is not None and found.unlike_tokens is None and "prompt_tokens_per_s" in found.rates


def swept(pool_s: tuple[float, ...], spread: float, trials: int = 3, store_s: tuple[float, ...] = ()) -> Summary:
    """Lengths 1,000, 2,000 … : the GPU alone takes 1 s, pool and store what they are given; each in three trials."""
    config = {"report": {"against": "gpu"}, "measure": {"trials": trials}}
    rows, samples, cells = [], [], []
    for place, pool in enumerate(pool_s):
        for name, middle_s in (("gpu", 1.0), ("pool", pool), *(("store", s) for s in store_s[place : place + 1])):
            length = 1000 * 2**place
            key = f"cache={name},workload.history_tokens={length}"
            cells.append(cell(key, {"cache": name, "workload.history_tokens": length}, config=config))
            for trial in range(trials):
                rows.append(row(None, middle_s * (1 + spread * (trial - 1)), cell=key, sample=trial))
                samples.append(sample("load", trial, None, cell=key))
    return summarize(manifest(cells), rows, samples)


def test_break_even_lies_where_the_ratio_passes_1_with_the_interval_s_ends() -> None:
    line, _ = break_even_lines(swept((2.0, 0.5, 0.25), 0.02))
    begun = "cache=pool is better than cache=gpu in mean TTFT from history_tokens = 1,410 ("
    assert line.startswith(begun) and line.endswith(") on, between the measured 1,000 and 2,000.")
    low, high = (float(end.replace(",", "")) for end in line.removeprefix(begun).split(")")[0].split(" to "))
    assert 1350 < low < 1414 < high < 1480
    [line, _] = break_even_lines(swept((0.5, 0.5, 4.0), 0.02))
    assert "up to history_tokens = 2,520 (" in line and "between the measured 2,000 and 4,000" in line


def test_break_even_says_where_its_interval_is_open_or_there_is_none() -> None:
    [line, _] = break_even_lines(swept((1.1, 0.9), 0.2))
    assert "from history_tokens = 1,390 (interval open) on" in line
    [line, _] = break_even_lines(swept((2.0, 0.5), 0.02, trials=1))
    assert "from history_tokens = 1,410 (no interval) on" in line
    assert break_even_lines(swept((2.0, 0.5, 2.0), 0.02)) == [], "it passes 1 twice"
    assert break_even_lines(swept((0.5, 0.25), 0.02)) == []
    outcomes = [[found.outcome for found in swept(pool, 0.02).break_evens] for pool in ((2.0, 0.5, 2.0), (0.5, 0.25))]
    assert outcomes == [["more than once"] * 2, ["everywhere"] * 2]


def test_set_ups_break_even_with_each_other_too_and_the_summary_keeps_it(tmp_path: Path) -> None:
    """The pool is worse than the GPU at 1,000 alone, the store up to some 2,000; against the pool it never passes 1."""
    found = swept((2.0, 0.5, 0.25), 0.02, store_s=(8.0, 1.1, 0.5))
    pairs = {(one.ours["cache"], one.theirs["cache"]): one for one in found.break_evens if one.metric == "ttft_s"}
    assert {pair: (one.outcome, one.between, one.named) for pair, one in pairs.items()} == {
        ("pool", "gpu"): ("from", (1000.0, 2000.0), True),
        ("store", "gpu"): ("from", (2000.0, 4000.0), True),
        ("store", "pool"): ("nowhere", None, False),
    }
    store = pairs["store", "gpu"]
    assert store.at == pytest.approx(2000 * 2 ** (math.log(1.1) / math.log(2.2)))
    assert store.at and store.low and store.high and store.low < store.at < store.high
    assert [place.ratio.ratio for place in store.places] == pytest.approx([1 / 8, 1 / 1.1, 2.0])
    assert [row.at for row in break_even_rows(found) if row.theirs == "cache=pool"] == ["none", "none"]
    write_summary(tmp_path, found)
    assert read_summary(tmp_path) == found


def test_a_line_along_log_axes_crosses_1_between_its_neighbours() -> None:
    assert crossing([1.0, 100.0], [0.1, 10.0]) == pytest.approx(10)
    assert crossing([1.0, 100.0, 1000.0], [4.0, 0.25, 0.1]) == pytest.approx(10)
    assert crossing([1.0, 2.0], [2.0, 3.0]) is None and crossing([1.0, 2.0, 3.0], [0.5, 2.0, 0.5]) is None
