"""Where a tier pays along one axis, what a load trades for its rate, and the page of `harness worth`."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.commands.worth import worth
from harness.report.run.pays import along, break_even, speedup_lines, trade, worth_lines
from harness.results.folder import read_rows, read_samples
from harness.results.manifest import read_manifest
from harness.results.summary import FREE_LOAD, Summary, summarize
from harness.results.worth import is_worth, judge
from tests.support.report_runs import cell, manifest, row

LENGTHS = [cell(str(n), {"workload.prompt_tokens": n}) for n in (129, 513, 2049)]


def swept(*ratios: float, spread: float = 0.01) -> Summary:
    """Three samples a side; recompute takes 1 s, disk 1 s over the ratio."""
    rows = []
    for each, ratio in zip(LENGTHS, ratios, strict=True):
        for sample in range(3):
            off = 1 + spread * (sample - 1)
            rows += [row("recompute", off, cell=each.key, sample=sample)]
            rows += [row("disk", 1 / (ratio * off), cell=each.key, sample=sample)]
    return summarize(manifest(LENGTHS), rows)


def test_break_even_lies_between_neighbours_whose_intervals_leave_no_doubt() -> None:
    summary = swept(0.5, 2.0, 8.0)
    figure = speedup_lines(summary)
    assert figure is not None
    (line,) = figure.data
    assert list(line.x) == [129, 513, 2049] and list(line.y) == pytest.approx([0.5, 2.0, 8.0], rel=1e-3)
    assert all(up > 0 and down > 0 for up, down in zip(line.error_y.array, line.error_y.arrayminus, strict=True))
    assert [shape.y0 for shape in figure.layout.shapes] == [1]
    assert break_even(along(summary)) == ["disk, page cache warm: breaks even between 129 and 513."]


def test_an_interval_over_1_says_nothing_of_break_even() -> None:
    assert break_even(along(swept(0.97, 1.03, 1.05, spread=0.2))) == []
    assert break_even(along(swept(2.0, 4.0, 8.0))) == []


def test_other_sweeps_have_no_such_lines() -> None:
    two = [cell(f"{n},{h}", {"workload.prompt_tokens": n, "workload.hit_rate": h}) for n in (1, 2) for h in (0, 1)]
    rows = [row(tier, 1.0, cell=each.key) for each in two for tier in ("recompute", "disk")]
    assert speedup_lines(summarize(manifest(two), rows)) is None
    names = [cell(name, {"storage.device.file_system": name}) for name in ("ext4", "xfs")]
    rows = [row(tier, 1.0, cell=each.key) for each in names for tier in ("recompute", "disk")]
    assert speedup_lines(summarize(manifest(names), rows)) is None


def test_a_load_that_another_beats_in_both_is_an_open_mark() -> None:
    cells = [cell(str(n), {"workload.concurrency": n}) for n in (1, 2, 4)]
    rows = []
    # Of 4 at once each takes longer, and no more are completed than of 2 at once.
    for each, (gap_s, ttft_s) in zip(cells, ((1.0, 0.1), (0.5, 0.2), (0.6, 0.4)), strict=True):
        rows += [row(None, ttft_s, cell=each.key, id=f"{each.key}-{n}", at_s=n * gap_s, sample=0) for n in range(10)]
    summary = summarize(manifest(cells), rows)
    assert set(summary.cells[0].tiers) == {FREE_LOAD}
    figure = trade(summary)
    assert figure is not None
    (line,) = figure.data
    assert list(line.marker.symbol) == ["circle", "circle", "circle-open"]
    assert list(line.text) == ["1", "2", "4"] and list(line.y) == pytest.approx([100, 200, 400])
    assert trade(summarize(manifest(cells[:1]), [r for r in rows if r.cell == "1"])) is None


GOALS = ["ttft_p90<300ms", "throughput>1.5requests/s", "e2e_mean<1s"]


def test_a_load_s_chart_reaches_to_p90_and_shows_the_goals() -> None:
    config = {"measure": {"goals": GOALS}}
    cells = [cell(str(n), {"workload.concurrency": n}, config=config) for n in (1, 2)]
    rows = [
        row(None, ttft_s * (1 + n / 10), cell=each.key, id=f"{each.key}-{n}", at_s=n * gap_s, sample=0)
        for each, gap_s, ttft_s in zip(cells, (1.0, 0.5), (0.1, 0.2), strict=True)
        for n in range(20)
    ]
    summary = summarize(manifest(cells), rows)
    figure = trade(summary)
    assert figure is not None
    line, *goals = figure.data
    ttfts = [each.tiers[FREE_LOAD].metrics["ttft_s"] for each in summary.cells]
    assert [y + up for y, up in zip(line.y, line.error_y.array, strict=True)] == pytest.approx(
        [ttft.p90 * 1000 for ttft in ttfts if ttft]
    )
    assert [goal.text[0] for goal in goals] == ["goal ttft_p90&lt;300ms", "goal throughput&gt;1.5requests/s"]
    assert set(goals[0].y) == {300.0} and set(goals[1].x) == {1.5}
    quick, full = line.hovertext
    assert "goal ttft_p90&lt;300ms: met" in quick and "goal throughput&gt;1.5requests/s: missed" in quick
    assert "goal ttft_p90&lt;300ms: missed" in full and "goal throughput&gt;1.5requests/s: met" in full
    assert "goal e2e_mean&lt;1s: met" in full and "p90 " in full


def test_a_p90_that_too_few_requests_carry_has_no_whisker() -> None:
    cells = [cell(str(n), {"workload.concurrency": n}) for n in (1, 2)]
    rows = [row(None, 0.1 + n, cell=each.key, at_s=float(n), sample=0) for each in cells for n in range(5)]
    figure = trade(summarize(manifest(cells), rows))
    assert figure is not None and list(figure.data[0].error_y.array) == [0, 0]


def test_a_page_of_worth_says_its_answer_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["measure.samples=2", "measure.until=null"]
    folder = tmp_path / "run"
    assert worth(Path("quickstart"), engine="sim", tokens=[64, 512], overrides=few, out=folder) == 0
    said = capsys.readouterr().out
    page = (folder / "report.html").read_text()
    made = read_manifest(folder)
    found = judge(made, read_rows(folder), read_samples(folder))
    [line] = [line for line in said.splitlines() if line.startswith("disk, page cache cold: ")]
    assert is_worth(made) and page.index("<h2>Is it worth it?</h2>") < page.index("<h2>Findings</h2>")
    assert f'<li class="answer">{line}</li>' in page and page.count('class="answer"') == 1
    figure = worth_lines(found)
    assert figure is not None and {trace.name for trace in figure.data} == {point.state for point in found.points}
    assert "Words on this page" in page and "The prefix lies in: CPU RAM." in page
