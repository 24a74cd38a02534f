"""The curve of a search for a capacity: times and throughput over the load, in the terminal and on the run's page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from harness.experiment.goals import parse_goal
from harness.report.page import picture
from harness.report.style import GREY, finish, safe, series_look
from harness.report.words import NOT_REPORTED, digits, duration, plural
from harness.results.capacity import Capacity, Found, mean_of

COLUMNS = ("measured", "TTFT p95", "E2E p95", "of the target", "output tok/s", "verdict")
_TIMES = {"TTFT p95": "ttft_p95_s", "E2E p95": "e2e_p95_s"}
_BAR = 24


class CurveRow(NamedTuple):
    """One load, as text. bar: the part of the longest bar that its throughput takes."""

    load: int
    cells: tuple[str, ...]
    bar: float


def answer_line(found: Capacity) -> str:
    """The answer, with the loads around it that leave no doubt."""
    answer = found.answer
    if not found.complete:
        return f"The search has not ended; {plural(len(found.steps), 'measurement')} so far."
    if answer.load is None:
        return f"Not even {found.key} = {found.loads()[0]} keeps the targets."
    if found.mode == "peak":
        sides = [str(each) for each in (answer.low, answer.high) if each is not None]
        return f"Peak capacity found: {found.key} = {answer.load}; measured on both sides: {' and '.join(sides)}."
    low = "none is sure to keep them" if answer.low is None else f"every measurement up to {answer.low} kept them"
    high = "none that was measured misses one" if answer.high is None else f"every one from {answer.high} on missed one"
    return f"Most within the targets: {found.key} = {answer.load}; {low}, {high}."


def curve_rows(found: Capacity) -> list[CurveRow]:
    """A row a load, in order: means over its measurements."""
    rates = {load: mean_of(found.of(load), "rate") for load in found.loads()}
    highest = max((rate for rate in rates.values() if rate is not None), default=0.0)
    return [
        CurveRow(load, _cells(found, found.of(load), rate), rate / highest if rate and highest else 0.0)
        for load, rate in rates.items()
    ]


def _cells(found: Capacity, own: Sequence[Found], rate: float | None) -> tuple[str, ...]:
    times = [mean_of(own, name) for name in _TIMES.values()]
    strain = mean_of(own, "strain")
    return (
        f"{len(own)}",
        *(NOT_REPORTED if value is None else duration(value) for value in times),
        NOT_REPORTED if strain is None else f"{strain:.2f}",
        NOT_REPORTED if rate is None else digits(rate),
        _verdict(found, own),
    )


def _verdict(found: Capacity, own: Sequence[Found]) -> str:
    if failed := sum(each.failed for each in own):
        return f"{plural(failed, 'request')} failed"
    if found.mode == "peak":
        return "highest" if own == found.of(found.answer.load or 0) else ""
    if any(each.strain is None for each in own):
        return "too few requests"
    kept = sum(each.met for each in own)
    return "kept" if kept == len(own) else "missed" if not kept else f"kept {kept} times of {len(own)}"


def render_capacity(found: Capacity) -> Any:
    """The curve as a table, its throughput as bars."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate((found.key, *COLUMNS, "")):
        table.add_column(heading, justify="right" if number < len(COLUMNS) else "left", no_wrap=True)
    for row in curve_rows(found):
        mark = "*" if row.load == found.answer.load else ""
        table.add_row(f"{mark}{row.load}", *row.cells, "█" * round(_BAR * row.bar))
    return table


def capacity_section(found: Capacity) -> dict[str, Any]:
    """What the run's page shows: the answer, each load, each step, and the curve."""
    caption = "P95 over the measurements of each load, and the throughput below. Dashed: the answer."
    return {
        "line": answer_line(found),
        "goals": ", ".join(found.goals),
        "columns": [found.key, *COLUMNS],
        "rows": [[str(row.load), *row.cells] for row in curve_rows(found)],
        "steps": [(f"{step.load}", step.action, step.reason) for step in found.steps],
        "picture": picture("capacity", "Times and throughput by load", caption, _figure(found), table="loads"),
    }


def _figure(found: Capacity) -> go.Figure:
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    panels = [(name, field, 1) for name, field in _TIMES.items()] + [("output tok/s", "rate", 2)]
    for number, (name, field, panel) in enumerate(panels):
        symbol, color = series_look(number)
        points = [(load, mean) for load in found.loads() if (mean := mean_of(found.of(load), field)) is not None]
        figure.add_scatter(
            x=[load for load, _ in points], y=[mean for _, mean in points], name=name, mode="lines+markers",
            marker={"color": color, "symbol": symbol, "size": 9}, line={"color": color, "width": 2},
            row=panel, col=1,
        )  # fmt: skip
        single = [(step.load, value) for step in found.steps if (value := getattr(step.found, field)) is not None]
        figure.add_scatter(
            x=[load for load, _ in single], y=[value for _, value in single], mode="markers", showlegend=False,
            marker={"color": color, "symbol": "circle-open", "size": 6}, name=f"{name}, each", row=panel, col=1,
        )  # fmt: skip
    for goal in map(parse_goal, found.goals):
        if goal.statistic == "p95" and goal.metric in ("ttft_s", "e2e_s"):
            figure.add_hline(y=goal.bound, line={"color": GREY, "dash": "dot"}, annotation_text=safe(goal.text), row=1)
    if found.answer.load is not None:
        figure.add_vline(x=found.answer.load, line={"color": GREY, "dash": "dash"})
    figure.update_xaxes(title=safe(found.key), row=2)
    figure.update_yaxes(title="P95 (s)", rangemode="tozero", row=1)
    figure.update_yaxes(title="output tokens/s", rangemode="tozero", row=2)
    return finish(figure, "", height=460)
