"""`harness traces`: the catalogue, and fetching from it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from harness.commands.errors import DONE, told
from harness.commands.output import AsJson, print_json


@told
def list_traces(*, as_json: AsJson = False) -> int:
    """Lists the catalogue."""
    from traces.catalogue import catalogue

    if as_json:
        print_json(catalogue())
        return DONE
    for name, entry in catalogue().items():
        print(f"{name:24} {entry.format:9} {entry.licence:12} {entry.description}")
    return DONE


@told
def fetch(
    name: Annotated[str, Parameter(help="A name from `harness traces list`.")],
    /,
    *,
    into: Annotated[Path | None, Parameter(help="The folder. Default: $HARNESS_TRACES, else traces/data.")] = None,
    accept_digest: Annotated[str | None, Parameter(help="The sha256 to accept where the catalogue has none.")] = None,
) -> int:
    """Downloads a trace and checks its sha256.

    Example: harness traces fetch mooncake_conversation
    """
    from harness.report.run.terminal import ProgressLine
    from traces.catalogue import fetch, fetched

    with ProgressLine() as progress:
        shown = 0

        def tell(done: int, total: int | None) -> None:
            nonlocal shown
            if not shown:
                progress.start(total, f"{name} (bytes)")
            progress.advance(done - shown)
            shown = done

        path = fetch(name, into or fetched(), accept_digest=accept_digest, progress=tell)
    print(path)
    return DONE
