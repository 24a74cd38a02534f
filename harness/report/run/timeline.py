"""When each request was sent and what it got: the one figure that draws every row, thinned where they are many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from harness.records import is_cut_off
from harness.report.style import (
    GREY,
    MAX_BINS,
    MAX_DOTS,
    MAX_PANELS,
    MAX_SLOWEST,
    SLOWEST_SHARE,
    VERDICT_SYMBOLS,
    color_of,
    finish,
    safe,
    symbol_of,
    thinning_note,
    wide,
)
from harness.report.words import duration, fitting_unit
from harness.results.summary import FREE_LOAD
from traces.request import RequestRecord


class _Stretch(msgspec.Struct):
    """One cell's rows of one attempt on the run's clock; shift_s lays stretches end to end where they overlap."""

    cell: str
    begin_s: float
    end_s: float
    shift_s: float = 0.0


def timeline(rows: Sequence[RequestRecord], labels: Mapping[str, str]) -> go.Figure:
    """TTFT at the time of sending, coloured by tier, with the verdict as symbol; above it the requests that failed
    or were cut off,
    below it a free load's requests in flight. Stretches whose clocks overlap (each begins at 0 in virtual time) are
    laid end to end.

    A dot of one of the slowest requests carries its place in their table (`slowest`) as custom data.
    """
    stretches = _stretches(rows)
    failed, free = any(_failed(row) for row in rows), any(row.expected_tier is None for row in rows)
    heights = [0.12] * failed + [1.0] + [0.5] * free
    figure = make_subplots(rows=len(heights), cols=1, shared_xaxes=True, row_heights=heights, vertical_spacing=0.05)
    ttfts = [row.ttft_s for row in rows if row.ttft_s is not None]
    unit, factor = fitting_unit(ttfts)
    places = {id(row): place for place, row in enumerate(slowest(rows))}
    groups: dict[tuple[str, str], list[RequestRecord]] = {}
    for row in rows:
        groups.setdefault((row.expected_tier or FREE_LOAD, _state(row)), []).append(row)
    chosen = _chosen(groups)
    for (tier, state), group in chosen.items():
        line = 1 if state in _NOT_DONE else 1 + failed
        figure.add_trace(_dots(group, tier, state, stretches, factor, places), row=line, col=1)
    if failed:
        figure.update_yaxes(title="not<br>done", range=[-1, 1], showticklabels=False, zeroline=False, row=1, col=1)
    if free:
        x, in_flight = requests_in_flight(rows, stretches)
        line_look = {"shape": "hv", "color": color_of(FREE_LOAD), "width": 1}
        hover = "%{y} in flight at %{x:.3f} s<extra></extra>"
        figure.add_scatter(x=x, y=in_flight, mode="lines", line=line_look, name="in flight", showlegend=False,
                           hovertemplate=hover, row=len(heights), col=1)  # fmt: skip
        figure.update_yaxes(title="in flight", rangemode="tozero", row=len(heights), col=1)
    scale = "log" if wide(ttfts) else "linear"
    figure.update_yaxes(title=f"TTFT ({unit})", type=scale, row=1 + failed, col=1)
    figure.update_xaxes(title="sent, seconds from the run's start", row=len(heights), col=1)
    _mark_cells(figure, stretches, labels)
    drawn = sum(map(len, chosen.values()))
    return finish(figure, _notes(drawn, len(rows), stretches), height=380 + 60 * failed + 140 * free)


def slowest(rows: Sequence[RequestRecord]) -> list[RequestRecord]:
    """The requests with the longest TTFT, the longest first, as many as the report's table holds."""
    answered = [row for row in rows if row.ttft_s is not None and row.error is None]
    return sorted(answered, key=lambda row: -(row.ttft_s or 0.0))[:MAX_SLOWEST]


def _chosen(groups: Mapping[tuple[str, str], Sequence[RequestRecord]]) -> dict[tuple[str, str], list[RequestRecord]]:
    """The requests that are drawn: all that failed or prove nothing, the slowest, and an even choice of the others."""
    plain = [row for (_, state), group in groups.items() if state in _PLAIN for row in group]
    most = -(-len(plain) // round(1 / SLOWEST_SHARE))
    always = {id(row) for row in sorted(plain, key=lambda row: -(row.ttft_s or 0.0))[:most]}
    # Each group is thinned by itself: a stride over interleaved tiers could miss one of them altogether.
    stride = -(-(len(plain) - most) // MAX_DOTS) or 1
    chosen: dict[tuple[str, str], list[RequestRecord]] = {}
    for (tier, state), group in groups.items():
        others = [row for row in group if id(row) not in always]
        kept = always | {id(row) for row in others[::stride]}
        chosen[tier, state] = [row for row in group if state not in _PLAIN or id(row) in kept]
    return chosen


def _notes(drawn: int, total: int, stretches: Mapping[Any, _Stretch]) -> str:
    always = f"the slowest {SLOWEST_SHARE:.0%} and all that failed or prove nothing"
    notes = [thinning_note(drawn, total, "request", always)]
    if any(stretch.shift_s > 0 for stretch in stretches.values()):
        notes.append("Cells whose clocks overlap are laid end to end.")
    return " ".join(note for note in notes if note)


# Of rows that a tier's figures hold, and of those that have no TTFT.
_PLAIN, _NOT_DONE = ("proven", "no claim"), ("error", "cut off")


def _failed(row: RequestRecord) -> bool:
    return row.error is not None or row.ttft_s is None


def _state(row: RequestRecord) -> str:
    if _failed(row):
        return "cut off" if is_cut_off(row.error) else "error"
    return row.verdict or ("no claim" if row.expected_tier is None else "unproven")


def _dots(
    group: Sequence[RequestRecord],
    tier: str,
    state: str,
    stretches: Mapping[tuple[str, int], _Stretch],
    factor: float,
    places: Mapping[int, int],
) -> go.Scatter:
    heights = [0.0 if state in _NOT_DONE or row.ttft_s is None else row.ttft_s * factor for row in group]
    # What a tier's figures leave out must stand out among those that they hold.
    size = 6 if state in _PLAIN else 10
    # Tiers differ in their marks as well as in their colours; a mark of doubt is one for all tiers.
    symbol = symbol_of(tier) if state == "proven" else VERDICT_SYMBOLS[state]
    return go.Scatter(
        x=np.array([row.sent_s + stretches[row.cell, row.attempt].shift_s for row in group]),
        y=np.array(heights),
        text=[_hover(row) for row in group],
        customdata=[places.get(id(row)) for row in group] if any(id(row) in places for row in group) else None,
        name=safe(tier if state in _PLAIN else f"{tier}, {state}"),
        mode="markers",
        marker={"color": color_of(tier), "symbol": symbol, "size": size},
        hovertemplate="%{text}<br>sent at %{x:.2f} s<extra>%{fullData.name}</extra>",
    )


def _hover(row: RequestRecord) -> str:
    """Which request it is and what it got; why it stands in no figure."""
    text = row.id if row.ttft_s is None or row.error else f"{row.id}: TTFT {duration(row.ttft_s)}"
    if reason := row.error or row.verdict_reason:
        text = f"{text}: {reason}"
    return safe(text if len(text) <= 120 else f"{text[:119]}…")


def _stretches(rows: Sequence[RequestRecord]) -> dict[tuple[str, int], _Stretch]:
    """The time that each (cell, attempt) took, in the order of the rows, moved where it overlaps the one before."""
    found: dict[tuple[str, int], _Stretch] = {}
    for row in rows:
        end_s = row.sent_s if row.last_token_s is None else row.last_token_s
        stretch = found.setdefault((row.cell, row.attempt), _Stretch(row.cell, row.sent_s, end_s))
        stretch.begin_s, stretch.end_s = min(stretch.begin_s, row.sent_s), max(stretch.end_s, end_s)
    free_from_s: float | None = None
    for stretch in found.values():
        if free_from_s is not None and stretch.begin_s < free_from_s:
            stretch.shift_s = free_from_s - stretch.begin_s
        free_from_s = stretch.end_s + stretch.shift_s
    return found


def requests_in_flight(
    rows: Sequence[RequestRecord], stretches: Mapping[tuple[str, int], _Stretch]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Times and the number in flight from each on; of very many events the maximum of each slice of time. Requests
    that failed have no end and are left out."""
    whole = [row for row in rows if row.last_token_s is not None]
    shifts = [stretches[row.cell, row.attempt].shift_s for row in whole]
    begins = [row.sent_s + shift for row, shift in zip(whole, shifts, strict=True)]
    ends = [row.last_token_s + shift for row, shift in zip(whole, shifts, strict=True) if row.last_token_s is not None]
    times = np.array(begins + ends)
    # At equal times ends go first: a slot that is handed over counts once.
    change = np.concatenate([np.ones(len(begins), dtype=int), -np.ones(len(ends), dtype=int)])
    order = np.lexsort((change, times))
    times, in_flight = times[order], np.cumsum(change[order])
    if len(times) <= MAX_BINS:
        return times, in_flight
    slices = np.unique(np.searchsorted(times, np.linspace(times[0], times[-1], MAX_BINS, endpoint=False)))
    return times[slices], np.maximum.reduceat(in_flight, slices)


def _mark_cells(figure: go.Figure, stretches: Mapping[tuple[str, int], _Stretch], labels: Mapping[str, str]) -> None:
    if not 1 < len(stretches) <= MAX_PANELS:
        return
    whole_s = max(stretch.end_s + stretch.shift_s for stretch in stretches.values())
    for stretch in stretches.values():
        # A name that does not fit over its cell would lie on the next one's.
        fits = stretch.end_s - stretch.begin_s > whole_s / 8
        text = safe(labels.get(stretch.cell, stretch.cell)) if fits else ""
        line, place = {"color": GREY, "dash": "dot", "width": 1}, stretch.begin_s + stretch.shift_s
        figure.add_vline(x=place, line=line)
        figure.add_annotation(
            x=place, y=1, xref="x", yref="paper", text=text, font={"size": 10}, showarrow=False,
            xanchor="left", yanchor="bottom",
        )  # fmt: skip
