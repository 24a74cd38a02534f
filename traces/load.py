"""When to send what: pure schedules. Nothing here sleeps, and no clock is read.

    load = Load(requests, concurrency=4)
    while not isinstance(action := load.next(now), Done): ...

The same Load drives every engine, so that a simulator and a real server get the same requests at the same
intended moments.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from traces.request import Request


@dataclass(frozen=True, slots=True)
class Send:
    """Send this now. scheduled_s: when it was meant to go."""

    request: Request
    scheduled_s: float


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Nothing to send before at_s, unless a completion comes first."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Blocked:
    """Nothing to send until some request completes."""


@dataclass(frozen=True, slots=True)
class Done:
    """Everything has been sent."""


Action = Send | WaitUntil | Blocked | Done


class Load:
    """An order of requests with their three constraints: a time, a predecessor, a free slot.

    Open loop: requests carry at_s, concurrency is None. Closed loop: at_s is None, concurrency says how many may
    be in flight. Sessions: turn k+1 waits for turn k. All mix. Requests that are ready at the same moment go in
    the order in which they were given.
    """

    def __init__(self, requests: Iterable[Request], concurrency: int | None = None) -> None:
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        self.requests = tuple(requests)
        self._concurrency = concurrency
        self._in_flight: dict[str, int] = {}
        self._free_since = 0.0
        self._later: dict[str, deque[int]] = {}
        self._ready: list[tuple[float, int]] = []
        queued: set[str] = set()
        for order, request in enumerate(self.requests):
            if request.session is not None and request.session in queued:
                self._later.setdefault(request.session, deque()).append(order)
                continue
            if request.session is not None:
                queued.add(request.session)
            self._ready.append((request.at_s or 0.0, order))
        heapq.heapify(self._ready)
        self._waiting_turns = sum(map(len, self._later.values()))

    def next(self, now_s: float) -> Action:
        if not self._ready:
            return Blocked() if self._waiting_turns else Done()
        if self._concurrency is not None and len(self._in_flight) >= self._concurrency:
            return Blocked()
        ready_s, order = self._ready[0]
        if ready_s > now_s:
            return WaitUntil(ready_s)
        heapq.heappop(self._ready)
        request = self.requests[order]
        if request.id in self._in_flight:
            raise ValueError(f"request id {request.id!r} is in flight already: ids must be unique")
        self._in_flight[request.id] = order
        # A request without a time of its own was meant to go when the slot it takes became free.
        scheduled_s = ready_s if request.at_s is not None or request.turn else max(ready_s, self._free_since)
        return Send(request, scheduled_s)

    def completed(self, request_id: str, now_s: float) -> None:
        """Tell that a request ended, well or not: its slot is free and its session goes on."""
        request = self.requests[self._in_flight.pop(request_id)]
        self._free_since = now_s
        turns = self._later.get(request.session) if request.session is not None else None
        if turns:
            order = turns.popleft()
            following = self.requests[order]
            self._waiting_turns -= 1
            heapq.heappush(self._ready, (max(now_s + following.delay_s, following.at_s or 0.0), order))
