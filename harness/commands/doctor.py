"""`harness doctor`."""

from __future__ import annotations

from pathlib import Path

from harness.commands.errors import DONE


def doctor() -> int:
    """Says what this machine can and cannot do, each with the cure."""
    from harness.doctor import checks, render

    print(render(checks(Path.cwd())))
    return DONE
