"""`harness report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from harness.commands.errors import DONE, told
from harness.commands.output import IN_WORDS, OutputChoice, console, name_report, print_json
from harness.errors import ConfigError


@told
def report(*folders: Annotated[Path, Parameter(help="Run folders.")], answer: OutputChoice = IN_WORDS) -> int:
    """Makes summary, table and report.html again, from the rows alone.

    With --json: a list, one summary a folder, as their summary.json have them.

    Example: harness report results/*
    """
    from harness.report.refresh import seal
    from harness.report.run.terminal import render_summary
    from harness.results.manifest import read_manifest
    from harness.results.summary import plain_summary

    if not folders:
        raise ConfigError("no folder given; name one, e.g. harness report results/*")
    summaries = []
    for folder in folders:
        summary = seal(folder)
        summaries.append(plain_summary(summary))
        if not answer.as_json:
            console().print(render_summary(summary, read_manifest(folder)))
            name_report(folder, browse=answer.browse)
    if answer.as_json:
        print_json(summaries)
    return DONE
