"""Figures of one side against the other: errors and their band, distributions, residuals, pairs. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from harness.report.axes import value_text
from harness.report.style import (
    GREY,
    MAX_CURVE_POINTS,
    MAX_DOTS,
    MAX_PANELS,
    color_of,
    finish,
    safe,
    thinning_note,
    wide,
)
from harness.report.words import fitting_unit
from harness.validation.equivalence import Figure, PointResult
from harness.validation.points import Point

VERDICT_COLORS = {"pass": "#009E73", "fail": "#D55E00", "not resolvable": "#8A8A8A"}
_BAND = "rgba(0,158,115,0.12)"
_PRIMARY = "ttft_mean_s"
# A point's label, its figures, and the rows of both sides.
Pair = tuple[str, PointResult, Point, Point]


def mean_ttft(figures: Sequence[Figure]) -> Figure | None:
    """The figure that stands for its point."""
    return next((figure for figure in figures if figure.metric == _PRIMARY), None)


def errors(points: Sequence[PointResult], labels: Sequence[str], margin: float, noise: bool = False) -> go.Figure:
    """One line a point: the relative error of its mean TTFT, its interval, and the margin as a band.

    noise: of the reference against itself.
    """
    figure = go.Figure()
    means = [mean_ttft(point.noise if noise else point.figures) for point in points]
    pairs = [(label, f) for label, f in zip(labels, means, strict=True) if f]
    for verdict, color in VERDICT_COLORS.items():
        own = [(label, f, f.error) for label, f in pairs if f.verdict == verdict and f.error is not None]
        figure.add_scatter(
            x=[error for _, _, error in own],
            y=[safe(label) for label, _, _ in own],
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [(error if f.high is None else f.high) - error for _, f, error in own],
                "arrayminus": [error - (error if f.low is None else f.low) for _, f, error in own],
                "thickness": 1.5,
            },
            customdata=[[f.samples, f.reference, f.candidate] for _, f, _ in own],
            hovertemplate="%{y}: %{x:.1%}<br>n = %{customdata[0]},"
            " %{customdata[1]:.4g} s against %{customdata[2]:.4g} s",
            name=verdict,
            mode="markers",
            marker={"color": color, "size": 8},
        )
    figure.add_vrect(x0=-margin, x1=margin, fillcolor=_BAND, line_width=0, layer="below")
    figure.update_xaxes(title="relative error of mean TTFT", tickformat="+.0%", zeroline=True)
    order = [safe(label) for label, _ in reversed(pairs)]
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=order, automargin=True)
    return finish(figure, "", height=140 + 22 * len(pairs))


def agreement(points: Sequence[PointResult], labels: Sequence[str], margin: float, names: tuple[str, str]) -> go.Figure:
    """Mean TTFT of one side over the other's, with equality and the margin around it."""
    found = [(label, point, f) for label, point in zip(labels, points, strict=True) if (f := mean_ttft(point.figures))]
    values = [value for _, _, f in found for value in (f.reference, f.candidate)]
    unit, factor = fitting_unit(values)
    ends = np.array([min(values), max(values)]) * factor if values else np.array([1.0, 2.0])
    figure = go.Figure()
    for share, dash in ((0.0, "solid"), (-margin, "dot"), (margin, "dot")):
        line = {"color": GREY, "dash": dash, "width": 1}
        figure.add_scatter(x=ends, y=ends * (1 + share), mode="lines", line=line, showlegend=False, hoverinfo="skip")
    for tier in dict.fromkeys(point.tier for _, point, _ in found):
        own = [(label, f) for label, point, f in found if point.tier == tier]
        figure.add_scatter(
            x=[f.reference * factor for _, f in own],
            y=[f.candidate * factor for _, f in own],
            text=[safe(label) for label, _ in own],
            name=safe(tier),
            mode="markers",
            marker={"color": color_of(tier), "size": 9},
        )
    kind = "log" if wide(values) else "linear"
    figure.update_xaxes(title=f"{safe(names[0])}: mean TTFT ({unit})", type=kind)
    figure.update_yaxes(title=f"{safe(names[1])}: mean TTFT ({unit})", type=kind)
    return finish(figure, "")


def residuals(points: Sequence[PointResult], margin: float) -> go.Figure | None:
    """The error of mean TTFT along every axis with more than one value; None where nothing was varied."""
    known = [point for point in points if (f := mean_ttft(point.figures)) and f.error is not None]
    axes = [axis for axis in (known[0].axes if known else {}) if len(_values(known, axis)) > 1]
    if not axes:
        return None
    columns = min(3, len(axes))
    lines = -(-len(axes) // columns)
    figure = make_subplots(rows=lines, cols=columns, shared_yaxes="all", vertical_spacing=0.35 / lines)
    for number, axis in enumerate(axes):
        place = {"row": number // columns + 1, "col": number % columns + 1}
        for tier in dict.fromkeys(point.tier for point in known):
            own = [point for point in known if point.tier == tier and point.axes[axis] is not None]
            trace = go.Scatter(
                x=[safe(value_text(point.axes[axis])) for point in own],
                y=[_error(point) for point in own],
                mode="markers",
                marker={"color": color_of(tier), "size": 8},
                name=safe(tier),
                legendgroup=tier,
                showlegend=not number,
            )
            figure.add_trace(trace, **place)
        order = [safe(value_text(value)) for value in sorted(_values(known, axis), key=lambda v: (str(type(v)), v))]
        figure.update_xaxes(title=axis, type="category", categoryorder="array", categoryarray=order, **place)
        figure.add_hrect(y0=-margin, y1=margin, fillcolor=_BAND, line_width=0, layer="below", **place)
    figure.update_yaxes(tickformat="+.0%")
    figure.update_yaxes(title="error of mean TTFT", col=1)
    return finish(figure, "", height=240 * lines + 120)


def _values(points: Sequence[PointResult], axis: str) -> set[Any]:
    return {point.axes[axis] for point in points if point.axes[axis] is not None}


def _error(point: PointResult) -> float:
    figure = mean_ttft(point.figures)
    return (figure.error or 0.0) if figure else 0.0


def distributions(pairs: Sequence[Pair], names: tuple[str, str]) -> go.Figure:
    """Cumulative TTFT of both sides, a panel a point."""
    shown = pairs[:MAX_PANELS]
    columns = min(3, len(shown)) or 1
    lines = -(-len(shown) // columns) or 1
    titles = [f"{safe(label)}<br>{_distance(result)}" for label, result, _, _ in shown]
    figure = make_subplots(rows=lines, cols=columns, subplot_titles=titles, vertical_spacing=0.45 / lines)
    for number, (_, _, reference, candidate) in enumerate(shown):
        place = {"row": number // columns + 1, "col": number % columns + 1}
        both = [np.sort([row.ttft_s or 0.0 for row in point.rows]) for point in (reference, candidate)]
        unit, factor = fitting_unit([float(v) for values in both for v in (values[0], values[-1])])
        for values, name, color in zip(both, names, ("#2B83C6", "#E69F00"), strict=True):
            ranks = np.unique(np.linspace(1, len(values), min(len(values), MAX_CURVE_POINTS)).astype(int))
            trace = go.Scatter(
                x=values[ranks - 1] * factor,
                y=ranks / len(values),
                mode="lines",
                line={"shape": "hv", "color": color, "width": 2},
                name=safe(name),
                legendgroup=name,
                showlegend=not number,
            )
            figure.add_trace(trace, **place)
        figure.update_xaxes(title=f"TTFT ({unit})", rangemode="tozero", **place)
    figure.update_yaxes(tickformat=".0%", range=[0, 1.02])
    figure.update_annotations(font_size=12)
    note = "" if len(shown) == len(pairs) else f"The first {len(shown)} of {len(pairs)} points are drawn."
    return finish(figure, note, height=300 * lines + 120)


def _distance(point: PointResult) -> str:
    """The Wasserstein distance as a share of the reference's mean: the same unit as the margin."""
    figure, distance_s = mean_ttft(point.figures), point.wasserstein_s
    if figure is None or distance_s is None:
        return ""
    return f"Wasserstein {distance_s / figure.reference:.1%} of the mean"


def request_pairs(pairs: Sequence[Pair], names: tuple[str, str]) -> go.Figure | None:
    """TTFT of the same request on both sides, for free loads; None where there is none."""
    loads = [(label, reference, candidate) for label, _, reference, candidate in pairs if reference.free]
    if not loads:
        return None
    figure, total, drawn = go.Figure(), 0, 0
    for label, reference, candidate in loads:
        theirs = {row.id: row.ttft_s for row in candidate.rows}
        dots = [(row.ttft_s, theirs[row.id], row.id) for row in reference.rows if theirs.get(row.id) and row.ttft_s]
        stride = -(-len(dots) * len(loads) // MAX_DOTS) or 1
        total, drawn = total + len(dots), drawn + len(dots[::stride])
        x, y, text = zip(*dots[::stride], strict=True) if dots else ((), (), ())
        figure.add_scatter(x=x, y=y, text=list(map(safe, text)), mode="markers", name=safe(label), marker={"size": 5})
    figure.add_scatter(x=[1e-4, 1e4], y=[1e-4, 1e4], mode="lines", line={"color": GREY, "width": 1}, showlegend=False)
    spread = [value for trace in figure.data[:-1] for value in (*trace.x, *trace.y)]
    limits = [float(np.log10(min(spread) * 0.8)), float(np.log10(max(spread) * 1.25))] if spread else None
    figure.update_xaxes(title=f"{safe(names[0])}: TTFT (s)", type="log", range=limits)
    figure.update_yaxes(title=f"{safe(names[1])}: TTFT (s)", type="log", range=limits)
    return finish(figure, thinning_note(drawn, total, "request"))
