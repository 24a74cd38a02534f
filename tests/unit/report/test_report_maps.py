"""Where a tier pays, and what TTFT is spent on: the figures that answer."""

from __future__ import annotations

import pytest

from harness.report.run.maps import heat_maps, ladder
from harness.report.words import TIMES
from harness.results.summary import summarize
from tests.support.report_runs import cell, manifest, row

CELLS = [
    cell(f"{n},{h}", {"workload.prompt_tokens": n, "workload.hit_rate": h}) for n in (513, 4097) for h in (0.0, 0.5)
]


def test_a_sweep_of_two_axes_is_a_map_with_a_line_where_both_are_equal() -> None:
    ttfts = {"513,0.0": 2.0, "4097,0.0": 1.0, "513,0.5": 0.5, "4097,0.5": 0.125}
    rows = [row("recompute", 1.0, cell=key) for key in ttfts]
    rows += [row("disk", ttft_s, cell=key) for key, ttft_s in ttfts.items()]
    figure = heat_maps(summarize(manifest(CELLS), rows))
    assert figure is not None
    cells, line = figure.data
    # A line of the map for each hit rate, a column for each length, in powers of two.
    assert [list(values) for values in cells.z] == [pytest.approx([-1.0, 0.0]), pytest.approx([1.0, 3.0])]
    assert [list(words) for words in cells.text] == [[f"0.5{TIMES}", f"1.0{TIMES}"], [f"2.0{TIMES}", f"8.0{TIMES}"]]
    assert cells.hovertext[1][1] == (
        f"<b>disk</b> at prompt_tokens=4097, hit_rate=0.5<br>8.0{TIMES} as fast as recompute"
        "<br>typical TTFT 125 ms against 1.00 s"
    )
    assert (line.type, line.contours.start, line.contours.end) == ("contour", 0, 0)
    assert list(figure.layout.xaxis.ticktext) == ["513", "4097"]


def test_where_one_side_always_wins_there_is_no_line_and_gaps_stay_gaps() -> None:
    rows = [row("recompute", 1.0, cell=each.key) for each in CELLS]
    rows += [row("disk", 0.5, cell=each.key) for each in CELLS[:3]]
    figure = heat_maps(summarize(manifest(CELLS), rows))
    assert figure is not None
    (cells,) = figure.data
    assert cells.z[1][1] is None
    assert cells.hovertext[1][1] == "disk: not measured"


def test_a_sweep_of_one_axis_has_no_map() -> None:
    cells = [cell(str(n), {"n": n}) for n in (1, 2)]
    assert heat_maps(summarize(manifest(cells), [row("gpu", 0.1, cell=each.key) for each in cells])) is None


def test_a_sweep_that_ended_before_its_first_row_has_no_map() -> None:
    assert heat_maps(summarize(manifest(CELLS), [])) is None


def test_the_ladder_adds_up_to_each_state_s_ttft() -> None:
    means = {"recompute": 3.0, "gpu": 0.1, "cpu": 0.15, "disk": 0.25, "disk_cold": 0.75}
    figure = ladder(summarize(manifest(), [row(tier, ttft_s) for tier, ttft_s in means.items()]))
    assert figure is not None
    bars = [trace for trace in figure.data if trace.type == "bar"]
    states = list(bars[0].y)
    for place, state in enumerate(states):
        assert sum(bar.x[place] for bar in bars) == pytest.approx(1000 * means[state])
    added = {bar.name: dict(zip(states, bar.x, strict=True)) for bar in bars}
    assert list(added) == [
        "first token with the prefix in the GPU", "prefill of the prefix", "load: CPU RAM",
        "load: disk, page cache warm", "load: disk, page cache cold",
    ]  # fmt: skip
    assert added["load: disk, page cache cold"] == pytest.approx(
        {"recompute": 0.0, "gpu": 0.0, "cpu": 0.0, "disk": 0.0, "disk_cold": 500.0}
    )


def test_a_step_that_costs_less_than_none_is_left_out() -> None:
    figure = ladder(summarize(manifest(), [row(t, s) for t, s in (("gpu", 0.1), ("cpu", 0.3), ("disk", 0.2))]))
    assert figure is not None
    assert list(figure.data[0].y) == ["gpu", "cpu"]
    assert ladder(summarize(manifest(), [row("recompute", 3.0), row("disk", 0.2)])) is None
