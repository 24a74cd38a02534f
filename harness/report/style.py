"""What all figures share: a colour and a symbol a tier, how many dots are drawn, how text from outside is escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from harness.results.summary import FREE_LOAD
from traces.tiers import COMPUTED, all_states, sources, state_names

# After Okabe and Ito's colours, which colour-blind readers can distinguish, in shades that stand out on white and on
# the dark page alike (contrast 3:1 or more). Each state keeps its own in every figure, and no other meaning has it.
_COLORS = {
    COMPUTED: "#D55E00",
    "recompute": "#D55E00",
    "gpu": "#009E73",
    "cpu": "#2B83C6",
    "pool": "#2A9DA8",
    "disk": "#B97A00",
    "disk_cold": "#C05A9C",
    "disk_restart": "#E7298A",
    "remote": "#8C6BB1",
    "remote_cold": "#5E7F3A",
    FREE_LOAD: "#7A6FD0",
}
# For states and tiers that are not named above, in their order.
_MORE_COLORS = ("#3F7F8C", "#A6611A", "#4D4D9F")
GREY = "#7D7D7D"


def color_of(name: str) -> str:
    """The colour of a state, a tier or 'computed'; grey for any other name."""
    known = dict.fromkeys((*state_names(), *sources()))
    more = [each for each in known if each not in _COLORS]
    if name in more:
        return _MORE_COLORS[more.index(name) % len(_MORE_COLORS)]
    return _COLORS.get(name, GREY)


def symbol_of(name: str) -> str:
    """The mark of a state in figures, as plotly names it; a circle for a name that is no state's."""
    return next((state.symbol for state in all_states() if state.name == name), "circle")


# Lines of loads, each with a colour and a mark of its own; they are no tiers.
_SERIES = ("#7A6FD0", "#3F7F8C", "#B97A00", "#C05A9C", "#2B83C6", "#5E7F3A")
_SHAPES = ("circle", "square", "diamond", "triangle-up", "star", "hexagon")


def series_look(number: int) -> tuple[str, str]:
    """The mark and the colour of a chart's n-th load. Colours repeat after six, with other marks."""
    return _SHAPES[(number + number // len(_SERIES)) % len(_SHAPES)], _SERIES[number % len(_SERIES)]


VERDICT_SYMBOLS = {
    "proven": "circle",
    "contradicted": "x",
    "unproven": "diamond-open",
    "no claim": "circle",
    "error": "triangle-down-open",
    "cut off": "line-ns-open",
}
MAX_DOTS = 6_000
MAX_CURVE_POINTS = 1_000
MAX_BINS = 2_000
MAX_PANELS = 12
MAX_CELLS = 40
MAX_BOXES = 16
MAX_SLOWEST = 50
_LOG_FROM = 5.0


# Of a load's requests that are drawn in any case: readers look for them.
SLOWEST_SHARE = 0.01


def thinning_note(drawn: int, total: int, noun: str, always: str = "") -> str:
    """What a figure leaves out. always: which are never left out."""
    how = f"{always}; the others evenly chosen" if always else "evenly chosen"
    return "" if drawn >= total else f"{drawn:,} of {total:,} {noun}s are drawn: {how}. The figures use all."


def wide(values: Sequence[float]) -> bool:
    """Whether values span so much that a linear axis would hide the small ones."""
    return len(values) > 0 and min(values) > 0 and max(values) / min(values) >= _LOG_FROM


def patterned(color: str, shape: str) -> dict[str, Any]:
    """A bar's marker: its colour, and a pattern over it for those who cannot tell colours apart ('': none)."""
    pattern = {
        "shape": shape,
        "fillmode": "overlay",
        "fgcolor": "#FFFFFF",
        "fgopacity": 0.6,
        "solidity": 0.2,
        "size": 7,
    }
    return {"color": color, "pattern": pattern} if shape else {"color": color}


def safe(text: str) -> str:
    return html.escape(text, quote=False)


def known_marks() -> list[tuple[str, str]]:
    """(name, colour) of every state and of a free load, for the page's own marks."""
    return [(name, color_of(name)) for name in (*state_names(), FREE_LOAD)]


def _legend_px(figure: go.Figure) -> int:
    return 12 if figure.layout.showlegend is False else 56


def _title_lines(figure: go.Figure) -> int:
    """Lines of text above the panels: the legend stands above them."""
    return max((str(note.text).count("<br>") + 1 for note in figure.layout.annotations if note.text), default=0)


def finish(figure: go.Figure, note: str, height: int = 380, min_width: int = 0) -> go.Figure:
    """The look that all figures share. min_width: pixels below which the page scrolls the figure sideways."""
    return figure.update_layout(
        template="none",
        height=height,
        margin={"l": 64, "r": 16, "t": _legend_px(figure) + 18 * _title_lines(figure), "b": 56},
        legend={"orientation": "h", "yref": "container", "y": 1, "yanchor": "top", "x": 0},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        meta={"note": note, "min_width": min_width},
    )
