"""Writes report.html: one file that needs no network, made from a run folder alone."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import plotly.graph_objects as go
import yaml
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from harness.errors import ResultsError
from harness.records import Counters, Sample
from harness.report.axes import cell_labels, value_text, varied_axes
from harness.report.io import html as io
from harness.report.io import tables as io_tables
from harness.report.io.storage_words import storage_lines
from harness.report.run import figures, tables
from harness.report.run.timeline import timeline
from harness.report.words import NOT_REPORTED, UNKNOWN, evidence, findings, percent, plural, tier_order
from harness.results.folder import read_rows, read_samples, write_atomically
from harness.results.manifest import CellEntry, Manifest, read_manifest
from harness.results.provenance import is_simulated
from harness.results.summary import FREE_LOAD, Summary, core_slower, summarize
from harness.results.traced import IoFigures, read_io
from traces.request import RequestRecord
from traces.tiers import sources

_TEMPLATES = Path(__file__).parent.parent / "templates"
_TABLES = {"ttft_s": "TTFT", "e2e_s": "End to end", "tpot_s": "Time per output token"}
_MAX_TABLE_ROWS = 500
_MAX_DOUBTS = 30
_LOG_TAIL_BYTES = 4096
_MAX_LOGS = 5


class Picture(msgspec.Struct, frozen=True):
    """A figure with the words around it. json: safe inside a script element."""

    id: str
    title: str
    caption: str
    note: str
    json: str
    height: int
    log_toggle: bool


class Doubt(msgspec.Struct, frozen=True):
    """A sample that did not prove its tier: what the counters moved by, and what they had to."""

    cell: str
    tier: str
    index: int
    verdict: str
    reason: str
    observed: str
    expected: str


def write_report(folder: Path) -> Path:
    """Writes report.html into the run's folder, whatever the run's state, and returns its path.

    Raises ResultsError where the folder is not a run's, its rows are damaged, or it cannot be written to.
    """
    rows = list(read_rows(folder))
    manifest = _with_all_cells(read_manifest(folder), rows)
    page = render_page("report.html.j2", _context(folder, manifest, rows, list(read_samples(folder))))
    target = folder / "report.html"
    try:
        write_atomically(target, page.encode("utf-8", errors="replace"))
    except OSError as error:
        raise ResultsError(f"{target}: cannot be written ({error.strerror}); make room or give write access") from None
    return target


def _with_all_cells(manifest: Manifest, rows: Sequence[RequestRecord]) -> Manifest:
    """The manifest with an entry also for each cell that only rows name."""
    known = {cell.key for cell in manifest.cells}
    more = [CellEntry(key=key) for key in dict.fromkeys(row.cell for row in rows) if key not in known]
    return msgspec.structs.replace(manifest, cells=[*manifest.cells, *more])


def render_page(template: str, context: Mapping[str, Any]) -> str:
    """A page from one of the templates, with the chart library inside it."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(context, plotly_js=Markup(get_plotlyjs()))


def _context(
    folder: Path, manifest: Manifest, rows: Sequence[RequestRecord], samples: Sequence[Sample]
) -> dict[str, Any]:
    summary = summarize(manifest, rows)
    figure_rows = tables.figure_rows(summary)
    return {
        "manifest": manifest,
        "state": _state(manifest, summary, folder),
        "what": _what(manifest, summary),
        "findings": [*findings(summary), *storage_lines(summary, cell_labels(summary.cells))],
        "evidence": evidence(summary),
        "doubts": _doubts(samples, summary),
        "load_counters": _load_counters(samples, summary)[:_MAX_TABLE_ROWS],
        "pictures": [*_pictures(summary, rows, samples), *_io_pictures(traced := read_io(folder))],
        "io": _io(traced),
        "tables": _tables(summary),
        "table_rows": len(figure_rows),
        "shown_rows": min(len(figure_rows), _MAX_TABLE_ROWS),
        "thin": any(percentile.thin for row in figure_rows for percentile in row.percentiles),
        "flows": tables.flow_rows(summary)[:_MAX_TABLE_ROWS],
        "source_names": sources(),
        "sources": tables.source_rows(summary)[:_MAX_TABLE_ROWS],
        "lags": tables.lag_rows(summary)[:_MAX_TABLE_ROWS],
        "environment": [*_environment(manifest), *_noise(samples)],
        "cells": _cells(manifest, cell_labels(summary.cells))[:_MAX_TABLE_ROWS],
        "sizes": _sizes(manifest),
        "config": _yaml(manifest.cells[0].config) if manifest.cells else "",
        "commands": _commands(manifest, folder),
        "logs": _log_tails(folder) if manifest.status != "complete" else [],
    }


def _tables(summary: Summary) -> list[tuple[str, list[tables.FigureRow]]]:
    """(title, rows) of each latency that some row has; TTFT's in any case, for what it leaves out."""
    found = [(title, tables.figure_rows(summary, metric)[:_MAX_TABLE_ROWS]) for metric, title in _TABLES.items()]
    return [(title, rows) for title, rows in found if title == _TABLES["ttft_s"] or any(row.n for row in rows)]


def _state(manifest: Manifest, summary: Summary, folder: Path) -> dict[str, str]:
    """How the run ended. level '' where there is nothing to say."""
    held = f"The figures below hold the {plural(summary.rows.measured, 'measured row')} that it finished."
    if manifest.status == "complete":
        return {"level": "", "text": "", "error": ""}
    if manifest.status == "failed":
        error = manifest.error or "no reason was recorded"
        return {"level": "bad", "text": f"This run failed. {held}", "error": error}
    text = f"This run has not finished, or was cut off. {held} Go on with --resume {_shown_path(folder)}."
    return {"level": "warn", "text": text, "error": manifest.error or ""}


def _what(manifest: Manifest, summary: Summary) -> str:
    """One line on what was measured, from the configuration and the rows."""
    first = manifest.cells[0] if manifest.cells else CellEntry(key="")
    tiers = tier_order(tier for cell in summary.cells for tier in cell.tiers)
    parts = [f"{first.workload_kind} workload"] if first.workload_kind else []
    if tiers and tiers != [FREE_LOAD]:
        parts.append(f"warm states {', '.join(tiers)}")
    if first.model:
        parts.append(f"model {first.model}")
    for axis in varied_axes(summary.cells):
        values = [value_text(value) for value in axis.values]
        shown = ", ".join(values) if len(values) <= 8 else f"{values[0]} … {values[-1]} ({len(values)} values)"
        parts.append(f"{axis.name} = {shown}")
    if any(cell.storage for cell in summary.cells):
        parts.append("a real storage device under a simulated engine")
    elif is_simulated(manifest.engine):
        parts.append("simulated: a prediction, not a measurement")
    return " · ".join(parts)


def _sizes(manifest: Manifest) -> list[tuple[str, str, str]]:
    """The first cell's tiers; none where this version cannot read its config."""
    if not manifest.cells:
        return []
    try:
        return tables.cache_sizes(manifest.cells[0])
    except ResultsError:
        return []


def _pictures(summary: Summary, rows: Sequence[RequestRecord], samples: Sequence[Sample]) -> list[Picture]:
    """The figures that have something to show."""
    measured = [row for row in rows if row.phase != "warm"]
    labels = cell_labels(summary.cells)
    found: list[Picture] = []
    if sum(group.rows.counted > 0 for cell in summary.cells for group in cell.tiers.values()) > 1:
        mean = "Mean TTFT and its 95 % interval, from the rows that count."
        found.append(picture("ttft", "TTFT by tier", mean, figures.ttft_by_axis(summary), log_toggle=True))
    if summary.rows.counted:
        spread = "How TTFT spreads, from the rows that count."
        found.append(picture("distribution", "Distribution", spread, figures.distribution(measured, labels)))
    if any(row.error is None for row in measured):
        sources = "Where the KV of a request's prompt came from, by the counters. A bar for rows left out stands apart."
        bars = figures.tokens_by_source(measured, labels)
        found.append(picture("sources", "Prompt tokens by source", sources, bars))
    if measured:
        dots = "Each measured request when it was sent. The symbol is its verdict; look for drift and for outliers."
        found.append(picture("timeline", "Timeline", dots, timeline(measured, labels), log_toggle=True))
    watched = [s for s in samples if s.host.steal_share is not None or s.host.foreign_cpu_share is not None]
    if len(watched) > 1:
        noise = (
            "CPU time that the hypervisor took, and that other processes used, while each sample ran; and what was left"
            " of the engine's core around it: who else uses the host's core shows nowhere else."
        )
        found.append(picture("noise", "Host noise", noise, figures.host_noise(watched)))
    return found


def _io_pictures(found: IoFigures | None) -> list[Picture]:
    """What was traced at the block device and in the cache server's files."""
    if found is None:
        return []
    lost, traces = sum(trace.lost_events for trace in found.traces), len(found.traces)
    tell = f" {lost} events were lost: counts are too low." if lost else ""
    if traces > io.MAX_COLUMNS:
        tell += f" The first {io.MAX_COLUMNS} of {traces} traces are drawn."
        found = msgspec.structs.replace(found, traces=found.traces[: io.MAX_COLUMNS])
    parts = "Engine, look-up (cache server), host (file system, page cache, copies) and device, by the traces."
    both = "Bytes at the block device, its queue depth, and the requests that waited for it, on one clock."
    sequence = "Block requests per 100 ms. Sequential: it begins where the one before, of its direction, ended."
    waits = "Reads: from being handed to the block layer to the driver, and from there to their completion."
    return [
        picture("io-timeline", "I/O and requests", both + tell, io.both_timelines(found)),
        picture("io-order", "Sequential and random I/O", sequence + tell, io.order(found)),
        picture("io-sizes", "Block request sizes", "Powers of two, as they reach the device." + tell, io.sizes(found)),
        picture("io-latency", "Block latencies", waits + tell, io.latencies(found)),
        picture("io-split", "Whose time a request's first token takes", parts + tell, io.whose_time(found)),
    ]


def _io(found: IoFigures | None) -> dict[str, Any] | None:
    """The tables of what was traced."""
    if found is None:
        return None
    requests, note = io_tables.request_rows(found), io_tables.request_note(found)
    if len(requests) > _MAX_TABLE_ROWS:
        note += f" The table has the first {_MAX_TABLE_ROWS} of these; io.json has all."
    return {
        "labels": io_tables.labels(found),
        "side_by_side": io_tables.side_by_side(found),
        "request_note": note,
        "requests": requests[:_MAX_TABLE_ROWS],
        "parts": list(io_tables.PARTS.values()),
        "file_columns": io_tables.FILE_COLUMNS,
        "files": io_tables.file_rows(found)[:_MAX_TABLE_ROWS],
        "file_total": sum(trace.files.files for trace in found.traces),
    }


def picture(name: str, title: str, caption: str, figure: go.Figure, log_toggle: bool = False) -> Picture:
    """A figure for a page, under an id of its own there."""
    note = figure.layout.meta["note"]
    return Picture(name, title, caption, note, script_json(figure.to_json()), figure.layout.height, log_toggle)


def script_json(text: str) -> Markup:
    """JSON that cannot end the script element it stands in, nor open another."""
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


def _doubts(samples: Sequence[Sample], summary: Summary) -> list[Doubt]:
    labels = cell_labels(summary.cells)
    found = [sample for sample in samples if sample.verdict in ("contradicted", "unproven")]
    return [
        Doubt(
            labels.get(sample.cell, sample.cell),
            sample.tier,
            sample.index,
            str(sample.verdict),
            sample.reason or "",
            _counters(sample.observed),
            _counters(sample.expected),
        )
        for sample in found[:_MAX_DOUBTS]
    ]


def _load_counters(samples: Sequence[Sample], summary: Summary) -> list[tuple[str, str]]:
    """(cell, what the counters moved by) of free loads, which claim no tier for a request."""
    labels = cell_labels(summary.cells)
    loads = [sample for sample in samples if sample.tier == FREE_LOAD]
    return [(labels.get(sample.cell, sample.cell), _counters(sample.observed)) for sample in loads]


def _counters(counters: Counters) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in counters.named().items()) or "nothing reported"


def _environment(manifest: Manifest) -> list[tuple[str, str]]:
    git, experiment = manifest.git, manifest.experiment
    commit = f"{git.commit}{' with uncommitted changes' if git.dirty else ''}" if git.commit else None
    pairs: list[tuple[str, Any]] = [("run", manifest.run_id), ("engine", manifest.engine)]
    pairs += [("experiment", experiment.path), ("experiment sha256", experiment.sha256)]
    pairs += [("seed", manifest.seed), ("git commit", commit)]
    pairs += [("created", manifest.created_at), ("finished", manifest.finished_at)]
    pairs.append(("attempts", len(manifest.attempts) or None))
    pairs += [(name.replace("_", " "), value) for name, value in msgspec.structs.asdict(manifest.host).items()]
    pairs += [(f"version of {name}", value) for name, value in manifest.versions.items()]
    return [(name, tables.shown(name, value)) for name, value in pairs if value is not None]


def _noise(samples: Sequence[Sample]) -> list[tuple[str, str]]:
    """Mean and largest of what disturbed the samples; 'not reported' where the kernel does not say."""
    pairs = []
    for name, found in (
        ("steal", [s.host.steal_share for s in samples]),
        ("other processes' CPU", [s.host.foreign_cpu_share for s in samples]),
        ("the engine's core, slower than at its best", core_slower(samples)),
    ):
        values = [value for value in found if value is not None]
        text = f"mean {percent(sum(values) / len(values))}, at most {percent(max(values))}" if values else NOT_REPORTED
        pairs.append((name, text))
    return pairs


def _cells(manifest: Manifest, labels: Mapping[str, str]) -> list[tuple[str, ...]]:
    """(label, status, trace, its requests, its sha256) of each cell."""
    found: list[tuple[str, ...]] = []
    for cell in manifest.cells:
        trace = cell.trace
        about = (trace.name, f"{trace.requests:,}", trace.sha256) if trace else (UNKNOWN, UNKNOWN, UNKNOWN)
        found.append((labels[cell.key], cell.status, *about))
    return found


def _yaml(config: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True) if config else ""


def _commands(manifest: Manifest, folder: Path) -> list[str]:
    commands = [f"git checkout {shlex.quote(manifest.git.commit)}"] if manifest.git.commit else []
    if manifest.command:
        commands.append(manifest.command)
    elif manifest.experiment.path:
        verb = "sweep" if any(cell.overrides for cell in manifest.cells) else "run"
        words = ["harness", verb, manifest.experiment.path, "--engine", manifest.engine]
        commands.append(shlex.join(words))
    return [*commands, f"harness report {_shown_path(folder)}"]


def _shown_path(folder: Path) -> str:
    """Relative to the working directory, so that a published report does not name a machine's folders."""
    absolute = folder.absolute()
    inside = absolute.is_relative_to(Path.cwd())
    return shlex.quote(os.fspath(absolute.relative_to(Path.cwd()) if inside else absolute.name))


def _log_tails(folder: Path) -> list[tuple[str, str]]:
    """The last lines of what the engines said, for a run that did not end well."""
    tails = []
    for path in sorted((folder / "logs").glob("*"))[:_MAX_LOGS]:
        if path.is_file():
            text = path.read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", errors="replace")
            lines = ["".join(c if c.isprintable() or c == "\t" else " " for c in line) for line in text.splitlines()]
            tails.append((path.name, "\n".join(lines[-25:])))
    return tails
