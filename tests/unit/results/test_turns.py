"""Figures by turn, against values worked out by hand from a few rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.results.folder import write_summary
from harness.results.summary import CellFigures, read_summary, summarize
from tests.support.report_runs import cell, manifest, row
from traces.request import RequestRecord


def asked(turn: int, ttft_s: float | None, cached: int | None, prompt: int = 100, **fields: Any) -> RequestRecord:
    """A request of a conversation: its own `turn`, `prompt` tokens of which `cached` hit, half GPU and half CPU RAM."""
    half = None if cached is None else cached // 2
    by_tier = {} if cached is None else {"computed": prompt - cached, "gpu": half, "cpu": half, "disk": 0}
    fields = {"prompt_tokens": prompt, "cached_tokens": cached, "session": "a", "turn": turn} | fields
    return row(None, ttft_s, by_tier=by_tier, **fields)


def figures_of(rows: list[RequestRecord]) -> CellFigures:
    return summarize(manifest(), rows).cells[0]


def test_each_turns_figures_are_sums_and_percentiles_of_its_own_rows() -> None:
    """Hits are Σ cached / Σ prompt: a mean of the requests' rates would give 0.3 for turn 1."""
    rows = [asked(0, 1.0, 0), asked(0, 3.0, 0)]
    rows += [asked(1, 0.1, 60), asked(1, 0.2, 0, prompt=300)]
    first, second = figures_of(rows).turns
    assert (first.turn, first.n, first.prompt_tokens, first.cached_tokens, first.hit_rate) == (0, 2, 200, 0, 0.0)
    assert first.ttft_s is not None and (first.ttft_s.mean, first.ttft_s.p50) == (2.0, 2.0)
    assert first.ttft_s.p95 == pytest.approx(2.9)
    assert (second.turn, second.n, second.prompt_tokens, second.hit_rate) == (1, 2, 400, 0.15)
    shares = {"computed": 0.85, "gpu": 0.075, "cpu": 0.075, "pool": None, "disk": 0.0, "remote": None}
    assert second.shares == shares
    assert second.ttft_s is not None and second.ttft_s.mean == pytest.approx(0.15)


def test_failed_and_unfinished_requests_are_counted_beside_the_figures() -> None:
    rows = [asked(0, 1.0, 0), asked(1, 0.5, 50), asked(1, None, None), asked(2, None, None)]
    found = figures_of(rows).turns
    assert [(turn.turn, turn.n, turn.left_out) for turn in found] == [(0, 1, 0), (1, 1, 1), (2, 0, 1)]
    assert found[1].hit_rate == 0.5, "the failed one is in no sum"
    assert (found[2].ttft_s, found[2].hit_rate, found[2].shares["gpu"]) == (None, None, None)


def test_hits_that_one_answer_does_not_report_are_unknown_not_zero() -> None:
    [_, second] = figures_of([asked(0, 1.0, 0), asked(1, 1.0, 50), asked(1, 1.0, None)]).turns
    assert (second.cached_tokens, second.hit_rate, set(second.shares.values())) == (None, None, {None})
    assert second.n == 2, "its TTFT counts all the same"


def test_a_load_without_second_turns_has_no_figures_by_turn(tmp_path: Path) -> None:
    found = summarize(manifest(), [asked(0, 1.0, 0), row(None, 2.0)])
    assert found.cells[0].turns == ()
    write_summary(tmp_path, found)
    assert "turns" not in json.loads((tmp_path / "summary.json").read_text())["cells"][0]


def test_turns_are_each_cells_own_and_come_back_from_the_file(tmp_path: Path) -> None:
    cells = [cell("a", {"c": "a"}), cell("b", {"c": "b"})]
    rows = [asked(turn, ttft_s, 0, cell=key) for key, ttft_s in (("a", 1.0), ("b", 2.0)) for turn in (0, 1)]
    written = summarize(manifest(cells), rows)
    means = [[turn.ttft_s.mean for turn in each.turns if turn.ttft_s] for each in written.cells]
    assert means == [[1.0, 1.0], [2.0, 2.0]]
    write_summary(tmp_path, written)
    assert read_summary(tmp_path) == written
