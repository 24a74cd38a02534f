"""From which place of a sweep's axis on one set-up serves a load better than another: break-even, with its interval."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeGuard

import msgspec

from harness.experiment.report import reference_cells
from harness.results.against import Served, against_of, compared
from harness.results.manifest import CellEntry
from harness.stats import Ratio, crossing

SpeedFigure = Literal["ttft_s", "requests_per_s"]
Passes = Literal["from", "up to", "everywhere", "nowhere", "more than once"]
_NO_DIFFERENCE = 0.01
# More set-ups than this are each compared with the named one alone.
_EACH_WITH_EACH = 6


class Compared(msgspec.Struct, frozen=True):
    """A measured value of the axis, and how many times better `ours` serves there."""

    value: float
    ratio: Ratio


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """Set-up `ours` against `theirs` along `axis`, a swept key. ours, theirs: their other overrides. places: ascending.

    named: theirs is what report.against names. outcome: ours is better from `at` on, or up to it; at every measured
    place, or at none; or the ratio passes 1 more than once. at: where it passes 1, on straight lines between neighbours
    on log axes. low, high: where the ends of the ratios' intervals pass 1; None: they do not, or not once. A ratio that
    repeats exactly has the ends 1 % below and above it: less is no difference that a choice would rest on.
    """

    axis: str
    metric: SpeedFigure
    ours: dict[str, Any]
    theirs: dict[str, Any]
    named: bool
    outcome: Passes
    at: float | None
    low: float | None
    high: float | None
    places: tuple[Compared, ...]

    @property
    def judged(self) -> bool:
        """Whether any ratio has an interval."""
        return any(place.ratio.low is not None for place in self.places)

    @property
    def between(self) -> tuple[float, float] | None:
        """The measured neighbours of break-even."""
        if self.at is None:
            return None
        values = [place.value for place in self.places]
        return max(v for v in values if v <= self.at), min(v for v in values if v >= self.at)


def break_evens(cells: Sequence[CellEntry], loads: Mapping[str, Served]) -> tuple[BreakEven, ...]:
    """Of a sweep of free loads that names a cell in report.against, along each axis of numbers."""
    against = against_of(cells[0].config) if cells else None
    if against is None:
        return ()
    overrides = {cell.key: cell.overrides for cell in cells if cell.key in loads}
    references = reference_cells({cell.key: cell.overrides for cell in cells}, against)
    axes = dict.fromkeys(axis for own in overrides.values() for axis in own)
    return tuple(found for axis in axes for found in _along(axis, overrides, references, loads))


def _along(
    axis: str, overrides: Mapping[str, Mapping[str, Any]], references: Mapping[str, str], loads: Mapping[str, Served]
) -> list[BreakEven]:
    sides: dict[str, dict[float, str]] = {}
    for key, own in overrides.items():
        if _is_number(value := own.get(axis)):
            sides.setdefault(_others(own, axis), {})[float(value)] = key
    named = {
        _others(overrides[other], axis)
        for key, other in references.items()
        if key in overrides and other in overrides and overrides[key].get(axis) == overrides[other].get(axis)
    }
    pairs = list(itertools.combinations(sides, 2))
    # What the author named is theirs, wherever in the sweep it stands.
    pairs = [(second, first) if second in named else (first, second) for first, second in pairs]
    if len(sides) > _EACH_WITH_EACH:
        pairs = [pair for pair in pairs if pair[0] in named]
    found = []
    for theirs, ours in pairs if named else ():
        places = sorted(sides[theirs].keys() & sides[ours].keys())
        if len(places) > 1:
            both = [(sides[theirs][place], sides[ours][place]) for place in places]
            found += _broken(axis, places, both, overrides, loads, named=theirs in named)
    return found


def _broken(
    axis: str,
    places: Sequence[float],
    keys: Sequence[tuple[str, str]],
    overrides: Mapping[str, Mapping[str, Any]],
    loads: Mapping[str, Served],
    *,
    named: bool,
) -> list[BreakEven]:
    """By metric, as far as every place has its ratio."""
    found = [compared(theirs, loads[theirs], loads[ours]) for theirs, ours in keys]
    metrics: dict[SpeedFigure, list[Ratio | None]] = {
        "ttft_s": [each.ttft for each in found],
        "requests_per_s": [each.rates.get("requests_per_s") for each in found],
    }
    theirs, ours = ({k: v for k, v in overrides[key].items() if k != axis} for key in keys[0])
    broken = []
    for metric, ratios in metrics.items():
        known = tuple(Compared(place, ratio) for place, ratio in zip(places, ratios, strict=True) if ratio is not None)
        if len(known) == len(places):
            outcome, at, low, high = _judged(known)
            broken.append(
                BreakEven(axis=axis, metric=metric, ours=ours, theirs=theirs, named=named, outcome=outcome, at=at,
                          low=low, high=high, places=known)
            )  # fmt: skip
    return broken


def _judged(known: Sequence[Compared]) -> tuple[Passes, float | None, float | None, float | None]:
    places, ratios = [place.value for place in known], [place.ratio for place in known]
    at = crossing(places, [ratio.ratio for ratio in ratios])
    if at is None:
        better = {ratio.ratio > 1 for ratio in ratios}
        alike: Passes = "everywhere" if better == {True} else "nowhere"
        return ("more than once" if len(better) > 1 else alike), None, None, None
    ends = [crossing(places, [_ends(ratio)[end] for ratio in ratios]) for end in (0, 1)]
    # A rising ratio passes 1 with its upper end first.
    rises = ratios[-1].ratio > 1
    low, high = reversed(ends) if rises else ends
    return ("from" if rises else "up to"), at, low, high


def _ends(ratio: Ratio) -> tuple[float | None, float | None]:
    if ratio.basis == "repeats exactly":
        return ratio.ratio * (1 - _NO_DIFFERENCE), ratio.ratio * (1 + _NO_DIFFERENCE)
    return ratio.low, ratio.high


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _others(overrides: Mapping[str, Any], axis: str) -> str:
    return json.dumps({key: value for key, value in overrides.items() if key != axis}, default=str)
