"""`harness doctor`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from harness.commands.errors import DONE, RUN_FAILED, told
from harness.commands.output import IN_WORDS, OutputChoice, print_json
from harness.errors import ConfigError

_COLOURS = {True: "32", False: "31", None: "33"}


@told
def doctor(
    *needs: Annotated[str, Parameter(help="What you want to do: the names in [] of its last lines.")],
    answer: OutputChoice = IN_WORDS,
) -> int:
    """Says what this machine can and cannot do, each with the cure.

    Exit code 1: a check failed; with names, one of those cannot be done here.

    Example: harness doctor vllm traces
    """
    from harness.doctor import abilities, checks, obstacles, render

    known = {ability.name: ability for ability in abilities()}
    if unknown := [name for name in needs if name not in known]:
        raise ConfigError(f"{unknown[0]}: doctor knows no such ability; choose from {', '.join(known)}")
    found = checks(Path.cwd())
    if answer.as_json:
        stops = {name: [check.name for check in obstacles(ability, found)] for name, ability in known.items()}
        print_json({"checks": found, "obstacles": stops})
    for line, ok in [] if answer.as_json else render(found):
        print(f"\x1b[{_COLOURS[ok]}m{line}\x1b[0m" if sys.stdout.isatty() and ok is not True else line)
    if needs:
        return RUN_FAILED if any(obstacles(known[name], found) for name in needs) else DONE
    return RUN_FAILED if any(check.ok is False for check in found) else DONE
