"""When to send what: pure schedules. Nothing here sleeps, and no clock is read.

    load = Load(requests, concurrency=4)
    while not isinstance(action := load.next(now), Done): ...

The same Load drives every engine, so that a simulator and a real server get the same requests at the same
intended moments.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence

import msgspec

from traces.request import Request


class Send(msgspec.Struct, frozen=True):
    """Send this now. scheduled_s: when it was meant to go."""

    request: Request
    scheduled_s: float


class WaitUntil(msgspec.Struct, frozen=True):
    """Nothing to send before at_s, unless a completion comes first."""

    at_s: float


class Blocked(msgspec.Struct, frozen=True):
    """Nothing to send until some request completes."""


class Done(msgspec.Struct, frozen=True):
    """Nothing more is sent."""


Action = Send | WaitUntil | Blocked | Done


class Load:
    """An order of requests with their constraints: a time, a predecessor, a wave, a free slot, a place for a session.

    Open loop: requests carry at_s, concurrency is None. Closed loop: at_s is None, concurrency says how many
    may be in flight. Sessions: turn k+1 waits for turn k, or for the turns that it names. Waves: a request waits until
    all requests of the waves before its own have completed. All mix.

    What is due goes by its due time, then in the order given. Requests without a time come after all that is
    due, in the order given: they fill the slots that are left, so a session under way goes on before a new one
    begins.

    fifo: what became ready first goes first: every session begins before one goes on. What has no time became ready
    when its wave began.
    active_sessions: at most so many sessions are live at once. A session is live from the send of its first turn to the
    completion of all its turns. A session that waits for a place keeps no other request back.
    gaps_s: the pauses after the sends, in the order of the sends. A send after the last of them has no pause.
    Requests of several priorities: of all that may go, those of the lowest number go first, in the order above.
    shuffle_seed: one of the requests that may go is chosen at random. None: the order above.
    duration_s: nothing is sent from that moment on. drain: what is under way then may end in its own time; False: the
    sender has to end it at cut_s.
    warm_up_s: with a duration, figures count what ends between this moment and the duration's end; None: all.

    ValueError: concurrency or active_sessions below 1, a session that goes back to an earlier wave, or a wave that
    could never end because sessions that go on in a later wave hold all places.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        concurrency: int | None = None,
        *,
        active_sessions: int | None = None,
        gaps_s: Sequence[float] = (),
        fifo: bool = False,
        shuffle_seed: int | None = None,
        duration_s: float | None = None,
        drain: bool = True,
        warm_up_s: float | None = None,
    ) -> None:
        for name, most in (("concurrency", concurrency), ("active_sessions", active_sessions)):
            if most is not None and most < 1:
                raise ValueError(f"{name} must be at least 1, not {most}")
        self.requests = tuple(requests)
        self.unsent = len(self.requests)
        # Requests that were under way when the time was over, as far as their ends are told.
        self.unfinished = 0
        self._duration_s, self._drain, self._warm_up_s = duration_s, drain, warm_up_s
        # Of each request in flight: its order, and when it was meant to go.
        self._in_flight: dict[str, tuple[int, float]] = {}
        # Since when each free slot and each free place has been free, oldest first; None: there are always enough.
        self._slots = None if concurrency is None else deque([0.0] * concurrency)
        self._places = None if active_sessions is None else deque([0.0] * active_sessions)
        self._gaps_s, self._gap_end_s = iter(gaps_s) if gaps_s else None, -math.inf
        self._ranked = len({request.priority for request in self.requests}) > 1
        self._fifo, self._random = fifo, None if shuffle_seed is None else random.Random(shuffle_seed)

        # Heaps of what may go: due times with orders, and orders without a time. Parked is what lacks only a place:
        # whether it has no time, its due time, its order.
        self._timed: list[tuple[float, int]] = []
        self._untimed: list[int] = []
        self._parked: list[tuple[bool, float, int]] = []
        self._begun: set[str] = set()
        # By order: which turns wait for the request, and for how many each still waits; by session: turns to complete.
        self._following, self._waits_for = _successions(self.requests)
        self._live = Counter(request.session for request in self.requests if request.session is not None)

        # By wave, in their order: how many requests have not completed; and what waits for the wave.
        self._unfinished = dict(sorted(Counter(request.wave for request in self.requests).items()))
        self._has_waves = len(self._unfinished) > 1
        self._held: dict[int, list[tuple[float | None, int]]] = {}
        self._wave, self._released_s = next(iter(self._unfinished), 0), 0.0
        for order, request in enumerate(self.requests):
            if order not in self._waits_for:
                self._admit(request.at_s, order)
        if self._has_waves:
            _check_waves(self.requests, active_sessions)

    @property
    def cut_s(self) -> float | None:
        """When the sender has to end what is under way; None: it may end in its own time."""
        return None if self._drain else self._duration_s

    @property
    def counted_s(self) -> tuple[float, float] | None:
        """From when to when requests have to end to be counted; None: all are."""
        if self._warm_up_s is None or self._duration_s is None:
            return None
        return self._warm_up_s, self._duration_s

    def next(self, now_s: float) -> Action:
        end_s = self._duration_s
        if end_s is None:
            return self._next(now_s)
        if now_s >= end_s:
            return Done()
        action = self._next(now_s)
        if isinstance(action, WaitUntil):
            return WaitUntil(min(action.at_s, end_s))
        # A sender waits for completions up to the end only; what has all been sent may still have to be ended there.
        if isinstance(action, Blocked) or (isinstance(action, Done) and self._in_flight and not self._drain):
            return WaitUntil(end_s)
        return action

    def _next(self, now_s: float) -> Action:
        if not self.unsent:
            return Done()
        if self._slots is not None and not self._slots:
            return Blocked()
        while self._timed or self._untimed:
            if now_s < self._gap_end_s or (not self._untimed and now_s < self._timed[0][0]):
                return WaitUntil(max(self._gap_end_s, -math.inf if self._untimed else self._timed[0][0]))
            due_s, order = self._take(now_s)
            request = self.requests[order]
            if self._places is None or request.session is None or request.session in self._begun or self._places:
                return self._send(request, order, due_s, now_s)
            heapq.heappush(self._parked, (due_s is None, due_s or 0.0, order))
        return Blocked()

    def completed(self, request_id: str, now_s: float) -> None:
        """Tell that a request ended, well or not: its slot is free, and its session and its wave go on."""
        sent, meant_s = self._in_flight.pop(request_id)
        request = self.requests[sent]
        self.unfinished += self._duration_s is not None and now_s >= self._duration_s
        if self._slots is not None:
            self._slots.append(now_s)
        for order in self._following.pop(sent, ()):
            self._waits_for[order] -= 1
            if not self._waits_for[order]:
                following = self.requests[order]
                paced_s = meant_s + following.interval_s
                self._admit(max(now_s + following.delay_s, following.at_s or 0.0, paced_s), order)
        if request.session is not None:
            self._live[request.session] -= 1
            if not self._live[request.session] and self._places is not None:
                self._places.append(now_s)
                self._unpark()
        if self._has_waves:
            self._unfinished[request.wave] -= 1
            if not self._unfinished[self._wave]:
                self._release_next_wave(now_s)

    def _send(self, request: Request, order: int, due_s: float | None, now_s: float) -> Send:
        if request.id in self._in_flight:
            raise ValueError(f"request id {request.id!r} is in flight already: ids must be unique")
        self.unsent -= 1
        # A request without a time of its own was meant to go when all that it takes became free.
        free_s = self._released_s
        if self._slots is not None and (since_s := self._slots.popleft()) > free_s:
            free_s = since_s
        if self._places is not None and request.session is not None and request.session not in self._begun:
            self._begun.add(request.session)
            free_s = max(free_s, self._places.popleft())
        scheduled_s = free_s if due_s is None else due_s
        if self._fifo or self._random:
            scheduled_s = max(scheduled_s, free_s)
        if self._gaps_s is not None:
            scheduled_s = max(self._gap_end_s, scheduled_s)
            gap_s = next(self._gaps_s, None)
            self._gap_end_s = -math.inf if gap_s is None else now_s + gap_s
        self._in_flight[request.id] = (order, scheduled_s)
        return Send(request, scheduled_s)

    def _take(self, now_s: float) -> tuple[float | None, int]:
        """Removes a request that may go; its due time (None: without a time) and its order."""
        if self._ranked:
            return self._take_first(now_s)
        if self._random is None:
            ready = self._fifo and self._untimed and (self._released_s, self._untimed[0])
            if self._timed and self._timed[0][0] <= now_s and not (ready and ready < self._timed[0]):
                return heapq.heappop(self._timed)
            return None, heapq.heappop(self._untimed)
        due = sorted(entry for entry in self._timed if entry[0] <= now_s)
        chosen = int(self._random.random() * (len(due) + len(self._untimed)))
        if chosen < len(due):
            self._timed.remove(due[chosen])
            heapq.heapify(self._timed)
            return due[chosen]
        return None, self._untimed.pop(chosen - len(due))

    def _take_first(self, now_s: float) -> tuple[float | None, int]:
        """The same by priority."""
        since_s = self._released_s if self._fifo else math.inf
        may_go = [*(entry for entry in self._timed if entry[0] <= now_s), *((since_s, one) for one in self._untimed)]
        due_s, order = min(may_go, key=lambda entry: (self.requests[entry[1]].priority, entry))
        if order in self._untimed:
            self._untimed.remove(order)
            heapq.heapify(self._untimed)
            return None, order
        self._timed.remove((due_s, order))
        heapq.heapify(self._timed)
        return due_s, order

    def _admit(self, due_s: float | None, order: int) -> None:
        """Takes in a request that waits for no other of its session: it may go when its wave has come."""
        wave = self.requests[order].wave
        if wave > self._wave:
            self._held.setdefault(wave, []).append((due_s, order))
        elif due_s is None:
            heapq.heappush(self._untimed, order)
        else:
            heapq.heappush(self._timed, (due_s, order))

    def _unpark(self) -> None:
        """A place is free: the first session that waits for one may go, or, where chance chooses, any of them."""
        for _ in range(len(self._parked) if self._random else min(1, len(self._parked))):
            untimed, due_s, order = heapq.heappop(self._parked)
            self._admit(None if untimed else due_s, order)

    def _release_next_wave(self, now_s: float) -> None:
        del self._unfinished[self._wave]
        if not self._unfinished:
            return
        self._wave, self._released_s = next(iter(self._unfinished)), now_s
        for due_s, order in self._held.pop(self._wave):
            self._admit(None if due_s is None else max(due_s, now_s), order)


def _successions(requests: tuple[Request, ...]) -> tuple[dict[int, tuple[int, ...]], dict[int, int]]:
    """By order: the turns that wait for the request; and for how many requests each turn waits, if for any.

    In a resumed run, what a turn waits for may have completed: it then waits for the turn before, if that is left.
    """
    following: dict[int, tuple[int, ...]] = {}
    waits_for: dict[int, int] = {}
    before: dict[str, int] = {}
    named = {name for request in requests for name in request.after}
    orders: dict[str, int] = {}
    for order, request in enumerate(requests):
        if request.session is None:
            continue
        found = [orders[name] for name in request.after if name in orders] if request.after else ()
        last = before.get(request.session)
        if found:
            waits_for[order] = len(found)
            for one in found:
                following[one] = (*following.get(one, ()), order)
        elif last is not None:
            waits_for[order] = 1
            following[last] = (*following[last], order) if last in following else (order,)
        before[request.session] = order
        if named and request.id in named:
            orders[request.id] = order
    return following, waits_for


def _check_waves(requests: tuple[Request, ...], active_sessions: int | None) -> None:
    """Whether every wave can end: no turn lies in an earlier wave than the one before it, and there are places."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for request in requests:
        if request.session is None:
            continue
        if request.wave < last.get(request.session, request.wave):
            where = f"from wave {last[request.session]} back to wave {request.wave}"
            raise ValueError(f"session {request.session!r} goes {where}: a later turn needs the same or a later wave")
        first.setdefault(request.session, request.wave)
        last[request.session] = request.wave
    if active_sessions is None:
        return
    begins, ends = Counter(first.values()), Counter(last.values())
    within = {wave for session, wave in first.items() if last[session] == wave}
    going_on = 0
    for wave in sorted(begins | ends):
        going_on += begins[wave] - ends[wave]
        need = going_on + (wave in within)
        if need > active_sessions:
            raise ValueError(
                f"active_sessions must be at least {need}, not {active_sessions}: {going_on} sessions hold their places"
                f" when wave {wave} ends"
            )
