"""What commands print: tables that nothing wraps where a program reads them, JSON on request, the report's path."""

from __future__ import annotations

import sys
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from harness.errors import ConfigError, ResultsError

if TYPE_CHECKING:
    from rich.console import Console

_UNWRAPPED = 10_000  # columns: wider than any line


AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="Prints the figures as JSON, and nothing else.")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class OutputChoice:
    """How a command that prints figures answers: options that all of them have."""

    as_json: AsJson = False
    browse: Annotated[bool, Parameter(name="--open", negative=(), help="Opens the report in a browser.")] = False


IN_WORDS = OutputChoice()


def console() -> Console:
    """Where figures go: the terminal at its width; into a pipe or a file without wrapping."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=_UNWRAPPED)


def check_writable(file: Path) -> None:
    """Raises ConfigError where a file could not be written later, after minutes of measuring."""
    existed = file.exists()
    try:
        file.open("ab").close()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written ({error.strerror}); choose a writable folder") from None
    if not existed:
        file.unlink()


def tell_kept(folder: Path, verb: str, options: str = "") -> None:
    """Of a run that ended early: reports what it has measured, and says how to go on. A full disk, which may have ended
    it, takes no report either. options: of the command that goes on."""
    from harness.report.refresh import seal

    if not (folder / "manifest.json").exists():
        return
    try:
        seal(folder)
    except ResultsError as error:
        print(f"harness: {error}", file=sys.stderr)
    print(f"harness: rows so far are in {folder}; harness {verb} --resume {folder}{options} goes on", file=sys.stderr)


def print_json(content: Any) -> None:
    """One JSON document of a struct, or of plain values."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(content), indent=1).decode())


def name_report(folder: Path, before: str = "", browse: bool = False) -> None:
    """Prints where the report is, as a link where the terminal has links, and opens it if asked to."""
    name_page(folder / "report.html", before, browse)


def name_page(page: Path, before: str = "", browse: bool = False) -> None:
    """The same of a page of any name."""
    from rich.text import Text

    link = Text(str(page), style=f"link {page.resolve().as_uri()}")
    console().print(Text.assemble(before, "report: ", link), soft_wrap=True)
    if browse and not webbrowser.open(page.resolve().as_uri()):
        print(f"harness: no browser could be started; open {page.resolve()}", file=sys.stderr)
