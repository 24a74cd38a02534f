"""`harness keys`: every key of an experiment file, as docs/experiments.md has them."""

from __future__ import annotations

from harness.commands.errors import DONE, told


@told
def keys() -> int:
    """Prints every key of an experiment file: unit or choices, default, meaning.

    docs/experiments.md holds these tables.

    Example: harness keys
    """
    from harness.experiment.reference import reference

    print(reference())
    return DONE
