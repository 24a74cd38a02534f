"""How fast the machine's cores are now, against the fastest that they have been.

Cores of a virtual machine are threads of cores that others use too: for seconds or minutes on end the same work takes
half as long again or nearly twice as long, and no counter of the guest shows it (steal stays 0). So a fixed piece of
work is timed on the cores that matter, before and after what is measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

# About a millisecond each: shorter than the phases, longer than the clock's grain and an interrupt.
_LOOPS, _ADDITIONS = 12, 40_000


class SpeedProbe:
    """Times a fixed loop on each of `cores`. The fastest loop of this object's life is speed 1."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = tuple(cores)
        self._best_s = dict.fromkeys(self._cores, float("inf"))

    @property
    def best_loop_s(self) -> dict[int, float]:
        """Seconds of the fastest loop so far, per core."""
        return dict(self._best_s)

    def read(self) -> float:
        """The slowest core's speed now, 0 to 1. Takes about 12 ms a core, in which this thread does nothing else."""
        allowed = os.sched_getaffinity(0)
        try:
            return min(self._read(core) for core in self._cores)
        finally:
            os.sched_setaffinity(0, allowed)

    def _read(self, core: int) -> float:
        os.sched_setaffinity(0, {core})
        times_s = [_loop_s() for _ in range(_LOOPS)]
        self._best_s[core] = min(self._best_s[core], *times_s)
        return round(self._best_s[core] * len(times_s) / sum(times_s), 4)


def _loop_s() -> float:
    began_s = time.perf_counter()
    total = 0
    for addend in range(_ADDITIONS):
        total += addend
    return time.perf_counter() - began_s
