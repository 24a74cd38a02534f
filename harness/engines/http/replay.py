"""The one HTTP load loop: sends a Load to a server and stamps what streams back.

    async with HttpReplay("http://127.0.0.1:8000", Completions("tiny"), tokens, clock) as client:
        await client.replay(load, emit)

The loop makes a request's tokens and JSON before the request is due. It reads sent_s right before the bytes go to the
socket, so a latency contains neither a connection's set-up nor the wait for a free one. A request that fails becomes a
record with an error, never an exception.

The schedule is always in this process. Bodies, sockets and stamps are a Sender's: in this process, or in several.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from msgspec import UNSET

from harness.engines.base import Emit
from harness.engines.http.clients import ClientProcesses, Clients
from harness.engines.http.dialect import Dialect
from harness.engines.http.sender import HttpSender, RequestOutcome, Sender, Target
from harness.processes.child import Child, outlive
from harness.records import CUT_SHORT
from traces.load import Action, Done, Load, Send, WaitUntil
from traces.request import Request, RequestRecord, TokenSource
from traces.routing import Router

# The event loop's timers are up to a millisecond late, so the loop spins through the last stretch.
SPIN_S = 0.0015
# Sends in a row, half a millisecond, before the event loop reads answers again: until then it stamps none.
BURST = 8
ERROR_CHARS = 300


class HttpReplay:
    """A client of servers (each a URL without /v1), reusable for any number of replays, one at a time.

    router: chooses a server for each request as it is sent; None: there is one. dialect: what the server there speaks.
    clock: the run's clock in seconds, of time.perf_counter where there are several clients; moment 0 of a load is
    clock() when its replay starts. clients: the processes that send; None: this one. max_connections: of each.
    Raises ValueError for a url or key that cannot be used.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        dialect: Dialect,
        tokens: TokenSource,
        clock: Callable[[], float],
        *,
        router: Router | None = None,
        api_key: str | None = None,
        request_timeout_s: float = 600.0,
        max_connections: int = 1024,
        clients: Clients | None = None,
    ) -> None:
        each = (urls,) if isinstance(urls, str) else tuple(urls)
        target = Target(each, dialect, tokens, api_key, request_timeout_s, max_connections)
        self._clock, self._api_key, self._router = clock, api_key, router
        self._processes = None if clients is None else ClientProcesses(target, clients, clock)
        self._sender: Sender = self._processes or HttpSender(target, clock)
        self._schedule: _Schedule | None = None

    @property
    def children(self) -> tuple[Child, ...]:
        """The client processes that run; () where this one sends."""
        return () if self._processes is None else self._processes.children

    async def open(self) -> None:
        """Binds the client to the running event loop. Raises EngineError where a process of its own cannot start."""
        await self._sender.open()

    async def close(self) -> None:
        """Closes all connections. Safe at any time, and safe to repeat."""
        await self._sender.close()

    async def __aenter__(self) -> HttpReplay:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def replay(self, load: Load, emit: Emit) -> None:
        """Sends the load and emits one record a request, as each completes.

        If the caller cancels it or emit raises, it drops the requests in flight without a record and leaves no task.
        If a client process ends, requests in flight become records, and EngineError names it.
        """
        await self.open()
        self._sender.take(load.requests)
        schedule = self._schedule = _Schedule(load, self._sender, self._clock, self._router)
        gc.freeze()  # a full collection of a big load's objects would stop the loop for 100 ms and more
        try:
            await self._outlived(self._sender.ready())
            playing = schedule.play(lambda send, instance, outcome: emit(self._record(send, instance, outcome)))
            await self._outlived(playing, self.give_up)
        finally:
            gc.unfreeze()
            self._schedule = None
            await self._sender.drop()

    async def _outlived(self, work: Coroutine[Any, Any, None], give_up: Callable[[str], None] | None = None) -> None:
        """`work`, which needs all client processes."""
        await (outlive(self.children, work, give_up) if self.children else work)

    def give_up(self, reason: str) -> None:
        """Ends the replay under way: requests in flight become records with this error, and no more are sent."""
        if self._schedule is not None:
            self._schedule.give_up(reason)

    def _record(self, send: Send, instance: int, outcome: RequestOutcome) -> RequestRecord:
        request, error = send.request, outcome.error
        if error is not None and self._api_key:
            error = error.replace(self._api_key, "[api key]")
        return RequestRecord(
            id=request.id,
            scheduled_s=send.scheduled_s,
            sent_s=outcome.sent_s,
            first_chunk_s=outcome.first_chunk_s,
            first_token_s=outcome.token_s[0] if outcome.token_s else None,
            last_token_s=outcome.token_s[-1] if outcome.token_s else None,
            token_s=outcome.token_s,
            prompt_tokens=request.prompt_tokens,
            output_tokens=outcome.output_tokens,
            cached_tokens=outcome.cached_tokens,
            tokens_by_tier=outcome.tokens_by_tier,
            session=request.session,
            turn=request.turn,
            instance=None if self._router is None else instance,
            client=UNSET if outcome.client is None else outcome.client,
            error=None if error is None else " ".join(error.split())[:ERROR_CHARS],
        )


_Emit = Callable[[Send, int, RequestOutcome], None]


class _Schedule:
    """One replay: the only place that sleeps. What is in flight is the sender's."""

    def __init__(self, load: Load, sender: Sender, clock: Callable[[], float], router: Router | None) -> None:
        self._load, self._sender, self._clock, self._router = load, sender, clock, router
        self._in_flight = 0
        self._wake: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        self._lost: str | None = None
        self._cut_s = math.inf if load.cut_s is None else load.cut_s

    async def play(self, emit: _Emit) -> None:
        self._start_s = self._clock()
        while self._failure is None:
            action = self._send_due(emit) if self._lost is None else Done()
            if self._in_flight and self._lost is None and self._cut_s <= self._now_s():
                self.give_up(CUT_SHORT)
            elif isinstance(action, Send):
                # The requests go out, and arrived answers get stamps. Twice: aiohttp writes in a task of a task.
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            elif isinstance(action, Done) and not self._in_flight:
                return
            else:
                gap_s = action.at_s - self._now_s() if isinstance(action, WaitUntil) else math.inf
                await self._pause(0 if self._sender.prepare(gap_s - SPIN_S) else gap_s)
        raise self._failure

    def _now_s(self) -> float:
        return self._clock() - self._start_s

    def _send_due(self, emit: _Emit) -> Action:
        """Begins up to BURST requests that are due. Returns the last Send, or another action if none is due."""
        last: Send | None = None
        for _ in range(BURST):
            action = self._load.next(self._now_s())
            if not isinstance(action, Send):
                return last or action
            last, instance = Send(action.request, self._start_s + action.scheduled_s), 0
            if self._router is not None:
                instance = self._router.choose(action.request)
                self._router.sent(action.request, instance)
            self._in_flight += 1
            self._sender.ask(action.request, instance, partial(self._ended, last, instance, emit))
        assert last is not None
        return last

    def _ended(self, send: Send, instance: int, emit: _Emit, outcome: RequestOutcome | BaseException) -> None:
        """What goes wrong here is raised by play() to its caller."""
        self._in_flight -= 1
        try:
            if isinstance(outcome, BaseException):
                raise outcome
            self._told(send.request, instance, answered=outcome.error is None)
            if self._failure is None:
                emit(send, instance, outcome)
        except Exception as error:
            self._failure = self._failure or error
        self._wake_up()

    def _told(self, request: Request, instance: int, *, answered: bool) -> None:
        if self._router is not None:
            self._router.ended(request, instance, answered=answered)
        self._load.completed(request.id, self._now_s())

    async def _pause(self, gap_s: float) -> None:
        """Waits until a request ends, or until shortly before gap_s is over."""
        if gap_s <= SPIN_S:
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        self._wake = loop.create_future()
        timer = None if gap_s == math.inf else loop.call_later(gap_s - SPIN_S, self._wake_up)
        try:
            await self._wake
        finally:
            self._wake = None
            if timer is not None:
                timer.cancel()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def give_up(self, reason: str) -> None:
        """Sends nothing more, and ends the requests in flight with this error."""
        self._lost = reason
        self._sender.give_up(reason)
        self._wake_up()
