"""Where a tier pays: TTFT against recompute over two axes, and what each step from tier to tier adds to TTFT."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from harness.report.axes import Axis, shortened, value_text, varied_axes
from harness.report.run.pays import baseline, faster, ttft_of
from harness.report.simulated import axis_title, in_figures
from harness.report.style import MAX_PANELS, color_of, finish, patterned, safe
from harness.report.words import TIMES, digits, duration, fitting_unit, tier_order, with_interval
from harness.results.summary import Summary
from traces.tiers import all_states, tier_named

# Cells hold their number only where it can be read.
_MAX_WORDED = 150
_SLOWER, _EQUAL, _FASTER = "#C2571A", "#E9E6DF", "#2E6FA8"
_PLAIN = "Cividis"
# Powers of two, 1 %: a tier that serves nothing takes what recompute takes, up to the last digits of a sum.
_EQUAL_WITHIN = 0.014


def heat_maps(summary: Summary) -> go.Figure | None:
    """How much faster than recompute each tier is, a panel a tier over a sweep's two axes; None for other sweeps.

    A line runs where both are equal. Without recompute there is nothing to compare with: mean TTFT is drawn. None, too,
    of a run that ended before its first row.
    """
    than = baseline()
    axes = varied_axes(summary.cells)
    if len(axes) != 2:
        return None
    along, across = axes
    tiers = tier_order({tier for cell in summary.cells for tier in cell.tiers})
    compared = [tier for tier in tiers if tier != than] if than in tiers else []
    shown = (compared or tiers)[:MAX_PANELS]
    if not shown:
        return None
    columns = min(2, len(shown))
    lines = -(-len(shown) // columns)
    figure = make_subplots(
        rows=lines, cols=columns, subplot_titles=[safe(tier) for tier in shown], shared_yaxes=True,
        horizontal_spacing=0.04, vertical_spacing=0.3 / lines,
    )  # fmt: skip
    for number, tier in enumerate(shown):
        place = {"row": number // columns + 1, "col": number % columns + 1}
        _add_map(figure, summary, axes, tier, than if compared else None, place)
    for axis, update in ((along, figure.update_xaxes), (across, figure.update_yaxes)):
        texts = [safe(shortened(value_text(value), 16)) for value in axis.values]
        update(tickmode="array", tickvals=list(range(len(texts))), ticktext=texts, showgrid=False, zeroline=False)
    figure.update_xaxes(title=safe(axis_title(summary, along)), row=lines)
    figure.update_yaxes(title=safe(axis_title(summary, across)), col=1)
    figure.update_annotations(font_size=12)
    figure.update_layout(coloraxis=_colours(bool(compared)), showlegend=False)
    height = lines * (110 + 30 * max(4, len(across.values))) + 60
    return finish(figure, "", height=height, min_width=columns * 36 * len(along.values) + 140)


def _add_map(
    figure: go.Figure,
    summary: Summary,
    axes: Sequence[Axis],
    tier: str,
    than: str | None,
    place: Mapping[str, int],
) -> None:
    z, words, hover = _grid(summary, axes, tier, than)
    worded = sum(map(len, words)) <= _MAX_WORDED
    # Text on a mid-toned cell: the library picks black or white for the contrast.
    figure.add_heatmap(
        z=z, text=words, texttemplate="%{text}" if worded else None, hovertext=hover, hoverinfo="text",
        coloraxis="coloraxis", xgap=1, ygap=1, **place,
    )  # fmt: skip
    known = [value for line in z for value in line if value is not None]
    if than and known and min(known) < -_EQUAL_WITHIN and max(known) > _EQUAL_WITHIN:
        figure.add_contour(
            z=z, contours={"start": 0, "end": 0, "size": 1, "coloring": "none"}, line={"color": "#000000", "width": 3},
            showscale=False, hoverinfo="skip", name=f"equal to {safe(than)}", showlegend=False, **place,
        )  # fmt: skip


def _grid(
    summary: Summary, axes: Sequence[Axis], tier: str, than: str | None
) -> tuple[list[list[Any]], list[list[str]], list[list[str]]]:
    """Line by line of the second axis: log2 of the ratio (or seconds), the cell's text, and its tooltip."""
    columns, lines = (len(axis.values) for axis in axes)
    z: list[list[Any]] = [[None] * columns for _ in range(lines)]
    words = [[""] * columns for _ in range(lines)]
    hover = [[f"{safe(tier)}: not measured"] * columns for _ in range(lines)]
    places = [{value_text(value): place for place, value in enumerate(axis.values)} for axis in axes]
    for cell in summary.cells:
        column, line = (at[value_text(cell.overrides.get(axis.key))] for at, axis in zip(places, axes, strict=True))
        where = ", ".join(f"{axis.name}={value_text(cell.overrides.get(axis.key))}" for axis in axes)
        head = f"<b>{safe(tier)}</b> at {safe(where)}"
        if than is None:
            if own := ttft_of(cell, tier):
                z[line][column], words[line][column] = own.mean, duration(own.mean)
                hover[line][column] = f"{head}<br>mean {duration(own.mean)}"
        elif (ratio := faster(cell, tier, than)) is not None:
            z[line][column] = math.log2(ratio.ratio)
            words[line][column] = f"{digits(ratio.ratio, 2)}{TIMES}"
            exact = ", simulated, repeats exactly" if ratio.basis == "repeats exactly" else ""
            times = f"typical TTFT {duration(ratio.typical_s)} against {duration(ratio.reference_s)}"
            hover[line][column] = f"{head}<br>{with_interval(ratio)} as fast as {safe(than)}{exact}<br>{times}"
    return z, words, hover


def _colours(compared: bool) -> dict[str, Any]:
    if not compared:
        return {"colorscale": _PLAIN, "colorbar": {"title": "TTFT (s)", "thickness": 12}}
    powers = range(-4, 8)
    texts = [f"{2**power}{TIMES}" if power >= 0 else f"1/{2**-power}{TIMES}" for power in powers]
    ticks = {"tickvals": list(powers), "ticktext": texts}
    scale = [[0.0, _SLOWER], [0.5, _EQUAL], [1.0, _FASTER]]
    return {"colorscale": scale, "cmid": 0, "colorbar": {"title": "faster", "thickness": 12, **ticks}}


def ladder(summary: Summary) -> go.Figure | None:
    """Mean TTFT by what it is spent on: each proven state against the state that lacks only its last step.

    None where states do not stand on each other: several cells, no state of the engine's own tier, or nothing above it.
    """
    if len(summary.cells) != 1:
        return None
    (cell,) = summary.cells
    means = {tier: found.mean for tier in cell.tiers if (found := ttft_of(cell, tier))}
    parts = _steps(means)
    if len(parts) < 2:
        return None
    unit, factor = fitting_unit([means[state] for state in parts])
    order = tier_order(parts)
    figure = go.Figure()
    for step, pattern in zip(parts, ("", "/", ".", "x", "\\", "-", "+"), strict=False):
        values = [parts[state].get(step, 0.0) for state in order]
        words = _step_words(step, first=len(parts[step]) == 1)
        figure.add_bar(
            x=[value * factor for value in values],
            y=[safe(state) for state in order],
            orientation="h",
            name=words,
            marker=patterned(color_of(step), pattern),
            hovertext=[f"{safe(state)}: {words} {duration(v)}" for state, v in zip(order, values, strict=True)],
            hoverinfo="text",
        )
    ends = [f"{duration(means[state])}" for state in order]
    figure.add_scatter(
        x=[means[state] * factor for state in order], y=[safe(state) for state in order], mode="text", text=ends,
        textposition="middle right", cliponaxis=False, showlegend=False, hoverinfo="skip",
    )  # fmt: skip
    figure.update_layout(barmode="stack", legend={"traceorder": "normal"})
    figure.update_xaxes(
        title=f"{in_figures(summary)}mean TTFT ({unit})",
        range=[0, 1.12 * factor * max(means[state] for state in parts)],
    )
    rows = [safe(state) for state in reversed(order)]
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=rows, automargin=True)
    return finish(figure, "", height=150 + 40 * len(order))


def _steps(means: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """State → what each step down to it adds, seconds; a state that is faster than the one above it is left out."""
    engine = next((s.name for s in all_states() if s.served_by and not tier_named(s.served_by).offload), None)
    if engine is None or engine not in means:
        return {}
    parts = {engine: {engine: means[engine]}}
    above = engine
    for state in all_states():
        below = engine if state.served_by is None else above
        if state.name == engine or state.name not in means or means[state.name] < means[below]:
            continue
        parts[state.name] = {**parts[below], state.name: means[state.name] - means[below]}
        above = above if state.served_by is None else state.name
    return parts


def _step_words(step: str, first: bool) -> str:
    """What a step is called in the legend."""
    state = next(each for each in all_states() if each.name == step)
    if first:
        return f"first token with the prefix in the {state.label}"
    return "prefill of the prefix" if state.served_by is None else f"load: {state.label}"
