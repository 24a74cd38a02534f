"""One HTML file that needs no network: a template, the figures of a page, and the chart library inside it."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import plotly.graph_objects as go
from markupsafe import Markup

from harness.report.glossary import meaning_of
from harness.report.style import known_marks

_HERE = Path(__file__).parent
CHART_LIBRARY = _HERE / "assets" / "plotly-cartesian.min.js.gz"


class Picture(msgspec.Struct, frozen=True):
    """A figure with the words around it. json: safe inside a script element. log_toggle: its scale can be switched.

    scale: 'log' or 'linear', as it is drawn first. min_width: pixels below which it scrolls sideways. table: the id of
    the section whose table holds the same numbers; '' where none does.
    """

    id: str
    title: str
    caption: str
    note: str
    json: str
    height: int
    log_toggle: bool
    scale: str
    min_width: int
    table: str


def picture(
    name: str, title: str, caption: str, figure: go.Figure, log_toggle: bool = False, table: str = ""
) -> Picture:
    """A figure for a page, under an id of its own there."""
    about = figure.layout.meta
    scale = "log" if any(axis.type == "log" for axis in figure.select_yaxes()) else "linear"
    if figure.layout.xaxis.type == "log":
        scale = "log"
    return Picture(
        id=name,
        title=title,
        caption=caption,
        note=about["note"],
        json=script_json(figure.to_json()),
        height=figure.layout.height,
        log_toggle=log_toggle,
        scale=scale,
        min_width=about["min_width"],
        table=table,
    )


def script_json(text: str) -> Markup:
    """JSON that cannot end the script element it stands in, nor open another."""
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


def packed(content: bytes) -> Markup:
    """Bytes for a page, compressed: the page unpacks them with DecompressionStream. The same bytes give the same."""
    return _base64(gzip.compress(content, mtime=0))


def _base64(content: bytes) -> Markup:
    return Markup(base64.b64encode(content).decode())


def render_page(template: str, context: Mapping[str, Any]) -> str:
    """A page from one of the templates."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    library = _base64(CHART_LIBRARY.read_bytes())
    return environment.get_template(template).render(
        context, chart_library=library, marks=known_marks(), meaning_of=meaning_of
    )
