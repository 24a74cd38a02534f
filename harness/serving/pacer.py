"""Runs the simulator on the wall clock: requests enter as they arrive, tokens leave at the simulated times.

The simulator's second 0 is the moment at which the pacer was created. The pacer advances the simulator to the present
whenever an event is due, and never further. So a later request can still change what happens next.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from simulator.simulate import Completion, Simulator
from traces.request import Request

# The event loop's timers have a resolution of 1 ms and fire up to 1 ms late, so the pacer polls the last 1.5 ms.
SPIN_S = 0.0015
FIRST_AT_ONCE, LATER_AT_ONCE = 2, 32


class Stream:
    """The answer to one request: the number of tokens so far, and finally its completion or its failure."""

    __slots__ = ("_waiter", "completion", "failure", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.completion: Completion | None = None
        self.failure: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def more(self, than: int) -> None:
        """Waits until the stream has more than this many tokens, or has ended."""
        while self.tokens <= than and self.completion is None and self.failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Pacer:
    """Drives a simulator that records token times. It belongs to the event loop that is running at its creation."""

    def __init__(self, simulator: Simulator, clock: Callable[[], float] = time.monotonic) -> None:
        self.simulator, self._clock = simulator, clock
        self.began_s = clock()
        self.generated_tokens = 0
        self._streams: dict[str, Stream] = {}
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._due_s: float | None = None
        self._first: deque[Stream] = deque()
        self._later: deque[tuple[str, int]] = deque()
        self._may_have_later = False  # the simulator may hold tokens after a request's first
        self._waking = False

    def submit(self, request: Request) -> Stream:
        """Sends a request now. Raises ValueError if one of its numbers does not fit the simulator."""
        self.simulator.submit(request, max(self._now_s(), self.simulator.now_s))
        stream = self._streams[request.id] = Stream()
        self._arm()
        return stream

    def reset(self, what: frozenset[str]) -> bool:
        """Empties tiers. Returns False while requests or transfers hold blocks: try again."""
        self._advance()
        self._arm()
        if not self.simulator.idle:
            return False
        self.simulator.reset(what)
        return True

    def catch_up(self) -> None:
        """Advances the counters and queues to the present."""
        self._advance()
        self._take_later()
        self._wake_later(len(self._later))
        self._arm()

    def close(self, why: str) -> None:
        """Ends all streams with this failure."""
        if self._timer is not None:
            self._timer.cancel()
        for stream in self._streams.values():
            stream.failure = why
            stream.wake()
        self._streams.clear()

    def _now_s(self) -> float:
        return self._clock() - self.began_s

    def _arm(self) -> None:
        """Sets a timer for the simulator's next event, unless an earlier timer is already set."""
        due_s = self.simulator.next_event_s
        if due_s is None or (self._due_s is not None and self._due_s <= due_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = due_s
        gap_s = due_s - self._now_s() - SPIN_S
        self._timer = self._loop.call_later(gap_s, self._tick) if gap_s > 0 else self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._due_s is not None and self._now_s() < self._due_s:
            self._timer = self._loop.call_soon(self._tick)
            return
        self._due_s = None
        self._advance()
        self._arm()

    def _advance(self) -> None:
        now_s = self._now_s()
        try:
            while completions := self.simulator.advance(max(now_s, self.simulator.now_s)):
                for completion in completions:
                    self._completed(completion)
        except RuntimeError as error:
            self.close(f"the simulator failed: {error}")
        for name, tokens in self.simulator.take_tokens(first=True):
            if (stream := self._streams.get(name)) is not None:
                self._count(stream, tokens)
                self._first.append(stream)
        self._may_have_later = True
        if not self._waking:
            self._wake()

    def _wake(self) -> None:
        """Wakes some streams, then lets the event loop write their tokens and read new requests before the rest.

        First tokens go first: TTFT is the figure of interest, and a thousand writes take many milliseconds.
        """
        if self._first:
            for _ in range(min(FIRST_AT_ONCE, len(self._first))):
                self._first.popleft().wake()
        else:
            self._take_later()
            self._wake_later(LATER_AT_ONCE)
        self._waking = bool(self._first or self._later or self._may_have_later)
        if self._waking:
            self._loop.call_soon(self._wake)

    def _take_later(self) -> None:
        if self._may_have_later:
            self._later.extend(self.simulator.take_tokens(first=False))
            self._may_have_later = False

    def _wake_later(self, most: int) -> None:
        for _ in range(min(most, len(self._later))):
            name, tokens = self._later.popleft()
            if (stream := self._streams.get(name)) is None:
                continue
            if stream.completion is None:
                self._count(stream, tokens)
            else:
                del self._streams[name]
            stream.wake()

    def _count(self, stream: Stream, tokens: int) -> None:
        stream.tokens += tokens
        self.generated_tokens += tokens

    def _completed(self, completion: Completion) -> None:
        if (stream := self._streams.get(completion.id)) is None:
            return
        if stream.tokens:
            self._later.append((completion.id, 0))
        else:
            self._first.append(self._streams.pop(completion.id))
        # This count includes the request's tokens in self._later.
        self._count(stream, completion.output_tokens - stream.tokens)
        stream.completion = completion
