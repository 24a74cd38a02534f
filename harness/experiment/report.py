"""What the report of a run compares. Nothing here changes what is measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from harness.experiment.fields import Strict


class ReportSettings(Strict):
    """What the report of a sweep compares.

    against: the cell that every other one is held against: a value of an axis, e.g. `gpu_only`, or a cell's whole key.
    """

    against: Annotated[str, Field(min_length=1)] | None = None


def reference_cells(cells: Mapping[str, Mapping[str, Any]], against: str) -> dict[str, str]:
    """By cell, the key of the one that it is held against. cells: by key, each cell's overrides.

    against: a cell's key, for all others; or a value of one axis: a cell is then held against the one with that value
    and all others of its own. Empty where it is neither, or a value of two axes.
    """
    if against in cells:
        return {key: against for key in cells if key != against}
    axes = {axis for overrides in cells.values() for axis, value in overrides.items() if _text(value) == against}
    if len(axes) != 1:
        return {}
    axis = axes.pop()
    references = {
        _others(overrides, axis): key for key, overrides in cells.items() if _text(overrides[axis]) == against
    }
    found = {key: references.get(_others(overrides, axis), key) for key, overrides in cells.items()}
    return {key: reference for key, reference in found.items() if reference != key}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _others(overrides: Mapping[str, Any], axis: str) -> str:
    return _text({key: value for key, value in overrides.items() if key != axis})
