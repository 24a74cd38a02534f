"""`harness report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from harness.commands.errors import DONE, command_line, told
from harness.commands.output import IN_WORDS, OutputChoice, check_writable, console, name_page, name_report, print_json
from harness.errors import ConfigError, NotComparable

_Together = Annotated[
    Path | None,
    Parameter(
        name=["--output", "-o"],
        help="One page of all the runs, each held against the first: NAME.html. Their own reports stay as they are.",
    ),
]


@told
def report(
    *folders: Annotated[Path, Parameter(help="Run folders.")], page: _Together = None, answer: OutputChoice = IN_WORDS
) -> int:
    """Makes summary, table and report.html again, from the rows alone.

    Of kept evidence (results/io, results/validation/…) it makes the table and the page from the figures there.

    With --json: a list, one summary a folder, as their summary.json have them; with -o, one comparison a run.

    Example: harness report results/*

    Example: harness report results/before results/after -o both.html
    """
    from harness.report.kept import kept_in, kept_report, write_kept_page
    from harness.report.refresh import seal
    from harness.report.run.terminal import render_summary
    from harness.results.manifest import read_manifest
    from harness.results.summary import plain_summary

    if not folders:
        raise ConfigError("no folder given; name one, e.g. harness report results/*")
    if page is not None:
        return _together(folders, page, answer)
    summaries: list[Any] = []
    for folder in folders:
        if (evidence := kept_in(folder)) is not None:
            kept = kept_report(evidence)
            written = write_kept_page(evidence, kept.page)
            summaries.append(kept.figures)
            if not answer.as_json:
                console().print(kept.words)
                name_page(written, browse=answer.browse)
            continue
        summary = seal(folder)
        summaries.append(plain_summary(summary))
        if not answer.as_json:
            console().print(render_summary(summary, read_manifest(folder)))
            name_report(folder, browse=answer.browse)
    if answer.as_json:
        print_json(summaries)
    return DONE


def _together(folders: Sequence[Path], page: Path, answer: OutputChoice) -> int:
    """One page of several runs. A run that cannot be held against the first is named on it, with the reason."""
    from harness.report.validation.contrast import contrast_table, findings_of_many, write_contrast_page
    from harness.validation.contrast import contrast
    from harness.validation.points import read_side

    _check_page(folders, page)
    sides, found, refused = [read_side([folder]) for folder in folders], [], []
    for folder, side in zip(folders[1:], sides[1:], strict=True):
        try:
            found.append(contrast(sides[0], side, command_line()))
        except NotComparable as error:
            refused.append(f"{folder.name}: {error}.")
    if not found:
        raise NotComparable(refused[0].removesuffix("."))
    write_contrast_page(page, *found, refused=refused)
    if answer.as_json:
        print_json(found)
        return DONE
    console().print(contrast_table(*found))
    for line in findings_of_many(found, refused):
        print(line)
    name_page(page, browse=answer.browse)
    return DONE


def _check_page(folders: Sequence[Path], page: Path) -> None:
    if len(folders) < 2:
        raise ConfigError(f"-o {page}: one page of several runs needs two folders at least; name another")
    if page.suffix != ".html":
        raise ConfigError(f"-o {page}: a page is an HTML file; name it NAME.html")
    if page.exists():
        raise ConfigError(f"-o {page}: exists already; choose another name, or remove it")
    if not page.absolute().parent.is_dir():
        raise ConfigError(f"-o {page}: there is no folder {page.parent}; make it first")
    check_writable(page)
