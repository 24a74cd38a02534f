"""What `harness compare` says of two unlike set-ups: a table, sentences, and report.html."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from harness.experiment.units import format_bytes
from harness.report.axes import shortened, value_text
from harness.report.page import render_page
from harness.report.words import UNKNOWN, duration, plural, with_interval
from harness.results.folder import write_atomically
from harness.stats import Ratio
from harness.validation.contrast import Contrast, MatchedPoint, TimeRatio
from harness.validation.setups import Difference

HEADINGS = ("point", "metric", "A", "B", "B is", "n")
_MAX_NAMED = 8
_BYTES = ("_bytes", "cache.cpu", "cache.gpu", ".capacity")


def contrast_table(found: Contrast) -> Table:
    """A line a time of each pair."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if number in (0, 1, 4) else "right", no_wrap=True)
    for line in ratio_lines(found):
        table.add_row(*map(escape, line))
    return table


def ratio_lines(found: Contrast) -> list[tuple[str, ...]]:
    """In the order of HEADINGS."""
    return [_line(pair, figure) for pair in found.pairs for figure in pair.figures]


def _line(pair: MatchedPoint, figure: TimeRatio) -> tuple[str, ...]:
    ratio = figure.ratio
    samples = f"{ratio.samples[0]:,}" if ratio.basis == "requests" else f"{ratio.samples[0]:,} / {ratio.samples[1]:,}"
    times = duration(ratio.reference_s), duration(ratio.typical_s)
    return pair_label(pair), figure.metric.removesuffix("_s").upper(), *times, factor(ratio), samples


def pair_label(pair: MatchedPoint) -> str:
    if pair.reference == pair.candidate:
        return f"{pair.tier} {pair.reference}"
    return f"{pair.tier} {pair.reference} / {pair.candidate}"


def factor(ratio: Ratio) -> str:
    """'1.4× (1.3–1.5×) faster', with what the interval rests on where that is not samples."""
    if ratio.reason is not None:
        return f"{ratio.reason}, typically {_faster(ratio)}"
    exact = {"samples": "", "requests": ", paired by request", "repeats exactly": ", simulated, repeats exactly"}
    if ratio.basis == "repeats exactly" and round(ratio.ratio, 3) == 1:
        return f"as fast{exact[ratio.basis]}"
    said = _faster(ratio) if ratio.distinct else f"not shown to differ, {with_interval(ratio)}"
    return f"{said}{exact[ratio.basis]}"


def _faster(ratio: Ratio) -> str:
    return f"{with_interval(ratio)} faster" if ratio.ratio >= 1 else f"{with_interval(ratio.turned)} slower"


def contrast_findings(found: Contrast) -> list[str]:
    """What was matched and by what, what differs, what the ratios leave open, and what has none."""
    said = [
        f"A is {_named(found.reference.runs)}, B is {_named(found.candidate.runs)}: two set-ups under one load, so"
        " there is no verdict on whether they are equal.",
        f"Matched by load and state: {plural(len(found.pairs), 'pair')}.",
        f"What differs: {_differing(found.differences)}.",
    ]
    for pair in found.pairs[:_MAX_NAMED]:
        if pair.differences:
            said.append(f"At {pair_label(pair)} also: {_differing(pair.differences)}.")
        said += [f"At {pair_label(pair)}: {note}." for note in pair.notes]
    said += _caveats(found)
    said += [f"Not compared, {each.side}: {each.point}: {each.reason}." for each in found.left_out[:_MAX_NAMED]]
    if len(found.left_out) > _MAX_NAMED:
        said.append(f"{len(found.left_out) - _MAX_NAMED} more points are not compared; contrast.json names them.")
    return said


def _named(runs: Sequence[str]) -> str:
    return ", ".join(runs)


def _differing(differences: Sequence[Difference]) -> str:
    return "; ".join(f"{name}: {a} in A, {b} in B" for name, a, b in map(_cells, differences)) or "nothing that is kept"


def _cells(each: Difference) -> tuple[str, str, str]:
    return each.key, _value(each.key, each.reference), _value(each.key, each.candidate)


def _value(key: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and key.endswith(_BYTES):
        return format_bytes(value)
    return shortened(value_text(value), 60)


def _caveats(found: Contrast) -> list[str]:
    keys = {each.key for each in found.differences}
    said = []
    if found.made == "simulated" and all(round(f.ratio.ratio, 6) == 1 for pair in found.pairs for f in pair.figures):
        said.append(
            "No simulated time differs: the presets have no term for what differs, or none that this load reaches. That"
            " is flat by construction, and no finding."
        )
    if found.made == "simulated":
        said.append("Both sides are simulated: a prediction for the presets' machines, not a measurement.")
    else:
        said.append("An interval speaks for these two starts of an engine: how two starts differ is not in it.")
    if found.made == "paced":
        said.append("Both sides are paced: engine, cache server and storage are real, the GPU's time is a model's.")
    if found.made == "device measured, engine simulated":
        said.append("The storage device is real; the engine and its other tiers are simulated.")
    if any(key.startswith("host.") for key in keys):
        said.append("The machines differ, so a ratio is theirs as well as the settings'.")
    if any(figure.ratio.basis == "requests" for pair in found.pairs for figure in pair.figures):
        said.append(
            "Paired by request: the median over requests of one request's ratio; A and B in the table are medians."
        )
    return said


def write_contrast_page(folder: Path, found: Contrast) -> None:
    """Writes report.html into the folder."""
    pairs = [(pair_label(pair), each) for pair in found.pairs for each in pair.differences]
    context = {
        "title": f"{_named(found.candidate.runs)} against {_named(found.reference.runs)}",
        "run": folder.name,
        "found": found,
        "level": "simulated" if found.made != "measured" else "good" if found.resolved else "warn",
        "badge": found.made.upper(),
        "findings": contrast_findings(found),
        "headings": HEADINGS,
        "lines": ratio_lines(found),
        "differences": [("all", *_cells(each)) for each in found.differences]
        + [(where, *_cells(each)) for where, each in pairs],
        "left_out": found.left_out,
        "facts": [("made", found.created_at), ("command", found.command or UNKNOWN)],
    }
    page = render_page("contrast.html.j2", context)
    write_atomically(folder / "report.html", page.encode("utf-8", errors="replace"))
