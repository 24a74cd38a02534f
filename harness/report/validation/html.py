"""report.html and validation.md of a comparison: sim against real, or any two runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.markup import escape
from rich.table import Table

from harness.experiment.units import format_bytes
from harness.report.axes import value_text
from harness.report.page import Picture, picture, render
from harness.report.validation import figures
from harness.report.words import TIMES, UNKNOWN, digits, duration, percent, plural
from harness.results.folder import write_atomically
from harness.validation.points import Side

Doc = Mapping[str, Any]
LEVELS = {"pass": "good", "fail": "bad", "not resolvable": "warn"}
_HEADLINES = {
    "pass": "Within ± {margin:.0%}: the two sides may be taken for equal",
    "fail": "Not within ± {margin:.0%}",
    "not resolvable": "Nothing fails at ± {margin:.0%}, and not everything could be resolved",
}


_MAX_NAMED = 8


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


def write_comparison(folder: Path, content: Doc, reference: Side | None = None, candidate: Side | None = None) -> None:
    """Writes report.html and validation.md into the folder; without sides there are no rows to draw."""
    labels = point_labels(content["points"])
    write_atomically(folder / "validation.md", markdown(content).encode())
    page = render("comparison.html.j2", _context(content, labels, reference, candidate))
    write_atomically(folder / "report.html", page.encode("utf-8", errors="replace"))


def _context(content: Doc, labels: Sequence[str], reference: Side | None, candidate: Side | None) -> dict[str, Any]:
    names = _names(content)
    return {
        "title": f"{content['name']}: {names[1]} against {names[0]}",
        "run": content["name"],
        "doc": content,
        "names": names,
        "level": LEVELS[content["verdict"]],
        "headline": _HEADLINES[content["verdict"]].format(margin=content["margin"]),
        "findings": findings(content),
        "shown_findings": _MAX_NAMED,
        "metrics": [_metric_cells(line) for line in content["metrics"]],
        "pictures": _pictures(content, labels, reference, candidate),
        "lines": lines(content, labels),
        "facts": _facts(content),
    }


def _names(content: Doc) -> tuple[str, str]:
    """What the two sides are called: their engines, or their runs where one engine is compared with itself."""
    engines = content["reference"]["engine"], content["candidate"]["engine"]
    if engines[0] != engines[1]:
        return engines
    return f"{engines[0]} {content['reference']['runs'][0]}", f"{engines[1]} {content['candidate']['runs'][0]}"


def _pictures(content: Doc, labels: Sequence[str], reference: Side | None, candidate: Side | None) -> list[Picture]:
    points, margin, names = content["points"], content["margin"], _names(content)
    keys = [(point["cell"], point["tier"]) for point in points]
    pairs = [
        (label, point, reference.points[key], candidate.points[key])
        for label, point, key in zip(labels, points, keys, strict=True)
        if reference and candidate and figures.figure_of(point)
    ]
    band = f"Relative error of mean TTFT with its {content['confidence']:.0%} interval; the band is ± {margin:.0%}."
    found = [picture("errors", "Error by point", band, figures.errors(points, labels, margin))]
    if any(point["noise"] for point in points):
        own = f"{names[0]} against itself: odd samples against even ones, or one pass over a load against another."
        found.append(picture("noise", "Noise floor", own, figures.errors(points, labels, margin, kind="noise")))
    equal = f"Each point's mean on both sides; dotted: ± {margin:.0%}."
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


def point_labels(points: Sequence[Doc]) -> list[str]:
    """Each point by its tier and what was varied, or by the row of a table that it is."""
    if points and "source" in points[0]["axes"]:
        return [f"{point['tier']} {point['axes']['source']} ({point['axes']['constants']})" for point in points]
    axes = list(points[0]["axes"]) if points else []
    varied = [axis for axis in axes if len({value_text(point["axes"][axis]) for point in points}) > 1]
    return [
        " ".join([point["tier"], *(_axis_text(a, point["axes"][a]) for a in varied if a not in ("tier", "workload"))])
        for point in points
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


def findings(content: Doc) -> list[str]:
    """What the figures say, one sentence each."""
    whole = content["overall"]
    shares = whole["shares"]
    said = [
        f"{plural(whole['points'], 'point')}: {percent(shares['pass'])} pass, {percent(shares['fail'])} fail,"
        f" {percent(shares['not resolvable'])} not resolvable at ± {content['margin']:.0%}.",
        f"MAPE of the times that count {percent(whole['mape'])}, largest error {percent(whole['largest_error'])}"
        + (f"; {whole['counts_equal']} of {whole['counts']} counts equal." if whole["counts"] else "."),
    ]
    missed = [name for name, met in whole["targets"].items() if not met]
    said.append(f"Of the aims missed: {'; '.join(missed)}." if missed else "All aims are met.")
    if whole["left_out"]:
        said.append(f"{plural(whole['left_out'], 'row')} left out: failed, or without evidence for its tier.")
    fit = content.get("calibration") or {}
    if fit.get("good") is False:
        said.append(f"The calibration itself calls its fit not good: {fit['verdict']}.")
    labels = point_labels(content["points"])
    failed = [
        (max((f for f in point["figures"] if f["gates"]), key=lambda f: abs(f["error"] or 0.0)), label)
        for label, point in zip(labels, content["points"], strict=True)
        if any(f["gates"] and f["verdict"] == "fail" for f in point["figures"])
    ]
    failed.sort(key=lambda each: -abs(each[0]["error"] or 0.0))
    said += [f"Fails: {label}, at most by {signed(f['error'])} ({f['metric']})." for f, label in failed[:_MAX_NAMED]]
    odd = [
        f"Counts differ: {label}, {f['metric']} {f['reference']:,.6g} against {f['candidate']:,.6g} a request."
        for label, point in zip(labels, content["points"], strict=True)
        for f in point["counts"]
        if f["verdict"] != "pass"
    ]
    return [*said, *odd[:_MAX_NAMED], *content.get("notes", ())]


def lines(content: Doc, labels: Sequence[str]) -> list[Line]:
    return [
        _line(label, point["tier"], figure)
        for label, point in zip(labels, content["points"], strict=True)
        for figure in (*point["figures"], *point["counts"])
    ]


def _line(label: str, tier: str, figure: Doc) -> Line:
    return Line(
        point=label,
        tier=tier,
        metric=figure["metric"] if figure["gates"] else f"{figure['metric']} (does not count)",
        reference=amount(figure["metric"], figure["reference"]),
        candidate=amount(figure["metric"], figure["candidate"]),
        error=signed(figure["error"]),
        interval=UNKNOWN if figure["low"] is None else f"{signed(figure['low'])} … {signed(figure['high'])}",
        verdict=figure["verdict"],
        samples=f"{figure['samples']:,}" + (f" of {figure['needed']:,}" if figure["needed"] else ""),
        reason=figure["reason"] or "",
    )


def amount(metric: str, value: float) -> str:
    if metric.endswith("_s") and metric.startswith("ttft"):
        return duration(value)
    return format_bytes(value) if metric.endswith("_bytes") else digits(value, 6 if metric.endswith("tokens") else 3)


def signed(share: float | None) -> str:
    """+1.2 %; tiny errors of arithmetic are no sign."""
    return UNKNOWN if share is None else f"{round(share * 100, 2) + 0.0:+.1f} %"


def _metric_cells(line: Doc) -> list[str]:
    verdicts = [f"{line[verdict]:,}" for verdict in ("pass", "fail", "not resolvable")]
    name = line["metric"] if line["gates"] else f"{line['metric']} (does not count)"
    return [name, f"{line['points']:,}", *verdicts, percent(line["mape"]), signed(line["largest_error"])]


def _facts(content: Doc) -> list[tuple[str, str]]:
    pairs: list[tuple[str, Any]] = [("made", content["created_at"]), ("commit", (content["git"] or {}).get("commit"))]
    for side in ("reference", "candidate"):
        about = content[side]
        pairs += [(f"{side}: engine", about["engine"]), (f"{side}: runs", ", ".join(about["runs"]))]
        pairs += [(f"{side}: {key}", about[key]) for key in ("created_at", "gpu_blocks", "block_tokens")]
        pairs += [(f"{side}: {key}", about["versions"][key]) for key in sorted(about["versions"])]
    pairs += [("origin", content["reference"].get("origin"))]
    pairs += [(f"machine: {key}", value) for key, value in content["reference"]["host"].items()]
    pairs += [(f"calibration: {key}", value) for key, value in (content.get("calibration") or {}).items()]
    return [(key, str(value)) for key, value in pairs if value is not None]


def terminal_table(content: Doc) -> Table:
    """One line a point: mean TTFT on both sides, error, interval, verdict."""
    names = _names(content)
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for number, head in enumerate(("point", *names, "error", "90 % interval", "n", "verdict")):
        table.add_column(head, justify="left" if number in (0, 6) else "right", no_wrap=number != 0)
    for label, point in zip(point_labels(content["points"]), content["points"], strict=True):
        if figure := figures.figure_of(point):
            line = _line(label, point["tier"], figure)
            cells = (label, line.reference, line.candidate, line.error, line.interval, line.samples, point["verdict"])
            table.add_row(*map(escape, cells))
    return table


def markdown(content: Doc) -> str:
    """The short version: verdict, metrics, and one line a point."""
    names = _names(content)
    head = [
        f"# {content['name']}: {names[1]} against {names[0]}",
        "",
        f"**{content['verdict']}** at ± {content['margin']:.0%}",
    ]
    head += ["", *(f"- {line}" for line in findings(content)), ""]
    head += ["| metric | points | pass | fail | not resolvable | MAPE | largest |", "|---|---|---|---|---|---|---|"]
    head += [_row(_metric_cells(line)) for line in content["metrics"]]
    head += ["", f"| point | {names[0]} | {names[1]} | error | 90 % interval | A/A | n | verdict |", "|---" * 8 + "|"]
    body = []
    for label, point in zip(point_labels(content["points"]), content["points"], strict=True):
        if figure := figures.figure_of(point):
            line = _line(label, point["tier"], figure)
            own = figures.figure_of(point, kind="noise")
            noise = signed(own["error"]) if own else UNKNOWN
            body.append(
                _row(
                    [
                        label,
                        line.reference,
                        line.candidate,
                        line.error,
                        line.interval,
                        noise,
                        line.samples,
                        point["verdict"],
                    ]
                )
            )
    facts = [f"- {key}: {value}" for key, value in _facts(content)]
    ttft = "TTFT: mean of a sample, median over samples; the verdict is of all the point's figures that count."
    caption = f"{ttft} A/A: the reference against itself."
    return "\n".join([*head, *body, "", caption, "", *facts, ""])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
