"""A new state, and a new tier, is one entry in traces/tiers.py: nothing else is told of it."""

from pathlib import Path

import pytest

from harness.measure.run import run
from harness.report.refresh import seal
from harness.report.style import GREY, color_of, symbol_of
from harness.results.folder import read_samples
from tests.unit.measure.test_run_loop import Quiet, measured, request
from traces import tiers
from traces.tiers import State, Tier


def test_a_state_of_one_entry_is_placed_proven_sampled_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = State(name="ram", label="RAM, again", served_by="cpu", symbol="star")
    monkeypatch.setattr(tiers, "STATES", (*tiers.STATES[:3], again, *tiers.STATES[3:]))
    measure = {"tiers": ["disk_cold", "ram", "recompute"], "samples": 2}
    folder = run(request(tmp_path, measure=measure), Quiet())
    rows = measured(folder)
    assert [row.expected_tier for row in rows] == ["recompute", "ram", "disk_cold"] * 2
    assert {row.verdict for row in rows} == {"proven"}
    assert [row.tokens_by_tier["cpu"] for row in rows] == [0, 512, 0] * 2
    assert [s.expected.hit_tokens for s in read_samples(folder) if s.tier == "ram"] == [
        {"gpu": 0, "cpu": 512, "disk": 0}
    ] * 2
    assert list(seal(folder).cells[0].tiers) == ["recompute", "ram", "disk_cold"]
    assert symbol_of("ram") == "star" and color_of("ram") not in {GREY, *map(color_of, tiers.tier_names())}
    assert "ram" in (folder / "report.html").read_text()


def test_a_tier_of_one_entry_lies_between_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lent = Tier(name="lent", label="lent RAM", kind="memory")
    state = State(name="lent", label="lent RAM", served_by="lent")
    monkeypatch.setattr(tiers, "TIERS", (*tiers.TIERS[:3], lent, *tiers.TIERS[3:]))
    monkeypatch.setattr(tiers, "STATES", (*tiers.STATES[:4], state, *tiers.STATES[4:]))
    states = ["recompute", "gpu", "cpu", "lent", "disk", "disk_cold"]
    folder = run(request(tmp_path, measure={"tiers": states, "samples": 2}), Quiet())
    rows = measured(folder)
    assert [row.expected_tier for row in rows] == states * 2
    assert {(row.verdict, row.verdict_reason) for row in rows} == {("proven", None)}
    [first, _] = [sample for sample in read_samples(folder) if sample.tier == "lent"]
    assert first.observed.hit_tokens == first.expected.hit_tokens == {"gpu": 0, "cpu": 0, "lent": 512, "disk": 0}
    tokens = seal(folder).cells[0].tiers["lent"].tokens.by_source
    assert (tokens["computed"], tokens["cpu"], tokens["lent"], tokens["disk"]) == (2 * 513, 0, 2 * 512, 0)
    assert '<th scope="col">lent</th>' in (folder / "report.html").read_text()
