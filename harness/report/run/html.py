"""Writes report.html: one file that needs no network, made from a run folder alone."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from harness.errors import ResultsError
from harness.records import Counters, Sample
from harness.report.asked import asked_lines
from harness.report.axes import cell_labels, value_text, varied_axes
from harness.report.glossary import glossary
from harness.report.goals import class_lines, goal_rows
from harness.report.io.section import io_pictures, io_tables
from harness.report.io.storage_words import storage_lines
from harness.report.page import Picture, picture, render_page
from harness.report.run import figures, maps, pays, tables
from harness.report.run.answer import badge, tiles
from harness.report.run.break_even import break_even_rows, speed_pictures
from harness.report.run.capacity import capacity_section
from harness.report.run.header import header_facts
from harness.report.run.loads import against_rows, load_findings, trial_rows
from harness.report.run.takeaway import take_away
from harness.report.run.timeline import slowest, timeline
from harness.report.run.turns import bars_say_it, turn_pictures, turn_rows, turn_word
from harness.report.simulated import flat_mark, how_made, in_figures, simulated_notes
from harness.report.suite import tests_section
from harness.report.words import NOT_REPORTED, UNKNOWN, evidence, percent, plural, tier_order
from harness.report.worth import answer, headings, label, table
from harness.results.capacity import read_capacity
from harness.results.folder import write_atomically
from harness.results.manifest import CellEntry, Manifest
from harness.results.provenance import is_simulated
from harness.results.summary import FREE_LOAD, Summary, core_slower
from harness.results.traced import read_io
from harness.results.whole import WholeRun, read_run
from harness.results.worth import is_worth, judge
from traces.request import RequestRecord

_NOISE = "noise"
_TABLES = {"ttft_s": "TTFT", "e2e_s": "End to end", "tpot_s": "Time per output token"}
_MAX_TABLE_ROWS = 500
_MAX_DOUBTS = 30
_LOG_TAIL_BYTES = 4096
_MAX_LOGS = 5


class Doubt(msgspec.Struct, frozen=True):
    """A sample that did not prove its tier: what the counters moved by, and what they had to."""

    cell: str
    tier: str
    index: int
    verdict: str
    reason: str
    observed: str
    expected: str


def write_report(folder: Path, run: WholeRun | None = None) -> Path:
    """Writes report.html into the run's folder, whatever the run's state, and returns its path.

    run: what the folder holds, where the caller has read it.
    Raises ResultsError where the folder is not a run's, its rows are damaged, or it cannot be written to.
    """
    page, target = report_page(folder, run), folder / "report.html"
    try:
        write_atomically(target, page.encode("utf-8", errors="replace"))
    except OSError as error:
        raise ResultsError(f"{target}: cannot be written ({error.strerror}); make room or give write access") from None
    return target


def report_page(folder: Path, run: WholeRun | None = None) -> str:
    """The page of the rows so far. Raises ResultsError where the folder is not a run's, or its rows are damaged."""
    return render_page("report.html.j2", _context(folder, run or read_run(folder)))


def _context(folder: Path, run: WholeRun) -> dict[str, Any]:
    manifest, rows, samples, summary = run
    tests = tests_section(summary, labels := cell_labels(summary.cells))
    figure_rows = tables.figure_rows(summary)
    slowest_rows = slowest([row for row in rows if row.phase == "measure"])
    traced, word, told = read_io(folder), turn_word(manifest), tables.told_sources(manifest, summary)
    return {
        "title": f"{manifest.name} on {manifest.engine}",
        "run": manifest.run_id,
        "manifest": manifest,
        "badge": badge(manifest, summary),
        "header": header_facts(manifest),
        "state": _state(manifest, summary, folder),
        "what": _what(manifest, summary),
        "worth": _worth(manifest, rows, samples),
        "capacity": capacity_section(searched) if (searched := read_capacity(folder)) else None,
        "findings": [
            *load_findings(summary),
            *asked_lines(summary, labels),
            *class_lines(summary),
            *([] if tests else storage_lines(summary, labels)),
        ],
        "tests": tests,
        "answer_at": len(simulated_notes(summary)),
        "tiles": tiles(summary),
        "made": in_figures(summary),
        "simulated": how_made(summary) == "simulated",
        "answers": _said([*speed_pictures(summary), *turn_pictures(summary, word), *_answers(summary)], summary),
        "break_evens": break_even_rows(summary)[:_MAX_TABLE_ROWS],
        "turns": turn_rows(summary, told)[:_MAX_TABLE_ROWS],
        "turn_word": word,
        "against": against_rows(summary)[:_MAX_TABLE_ROWS],
        "trials": trial_rows(summary)[:_MAX_TABLE_ROWS],
        "evidence": evidence(summary),
        "goals": goal_rows(summary)[:_MAX_TABLE_ROWS],
        "doubts": _doubts(samples, summary),
        "load_counters": _load_counters(samples, summary)[:_MAX_TABLE_ROWS],
        "details": _said(_details(summary, rows, samples), summary),
        "slowest": tables.slow_rows(slowest_rows, labels, tables.proven_word(summary)),
        "io": io_tables(traced) if traced else None,
        "io_pictures": io_pictures(traced) if traced else [],
        "flat": flat_mark(summary),
        "tables": _tables(summary),
        "table_rows": len(figure_rows),
        "shown_rows": min(len(figure_rows), _MAX_TABLE_ROWS),
        "thin": any(percentile.thin for row in figure_rows for percentile in row.percentiles),
        "flows": tables.flow_rows(summary)[:_MAX_TABLE_ROWS],
        "source_names": told,
        "sources": tables.source_rows(summary, told)[:_MAX_TABLE_ROWS],
        "lags": [row for row in tables.lag_rows(summary) if row.worth_telling][:_MAX_TABLE_ROWS],
        "glossary": glossary(tier for cell in summary.cells for tier in cell.tiers),
        "noise": _noise(samples),
        "environment": _environment(manifest),
        "cells": _cells(manifest, labels)[:_MAX_TABLE_ROWS],
        "sizes": _sizes(manifest),
        "config": _yaml(manifest.cells[0].config) if manifest.cells else "",
        "commands": _commands(manifest, folder),
        "take_away": take_away(rows),
        "logs": _log_tails(folder) if manifest.status != "complete" else [],
    }


def _worth(manifest: Manifest, rows: Sequence[RequestRecord], samples: Sequence[Sample]) -> dict[str, Any] | None:
    """The answer of a run of `harness worth`, as its command prints it; None for other runs."""
    if not is_worth(manifest):
        return None
    found = judge(manifest, rows, samples)
    lines, drawn = answer(found), pays.worth_lines(found)
    # How the figures came to be stands before the answer where it has to be said.
    first = int(not lines[0].startswith(label(found.onsets[-1].state)))
    caption = "How many times as fast as without the cache server, with 95 % intervals. Above the line it pays."
    shown = picture("worth-lines", "Where it pays", caption, drawn, table="worth-points") if drawn else None
    return {"lines": lines, "answer_at": first, "columns": headings(found), "rows": table(found), "picture": shown}


def _said(pictures: list[Picture], summary: Summary) -> list[Picture]:
    """The pictures, whose titles say that they are simulated or paced. The host's noise is measured in any case."""
    if not (made := in_figures(summary).strip()):
        return pictures
    return [
        each if each.id == _NOISE else msgspec.structs.replace(each, title=f"{each.title}, {made}") for each in pictures
    ]


def _tables(summary: Summary) -> list[tuple[str, list[tables.FigureRow]]]:
    """(title, rows) of each latency that some row has; TTFT's in any case, for what it leaves out."""
    found = [(title, tables.figure_rows(summary, metric)[:_MAX_TABLE_ROWS]) for metric, title in _TABLES.items()]
    return [(title, rows) for title, rows in found if title == _TABLES["ttft_s"] or any(row.n for row in rows)]


def _state(manifest: Manifest, summary: Summary, folder: Path) -> dict[str, str]:
    """How the run ended. level '' where there is nothing to say."""
    held = f"The figures below hold the {plural(summary.rows.measured, 'row')} that it finished."
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
        alone = any(cell.storage and cell.storage.kv for cell in summary.cells)
        parts.append("real tiers, no engine" if alone else "a real storage device under a simulated engine")
    elif is_simulated(manifest.engine):
        parts.append("simulated: a prediction, not a measurement")
    parts += dict.fromkeys(str(cell.accelerator) for cell in summary.cells if cell.accelerator)
    return " · ".join(parts)


def _sizes(manifest: Manifest) -> list[tuple[str, str, str]]:
    """The first cell's tiers; none where this version cannot read its config."""
    if not manifest.cells:
        return []
    try:
        return tables.cache_sizes(manifest.cells[0])
    except ResultsError:
        return []


def _answers(summary: Summary) -> list[Picture]:
    """The figures that answer: what each tier takes, what that is spent on, where it pays."""
    found: list[Picture] = []
    counted = sum(group.rows.counted > 0 for cell in summary.cells for group in cell.tiers.values())
    free = all(tier == FREE_LOAD for cell in summary.cells for tier in cell.tiers)
    if counted > 1 and not bars_say_it(summary):
        mean = "Mean TTFT and its 95 % interval, from the rows that count."
        one = len(summary.cells) == 1
        figure = figures.ttft_by_tier(summary) if one else figures.ttft_by_axis(summary)
        found.append(picture("ttft", "TTFT" if free else "TTFT by tier", mean, figure, True, "figures"))
    if steps := maps.ladder(summary):
        spent = (
            "A state costs what the one that lacks its last step costs, plus that step. Differences of mean TTFT: no"
            " tracing is needed."
        )
        found.append(picture("ladder", "What TTFT is spent on", spent, steps, table="figures"))
    if lines := pays.speedup_lines(summary):
        where = " ".join(
            ["Above the dashed line a state is faster than recompute.", *pays.break_even(pays.along(summary))]
        )
        found.append(picture("pays", "Where it pays", where, lines, True, "figures"))
    if trade := pays.trade(summary):
        open_marks = (
            "Marks are medians, whiskers end at p90. Filled: no other load completes as many requests with a lower"
            " median. Dotted lines join the sweep's order."
        )
        found.append(picture("trade", "Throughput against TTFT", open_marks, trade, True, "figures"))
    if heat := maps.heat_maps(summary):
        where = "How many times as fast as recompute; the line runs where both are equal. Blue: faster, brown: slower."
        title, caption = ("TTFT over both axes", "Mean TTFT.") if free else ("Where it pays", where)
        found.append(picture("map", title, caption, heat, table="figures"))
    return found


def _details(summary: Summary, rows: Sequence[RequestRecord], samples: Sequence[Sample]) -> list[Picture]:
    """The figures behind the answer, as far as they have something to show."""
    measured = [row for row in rows if row.phase == "measure"]
    labels = cell_labels(summary.cells)
    found: list[Picture] = []
    complete = _of_complete_trials(measured, summary)
    if figures.spreads(complete):
        spread = "How TTFT spreads, from the rows that count."
        spread_figure = figures.distribution(complete, labels)
        found.append(picture("distribution", "Distribution", spread, spread_figure, True, "figures"))
    if figures.mixed_sources(complete):
        sources = "Where the KV of a request's prompt came from, by the counters. A bar for rows left out stands apart."
        bars = figures.tokens_by_source(complete, labels)
        found.append(picture("sources", "Prompt tokens by source", sources, bars, table="source-table"))
    if measured:
        dots = "Each request when it was sent. A cross, an open diamond or a triangle is a row without proof."
        found.append(picture("timeline", "Timeline", dots, timeline(measured, labels), True, "slowest"))
    watched = [s for s in samples if s.host.steal_share is not None or s.host.foreign_cpu_share is not None]
    if len(watched) > 1:
        noise = (
            "CPU time that the hypervisor took, and that other processes used, while each sample ran; what was left of"
            " the engine's core around it; and how much memory that rested the host had taken before it. Who else uses"
            " the host's core and memory shows nowhere else."
        )
        found.append(picture(_NOISE, "Host noise", noise, figures.host_noise(watched)))
    return found


def _of_complete_trials(rows: Sequence[RequestRecord], summary: Summary) -> Sequence[RequestRecord]:
    left = {
        (cell.key, trial.trial, trial.attempt)
        for cell in summary.cells
        if cell.trials is not None
        for trial in cell.trials.left_out
    }
    return [row for row in rows if (row.cell, row.sample, row.attempt) not in left] if left else rows


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
        ("the client's core, slower than at its best", core_slower(samples, client=True)),
        ("memory in use that the host had taken", [s.host.taken_share for s in samples]),
    ):
        values = [value for value in found if value is not None]
        text = f"mean {percent(sum(values) / len(values))}, at most {percent(max(values))}" if values else NOT_REPORTED
        pairs.append((name, text))
    if waits_s := [s.host.core_wait_s for s in samples if s.host.core_wait_s is not None]:
        waited = f"{sum(wait_s > 0 for wait_s in waits_s)} of {len(waits_s)} samples"
        pairs.append(("waited for quick cores", f"{waited}, {sum(waits_s):.1f} s in all, at most {max(waits_s):.1f} s"))
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
