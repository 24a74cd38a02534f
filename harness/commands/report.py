"""`harness report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from harness.commands.errors import DONE, told
from harness.errors import ConfigError


@told
def report(*folders: Annotated[Path, Parameter(help="Run folders.")]) -> int:
    """Makes summary, table and report.html again, from the rows alone.

    Example: harness report results/*
    """
    from rich.console import Console

    from harness.report.refresh import seal
    from harness.report.run.terminal import render_summary
    from harness.results.manifest import read_manifest

    if not folders:
        raise ConfigError("no folder given; name one, e.g. harness report results/*")
    for folder in folders:
        summary = seal(folder)
        Console().print(render_summary(summary, read_manifest(folder)))
        print(f"report: {folder / 'report.html'}")
    return DONE
