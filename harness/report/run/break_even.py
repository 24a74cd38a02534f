"""Which set-up serves best at which place of an axis: speed and TTFT along it, and where one overtakes another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from harness.report.axes import short_names, shortened, value_text
from harness.report.page import Picture, picture
from harness.report.simulated import in_figures
from harness.report.style import GREY, finish, safe, series_look, wide
from harness.report.words import TIMES, digits, plural, with_interval
from harness.results.break_even import BreakEven, Compared
from harness.results.summary import FREE_LOAD, Summary

_METRICS = {"ttft_s": "mean TTFT", "requests_per_s": "requests/s"}
_MAX_LINES, _MAX_SENTENCES, _LABEL = 12, 8, 40


class BreakEvenRow(msgspec.Struct, frozen=True):
    """One set-up against another by one figure, as text. at: where break-even lies. between: its measured
    neighbours. ratios: of the first and the last place."""

    ours: str
    theirs: str
    figure: str
    better: str
    at: str
    between: str
    ratios: str


def break_even_lines(summary: Summary) -> list[str]:
    """From which value of an axis on, or up to which, a set-up serves better than another; first those against the
    named one.

    Only where the ratio passes 1 once along that axis.
    """
    lines = [
        f"{side(found.ours)} is better than {side(found.theirs)} in {_METRICS[found.metric]} {told}."
        for found in sorted(summary.break_evens, key=lambda found: not found.named)
        if (told := _told(found))
    ]
    more = len(lines) - _MAX_SENTENCES
    return [*lines[:_MAX_SENTENCES], f"{plural(more, 'more break-even')} in the table."] if more > 0 else lines


def break_even_rows(summary: Summary) -> list[BreakEvenRow]:
    return [_row(found) for found in summary.break_evens]


def side(overrides: Mapping[str, Any]) -> str:
    """What a set-up has on the other axes: 'cache=pool, users=4'."""
    names = short_names(list(overrides))
    return ", ".join(f"{names[key]}={value_text(value)}" for key, value in overrides.items())


def _told(found: BreakEven) -> str:
    """'from history_tokens = 3,100 (2,700 to 3,600) on, between the measured 2,000 and 4,000'; '' without one."""
    if found.at is None or found.between is None:
        return ""
    where = f"{_axis(found)} = {digits(found.at)} ({_interval(found)})"
    where = f"from {where} on" if found.outcome == "from" else f"up to {where}"
    left, right = map(_plain, found.between)
    return f"{where}, between the measured {left} and {right}"


def _interval(found: BreakEven) -> str:
    if not found.judged:
        return "no interval"
    if found.low is None or found.high is None:
        return "interval open"
    return f"{digits(found.low)} to {digits(found.high)}"


def _row(found: BreakEven) -> BreakEvenRow:
    first, *_, last = found.places
    return BreakEvenRow(
        ours=side(found.ours),
        theirs=side(found.theirs),
        figure=_METRICS[found.metric],
        better=f"{found.outcome} {_axis(found)}" if found.at is not None else found.outcome,
        at="none" if found.at is None else f"{digits(found.at)} ({_interval(found)})",
        between=" and ".join(map(_plain, found.between)) if found.between else "",
        ratios=", ".join(f"{with_interval(place.ratio)} at {_plain(place.value)}" for place in (first, last)),
    )


def _axis(found: BreakEven) -> str:
    return short_names([found.axis])[found.axis]


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


# ---- the picture


def speed_pictures(summary: Summary) -> list[Picture]:
    """Requests a second, and TTFT against the named set-up, along the axis: a line a set-up. [] for other sweeps."""
    axes = dict.fromkeys(found.axis for found in summary.break_evens)
    caption = (
        "Above: requests that a set-up finishes a second. Below: how many times shorter its mean TTFT is; above the"
        " dashed line it is better. Bars are 95 % intervals. A dotted line is a break-even."
    )
    return [
        picture(f"speed-{number}" if number else "speed", f"Speed by {name}", caption, drawn, table="break-even")
        for number, axis in enumerate(axes)
        for name, drawn in [(short_names([axis])[axis], _speed(summary, axis))]
    ]


def _speed(summary: Summary, axis: str) -> go.Figure:
    made, name = in_figures(summary), short_names([axis])[axis]
    against = {side(found.theirs) for found in summary.break_evens if found.named and found.axis == axis}
    held = shortened(" or ".join(sorted(against)), _LABEL)
    titles = [f"{made}requests finished per second", f"{made}mean TTFT, times as fast<br>as {safe(held)}"]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, subplot_titles=titles, vertical_spacing=0.13)
    lines = _rates(summary, axis)
    for number, (label, points) in enumerate(list(lines.items())[:_MAX_LINES]):
        hover = [f"<b>{safe(label)}</b> at {_plain(x)}<br>{digits(y)} requests/s" for x, y in points]
        _add(figure, number, label, [x for x, _ in points], [y for _, y in points], hover, row=1)
    looks = {label: number for number, label in enumerate(lines)}
    for found in summary.break_evens:
        number = looks.get(side(found.ours), _MAX_LINES)
        if found.axis == axis and found.named and found.metric == "ttft_s" and number < _MAX_LINES:
            _add_ratios(figure, number, found)
    figure.add_hline(y=1, line={"color": GREY, "dash": "dash", "width": 2}, row=2, col=1)
    places = sorted({x for points in lines.values() for x, _ in points})
    texts = [_plain(place) for place in places]
    figure.update_xaxes(type="log" if wide(places) else "linear", tickmode="array", tickvals=places, ticktext=texts)
    figure.update_xaxes(title=safe(name), row=2)
    figure.update_yaxes(rangemode="tozero", row=1)
    figure.update_yaxes(type="log", tickformat="~r", ticksuffix=TIMES, dtick="D2", row=2)
    figure.update_annotations(font_size=12, x=0, xanchor="left")
    note = f"The first {_MAX_LINES} of {len(lines)} set-ups are drawn." if len(lines) > _MAX_LINES else ""
    return finish(figure, note, height=600)


def _rates(summary: Summary, axis: str) -> dict[str, list[tuple[float, float]]]:
    """By set-up, (place, requests per second), ascending."""
    found: dict[str, list[tuple[float, float]]] = {}
    for cell in summary.cells:
        load, place = cell.tiers.get(FREE_LOAD), cell.overrides.get(axis)
        if load is not None and load.throughput is not None and isinstance(place, int | float):
            others = {key: value for key, value in cell.overrides.items() if key != axis}
            found.setdefault(side(others), []).append((float(place), load.throughput.requests_per_s))
    return {label: sorted(points) for label, points in found.items()}


def _add_ratios(figure: go.Figure, number: int, found: BreakEven) -> None:
    label, places = side(found.ours), found.places
    hover = [f"<b>{safe(label)}</b> at {_plain(at.value)}<br>{with_interval(at.ratio)} as fast" for at in places]
    bars = {
        "type": "data", "thickness": 1.5, "width": 5,
        "array": [_reach(place, upper=True) for place in places],
        "arrayminus": [_reach(place, upper=False) for place in places],
    }  # fmt: skip
    ratios = [place.ratio.ratio for place in places]
    _add(figure, number, label, [place.value for place in places], ratios, hover, row=2, error_y=bars)
    if found.at is not None:
        line = {"color": series_look(number)[1], "dash": "dot", "width": 1.5}
        figure.add_vline(x=found.at, line=line, row=2, col=1)


def _reach(place: Compared, *, upper: bool) -> float:
    """From the ratio to an end of its interval; 0 without one."""
    ratio = place.ratio
    if ratio.low is None or ratio.high is None:
        return 0.0
    return ratio.high - ratio.ratio if upper else ratio.ratio - ratio.low


def _add(
    figure: go.Figure, number: int, label: str, x: list[float], y: list[float], hover: list[str], row: int, **more: Any
) -> None:
    shape, color = series_look(number)
    name = safe(shortened(label, _LABEL))
    figure.add_scatter(
        x=x, y=y, name=name, legendgroup=name, showlegend=row == 1, mode="lines+markers",
        marker={"color": color, "symbol": shape, "size": 9}, line={"color": color, "width": 2},
        hovertext=hover, hoverinfo="text", row=row, col=1, **more,
    )  # fmt: skip
