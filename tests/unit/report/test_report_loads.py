"""A conversation load's charts and tables by turn, over trials and against a cell, on the page and in the terminal."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.report.run.terminal import render_summary
from harness.results.summary import summarize
from tests.support.report_runs import cell, manifest, row, sample
from tests.unit.report.test_report_html import report

# Two cells of a conversation in three rounds; only the second one's engine reports its hits.
NAMES = {"plain": (2.0, None), "cached": (1.0, 50)}


def run_of(kind: str = "rounds", trials: int = 1) -> tuple[list[Any], list[Any], list[Any]]:
    config = {"workload": {"kind": kind}, "report": {"against": "plain"}, "measure": {"trials": trials}}
    cells = [cell(f"cache={name}", {"cache": name}, config=config) for name in NAMES]
    rows, samples = [], []
    for one, (slow, cached) in zip(cells, NAMES.values(), strict=True):
        for trial in range(trials):
            samples.append(sample("load", trial, None, cell=one.key))
            for turn in range(3):
                by_tier = {"computed": 100 - cached, "gpu": cached} if cached else {}
                ttft_s = slow * (1 + turn) + trial / 10
                fields: dict[str, Any] = {"session": "a", "turn": turn, "cached_tokens": cached, "sample": trial}
                fields |= {"prompt_tokens": 100, "id": f"{turn}", "by_tier": by_tier}
                rows.append(row(None, ttft_s, cell=one.key, at_s=10.0 * turn, **fields))
    return rows, samples, cells


def test_the_page_draws_a_line_a_cell_and_leaves_out_what_no_engine_reports(tmp_path: Path) -> None:
    rows, samples, cells = run_of()
    page = report(tmp_path, rows, samples, cells=cells)
    assert page.figures()[:3] == ["ttft-by-turn", "hits-by-turn", "over-all"]
    assert "ttft" not in page.figures(), "the bars say it"
    lines = page.figure("ttft-by-turn")["data"]
    assert [(line["name"], line["x"], line["y"]) for line in lines] == [
        ("cache=plain", [0, 1, 2], [2.0, 4.0, 6.0]),
        ("cache=cached", [0, 1, 2], [1.0, 2.0, 3.0]),
    ]
    assert page.figure("ttft-by-turn")["layout"]["xaxis"]["title"]["text"] == "round (from 0)"
    assert [line["y"] for line in page.figure("hits-by-turn")["data"]] == [[], [0.5, 0.5, 0.5]]
    assert [bar["x"] for bar in page.figure("over-all")["data"]] == [[4.0, 2.0], [300 / 26, 300 / 23]]
    first, last = page.rows["turns"][1], page.rows["turns"][-1]
    assert first[:3] == ["cache=plain", "0", "1"] and first[6] == "not reported"
    assert last[:2] == ["cache=cached", "2"] and last[6:9] == ["50.0 %", "50.0 %", "50.0 %"]
    [against] = page.rows["against"][1:]
    assert against[:3] == ["cache=cached", "cache=plain", "\N{MINUS SIGN}50 %"] and "too few" in against[-1]
    assert "trials" not in page.rows
    said = page.text["findings"]
    assert said.index("cache=cached against cache=plain") < said.index("The median TTFT goes from")
    assert "paired by request" not in said, "the ratio is said once"


def test_other_conversations_have_turns_and_a_load_of_single_requests_has_none(tmp_path: Path) -> None:
    rows, samples, cells = run_of("sessions")
    page = report(tmp_path, rows, samples, cells=cells)
    assert page.figure("ttft-by-turn")["layout"]["xaxis"]["title"]["text"] == "turn (from 0)"
    first = [each for each in rows if not each.turn]
    page = report(tmp_path / "single", first, samples, cells=cells)
    assert "ttft-by-turn" not in page.figures() and "turns" not in page.rows and "ttft" in page.figures()


def test_the_table_over_trials_has_median_spread_and_every_trial(tmp_path: Path) -> None:
    rows, samples, cells = run_of(trials=3)
    page = report(tmp_path, rows, samples[:-1], cells=cells)
    lines = {(line[0], line[1]): line[2:] for line in page.rows["trials"][1:]}
    mean = lines["cache=plain", "mean TTFT"]
    assert mean == ["4.10 s", "4.10 s ± 100 ms", "3.85 s to 4.35 s", "2.4 %", "4.00 s, 4.10 s, 4.20 s"]
    assert lines["cache=cached", "hit rate"][:1] == ["50.0 %"] and ("cache=plain", "hit rate") not in lines
    said = page.text["findings"]
    assert "cache=cached: trial 3 is left out of every figure: did not end." in said
    assert "cache=cached: figures of 2 of 3 trials." in said
    assert page.rows["against"][1][-1].startswith("too few")
    drawn = {box["name"]: box["y"] for box in page.figure("distribution")["data"] if box["type"] == "scatter"}
    # The medians, then the slowest, of nine requests and of the six of two trials.
    assert [round(value, 3) for value in drawn["load"]] == [6.2, 3.1]


def test_the_terminal_has_a_line_a_round_and_as_many_cells_as_fit() -> None:
    rows, samples, cells = run_of()
    known = manifest(cells)

    def shown(columns: int) -> list[str]:
        text = io.StringIO()
        Console(file=text, width=columns).print(render_summary(summarize(known, rows, samples), known))
        return [" ".join(line.split()) for line in text.getvalue().splitlines()]

    wide, narrow = shown(120), shown(40)
    assert "Mean TTFT and hit rate by round, from 0" in wide
    assert "round cache=plain cache=cached" in wide and "1 4.00 s not reported 2.00 s 50.0 %" in wide
    assert "1 4.00 s not reported" in narrow and "1 more cell in the report" in narrow
    assert any(line.startswith("cache=cached against cache=plain: mean TTFT \N{MINUS SIGN}50 %") for line in wide)
