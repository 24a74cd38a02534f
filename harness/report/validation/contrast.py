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
# Of several runs, each held against the first.
_HEADINGS_OF_MANY = ("run", "point", "metric", "first run", "this run", "this run is", "n")
_RIGHT = ("A", "B", "first run", "this run", "n")
_MAX_NAMED = 8
_BYTES = ("_bytes", "cache.cpu", "cache.gpu", ".capacity")


def contrast_table(*found: Contrast) -> Table:
    """A line a time of each pair, of one run or of several against the first."""
    headings, lines = _tabulated(found)
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right" if heading in _RIGHT else "left", no_wrap=True)
    for line in lines:
        table.add_row(*map(escape, line))
    return table


def _tabulated(found: Sequence[Contrast]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    if len(found) == 1:
        return HEADINGS, ratio_lines(found[0])
    return _HEADINGS_OF_MANY, [(_named(each.candidate.runs), *line) for each in found for line in ratio_lines(each)]


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
    return [
        f"A is {_named(found.reference.runs)}, B is {_named(found.candidate.runs)}: two set-ups under one load, so"
        " there is no verdict on whether they are equal.",
        *_about(found),
        *_caveats([found]),
        *_not_compared(found),
    ]


def findings_of_many(found: Sequence[Contrast], refused: Sequence[str]) -> list[str]:
    """Of several runs, each held against the first. refused: runs that cannot be, each with its reason."""
    said = [
        f"Each run is held against the first, A: {_named(found[0].reference.runs)}. B is the run that a line names."
    ]
    for each in found:
        said += [f"{_named(each.candidate.runs)}: {line}" for line in (*_about(each), *_not_compared(each))]
    return [*said, *_caveats(found), *refused]


def _about(found: Contrast) -> list[str]:
    """What was matched, what differs, and what to know of single points."""
    said = [
        f"Matched by load and state: {plural(len(found.pairs), 'pair')}.",
        f"What differs: {_differing(found.differences)}.",
    ]
    for pair in found.pairs[:_MAX_NAMED]:
        if pair.differences:
            said.append(f"At {pair_label(pair)} also: {_differing(pair.differences)}.")
        said += [f"At {pair_label(pair)}: {note}." for note in pair.notes]
    if found.made == "simulated" and all(_is_flat(f.ratio) for pair in found.pairs for f in pair.figures):
        said.append(
            "No simulated time differs: the presets have no term for what differs, or none that this load reaches. That"
            " is flat by construction, and no finding."
        )
    return said


def _is_flat(ratio: Ratio) -> bool:
    """Whether all times are the same on both sides."""
    return {round(each, 6) for each in (ratio.ratio, ratio.low or 0.0, ratio.high or 0.0)} == {1.0}


def _not_compared(found: Contrast) -> list[str]:
    said = [f"Not compared, {each.side}: {each.point}: {each.reason}." for each in found.left_out[:_MAX_NAMED]]
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


def _caveats(found: Sequence[Contrast]) -> list[str]:
    keys, made = {each.key for one in found for each in one.differences}, found[0].made
    said = []
    if made == "simulated":
        said.append("Both sides are simulated: a prediction for the presets' machines, not a measurement.")
    else:
        said.append("An interval speaks for these two starts of an engine: how two starts differ is not in it.")
    if made == "paced":
        said.append("Both sides are paced: engine, cache server and storage are real, the GPU's time is a model's.")
    if made == "device measured, engine simulated":
        said.append("The storage device is real; the engine and its other tiers are simulated.")
    if any(key.startswith("host.") for key in keys):
        said.append("The machines differ, so a ratio is theirs as well as the settings'.")
    if any(f.ratio.basis == "requests" for one in found for pair in one.pairs for f in pair.figures):
        said.append(
            "Paired by request: the median over requests of one request's ratio; A and B in the table are medians."
        )
    return said


def write_contrast_page(file: Path, *found: Contrast, refused: Sequence[str] = ()) -> None:
    """The page of one comparison, or of several runs that are each held against the first."""
    first = found[0]
    many = len(found) > 1 or bool(refused)
    title = f"{_named(first.candidate.runs)} against {_named(first.reference.runs)}"
    headings, lines = _tabulated(found)
    context = {
        "title": f"{plural(len(found) + 1, 'run')} against {_named(first.reference.runs)}" if many else title,
        "run": file.parent.name if file.name == "report.html" else file.stem,
        "created_at": first.created_at,
        "level": "simulated" if first.made != "measured" else "good" if any(f.resolved for f in found) else "warn",
        "badge": first.made.upper(),
        "findings": findings_of_many(found, refused) if many else contrast_findings(first),
        "headings": headings,
        "left": [heading for heading in headings[1:] if heading not in _RIGHT],
        "lines": lines,
        "differences": [line for each in found for line in _difference_lines(each, many)],
        "left_out": [(_named(each.candidate.runs), out) for each in found for out in each.left_out],
        "facts": [("made", first.created_at), ("command", first.command or UNKNOWN)],
    }
    page = render_page("contrast.html.j2", context)
    write_atomically(file, page.encode("utf-8", errors="replace"))


def _difference_lines(found: Contrast, many: bool) -> list[tuple[str, ...]]:
    """(key, where, A, B) of each difference."""
    run = f"{_named(found.candidate.runs)}: " if many else ""
    pairs = [("all points", each) for each in found.differences]
    pairs += [(pair_label(pair), each) for pair in found.pairs for each in pair.differences]
    return [(each.key, f"{run}{where}", *_cells(each)[1:]) for where, each in pairs]
