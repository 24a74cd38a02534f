"""How fast a core is now: what a fixed loop takes on it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

_LOOPING_S = 0.005
_LOOP_TURNS = 2000
# A turn that takes longer than this many times the fastest one was interrupted: other guests slow it by less.
_INTERRUPTED = 2.5
_LOOKS, BETWEEN_LOOKS_S = 25, 0.015
# Median of the kept validations' calibrations (core_loop_s in results/validation).
KEPT_LOOP_S = 78e-6
# Times that loop, from which on it is worth a word.
_SLOW_FROM = 1.25
# Of Slower.quarter. On machines where validations resolved, one sample of ten met 23 to 33 %; where few did, 66 %.
MAX_SLOWER = 0.3


def core_loop_s(core: int) -> float:
    """Repeats a short loop on a core for 5 ms and returns the mean seconds of one turn.

    A virtual machine's core may be one of the two hardware threads of a host's core. Work on the other thread slows it
    by up to half, for milliseconds or minutes. No counter of the guest shows this, not even steal.
    """
    before, turns_s = os.sched_getaffinity(0), list[float]()
    os.sched_setaffinity(0, {core})
    try:
        end_s = time.perf_counter() + _LOOPING_S
        # Another process may keep the core until after that: one turn tells all the same.
        while (begin_s := time.perf_counter()) < end_s or not turns_s:
            total = 0
            for number in range(_LOOP_TURNS):
                total += number * number
            turns_s.append(time.perf_counter() - begin_s)
    finally:
        os.sched_setaffinity(0, before)
    return uninterrupted_s(turns_s)


class Slower(NamedTuple):
    """By which share of its quickest look the same work takes a core longer: half of the looks, and a quarter; and what
    the loop took, by the median look."""

    half: float
    quarter: float
    usual_s: float

    def in_words(self) -> str:
        said = (
            f"the same work takes a core {self.half:.0%} longer than at best half of the time, and {self.quarter:.0%} a"
            " quarter of it"
        )
        if self.usual_s < _SLOW_FROM * KEPT_LOOP_S:
            return said
        kept = f"it takes {self.usual_s / KEPT_LOOP_S:.1f} times as long as where the validations were kept"
        return f"{said}; {kept}: paced steps may end late"


def cores_slower(cores: Sequence[int]) -> Slower:
    """Looks at each core for 5 ms, 25 times in half a second."""
    slower, all_s = list[float](), list[float]()
    for core in cores:
        looks_s = list[float]()
        for _ in range(_LOOKS):
            looks_s.append(core_loop_s(core))
            time.sleep(BETWEEN_LOOKS_S)
        slower += [look_s / min(looks_s) - 1 for look_s in looks_s]
        all_s += looks_s
    return Slower(statistics.median(slower), statistics.quantiles(slower, n=4)[2], statistics.median(all_s))


def uninterrupted_s(turns_s: list[float]) -> float:
    """Mean seconds of the uninterrupted turns: another process's time slice does not make the core slow."""
    quickest_s = min(turns_s)
    return statistics.fmean(turn_s for turn_s in turns_s if turn_s < _INTERRUPTED * quickest_s)
