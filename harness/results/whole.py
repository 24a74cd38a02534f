"""What a run folder holds, read once for all that is made from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from harness.records import Sample
from harness.results.ceiling import read_ceilings
from harness.results.folder import read_rows, read_samples
from harness.results.manifest import CellEntry, Manifest, read_manifest
from harness.results.summary import Summary, summarize
from traces.request import RequestRecord


class WholeRun(NamedTuple):
    """manifest: with an entry also for each cell that only rows name."""

    manifest: Manifest
    rows: Sequence[RequestRecord]
    samples: Sequence[Sample]
    summary: Summary


def read_run(folder: Path) -> WholeRun:
    """Reads and summarizes it. Raises ResultsError where the folder is no run's, or its rows are damaged."""
    manifest, rows, samples = read_parts(folder)
    return WholeRun(manifest, rows, samples, summarize(manifest, rows, samples, read_ceilings(folder)))


def read_parts(folder: Path) -> tuple[Manifest, list[RequestRecord], list[Sample]]:
    """The manifest (with an entry also for each cell that only rows name), rows and samples. Raises ResultsError."""
    manifest, rows = read_manifest(folder), list(read_rows(folder))
    known = {cell.key for cell in manifest.cells}
    more = [CellEntry(key=key) for key in dict.fromkeys(row.cell for row in rows) if key not in known]
    return msgspec.structs.replace(manifest, cells=[*manifest.cells, *more]), rows, list(read_samples(folder))
