"""The order in which a validation measures a calibration's points and the held-out points: in turns.

A machine's speed drifts within minutes by more than the differences that a validation has to resolve. So each pass
measures all points of both kinds that share a running engine, each for a part of its time.

A restarted engine may be several percent faster or slower than before, in all that its host does. So no point of a
calibration stands on one start alone: half of the passes go through all engines, then cells that need an engine of
their own, and then the other half goes through all engines again.

An engine that has served a prompt length and a tier once serves them as fast as ever, whatever cell asks for them: so
only the first cell with either warms up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from harness.experiment.read import Cell, changed
from harness.experiment.workloads import PrefixWorkload
from harness.measure.group import engine_key
from harness.validation.points import point_name, repeated

_FEWEST = 3


def in_turns(micro: Sequence[Cell], cells: Sequence[Cell], passes: int) -> list[Cell]:
    """The cells in the order to run: each point of both kinds once a pass, engine by engine.

    Free loads run between the halves of the passes, as do cells whose engine measures no point of the calibration.

    micro: `micro_cells` of as many passes, whose keys end in #1, #2 …
    """
    fitted = _by_engine(micro)
    beside = [c for c in cells if isinstance(c.experiment.workload, PrefixWorkload) and engine_key(c) in fitted]
    held_out = _by_engine(beside)
    others = _by_engine(cell for cell in cells if cell not in beside)
    half = math.ceil(passes / 2)
    halves = [
        [cell for key, points in fitted.items() for cell in _turns(points, held_out.get(key, []), passes, numbers)]
        for numbers in (range(1, half + 1), range(half + 1, passes + 1))
    ]
    alone = [cell for group in others.values() for cell in _warmed_up(group, group)]
    return [*halves[0], *alone, *halves[1]]


def _by_engine(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(engine_key(cell), []).append(cell)
    return groups


def _turns(fitted: Sequence[Cell], held_out: Sequence[Cell], passes: int, numbers: range) -> list[Cell]:
    """Of all passes, those numbers of one engine's, pass by pass."""
    divided = [part for cell in held_out for part in _divided(cell, passes)]
    turns: list[Cell] = []
    for number in numbers:
        turns += _mixed(*([cell for cell in of if cell.key.endswith(f"#{number}")] for of in (fitted, divided)))
    return _warmed_up(turns, [*fitted, *divided])


def _warmed_up(cells: Sequence[Cell], asked: Sequence[Cell]) -> list[Cell]:
    """The cells of one start of an engine, in their order. asked: all cells of the engine; the first one of a point
    says how often it is warmed up where the engine is not warm for it."""
    warm_up = {point_name(cell.key): cell.experiment.measure.warm_up for cell in reversed(asked)}
    found: list[Cell] = []
    met: set[int | str] = set()
    for cell in cells:
        workload = cell.experiment.workload
        if not isinstance(workload, PrefixWorkload):
            found.append(cell)
            continue
        news: set[int | str] = {workload.prompt_tokens, *cell.experiment.measure.tiers}
        measure = {"warm_up": 0 if news <= met else warm_up[point_name(cell.key)]}
        found.append(Cell(cell.key, cell.overrides, changed(cell.experiment, measure=measure)))
        met |= news
    return found


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


def _mixed(fitted: Sequence[Cell], held_out: Sequence[Cell]) -> list[Cell]:
    """Both in their order, spread evenly among each other."""
    places = [((index + 0.5) / len(of), cell) for of in (fitted, held_out) for index, cell in enumerate(of)]
    return [cell for _, cell in sorted(places, key=lambda place: place[0])]
