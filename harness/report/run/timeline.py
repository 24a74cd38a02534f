"""When each request was sent and what it got: the one figure that draws every row, thinned where they are many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from harness.report.style import (
    GREY,
    MAX_BINS,
    MAX_DOTS,
    MAX_PANELS,
    VERDICT_SYMBOLS,
    color_of,
    finish,
    safe,
    thinning_note,
    wide,
)
from harness.report.words import fitting_unit
from harness.results.summary import FREE_LOAD
from traces.request import RequestRecord


class _Stretch(msgspec.Struct):
    """One cell's rows of one attempt on the run's clock; shift_s lays stretches end to end where they overlap."""

    cell: str
    begin_s: float
    end_s: float
    shift_s: float = 0.0


def timeline(rows: Sequence[RequestRecord], labels: Mapping[str, str]) -> go.Figure:
    """TTFT at the time of sending, coloured by tier, with the verdict as symbol; below it a free load's requests in
    flight. Stretches whose clocks overlap (each begins at 0 in virtual time) are laid end to end."""
    stretches = _stretches(rows)
    free = any(row.expected_tier is None for row in rows)
    figure = make_subplots(rows=2 if free else 1, cols=1, shared_xaxes=True, row_heights=[2, 1] if free else None)
    ttfts = [row.ttft_s for row in rows if row.ttft_s is not None]
    unit, factor = fitting_unit(ttfts)
    floor_s = min(ttfts, default=0.0)
    groups: dict[tuple[str, str], list[RequestRecord]] = {}
    for row in rows:
        groups.setdefault((row.expected_tier or FREE_LOAD, _state(row)), []).append(row)
    # Each group is thinned by itself: a stride over interleaved tiers could miss one of them altogether.
    stride = -(-len(rows) // MAX_DOTS) or 1
    chosen = {key: group[::stride] for key, group in groups.items()}
    for (tier, state), group in chosen.items():
        figure.add_trace(_dots(group, tier, state, stretches, factor, floor_s), row=1, col=1)
    if free:
        x, in_flight = requests_in_flight(rows, stretches)
        line = {"shape": "hv", "color": color_of(FREE_LOAD), "width": 1}
        figure.add_scatter(x=x, y=in_flight, mode="lines", line=line, name="in flight", showlegend=False, row=2, col=1)
        figure.update_yaxes(title="in flight", rangemode="tozero", row=2, col=1)
    figure.update_yaxes(title=f"TTFT ({unit})", type="log" if wide(ttfts) else "linear", row=1, col=1)
    figure.update_xaxes(title="sent, seconds from the run's start", row=2 if free else 1, col=1)
    _mark_cells(figure, stretches, labels)
    drawn = sum(map(len, chosen.values()))
    return finish(figure, _notes(drawn, len(rows), groups, stretches), height=520 if free else 380)


def _notes(drawn: int, total: int, groups: Mapping[tuple[str, str], Any], stretches: Mapping[Any, _Stretch]) -> str:
    notes = [thinning_note(drawn, total, "request")]
    if any(state == "error" for _, state in groups):
        notes.append("A failed request has no TTFT: it is drawn at the lowest one seen.")
    if any(stretch.shift_s > 0 for stretch in stretches.values()):
        notes.append("Cells whose clocks overlap are laid end to end.")
    return " ".join(note for note in notes if note)


def _state(row: RequestRecord) -> str:
    if row.error is not None or row.ttft_s is None:
        return "error"
    return row.verdict or ("no claim" if row.expected_tier is None else "unproven")


def _dots(
    group: Sequence[RequestRecord],
    tier: str,
    state: str,
    stretches: Mapping[tuple[str, int], _Stretch],
    factor: float,
    floor_s: float,
) -> go.Scatter:
    heights = [floor_s if row.ttft_s is None else row.ttft_s for row in group]
    # What a tier's figures leave out must stand out among those that they hold.
    size = 6 if state in ("proven", "no claim") else 10
    return go.Scatter(
        x=np.array([row.sent_s + stretches[row.cell, row.attempt].shift_s for row in group]),
        y=np.array(heights) * factor,
        text=[safe(_hover(row)) for row in group],
        name=safe(tier if state in ("proven", "no claim") else f"{tier}, {state}"),
        mode="markers",
        marker={"color": color_of(tier), "symbol": VERDICT_SYMBOLS[state], "size": size},
        hovertemplate="%{text}<br>%{y:.4g} at %{x:.3f} s<extra>%{fullData.name}</extra>",
    )


def _hover(row: RequestRecord) -> str:
    text = f"{row.id}: {row.error or row.verdict_reason}" if row.error or row.verdict_reason else row.id
    return text if len(text) <= 120 else f"{text[:119]}…"


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
        line = {"color": GREY, "dash": "dot", "width": 1}
        figure.add_vline(x=stretch.begin_s + stretch.shift_s, line=line, annotation_text=text, annotation_font_size=10)
