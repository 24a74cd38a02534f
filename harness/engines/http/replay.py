"""The one HTTP load loop: sends a Load to an OpenAI-compatible server and stamps what streams back.

    async with OpenAIReplay("http://127.0.0.1:8000", "tiny", tokens, clock) as client:
        await client.replay(load, emit)

What can be made before a request's moment (its tokens, its JSON) is made before it. sent_s is read right before the
request's bytes go to the socket, so neither a connection's set-up nor the wait for a free one is in a latency. A
request that fails is a record with an error, never an exception.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace, TracebackType
from typing import Any
from urllib.parse import SplitResult, urlsplit

import aiohttp
import msgspec

from harness.engines.base import Emit
from harness.engines.http.stream import Answer
from traces.load import Action, Done, Load, Send, WaitUntil
from traces.request import Request, RequestRecord, TokenSource

# Timers of the event loop are whole milliseconds and late by up to one: the last stretch is waited for awake.
SPIN_S = 0.0015
# Sends in a row before the event loop looks for answers again, which until then have no stamp: half a millisecond.
BURST = 8
PREPARED_BYTES = 256 << 20
# What preparing a prompt takes at most, for a guess whether it fits into a pause (about 0.1 µs a token is usual).
PREPARE_S, PREPARE_S_PER_TOKEN = 0.0002, 1e-6
# Servers drop idle connections (uvicorn after 5 s); one that is about to be dropped would lose the request.
REUSE_WITHIN_S = 3.0
CONNECT_AHEAD = aiohttp.ClientTimeout(total=5)
READ_BYTES = 1 << 20
ERROR_CHARS = 300


class OpenAIReplay:
    """A client of `url` (without /v1), reusable for any number of replays, one at a time.

    clock: the run's clock in seconds; moment 0 of a load is clock() when its replay starts.
    extra_body: added to every request's JSON, over the defaults (temperature 0, ignore_eos).
    count_tokens: counts a chunk as tokens where their number rose, not where it has text: text can be empty for a token
    that is half a character. It asks for the running count of `continuous_usage_stats` (vLLM) instead of
    the ids themselves, with which the prompt's would come back too. Without an answer to that, text counts.
    Raises ValueError for a url or key that cannot be used.
    """

    def __init__(
        self,
        url: str,
        model: str,
        tokens: TokenSource,
        clock: Callable[[], float],
        *,
        extra_body: Mapping[str, Any] = {},
        api_key: str | None = None,
        request_timeout_s: float = 600.0,
        max_connections: int = 1024,
        count_tokens: bool = False,
    ) -> None:
        self._address = _checked(url).netloc
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("api_key has characters that cannot go into an HTTP header: check for a line break")
        stream_options = {"include_usage": True} | ({"continuous_usage_stats": True} if count_tokens else {})
        fields = {"model": model, "temperature": 0, "ignore_eos": True, **extra_body}
        self._fields = msgspec.json.encode(fields | {"stream": True, "stream_options": stream_options})[:-1]
        self._url, self._tokens, self._clock, self._api_key = url.rstrip("/"), tokens, clock, api_key
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
        """Closes all connections. Safe at any time, twice too."""
        if self._session is not None:
            await self._session.close()
            self._session = None
            await asyncio.sleep(0)  # lets the transports go

    async def __aenter__(self) -> OpenAIReplay:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def replay(self, load: Load, emit: Emit) -> None:
        """Sends the load and emits one record a request, as each completes.

        Cancelled, or when emit raises: requests in flight are dropped without a record, and nothing stays behind.
        """
        await self.open()
        schedule = self._schedule = _Schedule(load, _Bodies(load.requests, self._encode), self._clock, self._ask)
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
        """Has one connection ready, so that a lone request does not follow its own connection's set-up."""
        assert self._session is not None
        # If this fails, then so will the requests, and be records; any status is fine.
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            models = self._session.get(f"{self._url}/v1/models", timeout=CONNECT_AHEAD, allow_redirects=False)
            async with models as response:
                await response.read()

    async def _stamp_sent(self, _session: aiohttp.ClientSession, context: SimpleNamespace, _chunk: object) -> None:
        context.trace_request_ctx.sent_s = self._clock()

    def _encode(self, request: Request) -> bytes:
        ids = msgspec.json.encode(self._tokens.expand(request.prompt))
        return b'%b,"max_tokens":%d,"prompt":%b}' % (self._fields, request.output_tokens, ids)

    async def _ask(self, body: bytes, answer: Answer) -> None:
        """Fills the answer in as it comes."""
        assert self._session is not None
        completions = f"{self._url}/v1/completions"
        post = self._session.post(completions, data=body, allow_redirects=False, trace_request_ctx=answer)
        try:
            async with post as response:
                answer.status, answer.content_type = response.status, response.content_type
                while answer.wants_more and (data := await response.content.readany()):
                    answer.feed(data, self._clock())
                answer.end(self._clock())
        except aiohttp.ClientConnectorError as error:
            # A negative number is a name look-up's, which has words of its own.
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
        details = usage.prompt_tokens_details if usage else None
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
            cached_tokens=details.cached_tokens if details else None,
            session=request.session,
            turn=request.turn,
            error=None if error is None else " ".join(error.split())[:ERROR_CHARS],
        )


_Ask = Callable[[bytes, Answer], Awaitable[None]]
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
    """One replay: the only place that sleeps. Each request in flight is a task, which waits for its answer alone."""

    def __init__(self, load: Load, bodies: _Bodies, clock: Callable[[], float], ask: _Ask) -> None:
        self._load, self._bodies, self._clock, self._ask = load, bodies, clock, ask
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
                # They go now, and answers that came meanwhile are stamped. Twice: aiohttp writes in a task's task.
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
        """Begins up to BURST requests that are due. Returns the last Send, or what is to be done if none is due."""
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
        answer = Answer(self._clock())
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
            self._failure = error  # it belongs to whoever awaits the replay
        self._wake_up()

    async def _pause(self, gap_s: float) -> None:
        """Until a request ends, or shortly before gap_s is over."""
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
        """Nothing more is sent, and what is in flight ends now, with this error."""
        self._lost = reason
        for task in self._in_flight:
            task.cancel()
        self._wake_up()

    async def abandon(self) -> None:
        """Drops what is in flight."""
        for task in self._in_flight:
            task.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)


class _Bodies:
    """Requests encoded ahead of their moment, up to PREPARED_BYTES, in the order in which they will be wanted."""

    def __init__(self, requests: tuple[Request, ...], encode: Callable[[Request], bytes]) -> None:
        self._encode, self._bytes = encode, 0
        self._ready: dict[int, bytes] = {}
        self._taken: set[int] = set()
        begins_s: dict[str | None, float] = {request.session: request.at_s or 0.0 for request in reversed(requests)}
        # A later turn, which has no time of its own, is wanted some time after its session's first.
        due_s = [begins_s[request.session] if request.at_s is None else request.at_s for request in requests]
        wanted = sorted(range(len(requests)), key=lambda order: (requests[order].wave, due_s[order]))
        self._queue = deque(requests[order] for order in wanted)

    def prepare(self, within_s: float) -> bool:
        """Encodes one request if that surely takes less than within_s. False: nothing was done."""
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
