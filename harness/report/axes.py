"""What a sweep varied: names, labels, which axis goes along x, and one panel for each point of the others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from harness.results.summary import CellFigures


class Axis(msgspec.Struct, frozen=True):
    """One swept key. values: in the sweep's order; numeric: all of them are numbers."""

    key: str
    name: str
    values: tuple[Any, ...]
    numeric: bool


class Panel(msgspec.Struct, frozen=True):
    """Cells that share all axes but the one along x."""

    title: str
    cells: tuple[CellFigures, ...]


def varied_axes(cells: Sequence[CellFigures]) -> list[Axis]:
    """The axes with more than one value, in the order of the sweep."""
    keys = list(dict.fromkeys(key for cell in cells for key in cell.overrides))
    names = short_names(keys)
    found = []
    for key in keys:
        values = {value_text(value): value for cell in cells for value in [cell.overrides.get(key)]}
        if len(values) > 1:
            numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values.values())
            found.append(Axis(key, names[key], tuple(values.values()), numeric))
    return found


def panels(cells: Sequence[CellFigures]) -> tuple[Axis | None, list[Panel]]:
    """The axis along x (the first one of numbers, or else the first), and a panel a point of the other axes."""
    axes = varied_axes(cells)
    if not axes:
        return None, [Panel("", tuple(cells))]
    along = next((axis for axis in axes if axis.numeric), axes[0])
    others = [axis for axis in axes if axis is not along]
    grouped: dict[str, list[CellFigures]] = {}
    for cell in cells:
        title = ", ".join(f"{axis.name}={value_text(cell.overrides.get(axis.key))}" for axis in others)
        grouped.setdefault(title, []).append(cell)
    return along, [Panel(title, tuple(group)) for title, group in grouped.items()]


def cell_labels(cells: Sequence[CellFigures]) -> dict[str, str]:
    """Cell key → a short label: 'prompt_tokens=4097'; the key itself for a cell without overrides."""
    names = short_names(list(dict.fromkeys(key for cell in cells for key in cell.overrides)))
    return {
        cell.key: ", ".join(f"{names[key]}={value_text(value)}" for key, value in cell.overrides.items()) or cell.key
        for cell in cells
    }


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """'workload.prompt_tokens' → 'prompt_tokens', unless two keys end alike."""
    ends = [key.rpartition(".")[2] for key in keys]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}


def value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
