"""When a request was sent, and when the parts of its answer had come: also where this thread got its core late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_COUNTS = Path("/proc/thread-self/schedstat")
FEW = 8


class Turns(NamedTuple):
    """Of a thread since it began: the seconds that it was ready to run and had no core, and how often it got one."""

    waited_s: float = 0.0
    times: int = 0


def turns_of_this_thread() -> Turns:
    """Nothing where the kernel does not count (Linux, Documentation/scheduler/sched-stats.rst, /proc/PID/schedstat)."""
    try:
        _, waited_ns, times = _COUNTS.read_bytes().split()
    except OSError:
        return Turns()
    return Turns(int(waited_ns) / 1e9, int(times))


class Moments:
    """The clock's time; of an answer that woke this thread up, less what the thread then waited for its core.

    Where a cache server has the same core and the kernel writes a chunk of 32 MiB for it, no priority helps: a kernel
    without preemption ends the write first (seen: 5 ms of a TTFT of 85). So what the thread waited is taken off where
    it got its core once since it last looked: what it reads first had woken it up. Of what it reads besides, nothing
    tells when it came. Where the thread got its core more often, nothing tells what it waited for.

    clock: the run's, in seconds. turns: of the thread that calls.
    """

    def __init__(self, clock: Callable[[], float], turns: Callable[[], Turns] = turns_of_this_thread) -> None:
        self._clock, self._turns = clock, turns
        self._looks = False
        self._last, self._last_s = Turns(), 0.0

    def begins(self, others: int) -> None:
        """A request begins. others: so many are in flight. To look costs 10 us, which a heavy load does not spend."""
        self._looks = others < FEW

    def sent(self) -> float:
        """The body goes out now."""
        self._last_s = self._clock()
        if self._looks:
            self._last = self._turns()
        return self._last_s

    def came(self) -> float:
        """When what is read now had come: not before what was sent or came last, of any request."""
        now_s = self._clock()
        if self._looks:
            now = self._turns()
            if now.times - self._last.times == 1:
                now_s = max(self._last_s, now_s - (now.waited_s - self._last.waited_s))
            self._last, self._last_s = now, now_s
        return now_s
