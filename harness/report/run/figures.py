"""Plotly figures from rows, samples and summaries: pure functions, one a question.

A figure that draws less than everything says so in `layout.meta["note"]`. Text from outside is escaped: plotly reads
a part of HTML in its labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from harness.records import Sample
from harness.report.axes import Axis, Panel, panels, shortened, value_text
from harness.report.simulated import axis_title, in_figures
from harness.report.style import (
    GREY,
    MAX_BOXES,
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
from harness.report.words import NOT_REPORTED, duration, fitting_unit, mean_with_interval, tier_order
from harness.results.rows import Latency
from harness.results.summary import FREE_LOAD, CellFigures, Summary, core_slower, counted
from traces.request import RequestRecord
from traces.tiers import sources


def ttft_by_tier(summary: Summary) -> go.Figure:
    """Mean TTFT with its 95 % interval in one cell: a line a tier, its value written beside its mark."""
    (cell,) = summary.cells
    found = [(tier, f) for tier in tier_order(cell.tiers) if (f := cell.tiers[tier].metrics["ttft_s"])]
    unit, factor = fitting_unit([figures.mean for _, figures in found])
    figure = go.Figure()
    for tier, figures in found:
        half = None if figures.half_width is None else figures.half_width * factor
        figure.add_scatter(
            x=[figures.mean * factor],
            y=[safe(tier)],
            error_x={"type": "data", "array": [half], "thickness": 1.5, "width": 5},
            mode="markers+text",
            text=[duration(figures.mean)],
            textposition="top center",
            cliponaxis=False,
            marker={"color": color_of(tier), "symbol": symbol_of(tier), "size": 11},
            name=safe(tier),
            hovertext=[_about(tier, figures)],
            hoverinfo="text",
        )
    scale = "log" if wide([figures.mean for _, figures in found]) else "linear"
    figure.update_xaxes(title=f"{in_figures(summary)}mean TTFT ({unit})", type=scale)
    figure.update_xaxes(rangemode="tozero" if scale == "linear" else "normal")
    order = [safe(tier) for tier, _ in reversed(found)]
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=order, automargin=True)
    figure.update_yaxes(range=[-0.5, len(found) - 0.3])
    return finish(figure.update_layout(showlegend=False), "", height=80 + 46 * len(found))


def ttft_by_axis(summary: Summary) -> go.Figure:
    """Mean with its 95 % interval per tier: along the first numeric axis, a panel for each point of the others.

    Points of an axis of names are not joined: there is nothing between them.
    """
    axis, all_panels = panels(summary.cells)
    shown = all_panels[:MAX_PANELS]
    means = [f.mean for panel in shown for cell in panel.cells for f in _ttfts(cell)]
    unit, factor = fitting_unit(means)
    columns = 2 if len(shown) in (2, 4) else min(len(shown), 3)
    lines = -(-len(shown) // columns)
    figure = make_subplots(
        rows=lines,
        cols=columns,
        vertical_spacing=0.28 / lines,
        subplot_titles=[safe(shortened(panel.title, 48)) for panel in shown] if len(shown) > 1 else None,
        shared_yaxes="all",
    )
    tiers = tier_order(tier for panel in shown for cell in panel.cells for tier in cell.tiers)
    for number, panel in enumerate(shown):
        place = {"row": number // columns + 1, "col": number % columns + 1}
        for tier in tiers:
            trace = _mean_trace(panel, axis, tier, factor)
            figure.add_trace(trace.update(showlegend=not number, legendgroup=tier), **place)
    _style_x(figure, axis, axis_title(summary, axis) if axis else "", columns)
    figure.update_annotations(font_size=12)
    scale = "log" if wide(means) else "linear"
    figure.update_yaxes(type=scale, rangemode="tozero" if scale == "linear" else "normal")
    figure.update_yaxes(title=f"{in_figures(summary)}mean TTFT ({unit})", col=1)
    note = "" if len(shown) == len(all_panels) else f"The first {len(shown)} of {len(all_panels)} panels are drawn."
    return finish(figure, note, height=280 * lines + 120, min_width=220 * columns + 80)


def _ttfts(cell: CellFigures) -> list[Latency]:
    return [figures for tier in cell.tiers.values() if (figures := tier.metrics["ttft_s"])]


def _mean_trace(panel: Panel, axis: Axis | None, tier: str, factor: float) -> go.Scatter:
    """One tier's line in one panel; without an axis a point over the tier's own name."""
    own = [(cell, cell.tiers[tier].metrics["ttft_s"]) for cell in panel.cells if tier in cell.tiers]
    found = [(cell, figures) for cell, figures in own if figures]
    halves = [None if f.half_width is None else f.half_width * factor for _, f in found]
    joined = axis is not None and axis.numeric
    return go.Scatter(
        x=[safe(tier) if axis is None else _x_value(axis, cell) for cell, _ in found],
        y=[figures.mean * factor for _, figures in found],
        error_y={"type": "data", "array": halves, "thickness": 1.5, "width": 5},
        name=safe(tier),
        mode="lines+markers" if joined else "markers",
        marker={"color": color_of(tier), "symbol": symbol_of(tier), "size": 9},
        line={"color": color_of(tier), "width": 2},
        hovertext=[_about(tier, figures, _where(axis, cell)) for cell, figures in found],
        hoverinfo="text",
    )


def _where(axis: Axis | None, cell: CellFigures) -> str:
    return "" if axis is None else f"{axis.name}={value_text(cell.overrides.get(axis.key))}"


def _about(tier: str, figures: Latency, where: str = "") -> str:
    """What a mark stands for, in words with units."""
    head = f"<b>{safe(tier)}</b>" + (f" at {safe(where)}" if where else "")
    spread = f"median {duration(figures.p50)}, slowest {duration(figures.max)}"
    return f"{head}<br>mean {mean_with_interval(figures)} (95 %)<br>{spread}<br>n = {figures.n:,}"


def _x_value(axis: Axis, cell: CellFigures) -> Any:
    value = cell.overrides.get(axis.key)
    return value if axis.numeric else safe(shortened(value_text(value)))


def _style_x(figure: go.Figure, axis: Axis | None, title: str, columns: int) -> None:
    """columns: of panels, which share the width."""
    if axis is None:
        figure.update_xaxes(type="category")
        return
    figure.update_xaxes(title={"text": safe(title), "standoff": 8})
    if not axis.numeric:
        order = [safe(shortened(value_text(value))) for value in axis.values]
        figure.update_xaxes(type="category", categoryorder="array", categoryarray=order, automargin=True)
        return
    values = sorted(axis.values)
    scale = "log" if wide(values) and not _evenly(values) else "linear"
    figure.update_xaxes(type=scale)
    if len(values) <= MAX_PANELS:
        shown = _apart([math.log(value) if scale == "log" else value for value in values], 0.03 + 0.06 * columns)
        ticks = [values[place] for place in shown]
        figure.update_xaxes(tickmode="array", tickvals=ticks, ticktext=[f"{value:,}" for value in ticks])


def _evenly(values: Sequence[float]) -> bool:
    steps = np.diff(values)
    return len(steps) > 2 and float(steps.max()) < 1.01 * float(steps.min())


def _apart(places: Sequence[float], share: float) -> list[int]:
    """Which of some ascending places can have a label: those that are a share of the whole beyond the one before."""
    least, shown = share * (places[-1] - places[0]), [0]
    for number, place in enumerate(places[1:], 1):
        if place - places[shown[-1]] >= least:
            shown.append(number)
    return shown


def spreads(rows: Sequence[RequestRecord]) -> bool:
    """Whether some tier's TTFT differs between its rows by more than 1 %: else there is no distribution to draw."""
    ends: dict[tuple[str, str], tuple[float, float]] = {}
    for row in rows:
        if counted(row) and row.ttft_s is not None:
            low, high = ends.get(key := (row.cell, row.expected_tier or FREE_LOAD), (row.ttft_s, row.ttft_s))
            ends[key] = min(low, row.ttft_s), max(high, row.ttft_s)
    return any(high > 1.01 * low for low, high in ends.values())


def mixed_sources(rows: Sequence[RequestRecord]) -> bool:
    """Whether a figure says more than the proof's table: rows left out, tokens of no source, or a tier of several."""
    answered = [row for row in rows if row.error is None]
    if any(not counted(row) or not row.tokens_by_tier for row in answered):
        return bool(answered)
    by_group: dict[tuple[str, str | None], dict[str, int]] = {}
    for row in answered:
        totals = by_group.setdefault((row.cell, row.expected_tier), {})
        for source, tokens in row.tokens_by_tier.items():
            totals[source] = totals.get(source, 0) + (tokens or 0)
    seconds = [(sorted(totals.values())[-2:-1] or [0])[0] / (sum(totals.values()) or 1) for totals in by_group.values()]
    return any(share > 0.02 for share in seconds)


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
            hovertemplate=f"%{{y:.1%}} of requests within %{{x:.3g}} {unit}<extra>%{{fullData.name}}</extra>",
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
    """Quartiles with the 5th and 95th percentile, and the slowest of all as a mark of its own.

    plotly would call a whisker's end 'max': the boxes are silent, and the marks say what each figure is.
    """
    figure, shown = go.Figure(), cells[:MAX_BOXES]
    for tier in tier_order(tier for _, tier in groups):
        own = [(cell, groups[cell, tier]) for cell in shown if (cell, tier) in groups]
        x = [_stacked(labels.get(cell, cell)) for cell, _ in own]
        low, q1, median, q3, high = (
            [float(np.quantile(values, share)) * factor for _, values in own] for share in (0.05, 0.25, 0.5, 0.75, 0.95)
        )
        look = {"name": safe(tier), "legendgroup": tier, "offsetgroup": tier}
        figure.add_box(
            x=x, lowerfence=low, q1=q1, median=median, q3=q3, upperfence=high, hoverinfo="skip",
            marker={"color": color_of(tier)}, **look,
        )  # fmt: skip
        hover = {"hovertext": [_spread(tier, values) for _, values in own], "hoverinfo": "text", "showlegend": False}
        middle = {"color": color_of(tier), "symbol": symbol_of(tier), "size": 8}
        figure.add_scatter(x=x, y=median, mode="markers", marker=middle, **look, **hover)
        largest = [float(values[-1]) * factor for _, values in own]
        top = {"color": color_of(tier), "symbol": f"{symbol_of(tier)}-open", "size": 6}
        figure.add_scatter(x=x, y=largest, mode="markers", marker=top, **look, **hover)
    figure.update_layout(boxmode="group", scattermode="group")
    figure.update_xaxes(type="category", automargin=True)
    figure.update_yaxes(title=f"TTFT ({unit})", type=scale)
    note = "Boxes are quartiles, whiskers the 5th and 95th percentile; the open mark above is the slowest."
    if len(shown) < len(cells):
        note += f" The first {len(shown)} of {len(cells)} cells are drawn; the table has all."
    return finish(figure, note, min_width=70 * len(shown))


def _spread(tier: str, values: Any) -> str:
    low, q1, median, q3, high = (duration(float(np.quantile(values, share))) for share in (0.05, 0.25, 0.5, 0.75, 0.95))
    return (
        f"<b>{safe(tier)}</b>, n = {len(values):,}<br>slowest {duration(float(values[-1]))}<br>p95 {high}<br>"
        f"quartiles {q1} to {q3}<br>median {median}<br>p5 {low}<br>fastest {duration(float(values[0]))}"
    )


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
            hover = "%{y:,.0f} tokens a request<extra>%{fullData.name}</extra>"
            figure.add_bar(x=x, y=means, name=source, marker={"color": color_of(source)}, hovertemplate=hover)
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
    """Steal and other processes' CPU around each sample, in the order measured, as shares of all cores' time; how much
    slower the engine's core was than at its best; and the share of rested memory that the host had taken."""
    figure = go.Figure()
    chosen = list(range(0, len(samples), -(-len(samples) // MAX_DOTS) or 1))
    fields = {
        "steal": ([s.host.steal_share for s in samples], "#B3261E", "x"),
        "other processes": ([s.host.foreign_cpu_share for s in samples], "#3B6FB6", "circle"),
        "the engine's core, slower than at its best": (core_slower(samples), "#6A8F3C", "diamond"),
        "memory in use that the host had taken": ([s.host.taken_share for s in samples], "#8E5BA6", "square"),
    }
    for name, (values, color, symbol) in fields.items():
        points = [(place + 1, values[place]) for place in chosen]
        points = [(place, value) for place, value in points if value is not None]
        if points:
            figure.add_scatter(
                x=[place for place, _ in points],
                y=[value for _, value in points],
                name=name,
                mode="markers",
                marker={"color": color, "symbol": symbol, "size": 6},
                hovertemplate="sample %{x}: %{y:.1%}<extra>%{fullData.name}</extra>",
            )
    figure.update_xaxes(title="sample, in the order measured")
    figure.update_yaxes(title="share", tickformat=".1%", rangemode="tozero")
    return finish(figure, thinning_note(len(chosen), len(samples), "sample"), height=260)
