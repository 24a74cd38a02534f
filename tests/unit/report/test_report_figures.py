"""The figures hold exactly what the rows say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from harness.records import HostSample
from harness.report import style
from harness.report.axes import cell_labels, panels, varied_axes
from harness.report.run import figures
from harness.report.run.timeline import slowest, timeline
from harness.results.manifest import CellEntry
from harness.results.summary import CellFigures, Summary, summarize
from tests.support.report_runs import cell, manifest, row, sample
from traces.request import RequestRecord


def summary_of(rows: Sequence[RequestRecord], cells: Sequence[CellEntry] = ()) -> Summary:
    return summarize(manifest(cells), rows)


def plain(cells: Sequence[CellEntry]) -> list[CellFigures]:
    """As a summary holds them."""
    return summary_of([], cells).cells


def traces(figure: Any) -> dict[str, Any]:
    return {trace.name: trace for trace in figure.data}


SWEEP = [cell(f"n={n}", {"workload.prompt_tokens": n}) for n in (513, 4097)]
GRID = [cell(f"{b},{h}", {"cache.backend": b, "workload.hit_rate": h}) for b in ("fs", "fs_native") for h in (0.5, 1.0)]


def test_a_sweep_runs_along_its_axis_with_intervals() -> None:
    rows = [row("gpu", t, cell="n=513") for t in (0.009, 0.01, 0.011)]
    rows += [row("gpu", t, cell="n=4097") for t in (0.09, 0.1, 0.11)]
    rows += [row("recompute", t, cell="n=4097") for t in (2.9, 3.1)]
    figure = figures.ttft_by_axis(summary_of(rows, SWEEP))
    gpu, recompute = traces(figure)["gpu"], traces(figure)["recompute"]
    assert list(gpu.x) == [513, 4097]
    assert list(recompute.x) == [4097]
    assert gpu.y == pytest.approx([10.0, 100.0])
    # Three samples: Student's t of two degrees of freedom (4.3027) times 1 ms over the root of 3. Two say nothing.
    assert gpu.error_y.array == pytest.approx([2.48413, 24.8413], rel=1e-4)
    assert recompute.error_y.array == (None,)
    assert figure.layout.yaxis.title.text == "mean TTFT (ms)"
    assert (figure.layout.yaxis.type, figure.layout.xaxis.type) == ("log", "log")
    assert [each.line.color for each in (gpu, recompute)] == [style.color_of("gpu"), style.color_of("recompute")]


def test_without_a_sweep_tiers_are_lines_in_their_order_with_their_values() -> None:
    figure = figures.ttft_by_tier(summary_of([row("disk", 2.0), row("gpu", 1.0), row("recompute", 3.0)]))
    assert [(trace.name, list(trace.x), list(trace.text)) for trace in figure.data] == [
        ("recompute", [3.0], ["3.00 s"]),
        ("gpu", [1.0], ["1.00 s"]),
        ("disk", [2.0], ["2.00 s"]),
    ]
    assert figure.data[0].error_x.array[0] is None
    assert figure.data[0].hovertext[0].endswith("median 3.00 s, slowest 3.00 s<br>n = 1")
    assert figure.layout.xaxis.title.text == "mean TTFT (s)"
    assert list(figure.layout.yaxis.categoryarray) == ["disk", "gpu", "recompute"]


def test_two_axes_give_a_panel_for_each_value_of_the_other() -> None:
    rows = [row("gpu", 0.01 * (1 + place), cell=each.key) for place, each in enumerate(GRID)]
    figure = figures.ttft_by_axis(summary_of(rows, GRID))
    assert [note.text for note in figure.layout.annotations] == ["backend=fs", "backend=fs_native"]
    assert [list(trace.x) for trace in figure.data] == [[0.5, 1.0], [0.5, 1.0]]
    assert [value for trace in figure.data for value in trace.y] == pytest.approx([10.0, 20.0, 30.0, 40.0])
    assert [trace.showlegend for trace in figure.data] == [True, False]


def test_names_along_x_are_categories_in_the_sweeps_order() -> None:
    cells = [cell(name, {"cache.backend": name}) for name in ("zfs", "ext4")]
    figure = figures.ttft_by_axis(summary_of([row("disk", 0.1, cell=name) for name in ("zfs", "ext4")], cells))
    assert figure.layout.xaxis.type == "category"
    assert list(figure.layout.xaxis.categoryarray) == ["zfs", "ext4"]
    # Between two names there is nothing that a line could stand for.
    assert [trace.mode for trace in figure.data] == ["markers"]
    assert figure.layout.yaxis.rangemode == "tozero"


def test_more_panels_than_fit_are_counted() -> None:
    cells = [cell(f"{n},{k}", {"n": n, "k": f"k{k}"}) for k in range(20) for n in (1, 2)]
    figure = figures.ttft_by_axis(summary_of([row("gpu", 0.1, cell=each.key) for each in cells], cells))
    assert len(figure.data) == style.MAX_PANELS
    assert figure.layout.meta["note"] == "The first 12 of 20 panels are drawn."


def test_an_axis_with_one_value_is_not_varied_and_alike_names_stay_whole() -> None:
    cells = [cell(str(n), {"a.size": n, "b.size": 1}) for n in (1, 2)]
    assert [(axis.name, axis.values) for axis in varied_axes(plain(cells))] == [("a.size", (1, 2))]
    assert cell_labels(plain(cells)) == {"1": "a.size=1, b.size=1", "2": "a.size=2, b.size=1"}
    axis, found = panels(plain(cells))
    assert axis is not None
    assert (axis.key, [panel.title for panel in found]) == ("a.size", [""])


def test_a_distribution_holds_only_rows_that_count() -> None:
    rows = [row("gpu", t) for t in (0.3, 0.1, 0.2, 0.4)]
    rows += [row("gpu", 9.0, verdict="contradicted"), row("gpu", None)]
    (curve,) = figures.distribution(rows, {}).data
    assert curve.name == "gpu (n=4)"
    assert curve.x == pytest.approx([100.0, 200.0, 300.0, 400.0])
    assert curve.y == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_a_long_distribution_is_thinned_to_its_true_ranks() -> None:
    figure = figures.distribution([row("gpu", n / 1000) for n in range(1, 5001)], {})
    (curve,) = figure.data
    assert len(curve.x) == style.MAX_CURVE_POINTS
    assert np.allclose(curve.x, np.asarray(curve.y) * 5000.0)
    assert curve.y[-1] == 1.0
    assert "1,000" in figure.layout.meta["note"]


def test_several_cells_are_boxes_of_their_quartiles() -> None:
    rows = [row("gpu", n / 10, cell="n=513") for n in range(1, 6)] + [row("gpu", 1.0, cell="n=4097")]
    box, medians, slowest = figures.distribution(rows, cell_labels(plain(SWEEP))).data
    assert list(box.x) == ["prompt_tokens=513", "prompt_tokens=4097"]
    assert [box.q1[0], box.median[0], box.q3[0]] == pytest.approx([200.0, 300.0, 400.0])
    assert [box.lowerfence[0], box.upperfence[0]] == pytest.approx([120.0, 480.0])
    # The library's own tooltip would call the whisker's end 'max': the marks tell, in words with units.
    assert box.hoverinfo == "skip"
    assert (medians.y[0], slowest.y[0]) == pytest.approx((300.0, 500.0))
    assert medians.hovertext == slowest.hovertext
    assert medians.hovertext[0].split("<br>") == [
        "<b>gpu</b>, n = 5", "slowest 500 ms", "p95 480 ms", "quartiles 200 ms to 400 ms", "median 300 ms",
        "p5 120 ms", "fastest 100 ms",
    ]  # fmt: skip


def test_unknown_sources_are_not_zero() -> None:
    known: dict[str, int | None] = {"computed": 1, "gpu": 4096, "cpu": 0, "disk": 0}
    rows = [row("gpu", 0.1, by_tier=known), row("cpu", 0.1, by_tier={"computed": 97})]
    figure = figures.tokens_by_source(rows, {})
    found = {trace.name: list(trace.y) for trace in figure.data}
    assert list(figure.data[0].x) == ["gpu", "cpu"]
    assert found["computed"] == [1.0, 97.0]
    assert found["gpu"] == [4096.0, None]
    assert found["not reported"] == [0.0, 4000.0]
    assert "shared" not in found


def test_rows_left_out_have_their_own_bar() -> None:
    rows = [row("disk", 0.1, by_tier={"computed": 1, "disk": 4096})]
    rows += [row("disk", 0.1, verdict="contradicted", by_tier={"computed": 4097, "disk": 0}), row("disk", None)]
    found = traces(figures.tokens_by_source(rows, {}))
    assert list(found["disk"].x) == ["disk", "disk, contradicted"]
    assert list(found["disk"].y) == [4096.0, 0.0]
    assert list(found["computed"].y) == [1.0, 4097.0]


def test_a_mean_never_mixes_known_with_unknown() -> None:
    rows = [row("gpu", 0.1, by_tier={"gpu": gpu}) for gpu in (4096, None)]
    assert [trace.name for trace in figures.tokens_by_source(rows, {}).data] == ["not reported"]


def test_the_timeline_shows_verdicts_and_errors() -> None:
    rows = [row("gpu", 0.2, at_s=1.0), row("gpu", 0.4, at_s=2.0, verdict="contradicted"), row("gpu", None, at_s=3.0)]
    figure = timeline(rows, {})
    found = traces(figure)
    shown: dict[str, object] = {name: (list(t.x), list(t.y), t.marker.symbol) for name, t in found.items()}
    assert shown == {
        "gpu": ([1.0], pytest.approx([200.0]), "square"),
        "gpu, contradicted": ([2.0], pytest.approx([400.0]), "x"),
        "gpu, error": ([3.0], [0.0], "triangle-down-open"),
    }
    assert found["gpu, error"].text[0] == "gpu-3: timed out"
    # A failed request has no TTFT: it stands in a strip of its own, above the axis of times.
    assert (found["gpu, error"].yaxis, found["gpu"].yaxis) == ("y", "y2")
    assert figure.layout.yaxis.domain[0] > figure.layout.yaxis2.domain[1]
    assert (figure.layout.yaxis.title.text, figure.layout.yaxis.showticklabels) == ("not<br>done", False)


def test_cells_whose_clocks_overlap_are_laid_end_to_end() -> None:
    rows = [row("gpu", 0.5, cell="n=513", at_s=t) for t in (0.0, 1.0)]
    rows += [row("gpu", 0.5, cell="n=4097", at_s=t) for t in (0.0, 1.0)]
    figure = timeline(rows, cell_labels(plain(SWEEP)))
    assert list(figure.data[0].x) == [0.0, 1.0, 1.5, 2.5]
    assert "end to end" in figure.layout.meta["note"]
    apart = [row("gpu", 0.5, cell="n=513", at_s=0.0), row("gpu", 0.5, cell="n=4097", at_s=7.0)]
    assert list(timeline(apart, {}).data[0].x) == [0.0, 7.0]


def test_requests_in_flight_of_a_free_load() -> None:
    rows = [row(None, 1.0, at_s=0.0), row(None, 2.0, at_s=0.5), row(None, 1.0, at_s=1.0), row(None, None, at_s=1.2)]
    flight = traces(timeline(rows, {}))["in flight"]
    # At 1.0 s the first one ends as the third begins; the one that failed has no end and is not counted.
    assert list(flight.x) == [0.0, 0.5, 1.0, 1.0, 2.0, 2.5]
    assert list(flight.y) == [1, 2, 1, 2, 1, 0]


def test_a_long_load_keeps_the_peak_in_flight() -> None:
    rows = [row(None, 0.5, at_s=float(n)) for n in range(5000)] + [
        row(None, 0.1, at_s=2500.2 + n / 100) for n in range(3)
    ]
    flight = traces(timeline(rows, {}))["in flight"]
    assert len(flight.x) <= style.MAX_BINS
    assert max(flight.y) == 4


def test_thinning_is_even_per_tier_and_said() -> None:
    rows = [row(("gpu", "cpu")[n % 2], 0.1, at_s=float(n)) for n in range(20_000)]
    figure = timeline(rows, {})
    drawn = {trace.name: len(trace.x) for trace in figure.data}
    # 200 are the slowest 1 %, all of one tier or of both; of each tier's others every fourth is drawn.
    assert drawn.keys() == {"gpu", "cpu"} and min(drawn.values()) >= 2475
    assert sum(drawn.values()) == 200 + 19_800 // 4
    assert figure.layout.meta["note"] == (
        "5,150 of 20,000 requests are drawn: the slowest 1% and all that failed or prove nothing; the others evenly"
        " chosen. The figures use all."
    )
    assert figure == timeline(rows, {})


def test_thinning_never_drops_the_slowest_nor_what_failed() -> None:
    # Every one of these stands where a stride of two or more would step over it.
    rows = [row(None, 0.1, at_s=float(n)) for n in range(20_000)]
    slow = {7_001 + 2 * n: 5.0 + n for n in range(10)}
    for place, ttft_s in slow.items():
        rows[place] = row(None, ttft_s, at_s=float(place))
    for place in (31, 33, 35):
        rows[place] = row(None, None, at_s=float(place))
    found = traces(timeline(rows, {}))
    assert sorted(found["load"].y)[-10:] == pytest.approx(sorted(slow.values()))
    assert list(found["load, error"].x) == [31.0, 33.0, 35.0]
    assert len(found["load"].x) < 7_000


def test_a_dot_of_a_slow_request_knows_its_place_among_them() -> None:
    rows = [row(None, ttft_s, at_s=float(n)) for n, ttft_s in enumerate((0.2, 0.9, 0.4))]
    assert [each.id for each in slowest(rows)] == ["None-1", "None-2", "None-0"]
    assert list(traces(timeline(rows, {}))["load"].customdata) == [2, 0, 1]


def test_host_noise_leaves_out_what_was_not_said() -> None:
    samples = [sample("gpu", n, host=HostSample(steal_share=s)) for n, s in enumerate((0.1, None, 0.3))]
    (steal,) = figures.host_noise(samples).data
    assert (steal.name, list(steal.x), list(steal.y)) == ("steal", [1, 3], [0.1, 0.3])


def test_host_noise_shows_the_memory_that_the_host_had_taken() -> None:
    samples = [sample("gpu", n, host=HostSample(taken_share=share)) for n, share in enumerate((None, 0.0, 0.45))]
    (taken,) = figures.host_noise(samples).data
    assert (taken.name, list(taken.y)) == ("memory in use that the host had taken", [0.0, 0.45])


def test_text_from_outside_is_escaped_in_labels() -> None:
    rows = [row("gpu", 0.1, cell=name, id="<img src=x>") for name in ("<b>a</b>", "c")]
    cells = [cell(name, {"k": name}) for name in ("<b>a</b>", "c")]
    means, dots = figures.ttft_by_axis(summary_of(rows, cells)), timeline(rows, cell_labels(plain(cells)))
    assert list(means.data[0].x) == ["&lt;b&gt;a&lt;/b&gt;", "c"]
    assert dots.data[0].text[0] == "&lt;img src=x&gt;: TTFT 100 ms"
