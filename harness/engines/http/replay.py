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
from collections import deque
from collections.abc import Awaitable, Callable
from types import SimpleNamespace, TracebackType
from urllib.parse import SplitResult, urlsplit

import aiohttp

from harness.engines.base import Emit
from harness.engines.http.dialect import Dialect, Event
from harness.engines.http.stream import Answer
from traces.load import Action, Done, Load, Send, WaitUntil
from traces.request import Request, RequestRecord, TokenSource

# The event loop's timers are up to a millisecond late, so the loop spins through the last stretch.
SPIN_S = 0.0015
# Sends in a row, half a millisecond, before the event loop reads answers again: until then it stamps none.
BURST = 8
PREPARED_BYTES = 256 << 20
# The longest time that a prompt takes to prepare, to judge whether it fits into a pause (usual: 0.1 µs a token).
PREPARE_S, PREPARE_S_PER_TOKEN = 0.0002, 1e-6
# Servers drop idle connections (uvicorn after 5 s). A request sent on a connection being dropped would be lost.
REUSE_WITHIN_S = 3.0
CONNECT_AHEAD = aiohttp.ClientTimeout(total=5)
READ_BYTES = 1 << 20
ERROR_CHARS = 300


class HttpReplay:
    """A client of `url` (without /v1), reusable for any number of replays, one at a time.

    dialect: what the server there speaks.
    clock: the run's clock in seconds; moment 0 of a load is clock() when its replay starts.
    Raises ValueError for a url or key that cannot be used.
    """

    def __init__(
        self,
        url: str,
        dialect: Dialect,
        tokens: TokenSource,
        clock: Callable[[], float],
        *,
        api_key: str | None = None,
        request_timeout_s: float = 600.0,
        max_connections: int = 1024,
    ) -> None:
        self._address = _checked(url).netloc
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("api_key has characters that cannot go into an HTTP header: check for a line break")
        self._url, self._dialect, self._tokens = url.rstrip("/"), dialect, tokens
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
        bodies = _Bodies(load.requests, self._encode)
        schedule = self._schedule = _Schedule(load, bodies, self._clock, self._ask, self._dialect.decode)
        gc.freeze()  # a full collection of a big load's objects would stop the loop for 100 ms and more
        try:
            await self._connect_ahead()
            await schedule.play(lambda send, answer: emit(self._record(send, answer)))
        finally:
            gc.unfreeze()
            self._schedule = None
            await schedule.abandon()

    def give_up(self, reason: str) -> None:
        """Ends the replay under way: requests in flight become records with this error, and no more are sent."""
        if self._schedule is not None:
            self._schedule.give_up(reason)

    async def _connect_ahead(self) -> None:
        """Opens one connection, so that a lone request does not wait for its set-up."""
        assert self._session is not None
        # Any status is fine. If the connection fails, the requests fail, too, and become records.
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            address = f"{self._url}{self._dialect.warm_path}"
            async with self._session.get(address, timeout=CONNECT_AHEAD, allow_redirects=False) as response:
                await response.read()

    async def _stamp_sent(self, _session: aiohttp.ClientSession, context: SimpleNamespace, _chunk: object) -> None:
        context.trace_request_ctx.sent_s = self._clock()

    def _encode(self, request: Request) -> bytes:
        return self._dialect.encode(self._tokens.expand(request.prompt), request.output_tokens)

    async def _ask(self, body: bytes, answer: Answer) -> None:
        """Posts the body and feeds what arrives to the answer."""
        assert self._session is not None
        address = f"{self._url}{self._dialect.path}"
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
            answer.error = f"cannot connect to {self._address}: {reason}"
        except TimeoutError:
            answer.error = f"no complete answer within {self._timeout_s:g} s"
        except aiohttp.ClientResponseError as error:
            answer.error = f"not an HTTP/1 answer: {error.message}"
        except aiohttp.ClientError as error:
            when = "midway through the answer" if answer.status else "before any answer"
            answer.error = answer.error or f"the connection was lost {when}: {error}"

    def _record(self, send: Send, answer: Answer) -> RequestRecord:
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
            session=request.session,
            turn=request.turn,
            error=None if error is None else " ".join(error.split())[:ERROR_CHARS],
        )


_Ask = Callable[[bytes, Answer], Awaitable[None]]
_Decode = Callable[[bytes], Event]
_Emit = Callable[[Send, Answer], None]


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

    def __init__(self, load: Load, bodies: _Bodies, clock: Callable[[], float], ask: _Ask, decode: _Decode) -> None:
        self._load, self._bodies, self._clock, self._ask, self._decode = load, bodies, clock, ask, decode
        self._in_flight: set[asyncio.Task[None]] = set()
        self._wake: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None
        self._lost: str | None = None

    async def play(self, emit: _Emit) -> None:
        while self._bodies.prepare(math.inf):
            pass
        self._start_s = self._clock()
        while self._failure is None:
            action = self._send_due(emit) if self._lost is None else Done()
            if isinstance(action, Send):
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
            task = asyncio.get_running_loop().create_task(self._serve(last, self._bodies.take(action.request), emit))
            self._in_flight.add(task)
            task.add_done_callback(self._ended)
        assert last is not None
        return last

    async def _serve(self, send: Send, body: bytes, emit: _Emit) -> None:
        answer = Answer(self._clock(), self._decode)
        try:
            await self._ask(body, answer)
        except asyncio.CancelledError:
            if self._lost is None:
                raise
            answer.error = self._lost
        self._load.completed(send.request.id, self._now_s())
        emit(send, answer)

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


class _Bodies:
    """Encodes requests before they are due, up to PREPARED_BYTES, in the order in which they will be needed."""

    def __init__(self, requests: tuple[Request, ...], encode: Callable[[Request], bytes]) -> None:
        self._encode, self._bytes = encode, 0
        self._ready: dict[int, bytes] = {}
        self._taken: set[int] = set()
        begins_s: dict[str | None, float] = {request.session: request.at_s or 0.0 for request in reversed(requests)}
        # A later turn has no time of its own; it is needed some time after its session's first turn.
        due_s = [begins_s[request.session] if request.at_s is None else request.at_s for request in requests]
        wanted = sorted(range(len(requests)), key=lambda order: (requests[order].wave, due_s[order]))
        self._queue = deque(requests[order] for order in wanted)

    def prepare(self, within_s: float) -> bool:
        """Encodes one request if that surely takes less than within_s. Returns whether it did."""
        while self._queue and id(self._queue[0]) in self._taken:
            self._queue.popleft()
        if not self._queue or self._bytes >= PREPARED_BYTES:
            return False
        if within_s < PREPARE_S + PREPARE_S_PER_TOKEN * self._queue[0].prompt_tokens:
            return False
        request = self._queue.popleft()
        self._ready[id(request)] = body = self._encode(request)
        self._bytes += len(body)
        return True

    def take(self, request: Request) -> bytes:
        """The request's bytes, made now if they are not ready."""
        body = self._ready.pop(id(request), None)
        if body is None:
            self._taken.add(id(request))
            return self._encode(request)
        self._bytes -= len(body)
        return body
