"""Figures of one side against the other: errors and their band, distributions, residuals, pairs. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    SLOWEST_SHARE,
    color_of,
    finish,
    safe,
    symbol_of,
    thinning_note,
    wide,
)
from harness.report.words import fitting_unit
from harness.results.summary import FREE_LOAD
from harness.validation.equivalence import Figure, PointResult
from harness.validation.points import Point

# A verdict has a mark as well as a colour, and neither is a tier's.
_VERDICTS = {"pass": ("#1B7F5A", "circle"), "fail": ("#C8342B", "x"), "not resolvable": (GREY, "diamond-open")}
_BAND = "rgba(27,127,90,0.14)"
_SIDES = (("#3B6FB6", "solid"), ("#B97A00", "dash"))
_MIN_WIDTH = 560
_PRIMARY = "ttft_mean_s"
# A point's label, its figures, and the rows of both sides.
Pair = tuple[str, PointResult, Point, Point]


def judged_ttft(figures: Sequence[Figure]) -> Figure | None:
    """The figure that stands for its point."""
    return next((figure for figure in figures if figure.metric == _PRIMARY), None)


def ttft_kind(point: PointResult) -> str:
    """What a point's judged TTFT is: of a warm state the middle of its samples, of a load the mean over its requests,
    and of a published row the printed value."""
    if "source" in point.axes:
        return "printed"
    return "mean" if point.tier == FREE_LOAD else "middle"


def metric_name(metric: str, points: Iterable[PointResult]) -> str:
    """A metric's name for people. The document calls the judged TTFT ttft_mean_s, whatever kind it is of."""
    if metric != _PRIMARY:
        return metric
    kinds = sorted({ttft_kind(point) for point in points if judged_ttft(point.figures)}, reverse=True)
    return f"ttft_{kinds[0]}_s" if len(kinds) == 1 else "ttft_s (middle; of a load: mean)"


def errors(points: Sequence[PointResult], labels: Sequence[str], margin: float, noise: bool = False) -> go.Figure:
    """One line a point: the relative error of its TTFT, its interval, and the margin as a band.

    noise: of the reference against itself.
    """
    figure = go.Figure()
    means = [judged_ttft(point.noise if noise else point.figures) for point in points]
    pairs = [(label, f) for label, f in zip(labels, means, strict=True) if f]
    kinds = {label: ttft_kind(point) for label, point in zip(labels, points, strict=True)}
    for verdict, (color, symbol) in _VERDICTS.items():
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
            customdata=[[f.samples, f.reference, f.candidate, kinds[label]] for label, f, _ in own],
            hovertemplate="%{y}: %{x:.1%}<br>n = %{customdata[0]}, %{customdata[3]} TTFT"
            " %{customdata[1]:.4g} s against %{customdata[2]:.4g} s",
            name=verdict,
            mode="markers",
            marker={"color": color, "symbol": symbol, "size": 9},
        )
    figure.add_vrect(x0=-margin, x1=margin, fillcolor=_BAND, line_width=0, layer="below")
    figure.update_xaxes(title="relative error of TTFT", tickformat="+.0%", zeroline=True)
    order = [safe(label) for label, _ in reversed(pairs)]
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=order, automargin=True)
    return finish(figure, "", height=140 + 22 * len(pairs), min_width=_MIN_WIDTH)


def agreement(points: Sequence[PointResult], labels: Sequence[str], margin: float, names: tuple[str, str]) -> go.Figure:
    """TTFT of one side over the other's, with equality and the margin around it."""
    found = [
        (label, point, f) for label, point in zip(labels, points, strict=True) if (f := judged_ttft(point.figures))
    ]
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
            hovertemplate=f"%{{text}}<br>%{{x:.3g}} {unit} against %{{y:.3g}} {unit}<extra></extra>",
            name=safe(tier),
            mode="markers",
            marker={"color": color_of(tier), "symbol": symbol_of(tier), "size": 9},
        )
    kind = "log" if wide(values) else "linear"
    figure.update_xaxes(title=f"{safe(names[0])}: TTFT ({unit})", type=kind)
    figure.update_yaxes(title=f"{safe(names[1])}: TTFT ({unit})", type=kind)
    return finish(figure, "")


def residuals(points: Sequence[PointResult], margin: float) -> go.Figure | None:
    """The error of TTFT along every axis with more than one value; None where nothing was varied."""
    known = [point for point in points if (f := judged_ttft(point.figures)) and f.error is not None]
    axes = [axis for axis in (known[0].axes if known else {}) if len(_values(known, axis)) > 1]
    if not axes:
        return None
    columns = min(3, len(axes))
    lines = -(-len(axes) // columns)
    figure = make_subplots(rows=lines, cols=columns, shared_yaxes="all", vertical_spacing=0.45 / lines)
    for number, axis in enumerate(axes):
        place = {"row": number // columns + 1, "col": number % columns + 1}
        for tier in dict.fromkeys(point.tier for point in known):
            own = [point for point in known if point.tier == tier and point.axes[axis] is not None]
            trace = go.Scatter(
                x=[safe(value_text(point.axes[axis])) for point in own],
                y=[_error(point) for point in own],
                mode="markers",
                marker={"color": color_of(tier), "symbol": symbol_of(tier), "size": 8},
                name=safe(tier),
                legendgroup=tier,
                showlegend=not number,
            )
            figure.add_trace(trace, **place)
        order = [safe(value_text(value)) for value in sorted(_values(known, axis), key=lambda v: (str(type(v)), v))]
        figure.update_xaxes(title=axis, type="category", categoryorder="array", categoryarray=order, **place)
        figure.add_hrect(y0=-margin, y1=margin, fillcolor=_BAND, line_width=0, layer="below", **place)
    figure.update_yaxes(tickformat="+.0%")
    figure.update_yaxes(title="error of TTFT", col=1)
    return finish(figure, "", height=300 * lines + 120, min_width=240 * columns + 60)


def _values(points: Sequence[PointResult], axis: str) -> set[Any]:
    return {point.axes[axis] for point in points if point.axes[axis] is not None}


def _error(point: PointResult) -> float:
    figure = judged_ttft(point.figures)
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
        for values, name, (color, dash) in zip(both, names, _SIDES, strict=True):
            ranks = np.unique(np.linspace(1, len(values), min(len(values), MAX_CURVE_POINTS)).astype(int))
            trace = go.Scatter(
                x=values[ranks - 1] * factor,
                y=ranks / len(values),
                mode="lines",
                line={"shape": "hv", "color": color, "width": 2, "dash": dash},
                hovertemplate=f"%{{y:.1%}} of requests within %{{x:.3g}} {unit}<extra>%{{fullData.name}}</extra>",
                name=safe(name),
                legendgroup=name,
                showlegend=not number,
            )
            figure.add_trace(trace, **place)
        figure.update_xaxes(title=f"TTFT ({unit})", rangemode="tozero", **place)
    figure.update_yaxes(tickformat=".0%", range=[0, 1.02])
    figure.update_annotations(font_size=12)
    note = "" if len(shown) == len(pairs) else f"The first {len(shown)} of {len(pairs)} points are drawn."
    return finish(figure, note, height=300 * lines + 120, min_width=240 * columns + 60)


def _distance(point: PointResult) -> str:
    """The Wasserstein distance as a share of the reference's TTFT: the same unit as the margin."""
    figure, distance_s = judged_ttft(point.figures), point.wasserstein_s
    if figure is None or distance_s is None:
        return ""
    return f"Wasserstein {distance_s / figure.reference:.1%} of its TTFT"


def request_pairs(pairs: Sequence[Pair], names: tuple[str, str]) -> go.Figure | None:
    """TTFT of the same request on both sides, for free loads; None where there is none."""
    loads = [(label, reference, candidate) for label, _, reference, candidate in pairs if reference.free]
    if not loads:
        return None
    figure, total, drawn = go.Figure(), 0, 0
    for label, reference, candidate in loads:
        theirs = {row.id: row.ttft_s for row in candidate.rows}
        dots = [(row.ttft_s, theirs[row.id], row.id) for row in reference.rows if theirs.get(row.id) and row.ttft_s]
        # The slowest on either side are drawn in any case.
        dots.sort(key=lambda dot: -max(dot[0], dot[1] or 0.0))
        slow = -(-len(dots) // round(1 / SLOWEST_SHARE))
        stride = -(-(len(dots) - slow) * len(loads) // MAX_DOTS) or 1
        chosen = dots[:slow] + dots[slow::stride]
        total, drawn = total + len(dots), drawn + len(chosen)
        x, y, text = zip(*chosen, strict=True) if chosen else ((), (), ())
        hover = "%{text}<br>%{x:.3g} s, on the other side %{y:.3g} s<extra></extra>"
        names_of = list(map(safe, text))
        marker = {"size": 5, "color": color_of(FREE_LOAD)}
        figure.add_scatter(
            x=x, y=y, text=names_of, mode="markers", name=safe(label), marker=marker, hovertemplate=hover
        )
    figure.add_scatter(x=[1e-4, 1e4], y=[1e-4, 1e4], mode="lines", line={"color": GREY, "width": 1}, showlegend=False)
    spread = [value for trace in figure.data[:-1] for value in (*trace.x, *trace.y)]
    limits = [float(np.log10(min(spread) * 0.8)), float(np.log10(max(spread) * 1.25))] if spread else None
    figure.update_xaxes(title=f"{safe(names[0])}: TTFT (s)", type="log", range=limits)
    figure.update_yaxes(title=f"{safe(names[1])}: TTFT (s)", type="log", range=limits)
    return finish(figure, thinning_note(drawn, total, "request", f"the slowest {SLOWEST_SHARE:.0%}"))
