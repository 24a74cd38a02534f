"""report.html and validation.md of a comparison: sim against real, or any two runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.markup import escape
from rich.table import Table

from harness.experiment.units import format_bytes
from harness.report.axes import value_text
from harness.report.page import Picture, picture, render_page
from harness.report.validation import figures
from harness.report.validation.turns import TurnLine, turn_findings, turn_lines, turn_table
from harness.report.words import TIMES, UNKNOWN, digits, duration, percent, plural
from harness.results.folder import write_atomically
from harness.validation.document import Document, MetricSummary, SideFacts
from harness.validation.equivalence import Figure, PointResult
from harness.validation.points import Side

LEVELS = {"pass": "good", "fail": "bad", "not resolvable": "warn"}
_HEADLINES = {
    "pass": "Within ± {margin:.0%}: the two sides may be taken for equal",
    "fail": "Not within ± {margin:.0%}",
    "not resolvable": "Nothing fails at ± {margin:.0%}, and not everything could be resolved",
}


_MAX_NAMED = 8
# Axes that a point's label holds already.
_NAMED = ("tier", "workload")
_WORST_FIRST = ("fail", "not resolvable", "pass")


class Line(msgspec.Struct, frozen=True):
    """One metric of one point as text."""

    point: str
    tier: str
    metric: str
    reference: str
    candidate: str
    error: str
    interval: str
    verdict: str
    samples: str
    reason: str


def write_comparison(
    folder: Path, document: Document, reference: Side | None = None, candidate: Side | None = None
) -> None:
    """Writes report.html and validation.md into the folder; without sides there are no rows to draw."""
    write_atomically(folder / "validation.md", markdown(document).encode())
    page = comparison_page(document, reference, candidate)
    write_atomically(folder / "report.html", page.encode("utf-8", errors="replace"))


def comparison_page(document: Document, reference: Side | None = None, candidate: Side | None = None) -> str:
    labels = point_labels(document.points)
    return render_page("comparison.html.j2", _context(document, labels, reference, candidate))


def _context(
    document: Document, labels: Sequence[str], reference: Side | None, candidate: Side | None
) -> dict[str, Any]:
    names = _names(document)
    return {
        "title": f"{document.name}: {names[1]} against {names[0]}",
        "run": document.name,
        "doc": document,
        "names": names,
        "level": LEVELS[document.verdict],
        "headline": _HEADLINES[document.verdict].format(margin=document.margin),
        "findings": comparison_findings(document),
        "shown_findings": _MAX_NAMED,
        "metrics": [_metric_cells(line, document.points) for line in document.metrics],
        "pictures": _pictures(document, labels, reference, candidate),
        "lines": lines(document, labels),
        "turns": turn_lines(document.points, labels),
        "turn_names": _short_names(document),
        "facts": _facts(document),
    }


def _names(document: Document) -> tuple[str, str]:
    """What the two sides are called: their engines, or their runs where one engine is compared with itself."""
    ours, theirs = document.reference, document.candidate
    called = _engine(ours), _engine(theirs)
    if called[0] != called[1]:
        return called
    names = f"{called[0]} {ours.runs[0]}", f"{called[1]} {theirs.runs[0]}"
    return names if names[0] != names[1] else (f"{names[0]} (reference)", f"{names[1]} (candidate)")


def _short_names(document: Document) -> tuple[str, str]:
    """For columns: without what stands for an engine's GPU."""
    called = document.reference.engine, document.candidate.engine
    return called if called[0] != called[1] else _names(document)


def _engine(side: SideFacts) -> str:
    return side.engine if side.accelerator is None else f"{side.engine} ({side.accelerator})"


def _pictures(
    document: Document, labels: Sequence[str], reference: Side | None, candidate: Side | None
) -> list[Picture]:
    points, margin, names = document.points, document.margin, _names(document)
    keys = [(point.cell, point.tier) for point in points]
    pairs = [
        (label, point, reference.points[key], candidate.points[key])
        for label, point, key in zip(labels, points, keys, strict=True)
        if reference and candidate and figures.judged_ttft(point.figures)
    ]
    band = f"Relative error of TTFT with its {document.confidence:.0%} interval; the band is ± {margin:.0%}."
    found = [picture("errors", "Error by point", band, figures.errors(points, labels, margin))]
    if any(point.noise for point in points):
        own = f"{names[0]} against itself: odd samples against even ones, or one pass over a load against another."
        found.append(picture("noise", "Noise floor", own, figures.errors(points, labels, margin, noise=True)))
    equal = f"Each point's TTFT on both sides; dotted: ± {margin:.0%}."
    found.append(picture("agreement", "One against the other", equal, figures.agreement(points, labels, margin, names)))
    if along := figures.residuals(points, margin):
        found.append(picture("residuals", "Residuals along each axis", "A slope is a term that is missing.", along))
    if pairs:
        spread = "Cumulative TTFT of both sides. A simulator has no noise of its own: without a queue it is a step."
        found.append(picture("spread", "Distributions", spread, figures.distributions(pairs, names)))
    if dots := figures.request_pairs(pairs, names):
        found.append(picture("pairs", "Request by request", "The same request on both sides.", dots))
    return found


# ---- words


def point_labels(points: Sequence[PointResult]) -> list[str]:
    """Each point by its tier and what was varied, or by the row of a table that it is; no two alike."""
    if points and "source" in points[0].axes:
        return [f"{point.tier} {point.axes['source']} ({point.axes['constants']})" for point in points]
    axes = list(points[0].axes) if points else []
    varied = [axis for axis in axes if len({value_text(point.axes[axis]) for point in points}) > 1]
    labels = [
        " ".join(filter(None, [point.tier, *(_axis_text(a, point.axes[a]) for a in varied if a not in _NAMED)]))
        for point in points
    ]
    # Where only the keys of their cells differ, labels have these.
    alike = {point.tier for label, point in zip(labels, points, strict=True) if labels.count(label) > 1}
    return [
        f"{point.tier} {point.cell}" if point.tier in alike else label
        for label, point in zip(labels, points, strict=True)
    ]


def _axis_text(axis: str, value: Any) -> str:
    if value is None:
        return ""
    texts = {
        "prompt_tokens": f"{value} tok",
        "hit_rate": f"hit {value}",
        "chunk_tokens": f"chunk {value}",
        "concurrency": f"{TIMES}{value}",
        "device_bytes_per_s": f"{format_bytes(value)}/s" if isinstance(value, int | float) else str(value),
    }
    return texts.get(axis, str(value))


def comparison_findings(document: Document) -> list[str]:
    """What the figures say, one sentence each."""
    whole = document.overall
    shares = whole.shares
    said = [
        f"{plural(whole.points, 'point')}: {percent(shares.passed)} pass, {percent(shares.failed)} fail,"
        f" {percent(shares.unresolved)} not resolvable at ± {document.margin:.0%}.",
        f"MAPE of the times that count {percent(whole.mape)}, largest error {percent(whole.largest_error)}"
        + (f"; {whole.counts_equal} of {whole.counts} counts equal." if whole.counts else "."),
    ]
    missed = [name for name, met in whole.targets.items() if not met]
    said.append(f"Of the aims missed: {'; '.join(missed)}." if missed else "All aims are met.")
    if whole.left_out:
        said.append(f"{plural(whole.left_out, 'row')} left out: failed, or without evidence for its tier.")
    fit = document.calibration
    if fit is not None and fit.good is False:
        said.append(f"The calibration itself calls its fit not good: {fit.verdict}.")
    labels = point_labels(document.points)
    failed = [
        (max((f for f in point.figures if f.gates), key=lambda f: abs(f.error or 0.0)), label, point)
        for label, point in zip(labels, document.points, strict=True)
        if any(f.gates and f.verdict == "fail" for f in point.figures)
    ]
    failed.sort(key=lambda each: -abs(each[0].error or 0.0))
    said += [
        f"Fails: {label}, at most by {signed(f.error)} ({figures.metric_name(f.metric, [point])})."
        for f, label, point in failed[:_MAX_NAMED]
    ]
    odd = [
        f"Counts differ: {label}, {f.metric} {f.reference:,.6g} against {f.candidate:,.6g} a request."
        for label, point in zip(labels, document.points, strict=True)
        for f in point.counts
        if f.verdict != "pass"
    ]
    said += [*odd[:_MAX_NAMED], *turn_findings(document.points, labels)]
    return [*said, *(document.notes or ())]


def lines(document: Document, labels: Sequence[str]) -> list[Line]:
    """A line a figure of each point, what fails first."""
    found = [
        _line(label, point, figure)
        for label, point in zip(labels, document.points, strict=True)
        for figure in (*point.figures, *point.counts)
    ]
    return sorted(found, key=lambda line: _WORST_FIRST.index(line.verdict))


def _line(label: str, point: PointResult, figure: Figure) -> Line:
    name = figures.metric_name(figure.metric, [point])
    return Line(
        point=label,
        tier=point.tier,
        metric=name if figure.gates else f"{name} (does not count)",
        reference=amount(figure.metric, figure.reference),
        candidate=amount(figure.metric, figure.candidate),
        error=signed(figure.error),
        interval=UNKNOWN if figure.low is None else f"{signed(figure.low)} … {signed(figure.high)}",
        verdict=figure.verdict,
        samples=f"{figure.samples:,}" + (f" of {figure.needed:,}" if figure.needed else ""),
        reason=figure.reason or "",
    )


def amount(metric: str, value: float) -> str:
    if metric.endswith("_s") and metric.startswith("ttft"):
        return duration(value)
    if metric.endswith("_bytes"):
        return format_bytes(value)
    # A count is a whole number: 513, and not 513.000.
    return f"{value:,.0f}" if value == round(value) else digits(value, 6 if metric.endswith("tokens") else 3)


def signed(share: float | None) -> str:
    """+1.2 %; tiny errors of arithmetic are no sign."""
    return UNKNOWN if share is None else f"{round(share * 100, 2) + 0.0:+.1f} %"


def _metric_cells(line: MetricSummary, points: Sequence[PointResult]) -> list[str]:
    counted = (line.points, line.passed, line.failed, line.unresolved)
    name = figures.metric_name(line.metric, points)
    name = name if line.gates else f"{name} (does not count)"
    return [name, *(f"{count:,}" for count in counted), percent(line.mape), signed(line.largest_error)]


def _facts(document: Document) -> list[tuple[str, str]]:
    pairs: list[tuple[str, Any]] = [("made", document.created_at)]
    pairs += [("commit", document.git.commit if document.git else None)]
    pairs += [*_side_facts("reference", document.reference), *_side_facts("candidate", document.candidate)]
    pairs += [("origin", document.reference.origin)]
    pairs += [(f"machine: {key}", value) for key, value in document.reference.host.items()]
    if document.calibration is not None:
        fit = msgspec.structs.asdict(document.calibration)
        pairs += [(f"calibration: {key}", value) for key, value in fit.items()]
    return [(key, str(value)) for key, value in pairs if value is not None]


def _side_facts(side: str, about: SideFacts) -> list[tuple[str, Any]]:
    return [
        (f"{side}: engine", about.engine),
        (f"{side}: accelerator", about.accelerator),
        (f"{side}: runs", ", ".join(about.runs)),
        (f"{side}: created_at", about.created_at),
        (f"{side}: gpu_blocks", about.gpu_blocks),
        (f"{side}: block_tokens", about.block_tokens),
        *((f"{side}: {name}", about.versions[name]) for name in sorted(about.versions)),
    ]


def terminal_tables(document: Document) -> list[Table]:
    """One line a point: TTFT on both sides, error, interval, verdict. Of conversations, one line a turn as well."""
    by_turn = turn_table(document.points, point_labels(document.points), _short_names(document))
    return [_by_point(document), *([by_turn] if by_turn else [])]


def _by_point(document: Document) -> Table:
    names = _names(document)
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for number, head in enumerate(("point", *names, "error", "90 % interval", "n", "verdict")):
        table.add_column(head, justify="left" if number in (0, 6) else "right", no_wrap=True)
    for label, point in zip(point_labels(document.points), document.points, strict=True):
        if figure := figures.judged_ttft(point.figures):
            line = _line(label, point, figure)
            cells = (label, line.reference, line.candidate, line.error, line.interval, line.samples, point.verdict)
            table.add_row(*map(escape, cells))
    return table


def markdown(document: Document) -> str:
    """The short version: verdict, metrics, and one line a point."""
    names = _names(document)
    head = [
        f"# {document.name}: {names[1]} against {names[0]}",
        "",
        f"**{document.verdict}** at ± {document.margin:.0%}",
    ]
    head += ["", *(f"- {line}" for line in comparison_findings(document)), ""]
    head += ["| metric | points | pass | fail | not resolvable | MAPE | largest |", "|---|---|---|---|---|---|---|"]
    head += [_row(_metric_cells(line, document.points)) for line in document.metrics]
    head += ["", f"| point | {names[0]} | {names[1]} | error | 90 % interval | A/A | n | verdict |", "|---" * 8 + "|"]
    body = []
    for label, point in zip(point_labels(document.points), document.points, strict=True):
        if figure := figures.judged_ttft(point.figures):
            line = _line(label, point, figure)
            own = figures.judged_ttft(point.noise)
            noise = signed(own.error) if own else UNKNOWN
            cells = (label, line.reference, line.candidate, line.error, line.interval, noise, line.samples)
            body.append(_row([*cells, point.verdict]))
    turns = turn_lines(document.points, point_labels(document.points))
    facts = [f"- {key}: {value}" for key, value in _facts(document)]
    kinds = "TTFT: of a warm state the middle of its samples, of a load the mean over its requests"
    ttft = f"{kinds}; the verdict is of all the point's figures that count."
    caption = f"{ttft} A/A: the reference against itself."
    return "\n".join([*head, *body, "", caption, "", *_turn_table(turns, _short_names(document)), *facts, ""])


def _turn_table(turns: Sequence[TurnLine], names: tuple[str, str]) -> list[str]:
    if not turns:
        return []
    heads = ("point", "turn", *(f"hit rate, {name}" for name in names), "hit tokens", "requests equal", "by tier")
    body = [_row([t.point, str(t.turn), t.reference, t.candidate, t.error, t.equal, t.by_tier]) for t in turns]
    return [_row(heads), "|---" * len(heads) + "|", *body, ""]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
