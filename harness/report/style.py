"""What all figures share: a colour and a symbol a tier, how many dots are drawn, how text from outside is escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence

import plotly.graph_objects as go

from harness.results.summary import FREE_LOAD

# Okabe and Ito's colours: told apart by colour-blind readers too, and each tier keeps its own in every figure.
COLORS = {
    "recompute": "#D55E00",
    "gpu": "#009E73",
    "cpu": "#2B83C6",
    "disk": "#E69F00",
    "disk_cold": "#CC79A7",
    FREE_LOAD: "#56B4E9",
}
SYMBOLS = {"recompute": "circle", "gpu": "square", "cpu": "diamond", "disk": "triangle-up", "disk_cold": "cross"}
SOURCE_COLORS = {"computed": "#D55E00", "gpu": "#009E73", "cpu": "#2B83C6", "disk": "#E69F00"}
VERDICT_SYMBOLS = {
    "proven": "circle",
    "contradicted": "x",
    "unproven": "diamond-open",
    "no claim": "circle",
    "error": "triangle-down-open",
}
GREY = "#8A8A8A"
MAX_DOTS = 6_000
MAX_CURVE_POINTS = 1_000
MAX_BINS = 2_000
MAX_PANELS = 12
MAX_CELLS = 40
_LOG_FROM = 5.0


def thinning_note(drawn: int, total: int, noun: str) -> str:
    return "" if drawn >= total else f"{drawn:,} of {total:,} {noun}s are drawn, evenly chosen; the figures use all."


def wide(values: Sequence[float]) -> bool:
    """Whether values span so much that a linear axis would hide the small ones."""
    return len(values) > 0 and min(values) > 0 and max(values) / min(values) >= _LOG_FROM


def safe(text: str) -> str:
    return html.escape(text, quote=False)


def finish(figure: go.Figure, note: str, height: int = 380) -> go.Figure:
    return figure.update_layout(
        template="none",
        height=height,
        margin={"l": 64, "r": 16, "t": 56, "b": 56},
        legend={"orientation": "h", "yref": "container", "y": 1, "yanchor": "top", "x": 0},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": GREY, "activecolor": GREY},
        meta={"note": note},
    )
