"""`harness report` of evidence that is kept in place of run folders: traces of the disk tier, and validations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from harness.errors import ResultsError
from harness.report.glossary import glossary
from harness.report.io.section import io_pictures, io_tables
from harness.report.io.tables import render_traces
from harness.report.page import render_page
from harness.report.run.tables import figure_rows
from harness.report.run.terminal import printable
from harness.report.validation.html import comparison_findings, comparison_page, terminal_tables
from harness.report.words import THIN_NOTE
from harness.results.folder import write_atomically
from harness.results.kept import KeptIo, read_kept_io
from harness.validation.document import NAME as VALIDATION
from harness.validation.document import Document, read_document

_TRACES = "io.json"


class KeptReport(msgspec.Struct, frozen=True):
    """What `harness report` says of kept evidence. figures: of the file, for --json."""

    figures: Any
    words: RenderableType
    page: str


def kept_in(path: Path) -> Path | None:
    """The folder, where this is kept evidence: the folder itself or its file of figures. None for anything else."""
    folder = path.parent if path.name in (_TRACES, VALIDATION) and path.is_file() else path
    if (folder / VALIDATION).is_file():
        return folder
    return folder if (folder / _TRACES).is_file() and not (folder / "manifest.json").exists() else None


def kept_report(folder: Path) -> KeptReport:
    """Of a folder that `kept_in` has named. Raises ResultsError."""
    if (folder / VALIDATION).is_file():
        document = read_document(folder)
        return KeptReport(document, _validation_words(document), comparison_page(document))
    kept = read_kept_io(folder)
    return KeptReport(kept, Text(render_traces([kept.io]).rstrip()), _io_page(folder, kept))


def write_kept_page(folder: Path, page: str) -> Path:
    """Writes report.html beside the evidence, which stays as it is. Raises ResultsError.

    A validation's page stays, too: its own command drew rows in it that validation.json does not hold.
    """
    target = folder / "report.html"
    if target.exists() and (folder / VALIDATION).is_file():
        return target
    try:
        write_atomically(target, page.encode("utf-8", errors="replace"))
    except OSError as error:
        raise ResultsError(
            f"{target}: cannot be written ({error.strerror}); copy the folder to where it can be"
        ) from None
    return target


def _validation_words(document: Document) -> RenderableType:
    return Group(*terminal_tables(document), *(Text(printable(line)) for line in comparison_findings(document)))


def _io_page(folder: Path, kept: KeptIo) -> str:
    facts, summaries = kept.facts, kept.summaries
    made = [("engine", f"{kept.io.engine} {facts.versions.get(kept.io.engine, '')}".strip()), ("run", kept.io.run)]
    made += [("commit", facts.git.commit or "")]
    pairs = [(key.replace("_", " "), str(value)) for key, value in facts.host.items()]
    pairs += [(f"version of {name}", version) for name, version in facts.versions.items()]
    tables = [(summary.run_id, figure_rows(summary)) for summary in summaries]
    context = {
        "title": f"I/O of the disk tier on {kept.io.engine}",
        "run": folder.resolve().name,
        "header": [(name, value) for name, value in made if value],
        "io": io_tables(kept.io),
        "io_pictures": io_pictures(kept.io),
        "tables": tables,
        "thin": THIN_NOTE if any(p.thin for _, rows in tables for row in rows for p in row.percentiles) else "",
        "glossary": glossary(tier for summary in summaries for cell in summary.cells for tier in cell.tiers),
        "environment": pairs,
    }
    return render_page("kept_io.html.j2", context)
