"""A load of conversations by turn: how TTFT grows and hits change as prompts do. A line a cell, a row a turn.

word: what a turn is called, 'round' or 'turn'; both count from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from harness.report.axes import cell_labels, shortened, varied_axes
from harness.report.page import Picture, picture
from harness.report.simulated import in_figures
from harness.report.style import GREY, finish, safe, series_look
from harness.report.words import (
    NOT_REPORTED,
    UNKNOWN,
    digits,
    duration,
    fitting_unit,
    mean_with_interval,
    percent,
    percentile_text,
)
from harness.results.manifest import Manifest
from harness.results.summary import FREE_LOAD, CellFigures, Summary
from harness.results.turns import TurnFigures

_ROUNDS = ("rounds", "qa")
_MAX_LINES = 12
_LABEL = 40


class TurnRow(msgspec.Struct, frozen=True):
    """One turn of one cell, as text. shares: of the prompt tokens, in the order of their columns."""

    cell: str
    turn: int
    n: str
    mean: str
    p50: str
    p95: str
    hit_rate: str
    shares: tuple[str, ...]
    prompt_tokens: str
    left_out: str


def turn_word(manifest: Manifest) -> str:
    """What people call a turn of this load."""
    return "round" if manifest.cells and manifest.cells[0].workload_kind in _ROUNDS else "turn"


def turn_rows(summary: Summary, names: Sequence[str]) -> list[TurnRow]:
    """names: the sources that have a column."""
    labels = cell_labels(summary.cells)
    return [_turn_row(labels[cell.key], turn, names) for cell in summary.cells for turn in cell.turns]


def _turn_row(cell: str, turn: TurnFigures, names: Sequence[str]) -> TurnRow:
    ttft = turn.ttft_s
    return TurnRow(
        cell=cell,
        turn=turn.turn,
        n=f"{turn.n:,}",
        mean=mean_with_interval(ttft),
        p50=percentile_text(ttft.p50 if ttft else None, turn.n, 0.5),
        p95=percentile_text(ttft.p95 if ttft else None, turn.n, 0.95),
        hit_rate=_share(turn.hit_rate),
        shares=tuple(_share(turn.shares.get(source)) for source in names),
        prompt_tokens=f"{turn.prompt_tokens:,}",
        left_out=f"{turn.left_out:,}",
    )


def _share(share: float | None) -> str:
    return NOT_REPORTED if share is None else percent(share)


def turn_pictures(summary: Summary, word: str) -> list[Picture]:
    """TTFT and hit rate by turn, all cells in one chart each, and bars over all turns; none of other loads."""
    cells = [cell for cell in summary.cells if cell.turns]
    if not cells:
        return []
    ttft = f"Mean TTFT of the requests that count, by {word} of their conversation."
    found = [picture("ttft-by-turn", f"TTFT by {word}", ttft, _ttft_lines(summary, cells, word), True, "turns")]
    if any(turn.hit_rate is not None for cell in cells for turn in cell.turns):
        hits = f"The share of a {word}'s prompt tokens whose KV came from a cache."
        found.append(
            picture("hits-by-turn", f"Hit rate by {word}", hits, _hit_lines(summary, cells, word), table="turns")
        )
    if len(cells) > 1:
        over_all = f"Mean TTFT over all {word}s, and prompt tokens served a second from the first send to the last end."
        found.append(picture("over-all", f"Over all {word}s", over_all, _bars(summary, cells), table="throughput"))
    return found


def bars_say_it(summary: Summary) -> bool:
    """Whether the bars show what a chart of mean TTFT along the axis would: an axis of names has no line."""
    axes = varied_axes(summary.cells)
    return sum(bool(cell.turns) for cell in summary.cells) > 1 and not any(axis.numeric for axis in axes)


def _ttft_lines(summary: Summary, cells: Sequence[CellFigures], word: str) -> go.Figure:
    means = [turn.ttft_s.mean for cell in cells for turn in cell.turns if turn.ttft_s]
    unit, factor = fitting_unit(means)
    figure = go.Figure()
    labels = cell_labels(summary.cells)
    for number, cell in enumerate(cells[:_MAX_LINES]):
        turns = [(turn, turn.ttft_s) for turn in cell.turns if turn.ttft_s]
        halves = [None if ttft.half_width is None else ttft.half_width * factor for _, ttft in turns]
        _add_line(
            figure,
            number,
            labels[cell.key],
            [turn.turn for turn, _ in turns],
            [ttft.mean * factor for _, ttft in turns],
            [_about(labels[cell.key], word, turn) for turn, _ in turns],
            error_y={"type": "data", "array": halves, "thickness": 1.5, "width": 5},
        )
    figure.update_yaxes(title=f"{in_figures(summary)}mean TTFT ({unit})", rangemode="tozero")
    return _finish_lines(figure, cells, word)


def _hit_lines(summary: Summary, cells: Sequence[CellFigures], word: str) -> go.Figure:
    figure = go.Figure()
    labels = cell_labels(summary.cells)
    for number, cell in enumerate(cells[:_MAX_LINES]):
        known = [(turn, turn.hit_rate) for turn in cell.turns if turn.hit_rate is not None]
        hover = [_about(labels[cell.key], word, turn) for turn, _ in known]
        _add_line(
            figure, number, labels[cell.key], [turn.turn for turn, _ in known], [rate for _, rate in known], hover
        )
    title = f"{in_figures(summary)}hit rate"
    figure.update_yaxes(title=title, tickformat=".0%", range=[0, 1.02])
    return _finish_lines(figure, cells, word)


def _add_line(
    figure: go.Figure, number: int, name: str, x: list[int], y: list[float], hover: list[str], **more: Any
) -> None:
    shape, color = series_look(number)
    figure.add_scatter(
        x=x, y=y, name=safe(shortened(name, _LABEL)), mode="lines+markers",
        marker={"color": color, "symbol": shape, "size": 8}, line={"color": color, "width": 2},
        hovertext=hover, hoverinfo="text", **more,
    )  # fmt: skip


def _finish_lines(figure: go.Figure, cells: Sequence[CellFigures], word: str) -> go.Figure:
    last = max(turn.turn for cell in cells for turn in cell.turns)
    figure.update_xaxes(title=f"{word} (from 0)", dtick=1 if last <= 20 else None, range=[-0.03 * last, 1.03 * last])
    figure.update_layout(showlegend=len(cells) > 1)
    return finish(figure, _lines_note(cells), height=360 + 20 * max(0, min(len(cells), _MAX_LINES) - 4))


def _lines_note(cells: Sequence[CellFigures]) -> str:
    return f"The first {_MAX_LINES} of {len(cells)} cells are drawn." if len(cells) > _MAX_LINES else ""


def _about(label: str, word: str, turn: TurnFigures) -> str:
    ttft, hits = turn.ttft_s, "" if turn.hit_rate is None else f"<br>hit rate {percent(turn.hit_rate)}"
    served = [f"{source} {percent(share)}" for source, share in turn.shares.items() if share]
    times = ""
    if ttft:
        times = (
            f"<br>mean {mean_with_interval(ttft)}<br>median {duration(ttft.p50)}, p95"
            f" {percentile_text(ttft.p95, ttft.n, 0.95)}"
        )
    left_out = f", {turn.left_out:,} left out" if turn.left_out else ""
    tiers = f"<br>{', '.join(served)}" if served else ""
    return f"<b>{safe(label)}</b>, {word} {turn.turn}{times}{hits}{tiers}<br>n = {turn.n:,}{left_out}"


def _bars(summary: Summary, cells: Sequence[CellFigures]) -> go.Figure:
    """Two panels below each other, so that a telephone shows both: mean TTFT, and prompt tokens a second."""
    shown, labels, made = cells[:_MAX_LINES], cell_labels(summary.cells), in_figures(summary)
    names = [safe(shortened(labels[cell.key], _LABEL)) for cell in shown]
    ttfts = [cell.tiers[FREE_LOAD].metrics["ttft_s"] for cell in shown]
    rates = [cell.tiers[FREE_LOAD].throughput for cell in shown]
    unit, factor = fitting_unit([ttft.mean for ttft in ttfts if ttft])
    titles = [f"{made}mean TTFT ({unit})", f"{made}prompt tokens per second"]
    figure = make_subplots(rows=2, cols=1, subplot_titles=titles, vertical_spacing=2.2 / (2 * len(shown) + 6))
    panels: tuple[list[tuple[float | None, str]], ...] = (
        [(None, UNKNOWN) if ttft is None else (ttft.mean * factor, duration(ttft.mean)) for ttft in ttfts],
        [
            (None, NOT_REPORTED)
            if rate is None
            else (rate.prompt_tokens_per_s, f"{digits(rate.prompt_tokens_per_s)}/s")
            for rate in rates
        ],
    )
    for line, values in enumerate(panels, 1):
        figure.add_bar(
            x=[value for value, _ in values], y=names, orientation="h", text=[text for _, text in values],
            textposition="auto", hoverinfo="y+text", showlegend=False, width=0.6,
            marker={"color": [series_look(number)[1] for number in range(len(shown))]}, row=line, col=1,
        )  # fmt: skip
    figure.update_yaxes(type="category", autorange="reversed", automargin=True)
    figure.update_xaxes(rangemode="tozero", gridcolor=GREY, gridwidth=0.3)
    figure.update_annotations(font_size=12, x=0, xanchor="left")
    return finish(figure.update_layout(showlegend=False), _lines_note(cells), height=210 + 68 * len(shown))
