"""Where a tier pays along one axis, by the run's own figures or by `harness worth`; what a load trades for its rate."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from harness.experiment.goals import parse_goal
from harness.report.axes import panels, shortened, value_text, varied_axes
from harness.report.simulated import axis_title, in_figures
from harness.report.style import GREY, MAX_PANELS, color_of, finish, safe, series_look, symbol_of, wide
from harness.report.words import (
    TIMES,
    duration,
    fitting_unit,
    percentile_text,
    tier_order,
    too_few,
    with_interval,
)
from harness.results.goals import JudgedGoal
from harness.results.rows import Latency, LoadRates
from harness.results.summary import FREE_LOAD, CellFigures, Summary
from harness.results.worth import Worth
from harness.stats import Ratio, ratio_interval
from traces.tiers import all_states, state_named


class At(NamedTuple):
    """A state against recompute, at one value of the axis."""

    value: float
    ratio: Ratio


def baseline() -> str:
    """The state that nothing is served from."""
    return next(state.name for state in all_states() if state.served_by is None)


def ttft_of(cell: CellFigures, tier: str | None) -> Latency | None:
    group = cell.tiers.get(tier) if tier else None
    return group.metrics["ttft_s"] if group else None


def faster(cell: CellFigures, tier: str, than: str) -> Ratio | None:
    """How many times as fast a state is; None where one of the two has no row that counts."""
    own, base = ttft_of(cell, tier), ttft_of(cell, than)
    return ratio_interval(base.samples, own.samples, repeats=cell.repeats) if own and base else None


def along(summary: Summary) -> dict[str, list[At]]:
    """By state, its ratios along a sweep's only axis, of numbers; nothing for other sweeps."""
    axes = varied_axes(summary.cells)
    if len(axes) != 1 or not axes[0].numeric:
        return {}
    states = tier_order({tier for cell in summary.cells for tier in cell.tiers} - {baseline(), FREE_LOAD})
    found: dict[str, list[At]] = {}
    for state, cell in itertools.product(states, summary.cells):
        if (ratio := faster(cell, state, baseline())) is not None:
            found.setdefault(state, []).append(At(float(cell.overrides[axes[0].key]), ratio))
    return {state: sorted(points, key=lambda at: at.value) for state, points in found.items() if len(points) > 1}


def speedup_lines(summary: Summary) -> go.Figure | None:
    """How many times as fast as recompute each state is along a sweep's only axis; None for other sweeps."""
    found = along(summary)
    return _lines(found, safe(axis_title(summary, varied_axes(summary.cells)[0]))) if found else None


def worth_lines(worth: Worth) -> go.Figure | None:
    """The same of `harness worth`, over the prefix's tokens; None where no point could be compared."""
    found: dict[str, list[At]] = {}
    for point in worth.points:
        if point.speedup is not None:
            found.setdefault(point.state, []).append(At(point.tokens, point.speedup))
    return _lines(found, "prefix (tokens)") if found else None


def break_even(found: Mapping[str, Sequence[At]]) -> list[str]:
    """'disk, page cache cold: breaks even between 512 and 1,024', of neighbours whose intervals leave no doubt."""
    said = []
    for state, points in found.items():
        for left, right in itertools.pairwise(points):
            if left.ratio.distinct and right.ratio.distinct and (left.ratio.ratio > 1) != (right.ratio.ratio > 1):
                said.append(
                    f"{state_named(state).label}: breaks even between {_number(left.value)} and {_number(right.value)}."
                )
    return said


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def _lines(found: Mapping[str, Sequence[At]], title: str) -> go.Figure:
    figure = go.Figure()
    values = [at.value for points in found.values() for at in points]
    for state, points in found.items():
        figure.add_scatter(
            x=[at.value for at in points],
            y=[at.ratio.ratio for at in points],
            error_y={
                "type": "data",
                "array": [0 if at.ratio.high is None else at.ratio.high - at.ratio.ratio for at in points],
                "arrayminus": [0 if at.ratio.low is None else at.ratio.ratio - at.ratio.low for at in points],
                "thickness": 1.5,
                "width": 5,
            },
            name=safe(state),
            mode="lines+markers",
            marker={"color": color_of(state), "symbol": symbol_of(state), "size": 9},
            line={"color": color_of(state), "width": 2},
            hovertext=[_about(state, at) for at in points],
            hoverinfo="text",
        )
    figure.add_hline(y=1, line={"color": "#7D7D7D", "dash": "dash", "width": 2})
    figure.update_yaxes(type="log", title="times as fast as recompute", tickformat="~r", ticksuffix=TIMES, dtick="D2")
    ticks = sorted(set(values))
    figure.update_xaxes(
        title=title, type="log" if wide(values) else "linear", tickmode="array", tickvals=ticks,
        ticktext=[_number(value) for value in ticks],
    )  # fmt: skip
    return finish(figure, "", height=360)


def _about(state: str, at: At) -> str:
    ratio = at.ratio
    exact = ", simulated, repeats exactly" if ratio.basis == "repeats exactly" else ""
    times = f"typical TTFT {duration(ratio.typical_s)} against {duration(ratio.reference_s)}"
    return f"<b>{safe(state)}</b> at {_number(at.value)}<br>{with_interval(ratio)} as fast{exact}<br>{times}"


class _Load(NamedTuple):
    """One load of a sweep: what the axis had there, what it completed, its TTFT, and the run's goals for it."""

    label: str
    rates: LoadRates
    ttft: Latency
    goals: tuple[JudgedGoal, ...]

    @property
    def p90_s(self) -> float | None:
        """None where too few requests carry it."""
        return None if too_few(self.ttft.n, 0.9) else self.ttft.p90


def trade(summary: Summary) -> go.Figure | None:
    """Median TTFT over requests per second, a line a sweep's other axes; None without two loads.

    A filled mark is a load that no other of the sweep beats in both; the others are open. A whisker ends at p90, the
    percentile that goals name; goals on TTFT and on requests per second are lines.
    """
    axis, groups = panels(summary.cells)
    series: dict[str, list[_Load]] = {}
    for group in groups[:MAX_PANELS]:
        for cell in group.cells:
            if (load := _load_of(cell, axis.key if axis else None)) is not None:
                series.setdefault(group.title, []).append(load)
    loads = [load for own in series.values() for load in own]
    if axis is None or len(loads) < 2:
        return None
    unit, factor = fitting_unit([load.ttft.p50 for load in loads])

    def mark(load: _Load) -> str:
        return "" if _best(load, loads) else "-open"

    figure = go.Figure()
    for number, (title, own) in enumerate(series.items()):
        shape, color = series_look(number)
        figure.add_scatter(
            x=[load.rates.requests_per_s for load in own],
            y=[load.ttft.p50 * factor for load in own],
            error_y={
                "type": "data", "symmetric": False, "arrayminus": [0] * len(own),
                "array": [0 if load.p90_s is None else (load.p90_s - load.ttft.p50) * factor for load in own],
                "color": color, "thickness": 1, "width": 5,
            },
            name=safe(shortened(title, 48)) or "loads",
            mode="lines+markers+text",
            text=[safe(shortened(load.label, 16)) for load in own],
            textposition="bottom center",
            marker={"color": color, "size": 10, "symbol": [f"{shape}{mark(load)}" for load in own]},
            line={"color": color, "width": 1.5, "dash": "dot"},
            hovertext=[_about_load(axis.name, load, _best(load, loads)) for load in own],
            hoverinfo="text",
        )  # fmt: skip
    figure.update_layout(showlegend=len(series) > 1)
    made = in_figures(summary)
    figure.update_xaxes(title=f"{made}requests completed per second", rangemode="tozero")
    tops = [load.p90_s or load.ttft.p50 for load in loads]
    figure.update_yaxes(
        title=f"{made}median TTFT, to p90 ({unit})",
        type="log" if wide([*tops, *(load.ttft.p50 for load in loads)]) else "linear",
    )
    _draw_goals(figure, loads, factor)
    return finish(figure, "", height=400)


def _draw_goals(figure: go.Figure, loads: Sequence[_Load], factor: float) -> None:
    """A line for each goal on TTFT or on requests per second; the others stand in the table of goals alone."""
    for text in dict.fromkeys(judged.goal for load in loads for judged in load.goals):
        goal = parse_goal(text)
        if goal.metric == "ttft_s":
            # A scatter's ends give the axis its room: a shape beyond the marks would be cut off.
            x, y = [0.0, max(load.rates.requests_per_s for load in loads)], [goal.bound * factor] * 2
        elif goal.metric == "requests_per_s":
            low, high = min(load.ttft.p50 for load in loads), max(load.p90_s or load.ttft.p50 for load in loads)
            x, y = [goal.bound] * 2, [high * factor, low * factor]
        else:
            continue
        # The name stands at the line: a legend of goals would fill a telephone's page.
        figure.add_scatter(
            x=x, y=y, mode="lines+text", text=[safe(f"goal {text}"), ""], textposition="top right", cliponaxis=False,
            line={"color": GREY, "width": 1.5, "dash": "longdash"}, hoverinfo="skip", showlegend=False,
        )  # fmt: skip


def _load_of(cell: CellFigures, key: str | None) -> _Load | None:
    group, ttft = cell.tiers.get(FREE_LOAD), ttft_of(cell, FREE_LOAD)
    if group is None or group.throughput is None or ttft is None:
        return None
    value: Any = cell.overrides.get(key) if key else None
    judged = tuple(judged for tier in cell.goals if tier.tier == FREE_LOAD for judged in tier.judged)
    return _Load(value_text(value), group.throughput, ttft, judged)


def _best(load: _Load, loads: Sequence[_Load]) -> bool:
    """Whether no other load completes as many requests a second with a lower median."""
    rate, middle_s = load.rates.requests_per_s, load.ttft.p50
    return not any(
        other.rates.requests_per_s >= rate
        and other.ttft.p50 <= middle_s
        and (other.rates.requests_per_s, other.ttft.p50) != (rate, middle_s)
        for other in loads
    )


def _about_load(axis: str, load: _Load, best: bool) -> str:
    beaten = "" if best else "<br>another load completes more, with a lower median"
    return (
        f"<b>{safe(axis)}={safe(load.label)}</b><br>{load.rates.requests_per_s:.3g} requests/s, median"
        f" {duration(load.ttft.p50)}, p90 {percentile_text(load.ttft.p90, load.ttft.n, 0.9)}, slowest"
        f" {duration(load.ttft.max)}{beaten}{''.join(map(_about_goal, load.goals))}"
    )


def _about_goal(judged: JudgedGoal) -> str:
    return f"<br>goal {safe(judged.goal)}: {judged.verdict if judged.verdict in ('met', 'missed') else 'not met'}"
