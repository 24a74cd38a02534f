"""What a run's traces say of its I/O, as figures: a column a trace, so that file systems stand beside each other."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from harness.experiment.units import format_bytes
from harness.report.io.tables import DIRECTIONS, PARTS, labels
from harness.report.style import GREY, finish, patterned, safe
from harness.report.words import THIN_MARK, THIN_NOTE, too_few
from harness.results.traced import IoFigures

# None of these colours is a tier's or a verdict's; a pattern tells them apart without colour.
_COLORS = {"read": "#3B6FB6", "write": "#A0522D"}
_PATTERNS = {"read": "", "write": "/"}
_PART_COLORS = {"engine_s": "#5E7F3A", "lookup_s": "#6C7681", "host_s": "#3F7F8C", "device_s": "#A0527A"}
_PART_PATTERNS = {"engine_s": "", "lookup_s": ".", "host_s": "/", "device_s": "x"}
_ORDERS = {"sequential": ("#6C7681", ""), "random": ("#A0527A", "/")}
_LATENCIES = {"q2d_s": "queue to device (Q2D)", "d2c_s": "device to completion (D2C)"}
_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_PERCENTILES = {"p50": "#6F8FAF", "p90": "#3B6FB6", "p99": "#6B5BC4"}
_MAX_BARS = 60
MAX_COLUMNS = 6
# Pixels that a trace's column needs at least.
_WIDTH = 190


def _columns(io: IoFigures, heights: list[int], **shared: Any) -> go.Figure:
    """A grid with a column for each trace, under its name."""
    names = [safe(name) for name in labels(io)]
    return make_subplots(
        rows=len(heights), cols=len(names), column_titles=names, row_heights=heights, horizontal_spacing=0.04, **shared
    )


def _marker(side: str) -> dict[str, Any]:
    return patterned(_COLORS[side], _PATTERNS[side])


def both_timelines(io: IoFigures) -> go.Figure:
    """The device's bytes and queue depth per 100 ms, and the requests' waits for their first token, on one clock."""
    figure = _columns(io, [2, 1, 1], shared_xaxes=True, shared_yaxes="rows", vertical_spacing=0.06)
    for number, trace in enumerate(io.traces):
        held, column = trace.timeline, number + 1
        starts = [start - trace.started_s for start in held.start_s]
        for side in DIRECTIONS:
            look = {"offset": 0, "width": 0.1, "marker": _marker(side), "name": side, "legendgroup": side}
            rates = [count * 10 / 2**20 for count in getattr(held, f"{side}_bytes")]
            figure.add_bar(x=starts, y=rates, showlegend=not number, row=1, col=column, **look)
            figure.add_bar(x=starts, y=getattr(held, f"{side}_depth"), showlegend=False, row=2, col=column, **look)
        for request in trace.requests:
            sent_s = request.sent_s - trace.started_s
            figure.add_scatter(
                x=[sent_s, sent_s + request.ttft_s], y=[request.ttft_s * 1000] * 2, mode="lines",
                line={"color": GREY, "width": 4}, name=safe(request.id), showlegend=False, row=3, col=column,
            )  # fmt: skip
    for row, title in enumerate(("MiB/s", "queue depth", "TTFT (ms)"), 1):
        figure.update_yaxes(rangemode="tozero", row=row)
        figure.update_yaxes(title=title, row=row, col=1)
    figure.update_xaxes(title="seconds traced", row=3)
    return finish(
        figure,
        "A grey line is a request, from its sending to its first token.",
        height=560,
        min_width=_WIDTH * len(io.traces),
    )


def order(io: IoFigures) -> go.Figure:
    """Block requests per 100 ms that begin where the one before ended, and the others: of reads, and of writes."""
    figure = _columns(io, [1, 1], shared_xaxes=True, shared_yaxes="rows", vertical_spacing=0.08)
    for number, trace in enumerate(io.traces):
        held = trace.timeline
        starts = [start - trace.started_s for start in held.start_s]
        for row, side in enumerate(DIRECTIONS, 1):
            for how, (color, pattern) in _ORDERS.items():
                figure.add_bar(
                    x=starts, y=getattr(held, f"{side}_{how}"), offset=0, width=0.1, name=how,
                    marker=patterned(color, pattern),
                    legendgroup=how, showlegend=not number and row == 1, row=row, col=number + 1,
                )  # fmt: skip
    figure.update_layout(barmode="stack")
    for row, side in enumerate(DIRECTIONS, 1):
        figure.update_yaxes(title=f"{side}s", row=row, col=1)
    figure.update_xaxes(title="seconds traced", row=2)
    return finish(figure, "", height=440, min_width=_WIDTH * len(io.traces))


def sizes(io: IoFigures) -> go.Figure:
    """How many block requests of each size, reads and writes."""
    figure = _columns(io, [1], shared_yaxes="rows")
    lows = sorted({low for trace in io.traces for side in DIRECTIONS for low in trace.block.of(side).sizes})
    names = [format_bytes(low) for low in lows]
    for number, trace in enumerate(io.traces):
        for side in DIRECTIONS:
            counts = [trace.block.of(side).sizes.get(low, 0) for low in lows]
            figure.add_bar(
                x=names, y=counts, name=side, marker=_marker(side), showlegend=not number, row=1, col=number + 1
            )
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=names, title="request size, from")
    figure.update_yaxes(title="requests", col=1)
    return finish(figure, "", min_width=_WIDTH * len(io.traces))


def latencies(io: IoFigures) -> go.Figure:
    """Percentiles of how long block reads waited, and how long the device took for them."""
    figure = make_subplots(rows=1, cols=len(_LATENCIES), column_titles=list(_LATENCIES.values()))
    names, hatched = [safe(name) for name in labels(io)], False
    for column, latency in enumerate(_LATENCIES, 1):
        for percentile, color in _PERCENTILES.items():
            found = [getattr(getattr(trace.block.read, latency), percentile) for trace in io.traces]
            heights = [None if value is None else value * 1000 for value in found]
            thin = [too_few(trace.block.read.requests, _SHARES[percentile]) for trace in io.traces]
            hatched |= any(thin)
            marker = {"color": color, "pattern": {"shape": ["/" if few else "" for few in thin]}}
            figure.add_bar(x=names, y=heights, name=percentile, marker=marker, legendgroup=percentile,
                           hovertemplate="%{x}: %{y:.3g} ms<extra>%{fullData.name}</extra>",
                           showlegend=column == 1, row=1, col=column)  # fmt: skip
    figure.update_yaxes(title="ms, reads", col=1)
    return finish(figure, f"Hatched: {THIN_NOTE.removeprefix(THIN_MARK).strip()}." if hatched else "")


def whose_time(io: IoFigures) -> go.Figure:
    """Each request's time to first token, in its parts."""
    figure = _columns(io, [1], shared_yaxes="rows")
    left_out = False
    for number, trace in enumerate(io.traces):
        shown = trace.requests[:_MAX_BARS]
        left_out |= len(shown) < trace.requests_from_disk
        for part, name in PARTS.items():
            figure.add_bar(
                x=[safe(request.id) for request in shown],
                y=[getattr(request, part) * 1000 for request in shown],
                name=name,
                marker=patterned(_PART_COLORS[part], _PART_PATTERNS[part]),
                hovertemplate="%{x}: %{y:.3g} ms<extra>%{fullData.name}</extra>",
                legendgroup=part,
                showlegend=not number,
                row=1,
                col=number + 1,
            )
    figure.update_layout(barmode="stack")
    figure.update_xaxes(showticklabels=False, title="requests, as they were sent")
    figure.update_yaxes(title="TTFT (ms)", col=1)
    return finish(
        figure, f"The first {_MAX_BARS} of each are drawn." if left_out else "", min_width=_WIDTH * len(io.traces)
    )
