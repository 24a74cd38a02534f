"""`harness keys`: the keys of an experiment file, as docs/experiments.md has them."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from harness.commands.errors import DONE, told


@told
def keys(
    prefix: Annotated[str, Parameter(help="Only keys that begin so, e.g. cache, or cache.disk.capacity.")] = "",
    /,
) -> int:
    """Prints every key of an experiment file: unit or choices, default, meaning.

    docs/experiments.md holds these tables.

    Example: harness keys cache.disk
    """
    from harness.experiment.reference import reference

    print(reference(prefix))
    return DONE
