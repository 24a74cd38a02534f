"""The one HTTP load loop: sends a Load to a server and stamps what streams back.

    async with HttpReplay("http://127.0.0.1:8000", Completions("tiny"), tokens, clock) as client:
        await client.replay(load, emit)

The loop makes a request's tokens and JSON before the request is due. It reads sent_s right before the bytes go to the
socket, so a latency contains neither a connection's set-up nor the wait for a free one. A request that fails becomes a
record with an error, never an exception.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import SimpleNamespace, TracebackType
from urllib.parse import SplitResult, urlsplit

import aiohttp

from harness.engines.base import Emit
from harness.engines.http.bodies import Bodies, Unquotable, bodies_of
from harness.engines.http.dialect import Dialect
from harness.engines.http.stream import Answer
from harness.records import CUT_SHORT
from traces.load import Action, Done, Load, Send, WaitUntil
from traces.request import RequestRecord, TokenSource
from traces.routing import Router

# The event loop's timers are up to a millisecond late, so the loop spins through the last stretch.
SPIN_S = 0.0015
# Sends in a row, half a millisecond, before the event loop reads answers again: until then it stamps none.
BURST = 8
# Servers drop idle connections (uvicorn after 5 s). A request sent on a connection being dropped would be lost.
REUSE_WITHIN_S = 3.0
CONNECT_AHEAD = aiohttp.ClientTimeout(total=5)
READ_BYTES = 1 << 20
ERROR_CHARS = 300


class HttpReplay:
    """A client of servers (each a URL without /v1), reusable for any number of replays, one at a time.

    router: chooses a server for each request as it is sent; None: there is one. dialect: what the server there speaks.
    clock: the run's clock in seconds; moment 0 of a load is clock() when its replay starts.
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
    ) -> None:
        each = [urls] if isinstance(urls, str) else urls
        self._addresses = [_checked(url).netloc for url in each]
        self._urls, self._router = [url.rstrip("/") for url in each], router
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("api_key has characters that cannot go into an HTTP header: check for a line break")
        self._dialect, self._tokens = dialect, tokens
        self._clock, self._api_key = clock, api_key
        self._timeout_s, self._max_connections = request_timeout_s, max_connections
        self._session: aiohttp.ClientSession | None = None
        self._schedule: _Schedule | None = None

    async def open(self) -> None:
        """Binds the client to the running event loop. Connections are made as they are needed."""
        if self._session is not None:
            return
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream", "Accept-Encoding": "identity"}
        stamps = aiohttp.TraceConfig()
        stamps.on_request_chunk_sent.append(self._stamp_sent)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=REUSE_WITHIN_S),
            headers=headers | ({"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            read_bufsize=READ_BYTES,
            trace_configs=[stamps],
        )

    async def close(self) -> None:
        """Closes all connections. Safe at any time, and safe to repeat."""
        if self._session is not None:
            await self._session.close()
            self._session = None
            await asyncio.sleep(0)  # lets the transports go

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
        """
        await self.open()
        quotes = any(request.quotes for request in load.requests)
        dialect = self._dialect.telling_ids() if quotes else self._dialect
        bodies = bodies_of(load.requests, dialect, self._tokens)
        begin = partial(Answer, decode=dialect.decode, tells_ids=quotes)
        schedule = self._schedule = _Schedule(load, bodies, self._clock, self._ask, begin, self._router)
        gc.freeze()  # a full collection of a big load's objects would stop the loop for 100 ms and more
        try:
            await self._connect_ahead()
            await schedule.play(lambda send, instance, answer: emit(self._record(send, instance, answer)))
        finally:
            gc.unfreeze()
            self._schedule = None
            await schedule.abandon()

    def give_up(self, reason: str) -> None:
        """Ends the replay under way: requests in flight become records with this error, and no more are sent."""
        if self._schedule is not None:
            self._schedule.give_up(reason)

    async def _connect_ahead(self) -> None:
        """Opens one connection to each server, so that a lone request does not wait for its set-up."""
        assert self._session is not None
        for url in self._urls:
            # Any status is fine. If the connection fails, the requests fail, too, and become records.
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                address = f"{url}{self._dialect.warm_path}"
                async with self._session.get(address, timeout=CONNECT_AHEAD, allow_redirects=False) as response:
                    await response.read()

    async def _stamp_sent(self, _session: aiohttp.ClientSession, context: SimpleNamespace, _chunk: object) -> None:
        context.trace_request_ctx.sent_s = self._clock()

    async def _ask(self, instance: int, body: bytes, answer: Answer) -> None:
        """Posts the body and feeds what arrives to the answer."""
        assert self._session is not None
        address = f"{self._urls[instance]}{self._dialect.path}"
        post = self._session.post(address, data=body, allow_redirects=False, trace_request_ctx=answer)
        try:
            async with post as response:
                answer.status, answer.content_type = response.status, response.content_type
                while answer.wants_more and (data := await response.content.readany()):
                    answer.feed(data, self._clock())
                answer.end(self._clock())
        except aiohttp.ClientConnectorError as error:
            # A negative number comes from a name look-up, whose error carries its own text.
            number = error.errno or 0
            reason = os.strerror(number) if number > 0 else error.strerror or error
            answer.error = f"cannot connect to {self._addresses[instance]}: {reason}"
        except TimeoutError:
            answer.error = f"no complete answer within {self._timeout_s:g} s"
        except aiohttp.ClientResponseError as error:
            answer.error = f"not an HTTP/1 answer: {error.message}"
        except aiohttp.ClientError as error:
            when = "midway through the answer" if answer.status else "before any answer"
            answer.error = answer.error or f"the connection was lost {when}: {error}"

    def _record(self, send: Send, instance: int, answer: Answer) -> RequestRecord:
        request, usage = send.request, answer.usage
        error = answer.failure(request.prompt_tokens)
        if error is not None and self._api_key:
            error = error.replace(self._api_key, "[api key]")
        return RequestRecord(
            id=request.id,
            scheduled_s=send.scheduled_s,
            sent_s=answer.sent_s,
            first_chunk_s=answer.first_chunk_s,
            first_token_s=answer.token_s[0] if answer.token_s else None,
            last_token_s=answer.token_s[-1] if answer.token_s else None,
            token_s=tuple(answer.token_s),
            prompt_tokens=request.prompt_tokens,
            output_tokens=usage.completion_tokens if usage else None,
            cached_tokens=usage.cached_tokens if usage else None,
            tokens_by_tier=usage.tokens_by_tier if usage else {},
            session=request.session,
            turn=request.turn,
            instance=None if self._router is None else instance,
            error=None if error is None else " ".join(error.split())[:ERROR_CHARS],
        )


_Ask = Callable[[int, bytes, Answer], Awaitable[None]]
_Begin = Callable[[float], Answer]
_Emit = Callable[[Send, int, Answer], None]


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.port != 0 and (parts.hostname or "").encode("idna")
    except ValueError:  # a port or a host name that cannot be
        usable = False
    if not usable or parts.username or parts.query:
        raise ValueError("url must look like http://HOST:PORT, without a user, a password or a query")
    return parts


class _Schedule:
    """One replay: the only place that sleeps. Each request in flight is a task that waits for its own answer."""

    def __init__(
        self,
        load: Load,
        bodies: Bodies,
        clock: Callable[[], float],
        ask: _Ask,
        begin: _Begin,
        router: Router | None,
    ) -> None:
        """begin: makes the answer of a request that is sent at a moment."""
        self._router = router
        self._load, self._bodies, self._clock, self._ask, self._begin = load, bodies, clock, ask, begin
        self._in_flight: set[asyncio.Task[None]] = set()
        self._wake: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        self._lost: str | None = None
        self._cut_s = math.inf if load.cut_s is None else load.cut_s

    async def play(self, emit: _Emit) -> None:
        while self._bodies.prepare(math.inf):
            pass
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
                await self._pause(0 if self._bodies.prepare(gap_s - SPIN_S) else gap_s)
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
            last = Send(action.request, self._start_s + action.scheduled_s)
            try:
                body: bytes | Unquotable = self._bodies.take(action.request)
            except Unquotable as error:
                body = error
            instance = 0
            if self._router is not None:
                instance = self._router.choose(action.request)
                self._router.sent(action.request, instance)
            task = asyncio.get_running_loop().create_task(self._serve(last, instance, body, emit))
            self._in_flight.add(task)
            task.add_done_callback(self._ended)
        assert last is not None
        return last

    async def _serve(self, send: Send, instance: int, body: bytes | Unquotable, emit: _Emit) -> None:
        answer = self._begin(self._clock())
        try:
            if isinstance(body, Unquotable):
                answer.error = str(body)
            else:
                await self._ask(instance, body, answer)
        except asyncio.CancelledError:
            if self._lost is None:
                raise
            answer.error = self._lost
        if answer.token_ids is not None:
            failed = answer.failure(send.request.prompt_tokens) is not None
            self._bodies.answered(send.request, None if failed else answer.token_ids)
        if self._router is not None:
            answered = answer.failure(send.request.prompt_tokens) is None
            self._router.ended(send.request, instance, answered=answered)
        self._load.completed(send.request.id, self._now_s())
        emit(send, instance, answer)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error  # play() raises it to its caller
        self._wake_up()

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
        for task in self._in_flight:
            task.cancel()
        self._wake_up()

    async def abandon(self) -> None:
        """Drops the requests in flight."""
        for task in self._in_flight:
            task.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)
