"""Finds the capacity of a set-up: the largest load that keeps its targets, or the load with the highest throughput.

Pure: a search asks for loads one after another, is told what came of each, and never measures anything itself.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from statistics import fmean

from harness.results.capacity import CapacityAnswer, Found, SearchAction
from harness.stats import mean_interval

# Beyond the doubled load, steps are smaller, as in the benchmark's own search.
_FIRST, _THEN = 2.0, 1.5

# A load, why it is asked for, in one word and in more. A load that was asked for before is measured anew.
SearchStep = tuple[int, SearchAction, str]
Search = Generator[SearchStep, Found, CapacityAnswer]


def most_within(start: int, most: int, tolerance: float, repeats: int = 1) -> Search:
    """The largest load that keeps the targets. It ends when the answer is known to within the tolerance, a share of
    it, and the two loads around it were measured `repeats` times, or until the interval of their strain leaves 1 out.
    """
    known = _Kept(repeats)
    ask: SearchStep = (start, "start", "the first load")
    bisect = False
    while True:
        known.add(ask[0], (yield ask))
        bad = min((load for load in known.found if not known.keeps(load)), default=most + 1)
        good = max((load for load in known.found if load < bad), default=0)
        if bad - good <= max(1, int(tolerance * good)):
            unsure = next((load for load in (good, bad) if known.unsure(load)), None)
            if unsure is None:
                return known.answer(good, most)
            ask = unsure, "again", f"the answer lies between {good} and {bad}"
        elif bad > most and good < most:
            ask = min(most, round(good * _FIRST)), "more", f"{good} keeps the targets"
        elif good == 0:
            ask = max(1, bad // 2), "fewer", f"{bad} misses a target"
        else:
            aim = (good + bad) // 2 if bisect else known.crossing(good, bad)
            ask, bisect = (aim, "between", f"{good} keeps the targets, {bad} does not"), not bisect


class _Kept:
    """What was found, by load."""

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats
        self.found: dict[int, list[Found]] = {}

    def add(self, load: int, found: Found) -> None:
        self.found.setdefault(load, []).append(found)

    def keeps(self, load: int) -> bool:
        """By the mean strain; where a strain is not known, every measurement has to keep the targets."""
        strains = self._strains(load)
        return all(each.met for each in self.found[load]) if strains is None else fmean(strains) <= 1

    def unsure(self, load: int) -> bool:
        if len(self.found.get(load, ())) >= self._repeats or load not in self.found:
            return False
        strains = self._strains(load)
        if strains is None:
            return False
        low, high = (mean_interval(strains) if len(strains) > 1 else None) or (-math.inf, math.inf)
        return low <= 1 <= high

    def crossing(self, good: int, bad: int) -> int:
        """Where the strain crosses 1 if its logarithm is straight; the middle where it is not known."""
        below, above = (self._strains(load) for load in (good, bad))
        if below is None or above is None or not 0 < fmean(below) < fmean(above) < math.inf:
            return (good + bad) // 2
        first, last = math.log(fmean(below)), math.log(fmean(above))
        return min(bad - 1, max(good + 1, round(good + (bad - good) * -first / (last - first))))

    def answer(self, good: int, most: int) -> CapacityAnswer:
        missed = [load for load, found in self.found.items() if not all(each.met for each in found)]
        met = [load for load, found in self.found.items() if any(each.met for each in found)]
        low = max((load for load in met if load < min(missed, default=most + 1)), default=None)
        high = min((load for load in missed if load > max(met, default=0)), default=None)
        return CapacityAnswer(load=good or None, low=low, high=high)

    def _strains(self, load: int) -> list[float] | None:
        found = self.found[load]
        strains = [each.strain for each in found if each.strain is not None and not each.failed]
        return strains if len(strains) == len(found) else None


def highest(start: int, most: int, tolerance: float, repeats: int = 1) -> Search:
    """The load with the highest throughput: ×2, then ×1.5 until it falls, then between the neighbours of the best.

    The best and its neighbours are measured `repeats` times, and their means are compared.
    """
    found: dict[int, list[float]] = {}

    def mean(load: int) -> float:
        return fmean(found[load])

    ask: SearchStep = (start, "start", "the first load")
    growth = _FIRST
    while True:
        load = ask[0]
        found[load] = [(yield ask).rate or 0.0]
        if load >= most or mean(load) < max(map(mean, found)):
            break
        ask = min(most, max(load + 1, round(load * growth))), "more", "throughput still rises"
        growth = _THEN
    while True:
        best = max(found, key=lambda each: (mean(each), -each))
        below = max((each for each in found if each < best), default=best)
        above = min((each for each in found if each > best), default=best)
        wider = below if best - below >= above - best else above
        middle = (wider + best) // 2
        if abs(wider - best) > max(1, int(tolerance * best)) and middle not in found:
            ask = middle, "between", f"the highest so far is at {best}"
        elif (few := [each for each in (best, below, above) if len(found[each]) < repeats]) == []:
            return CapacityAnswer(
                load=best, low=None if below == best else below, high=None if above == best else above
            )
        else:
            ask = few[0], "again", f"the highest so far is at {best}"
        found.setdefault(ask[0], []).append((yield ask).rate or 0.0)
