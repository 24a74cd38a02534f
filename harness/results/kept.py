"""Evidence that is kept in results/ in place of run folders, small enough for git.

    kept = read_kept_io(folder)                    # io.json as scripts/characterize keeps it
    kept.io.traces[0].block.read.requests
    kept.summaries[0].cells

A kept validation is harness/validation/document.py's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from harness.errors import ResultsError
from harness.results.provenance import Git
from harness.results.summary import Summary, summary_of_cells
from harness.results.traced import IoFigures


class KeptFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the figures came from. host: facts of the machine, without its name."""

    host: dict[str, Any]
    versions: dict[str, str]
    git: Git


class KeptIo(msgspec.Struct, frozen=True, kw_only=True):
    """The traces of one run, and the summaries of that run and of others made with it."""

    facts: KeptFacts
    io: IoFigures
    summaries: tuple[Summary, ...]


class _File(msgspec.Struct, frozen=True, kw_only=True):
    """io.json as it lies there. summaries: by run, the cells as summary.json has them."""

    manifest: KeptFacts
    io: IoFigures
    summaries: dict[str, list[dict[str, Any]]]


def read_kept_io(folder: Path) -> KeptIo:
    """Raises ResultsError where the folder holds no io.json of this kind."""
    path = folder / "io.json"
    try:
        content = msgspec.json.decode(path.read_bytes(), type=_File)
        summaries = tuple(summary_of_cells(run, content.io.engine, cells) for run, cells in content.summaries.items())
    except (OSError, msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(f"{path}: cannot be read as kept evidence ({error}); restore the file") from None
    return KeptIo(facts=content.manifest, io=content.io, summaries=summaries)
