"""A calibration's points and those that it is held against, measured in turns.

Machines get slower and faster by more, within minutes, than what is to be told apart: what is measured at another time
is measured on another machine. So each pass measures all points of both kinds that share a running engine, each for a
part of its time; and what needs an engine of its own runs between one such engine and the next. (Not between passes: an
engine that is started again may be several percent quicker or slower than it was.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

from harness.config import PrefixWorkload
from harness.experiments import Cell, changed
from harness.micro import WARM_UP
from harness.run import engine_key
from harness.sides import repeated

_FEWEST = 3


def in_turns(micro: Sequence[Cell], cells: Sequence[Cell], passes: int) -> list[Cell]:
    """Cells to run in this order: each point of both kinds once a pass, engine by engine; free loads, and what has an
    engine without a point of the calibration, after the first engine.

    micro: `micro_cells` of as many passes, whose keys end in #1, #2 …
    """
    fitted = _grouped(micro, engine_key)
    in_passes = [cell for cell in cells if _divisible(cell) and engine_key(cell) in fitted]
    held_out = _grouped(in_passes, engine_key)
    first, *more = (_turns(points, held_out.get(key, []), passes) for key, points in fitted.items())
    others = _grouped((cell for cell in cells if cell not in in_passes), engine_key)
    return _warm_where_it_starts([*first, *others.values(), *itertools.chain(*more)])


def _grouped(cells: Iterable[Cell], key: Callable[[Cell], str]) -> dict[str, list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    return groups


def _divisible(cell: Cell) -> bool:
    return isinstance(cell.experiment.workload, PrefixWorkload)


def _turns(fitted: Sequence[Cell], held_out: Sequence[Cell], passes: int) -> list[list[Cell]]:
    """One list of cells a pass, all of one engine."""
    warmed = [_with_warm_up(cell, WARM_UP) for cell in fitted]
    divided = [part for cell in held_out for part in _divided(cell, passes)]
    return [
        _mixed(*([cell for cell in of if cell.key.endswith(f"#{number}")] for of in (warmed, divided)))
        for number in range(1, passes + 1)
    ]


def _divided(cell: Cell, passes: int) -> list[Cell]:
    """Cells of the same point that together take the cell's samples, or its time."""
    measure = cell.experiment.measure
    changes: dict[str, object] = {}
    if measure.samples is not None:
        changes["samples"] = math.ceil(measure.samples / passes)
    if measure.budget is not None:
        changes["budget"] = measure.budget / passes
    if measure.until is not None:
        limits = {name: getattr(measure.until, name) for name in ("min_samples", "max_samples")}
        fewer = {name: max(_FEWEST, math.ceil(limit / passes)) for name, limit in limits.items()}
        # Independent parts of a width each make a whole that is narrower by the root of their number.
        width = min(0.99, measure.until.half_width * math.sqrt(passes))
        changes["until"] = measure.until.model_dump(mode="json") | fewer | {"half_width": width}
    part = changed(cell.experiment, measure=changes)
    return [Cell(key, cell.overrides, part) for key in repeated(cell.key, passes)]


def _warm_where_it_starts(turns: Iterable[list[Cell]]) -> list[Cell]:
    """An engine runs on from turn to turn, and is warm after its first one; started again, it is cold again."""
    found: list[Cell] = []
    for turn in turns:
        runs_on = bool(found) and engine_key(found[-1]) == engine_key(turn[0])
        found += [_with_warm_up(cell, 0) if runs_on and _divisible(cell) else cell for cell in turn]
    return found


def _with_warm_up(cell: Cell, samples: int) -> Cell:
    return Cell(cell.key, cell.overrides, changed(cell.experiment, measure={"warm_up": samples}))


def _mixed(fitted: Sequence[Cell], held_out: Sequence[Cell]) -> list[Cell]:
    """Both in their order, spread evenly among each other."""
    places = [((index + 0.5) / len(of), cell) for of in (fitted, held_out) for index, cell in enumerate(of)]
    return [cell for _, cell in sorted(places, key=lambda place: place[0])]
