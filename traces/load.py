"""When to send what: pure schedules. Nothing here sleeps, and no clock is read.

    load = Load(requests, concurrency=4)
    while not isinstance(action := load.next(now), Done): ...

The same Load drives every engine, so that a simulator and a real server get the same requests at the same
intended moments.
"""

from __future__ import annotations

import heapq
import math
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

    Open loop: requests carry at_s, concurrency is None. Closed loop: at_s is None, concurrency says how many
    may be in flight. Sessions: turn k+1 waits for turn k. All mix.

    What is due goes by its due time, then in the order given. Requests without a time come after all that is
    due, in the order given: they fill the slots that are left, so a session under way goes on before a new one
    begins.
    """

    def __init__(self, requests: Iterable[Request], concurrency: int | None = None) -> None:
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        self.requests = tuple(requests)
        self._in_flight: dict[str, int] = {}
        # Since when each free slot has been free, oldest first; None: there are always enough.
        self._slots = None if concurrency is None else deque([0.0] * concurrency)
        self._timed: list[tuple[float, int]] = []
        self._untimed: deque[int] = deque()
        self._later: dict[str, deque[int]] = {}
        begun: set[str] = set()
        for order, request in enumerate(self.requests):
            if request.session is not None and request.session in begun:
                self._later.setdefault(request.session, deque()).append(order)
                continue
            if request.session is not None:
                begun.add(request.session)
            if request.at_s is None:
                self._untimed.append(order)
            else:
                self._timed.append((request.at_s, order))
        heapq.heapify(self._timed)
        self._waiting_turns = sum(map(len, self._later.values()))

    def next(self, now_s: float) -> Action:
        if not self._timed and not self._untimed:
            return Blocked() if self._waiting_turns else Done()
        if self._slots is not None and not self._slots:
            return Blocked()
        due_s = self._timed[0][0] if self._timed else math.inf
        if due_s > now_s and not self._untimed:
            return WaitUntil(due_s)
        order = heapq.heappop(self._timed)[1] if due_s <= now_s else self._untimed.popleft()
        request = self.requests[order]
        if request.id in self._in_flight:
            raise ValueError(f"request id {request.id!r} is in flight already: ids must be unique")
        self._in_flight[request.id] = order
        free_since_s = self._slots.popleft() if self._slots is not None else 0.0
        # A request without a time of its own was meant to go when the slot it takes became free.
        return Send(request, due_s if due_s <= now_s else free_since_s)

    def completed(self, request_id: str, now_s: float) -> None:
        """Tell that a request ended, well or not: its slot is free and its session goes on."""
        request = self.requests[self._in_flight.pop(request_id)]
        if self._slots is not None:
            self._slots.append(now_s)
        turns = self._later.get(request.session) if request.session is not None else None
        if turns:
            order = turns.popleft()
            following = self.requests[order]
            self._waiting_turns -= 1
            heapq.heappush(self._timed, (max(now_s + following.delay_s, following.at_s or 0.0), order))
