"""`harness export`: runs as a table for spreadsheets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from harness.commands.errors import DONE, told
from harness.errors import ConfigError

_Requests = Annotated[bool, Parameter(negative="", help="A row for each request, instead of for each load.")]


@told
def export(
    *folders: Annotated[Path, Parameter(help="Run folders.")],
    csv: Annotated[Path | None, Parameter(help="Writes NAME.csv.")] = None,
    xlsx: Annotated[Path | None, Parameter(help="Writes NAME.xlsx; needs kv-harness[xlsx].")] = None,
    parquet: Annotated[Path | None, Parameter(help="Writes NAME.parquet.")] = None,
    requests: _Requests = False,
) -> int:
    """Writes runs as one table: CSV, a spreadsheet, or Parquet.

    A row is one load, or one warm state of a prefix, in the columns of the MLPerf KV-cache benchmark. A spreadsheet has
    sheets: summary (these rows), rows (a row for each request), settings (what each run's manifest says).

    Example: harness export results/* --csv all.csv

    Example: harness export results/mine --parquet mine.parquet --requests
    """
    from harness.results.export import fact_table, load_table, request_table, write_table, write_workbook

    asked = {".csv": csv, ".xlsx": xlsx, ".parquet": parquet}
    named = [(suffix, path) for suffix, path in asked.items() if path is not None]
    if not folders:
        raise ConfigError("no folder given; name one, e.g. harness export results/* --csv all.csv")
    if not named:
        raise ConfigError("no table asked for; add --csv, --xlsx or --parquet with a file's name")
    for suffix, path in named:
        if path.suffix != suffix:
            raise ConfigError(f"--{suffix[1:]} {path}: a file's name has to end in {suffix}; add it")
        if path.exists():
            raise ConfigError(f"--{suffix[1:]} {path}: exists already; choose another name")
    table = (request_table if requests else load_table)(folders)
    for suffix, path in named:
        if suffix == ".xlsx":
            rows = table if requests else request_table(folders)
            loads = load_table(folders) if requests else table
            write_workbook({"summary": loads, "rows": rows, "settings": fact_table(folders)}, path)
            print(f"{path}: {len(loads):,} rows of loads, {len(rows):,} of requests")
        else:
            write_table(table, path)
            print(f"{path}: {len(table):,} rows")
    return DONE
