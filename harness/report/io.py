"""What a run's traces say of its I/O: figures for the report, and a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from harness.report.style import GREY, finish, safe
from harness.units import format_bytes

_PARTS = {"engine_s": "#009E73", "lookup_s": "#56B4E9", "host_s": "#E69F00", "device_s": "#CC79A7"}
_DIRECTIONS = {"read": "#2B83C6", "write": "#D55E00"}
_MAX_BARS = 60


def labels(io: Mapping[str, Any]) -> list[str]:
    """A name for each trace: its cells', or the file system's."""
    return [", ".join(t["cells"]) if t["cells"] != ["base"] else str(t["file_system"]) for t in io["traces"]]


def sizes(io: Mapping[str, Any]) -> go.Figure:
    """How many block requests of each size, reads and writes."""
    traces = io["traces"]
    figure = make_subplots(rows=1, cols=len(traces), subplot_titles=[safe(name) for name in labels(io)])
    lows = sorted({int(low) for t in traces for side in _DIRECTIONS for low in t["block"][side]["sizes"]})
    names = [format_bytes(low) for low in lows]
    for number, trace in enumerate(traces):
        for side, color in _DIRECTIONS.items():
            counts = [trace["block"][side]["sizes"].get(str(low), 0) for low in lows]
            figure.add_bar(
                x=names, y=counts, name=side, marker_color=color, showlegend=not number, row=1, col=number + 1
            )
    figure.update_xaxes(type="category", title="request size, from")
    figure.update_yaxes(title="requests", col=1)
    return finish(figure, "")


def order(io: Mapping[str, Any]) -> go.Figure:
    """Share of block requests that begin where the one before ended."""
    figure = go.Figure()
    for side, color in _DIRECTIONS.items():
        shares = [sequential_share(trace["block"][side]) for trace in io["traces"]]
        figure.add_bar(x=[safe(name) for name in labels(io)], y=shares, name=side, marker_color=color)
    figure.update_yaxes(title="sequential share", range=[0, 1], tickformat=".0%")
    return finish(figure, "")


def sequential_share(side: Mapping[str, Any]) -> float | None:
    steps = side["sequential"] + side["random"]
    return side["sequential"] / steps if steps else None


def both_timelines(io: Mapping[str, Any]) -> go.Figure:
    """The device's bytes per 100 ms, and below the requests' waits for their first token, on one clock."""
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[2, 1])
    for number, trace in enumerate(io["traces"]):
        held = trace["timeline"]
        for side, color in _DIRECTIONS.items():
            rates = [count * 10 / 2**20 for count in held[f"{side}_bytes"]]
            figure.add_bar(x=held["start_s"], y=rates, offset=0, width=0.1, name=side, marker_color=color,
                           showlegend=not number, row=1, col=1)  # fmt: skip
        for request in trace["requests"]:
            x = [request["sent_s"], request["sent_s"] + request["ttft_s"]]
            figure.add_scatter(x=x, y=[request["ttft_s"] * 1000] * 2, mode="lines", line={"color": GREY, "width": 4},
                               name=safe(request["id"]), showlegend=False, row=2, col=1)  # fmt: skip
    figure.update_yaxes(title="MiB/s", row=1, col=1)
    figure.update_yaxes(title="TTFT (ms)", rangemode="tozero", row=2, col=1)
    figure.update_xaxes(title="seconds from the run's start", row=2, col=1)
    return finish(figure, "A line below is a request, from its sending to its first token.", height=460)


def whose_time(io: Mapping[str, Any]) -> go.Figure:
    """Each request's time to first token, in its parts."""
    requests = [request for trace in io["traces"] for request in trace["requests"]]
    shown = requests[:_MAX_BARS]
    figure = go.Figure()
    for part, color in _PARTS.items():
        heights = [request[part] * 1000 for request in shown]
        names = [safe(f"{request['id']} {request['cell']}") for request in shown]
        figure.add_bar(x=names, y=heights, name=part.removesuffix("_s"), marker_color=color)
    figure.update_layout(barmode="stack")
    figure.update_xaxes(showticklabels=False, title="requests served from disk, as they were sent")
    figure.update_yaxes(title="TTFT (ms)")
    note = "" if len(shown) == len(requests) else f"The first {len(shown)} of {len(requests)} requests are drawn."
    return finish(figure, note)


def render(ios: Sequence[Mapping[str, Any]]) -> str:
    """Traces of runs beside each other, one a column block of lines: for the terminal."""
    lines = []
    for io in ios:
        for name, trace in zip(labels(io), io["traces"], strict=True):
            lines += [f"{io['run']} · {io['engine']} · {name} · {trace['file_system']}", *_lines(trace), ""]
    return "\n".join(lines)


def _lines(trace: Mapping[str, Any]) -> list[str]:
    lines = []
    for side in _DIRECTIONS:
        held, share = trace["block"][side], sequential_share(trace["block"][side])
        d2c = held["d2c_s"]
        if held["requests"]:
            lines.append(
                f"  {side:5} {held['requests']:>6} requests {format_bytes(held['bytes']):>9}"
                f"  {'' if share is None else f'{share:.0%} sequential'}  D2C {d2c['p50'] * 1000:.2f} ms (p99"
                f" {d2c['p99'] * 1000:.2f})  depth {held['depth']:.1f}"
                f"  {format_bytes(held['bytes_per_s'])}/s while busy"
            )
    files = trace["files"]
    lines.append(
        f"  files {files['files']:>6} opened {files['opens']} times, {format_bytes(files['write_bytes'])} written,"
        f" {format_bytes(files['read_bytes'])} read; {trace['syncs']} syncs"
    )
    if trace["requests"]:
        count = len(trace["requests"])
        parts = {part: sum(request[part] for request in trace["requests"]) / count * 1000 for part in _PARTS}
        shown = " + ".join(f"{part.removesuffix('_s')} {value:.1f}" for part, value in parts.items())
        lines.append(f"  TTFT  {sum(parts.values()):.1f} ms = {shown} (means of {count} requests)")
    for check in trace["checks"]:
        deviation = "" if check["deviation"] is None else f"{check['deviation']:+.2%}"
        lines.append(f"  read  {format_bytes(check['bytes'] or 0):>9} by {check['account']}  {deviation}")
    lost = trace["lost_events"]
    return lines + ([f"  {lost} events were lost: the counts above are too low"] if lost else [])
