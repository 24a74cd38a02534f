"""When cores are quick: samples wait until no other guest uses a core's other hardware thread."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from harness.collectors.cores import BETWEEN_LOOKS_S, core_loop_s

# Of a quick core's loop. Looks without a neighbour differ by less, and a neighbour makes them 30 to 60 % longer.
_QUICK_WITHIN = 0.15
_WAITING_SHARE, _FIRST_WAIT_S = 0.25, 5.0
_LOOKS_KEPT = 200


class SteadyCores:
    """Waits before a sample until its cores are about as quick as they often are, or for as long as they may keep it.

    Another guest's work on a core's other hardware thread comes and goes within seconds, or minutes. Lone hits of
    17.2 ± 0.4 ms took 19 to 21 ms meanwhile. Where it seldom goes, its pace is the usual one, and nothing is to be
    waited for.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        self._looks_s = {core: deque[float](maxlen=_LOOKS_KEPT) for core in cores}
        self._began_s, self._waited_s = time.monotonic(), 0.0

    async def wait(self, at_most_s: float) -> float:
        """Returns the seconds waited. All waits together take a quarter of the time since the first at most."""
        began_s = time.monotonic()
        left_s = min(at_most_s, (began_s - self._began_s) * _WAITING_SHARE + _FIRST_WAIT_S - self._waited_s)
        loops_s = self._look()
        # What is seen while it waits is no fair share of the time, and is not kept.
        for core, loop_s in loops_s.items():
            self._looks_s[core].append(loop_s)
        slow_from_s = {core: (1 + _QUICK_WITHIN) * _quick_loop_s(looks_s) for core, looks_s in self._looks_s.items()}
        waited_s = 0.0
        while any(loop_s > slow_from_s[core] for core, loop_s in loops_s.items()) and waited_s < left_s:
            await asyncio.sleep(BETWEEN_LOOKS_S)
            loops_s = self._look()
            waited_s = time.monotonic() - began_s
        self._waited_s += waited_s
        return waited_s

    def _look(self) -> dict[int, float]:
        return {core: core_loop_s(core) for core in self._looks_s}


def _quick_loop_s(loops_s: Sequence[float]) -> float:
    """What the loop takes a core when it is quick: a quarter of these took no longer."""
    return sorted(loops_s)[(len(loops_s) - 1) // 4]
