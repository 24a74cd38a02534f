"""Finds the capacity of a set-up: the largest load that keeps its targets, or the load with the highest throughput.

Pure: a search asks for loads one after another, is told what came of each, and never measures anything itself.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal

import msgspec

SearchAction = Literal["start", "more", "fewer", "between"]
# Beyond the doubled load, steps are smaller, as in the benchmark's own search.
_FIRST, _THEN = 2.0, 1.5


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one load. met: whether it kept every target; in mode peak it is True. rate: tokens per second."""

    met: bool
    rate: float | None


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One load that was measured, and why this one."""

    load: int
    action: SearchAction
    reason: str
    met: bool
    rate: float | None


Search = Generator[tuple[int, SearchAction, str], Found, int | None]


def most_within(start: int, most: int, tolerance: float) -> Search:
    """The largest load that keeps the targets; None: not even one does. It ends when the answer is known to within the
    tolerance, a share of it, or exactly."""
    good, bad = 0, most + 1
    load, action, reason = start, "start", "the first load"  # type: int, SearchAction, str
    while bad - good > max(1, int(tolerance * good)):
        found = yield load, action, reason
        if found.met:
            good = max(good, load)
        else:
            bad = min(bad, load)
        if bad > most and good < most:
            load, action, reason = min(most, round(good * _FIRST)), "more", f"{good} keeps the targets"
        elif good == 0 and bad > 1:
            load, action, reason = max(1, bad // 2), "fewer", f"{bad} misses a target"
        else:
            load, action, reason = (good + bad) // 2, "between", f"{good} keeps the targets, {bad} does not"
    return good or None


def highest(start: int, most: int, tolerance: float) -> Search:
    """The load with the highest throughput: ×2, then ×1.5 until it falls, then between the neighbours of the best."""
    rates: dict[int, float] = {}
    load, action, reason, growth = start, "start", "the first load", _FIRST  # type: int, SearchAction, str, float
    while True:
        found = yield load, action, reason
        rates[load] = found.rate or 0.0
        if load < most and rates[load] >= max(rates.values()):
            load, action, reason = min(most, max(load + 1, round(load * growth))), "more", "throughput still rises"
            growth = _THEN
            continue
        break
    while True:
        best = max(rates, key=lambda each: (rates[each], -each))
        gap = max(1, int(tolerance * best))
        below = max((each for each in rates if each < best), default=best)
        above = min((each for each in rates if each > best), default=best)
        wider = below if best - below >= above - best else above
        if abs(wider - best) <= gap:
            return best
        load, action, reason = (wider + best) // 2, "between", f"the highest so far is at {best}"
        if load in rates:
            return best
        found = yield load, action, reason
        rates[load] = found.rate or 0.0
