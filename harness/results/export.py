"""Runs as tables for spreadsheets: a row a load or warm state, a row a request, and the facts of each run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from harness.errors import ResultsError
from harness.results.folder import read_rows, row_fields
from harness.results.manifest import Manifest, read_manifest
from harness.results.summary import CellFigures, TierFigures, read_summary

if TYPE_CHECKING:
    import pandas as pd

# The columns that users of the MLPerf KV-cache benchmark know, in their order. Storage throughput is theirs: output
# tokens over the sum of all I/O times.
COLUMNS = (
    "Model",
    "Num Users",
    "Duration (s)",
    "GPU Mem (GB)",
    "CPU Mem (GB)",
    "Total Requests",
    "Total Tokens",
    "Avg Throughput (tok/s)",
    "Storage Throughput (tok/s)",
    "Cache Hit Rate",
    "E2E P95 (ms)",
    "Storage IO P95 (ms)",
)
# Of a spreadsheet's format, below its headings.
MOST_SHEET_ROWS = 2**20 - 1
_USERS = ("users", "clients", "active_sessions", "concurrency", "sessions")


def load_table(folders: Sequence[Path]) -> pd.DataFrame:
    """A row for each load, or warm state of a prefix: Run, Cell, State, then COLUMNS. Empty: not reported.

    Raises ResultsError for a folder that is no run's, or has no summary."""
    import pandas as pd

    return pd.DataFrame(
        [row for folder in folders for row in _loads(folder)], columns=["Run", "Cell", "State", *COLUMNS], dtype=object
    )


def request_table(folders: Sequence[Path]) -> pd.DataFrame:
    """A row for each request as rows.jsonl has it, its tokens by source apart. Raises ResultsError."""
    import pandas as pd

    rows = []
    for folder in folders:
        read_manifest(folder)
        for each in read_rows(folder):
            fields = row_fields(each)
            del fields["token_s"]
            rows.append({"run": folder.name, **fields})
    return pd.DataFrame(rows)


def fact_table(folders: Sequence[Path]) -> pd.DataFrame:
    """A row a fact of each run's manifest: Run, Cell (empty: of the whole run), Fact, Value. Raises ResultsError."""
    import pandas as pd

    rows = [(folder.name, *fact) for folder in folders for fact in _facts(read_manifest(folder))]
    return pd.DataFrame(rows, columns=["Run", "Cell", "Fact", "Value"], dtype=object)


def _facts(manifest: Manifest) -> Iterator[tuple[str, str, Any]]:
    whole = msgspec.to_builtins(manifest)
    cells = whole.pop("cells")
    yield from (("", name, value) for name, value in _flat(whole))
    for cell in cells:
        key = cell.pop("key")
        # What a device did is in the figures.
        cell.pop("record", None)
        yield from ((key, name, value) for name, value in _flat(cell))


def _flat(content: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """(place, value) of everything that is known; a list of plain values is one text."""
    if isinstance(content, dict):
        for name, value in content.items():
            yield from _flat(value, f"{place}.{name}" if place else str(name))
    elif isinstance(content, list) and any(isinstance(each, dict) for each in content):
        for number, value in enumerate(content):
            yield from _flat(value, f"{place}.{number}")
    elif content is not None:
        yield place, ", ".join(map(str, content)) if isinstance(content, list) else content


def _loads(folder: Path) -> Iterator[tuple[Any, ...]]:
    manifest, summary = read_manifest(folder), read_summary(folder)
    for cell in summary.cells:
        for state, group in cell.tiers.items():
            yield folder.name, cell.key, state, *_columns(manifest, cell, group)


def _columns(manifest: Manifest, cell: CellFigures, group: TierFigures) -> tuple[Any, ...]:
    entry = manifest.cell(cell.key)
    workload, resolved = entry.config.get("workload") or {}, entry.resolved
    storage, rates, e2e = cell.storage, group.throughput, group.metrics.get("e2e_s")
    throughput = {} if storage is None or storage.throughput is None else storage.throughput
    per_io = throughput.get("per_io_time")
    wall = throughput.get("wall_clock")
    io_p95_s = None if storage is None else storage.kv.io_s.get("p95") if storage.kv else None
    requests, output = group.rows.counted, group.tokens.output
    average = wall.tokens_per_s if wall else rates.output_tokens_per_s if rates else None
    return (
        entry.model,
        next((workload[name] for name in _USERS if workload.get(name)), None),
        storage.elapsed_s if storage and storage.elapsed_s else rates.duration_s if rates else None,
        _gigabytes(resolved.gpu_bytes if resolved else None),
        _gigabytes(resolved.cpu_bytes if resolved else None),
        requests,
        output,
        average,
        per_io.tokens_per_s if per_io else None,
        group.tokens.hit_rate,
        _milliseconds(e2e.p95 if e2e else None),
        _milliseconds(io_p95_s),
    )


def _gigabytes(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / 10**9


def _milliseconds(time_s: float | None) -> float | None:
    return None if time_s is None else time_s * 1000


def write_table(table: pd.DataFrame, path: Path) -> None:
    """By the name's end: .csv or .parquet. Raises ResultsError."""
    try:
        if path.suffix == ".csv":
            table.to_csv(path, index=False)
        else:
            table.convert_dtypes().to_parquet(path, index=False)
    except OSError as error:
        raise ResultsError(f"{path}: cannot be written ({error.strerror}); name another place") from None


def write_workbook(sheets: Mapping[str, pd.DataFrame], path: Path) -> None:
    """Each table as a sheet of its own. Raises ResultsError."""
    import pandas as pd

    if long := next((name for name, table in sheets.items() if len(table) > MOST_SHEET_ROWS), None):
        raise ResultsError(
            f"{path}: sheet {long} would have {len(sheets[long]):,} rows, and a sheet holds {MOST_SHEET_ROWS:,}; use"
            " --parquet, or export fewer runs"
        )
    try:
        with pd.ExcelWriter(path, engine="openpyxl") as book:
            for name, table in sheets.items():
                table.to_excel(book, sheet_name=name, index=False, freeze_panes=(1, 0))
    except ImportError:
        raise ResultsError(
            f"{path}: needs the package openpyxl; run: pip install 'kv-harness[xlsx]', or --csv"
        ) from None
    except OSError as error:
        raise ResultsError(f"{path}: cannot be written ({error.strerror}); name another place") from None
