"""Keeps a validation's evidence in a folder small enough for git, without the machine's paths.

    python scripts/validate_lib/keep.py results/validate-… results/validation/NAME [--calibration FILE]

validation.json and validation.md, calibration.yaml, manifest.json (both sides', cells shortened), and
rows.csv: every measured request of both sides.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from harness.records import Origin
from harness.results.folder import read_rows
from harness.results.manifest import CellEntry, Manifest, read_manifest
from harness.validation.document import Document, read_document, write_document

# The sections of a cell's config that say what was measured; the others name engines' settings, paths among them.
_KEPT = ("model", "cache", "workload", "storage")
COLUMNS = ("side", "cell", "tier", "sample", "id", "prompt_tokens", "cached_tokens", "output_tokens", "ttft_s", "e2e_s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--calibration", type=Path)
    given = parser.parse_args()
    given.target.mkdir(parents=True, exist_ok=True)
    runs = sorted(path.parent for path in given.source.glob("*/manifest.json"))
    shutil.copyfile(given.source / "validation.md", given.target / "validation.md")
    judged = _without_paths(msgspec.to_builtins(read_document(given.source)))
    write_document(given.target, msgspec.convert(judged, Document))
    if given.calibration:
        shutil.copyfile(given.calibration, given.target / "calibration.yaml")
    manifests = {run.name: _without_paths(msgspec.to_builtins(_shortened(read_manifest(run)))) for run in runs}
    (given.target / "manifest.json").write_text(json.dumps(manifests, indent=1) + "\n")
    with (given.target / "rows.csv").open("w", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow((*COLUMNS, "verdict"))
        for run in runs:
            writer.writerows(_rows(run))


def _shortened(manifest: Manifest) -> Manifest:
    """Without names of this machine: command, host name, paths, ports."""
    return msgspec.structs.replace(
        manifest,
        experiment=Origin(),
        command=None,
        host=msgspec.structs.replace(manifest.host, hostname=None),
        attempts=[],
        cells=[_shortened_cell(cell) for cell in manifest.cells],
    )


def _shortened_cell(cell: CellEntry) -> CellEntry:
    resolved = cell.resolved
    if resolved is not None:
        resolved = msgspec.structs.replace(resolved, url=None, cache_config={}, calibration_source=None)
    config = {key: value for key, value in cell.config.items() if key in _KEPT}
    return msgspec.structs.replace(cell, config=config, resolved=resolved, device=None, record=None)


def _without_paths(value: Any) -> Any:
    """Absolute paths, also those in a command, by their last part."""
    if isinstance(value, dict):
        return {key: _without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(inner) for inner in value]
    if isinstance(value, str):
        return " ".join(_without_path(word) for word in value.split(" "))
    return value


def _without_path(word: str) -> str:
    """A path may stand behind a key: engines.vllm.python=/…"""
    key, equals, path = word.rpartition("=")
    return f"{key}{equals}{Path(path).name}" if path.startswith("/") and len(path) > 1 else word


def _rows(run: Path) -> Iterator[tuple[Any, ...]]:
    for row in read_rows(run):
        if row.phase == "measure":
            times = [None if value is None else f"{value:.6f}" for value in (row.ttft_s, row.e2e_s)]
            counts = (row.prompt_tokens, row.cached_tokens, row.output_tokens)
            yield (run.name, row.cell, row.expected_tier, row.sample, row.id, *counts, *times, row.verdict)


if __name__ == "__main__":
    main()
