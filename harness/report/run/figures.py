"""Plotly figures from rows, samples and summaries: pure functions, one a question.

A figure that draws less than everything says so in `layout.meta["note"]`. Text from outside is escaped: plotly reads
a part of HTML in its labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from harness.records import Sample
from harness.report.axes import Axis, Panel, panels, value_text
from harness.report.style import (
    GREY,
    MAX_CELLS,
    MAX_CURVE_POINTS,
    MAX_DOTS,
    MAX_PANELS,
    color_of,
    finish,
    safe,
    symbol_of,
    thinning_note,
    wide,
)
from harness.report.words import NOT_REPORTED, fitting_unit, tier_order
from harness.results.summary import FREE_LOAD, CellFigures, Latency, Summary, core_slower, counted
from traces.request import RequestRecord
from traces.tiers import sources


def ttft_by_axis(summary: Summary, metric: str = "ttft_s") -> go.Figure:
    """Mean with its 95 % interval per tier: along the first numeric axis, a panel for each point of the others."""
    axis, all_panels = panels(summary.cells)
    shown = all_panels[:MAX_PANELS]
    means = [f.mean for panel in shown for cell in panel.cells for f in _metrics(cell, metric)]
    unit, factor = fitting_unit(means)
    columns = 2 if len(shown) in (2, 4) else min(len(shown), 3)
    lines = -(-len(shown) // columns)
    figure = make_subplots(
        rows=lines,
        cols=columns,
        vertical_spacing=0.28 / lines,
        subplot_titles=[safe(panel.title) for panel in shown] if len(shown) > 1 else None,
        shared_yaxes="all",
    )
    tiers = tier_order(tier for panel in shown for cell in panel.cells for tier in cell.tiers)
    for number, panel in enumerate(shown):
        place = {"row": number // columns + 1, "col": number % columns + 1}
        for tier in tiers:
            trace = _mean_trace(panel, axis, tier, metric, factor)
            figure.add_trace(trace.update(showlegend=not number, legendgroup=tier), **place)
    _style_x(figure, axis)
    figure.update_annotations(font_size=12)
    figure.update_yaxes(type="log" if wide(means) else "linear")
    figure.update_yaxes(title=f"mean {metric.removesuffix('_s').upper()} ({unit})", col=1)
    note = "" if len(shown) == len(all_panels) else f"The first {len(shown)} of {len(all_panels)} panels are drawn."
    return finish(figure, note, height=280 * lines + 120)


def _metrics(cell: CellFigures, metric: str) -> list[Latency]:
    return [figures for tier in cell.tiers.values() if (figures := tier.metrics[metric])]


def _mean_trace(panel: Panel, axis: Axis | None, tier: str, metric: str, factor: float) -> go.Scatter:
    """One tier's line in one panel; without an axis a point over the tier's own name."""
    own = [(cell, cell.tiers[tier].metrics[metric]) for cell in panel.cells if tier in cell.tiers]
    found = [(cell, figures) for cell, figures in own if figures]
    halves = [None if f.mean_high is None else (f.mean_high - f.mean) * factor for _, f in found]
    return go.Scatter(
        x=[safe(tier) if axis is None else _x_value(axis, cell) for cell, _ in found],
        y=[figures.mean * factor for _, figures in found],
        error_y={"type": "data", "array": halves, "thickness": 1.5, "width": 5},
        name=safe(tier),
        mode="markers" if axis is None else "lines+markers",
        marker={"color": color_of(tier), "symbol": symbol_of(tier), "size": 9},
        line={"color": color_of(tier), "width": 2},
        customdata=[[figures.n, figures.p50 * factor] for _, figures in found],
        hovertemplate="%{x}: %{y:.4g}<br>n = %{customdata[0]}, median %{customdata[1]:.4g}"
        "<extra>%{fullData.name}</extra>",
    )


def _x_value(axis: Axis, cell: CellFigures) -> Any:
    value = cell.overrides.get(axis.key)
    return value if axis.numeric else safe(value_text(value))


def _style_x(figure: go.Figure, axis: Axis | None) -> None:
    if axis is None:
        figure.update_xaxes(type="category")
        return
    figure.update_xaxes(title={"text": safe(axis.name), "standoff": 8})
    if not axis.numeric:
        order = [safe(value_text(value)) for value in axis.values]
        figure.update_xaxes(type="category", categoryorder="array", categoryarray=order)
        return
    figure.update_xaxes(type="log" if wide(axis.values) else "linear")
    if len(axis.values) <= MAX_PANELS:
        values = sorted(axis.values)
        figure.update_xaxes(tickmode="array", tickvals=values, ticktext=[f"{value:,}" for value in values])


def distribution(rows: Sequence[RequestRecord], labels: Mapping[str, str]) -> go.Figure:
    """TTFT of the rows that count: cumulative shares for one cell, boxes for several."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if counted(row) and row.ttft_s is not None:
            groups.setdefault((row.cell, row.expected_tier or FREE_LOAD), []).append(row.ttft_s)
    cells = list(dict.fromkeys(cell for cell, _ in groups))
    sorted_groups = {key: np.sort(np.asarray(values)) for key, values in groups.items()}
    ends = [float(end) for values in sorted_groups.values() for end in (values[0], values[-1])]
    unit, factor = fitting_unit(ends)
    scale = "log" if wide(ends) else "linear"
    if len(cells) <= 1:
        return _cumulative(sorted_groups, unit, factor, scale)
    return _boxes(sorted_groups, cells, labels, unit, factor, scale)


def _cumulative(groups: Mapping[tuple[str, str], Any], unit: str, factor: float, scale: str) -> go.Figure:
    figure, thinned = go.Figure(), False
    by_tier = {tier: values for (_, tier), values in groups.items()}
    for tier in tier_order(by_tier):
        values = by_tier[tier]
        # The i-th smallest of n is where the share reaches i/n; of many values evenly spread ranks are kept.
        ranks = np.unique(np.linspace(1, len(values), min(len(values), MAX_CURVE_POINTS)).astype(int))
        thinned |= len(ranks) < len(values)
        figure.add_scatter(
            x=values[ranks - 1] * factor,
            y=ranks / len(values),
            name=f"{safe(tier)} (n={len(values):,})",
            mode="lines",
            line={"shape": "hv", "color": color_of(tier), "width": 2},
            hovertemplate="%{y:.1%} within %{x:.4g}<extra>%{fullData.name}</extra>",
        )
    figure.update_xaxes(title=f"TTFT ({unit})", type=scale)
    figure.update_yaxes(title="share of requests", tickformat=".0%", range=[0, 1.02])
    return finish(figure, f"Curves are drawn through {MAX_CURVE_POINTS:,} of their values." if thinned else "")


def _boxes(
    groups: Mapping[tuple[str, str], Any],
    cells: Sequence[str],
    labels: Mapping[str, str],
    unit: str,
    factor: float,
    scale: str,
) -> go.Figure:
    figure, shown = go.Figure(), cells[:MAX_CELLS]
    for tier in tier_order(tier for _, tier in groups):
        own = [(cell, groups[cell, tier]) for cell in shown if (cell, tier) in groups]
        low, q1, median, q3, high = (
            [float(np.quantile(values, share)) * factor for _, values in own] for share in (0.05, 0.25, 0.5, 0.75, 0.95)
        )
        figure.add_box(
            x=[_stacked(labels.get(cell, cell)) for cell, _ in own],
            lowerfence=low,
            q1=q1,
            median=median,
            q3=q3,
            upperfence=high,
            name=safe(tier),
            marker={"color": color_of(tier)},
        )
    figure.update_layout(boxmode="group")
    figure.update_xaxes(type="category", automargin=True)
    figure.update_yaxes(title=f"TTFT ({unit})", type=scale)
    note = "Boxes are quartiles, whiskers the 5th and 95th percentile."
    if len(shown) < len(cells):
        note += f" The first {len(shown)} of {len(cells)} cells are drawn."
    return finish(figure, note)


def tokens_by_source(rows: Sequence[RequestRecord], labels: Mapping[str, str]) -> go.Figure:
    """Prompt tokens a request by where their KV came from; rows that a tier's figures leave out in bars of their own.

    What the named sources do not add up to is drawn as 'not reported': an unknown is not a zero.
    """
    groups: dict[tuple[str, str, str], list[RequestRecord]] = {}
    for row in rows:
        if row.error is None:
            left_out = "" if counted(row) else f", {row.verdict or 'no verdict'}"
            groups.setdefault((row.cell, row.expected_tier or FREE_LOAD, left_out), []).append(row)
    cells = {cell: place for place, cell in enumerate(dict.fromkeys(cell for cell, _, _ in groups))}
    order = {tier: place for place, tier in enumerate(tier_order(tier for _, tier, _ in groups))}
    keys = [key for key in groups if cells[key[0]] < MAX_CELLS]
    keys.sort(key=lambda key: (cells[key[0]], order[key[1]], key[2]))
    x: list[Any] = [safe(tier + left_out) for _, tier, left_out in keys]
    if len(cells) > 1:
        x = [[_stacked(labels.get(cell, cell)) for cell, _, _ in keys], x]
    figure, left = go.Figure(), [_mean([row.prompt_tokens for row in groups[key]]) for key in keys]
    for source in sources():
        means = [_mean([row.tokens_by_tier.get(source) for row in groups[key]]) for key in keys]
        left = [total - (mean or 0.0) for total, mean in zip(left, means, strict=True)]
        if any(mean is not None for mean in means):
            figure.add_bar(x=x, y=means, name=source, marker={"color": color_of(source)})
    if any(rest > 1e-9 for rest in left):
        pattern = {"shape": "/", "fgcolor": GREY, "bgcolor": "rgba(0,0,0,0)"}
        rest = [max(0.0, value) for value in left]
        figure.add_bar(x=x, y=rest, name=NOT_REPORTED, marker={"color": GREY, "pattern": pattern})
    # One or two bars alone would fill the page.
    figure.update_traces(width=0.4 if len(keys) < 3 else None)
    figure.update_layout(barmode="stack", showlegend=True, legend={"traceorder": "normal"})
    figure.update_xaxes(type="multicategory" if len(cells) > 1 else "category", automargin=True)
    figure.update_yaxes(title="prompt tokens a request")
    note = f"The first {MAX_CELLS} of {len(cells)} cells are drawn." if len(cells) > MAX_CELLS else ""
    return finish(figure, note)


def _stacked(label: str) -> str:
    """A cell's label with a line for each axis: many cells leave little room side by side."""
    return safe(label).replace(", ", "<br>")


def _mean(values: Sequence[int | None]) -> Any:
    """None where no row has the figure, or only some have: a mean never mixes the known with the unknown."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def host_noise(samples: Sequence[Sample]) -> go.Figure:
    """Steal and other processes' CPU around each sample, in the order measured, as shares of all cores' time; and how
    much slower the engine's core was than at its best."""
    figure = go.Figure()
    chosen = list(range(0, len(samples), -(-len(samples) // MAX_DOTS) or 1))
    fields = {
        "steal": ([s.host.steal_share for s in samples], "#D55E00"),
        "other processes": ([s.host.foreign_cpu_share for s in samples], "#2B83C6"),
        "the engine's core, slower than at its best": (core_slower(samples), "#6A8F3C"),
    }
    for name, (values, color) in fields.items():
        points = [(place + 1, values[place]) for place in chosen]
        points = [(place, value) for place, value in points if value is not None]
        if points:
            figure.add_scatter(
                x=[place for place, _ in points],
                y=[value for _, value in points],
                name=name,
                mode="markers",
                marker={"color": color, "size": 5},
            )
    figure.update_xaxes(title="sample, in the order measured")
    figure.update_yaxes(title="share", tickformat=".1%", rangemode="tozero")
    return finish(figure, thinning_note(len(chosen), len(samples), "sample"), height=260)
