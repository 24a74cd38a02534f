"""When a lone request was sent, and when the parts of its answer had come: also where this thread got its core late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

_COUNTS = Path("/proc/thread-self/schedstat")


def waited_for_core_s() -> float:
    """For how many seconds the calling thread was ready to run and had no core, since it began.

    0 where the kernel does not count it (Linux, Documentation/scheduler/sched-stats.rst, /proc/PID/schedstat).
    """
    try:
        return int(_COUNTS.read_bytes().split()[1]) / 1e9
    except OSError:
        return 0.0


class Moments:
    """The clock's time, less what this thread waited for its core in between, as long as one request is in flight.

    An answer wakes this thread up. Where a cache server has the same core and the kernel writes a chunk of 32 MiB for
    it, no priority helps: a kernel without preemption ends the write first (seen: 5 ms of a TTFT of 85). The answer had
    come before that. Of several requests in flight, nothing tells which answer came when: their times stay as they are.

    clock: the run's, in seconds. waited_s: what the thread has waited so far.
    """

    def __init__(self, clock: Callable[[], float], waited_s: Callable[[], float] = waited_for_core_s) -> None:
        self._clock, self._waited_s = clock, waited_s
        self._alone = False
        self._until_last_s = self._last_s = 0.0

    def begins(self, *, alone: bool) -> None:
        """A request begins. alone: no other one is in flight."""
        self._alone = alone

    def sent(self) -> float:
        """The body goes out now."""
        self._last_s = self._clock()
        if self._alone:
            self._until_last_s = self._waited_s()
        return self._last_s

    def came(self) -> float:
        """When what is read now had come: not before what came last."""
        now_s = self._clock()
        if self._alone:
            until_now_s = self._waited_s()
            now_s = max(self._last_s, now_s - (until_now_s - self._until_last_s))
            self._until_last_s, self._last_s = until_now_s, now_s
        return now_s
