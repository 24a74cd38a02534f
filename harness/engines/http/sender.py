"""What sends a load's requests when replay.py's schedule asks: this process (HttpSender), or several (clients.py)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp.abc import AbstractStreamWriter

from harness.engines.http.bodies import PREPARED_BYTES, Unquotable, bodies_of
from harness.engines.http.dialect import Dialect
from harness.engines.http.moments import Moments
from harness.engines.http.stream import Answer
from traces.request import Request, TokensByTier, TokenSource

# Servers drop idle connections (uvicorn after 5 s). A request sent on a connection being dropped would be lost.
REUSE_WITHIN_S = 3.0
CONNECT_AHEAD = aiohttp.ClientTimeout(total=5)
READ_BYTES = 1 << 20


class RequestOutcome(msgspec.Struct, array_like=True):
    """What came of one request. error: why it was not answered in full. client: which of several processes sent it."""

    sent_s: float
    first_chunk_s: float | None = None
    token_s: tuple[float, ...] = ()
    output_tokens: int | None = None
    cached_tokens: int | None = None
    tokens_by_tier: TokensByTier = {}
    error: str | None = None
    client: int | None = None


# Takes what came of a request, or the bug that broke it off.
WhenEnded = Callable[[RequestOutcome | BaseException], None]


class Sender(Protocol):
    """Lifecycle: open; then take, ready, any number of ask, and drop, as often as there are loads; close."""

    async def open(self) -> None: ...

    def take(self, requests: tuple[Request, ...]) -> None:
        """The load that comes next."""

    async def ready(self) -> None:
        """Returns when its bodies are made, as far as there is room for them, and connections are there."""

    def prepare(self, within_s: float) -> bool:
        """Uses a pause of within_s to make bodies; returns whether it has taken some of it and may take more."""

    def ask(self, request: Request, instance: int, ended: WhenEnded) -> None:
        """Sends one of the load's requests now; `ended` is called once, unless the request is dropped."""

    def give_up(self, reason: str) -> None:
        """Ends what is in flight: what came of each has this error."""

    async def drop(self) -> None:
        """Drops what is in flight, and leaves no task."""

    async def close(self) -> None:
        """Safe at any time, and safe to repeat."""


@dataclass(frozen=True)
class Target:
    """Where requests go. urls: of the servers, each without /v1. dialect: what they speak.

    Raises ValueError for a url or key that cannot be used.
    """

    urls: tuple[str, ...]
    dialect: Dialect
    tokens: TokenSource
    api_key: str | None
    timeout_s: float
    max_connections: int

    def __post_init__(self) -> None:
        for url in self.urls:
            _check(url)
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("api_key has characters that cannot go into an HTTP header: check for a line break")


def _check(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.port != 0 and (parts.hostname or "").encode("idna")
    except ValueError:  # a port or a host name that cannot be
        usable = False
    if not usable or parts.username or parts.query:
        raise ValueError("url must look like http://HOST:PORT, without a user, a password or a query")


class _StampedBody(aiohttp.BytesPayload):
    """Reads the clock right before the body goes to the socket. A trace of aiohttp could tell that moment, too, but
    costs a call at every other point of each request as well."""

    def __init__(self, body: bytes, answer: Answer, moments: Moments) -> None:
        super().__init__(body)
        self._answer, self._moments = answer, moments

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        self._answer.sent_s = self._moments.sent()
        await super().write_with_length(writer, content_length)


class HttpSender:
    """A Sender in this process: each request in flight is a task that waits for its own answer.

    clock: the run's clock in seconds.
    """

    def __init__(self, target: Target, clock: Callable[[], float]) -> None:
        self._target, self._clock = target, clock
        self._urls = [url.rstrip("/") for url in target.urls]
        self._addresses = [f"{url}{target.dialect.path}" for url in self._urls]
        self._moments = Moments(clock)
        self._session: aiohttp.ClientSession | None = None
        self._in_flight: set[asyncio.Task[None]] = set()
        self._lost: str | None = None
        self.take(())

    async def open(self) -> None:
        """Connections are made as they are needed."""
        if self._session is not None:
            return
        key = self._target.api_key
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream", "Accept-Encoding": "identity"}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._target.max_connections, keepalive_timeout=REUSE_WITHIN_S),
            headers=headers | ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=aiohttp.ClientTimeout(total=self._target.timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            read_bufsize=READ_BYTES,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
            await asyncio.sleep(0)  # lets the transports go

    def take(
        self, requests: tuple[Request, ...], *, quotes: bool | None = None, room_bytes: int = PREPARED_BYTES
    ) -> None:
        """quotes: whether the whole load, of which this is a part, quotes answers. room_bytes: for bodies."""
        quotes = any(request.quotes for request in requests) if quotes is None else quotes
        dialect = self._target.dialect.telling_ids() if quotes else self._target.dialect
        self._bodies = bodies_of(requests, dialect, self._target.tokens, room_bytes)
        self._begin = partial(Answer, decode=dialect.decode, tells_ids=quotes)
        self._lost = None

    async def ready(self) -> None:
        """One connection to each server is there, so that a lone request does not wait for its set-up."""
        assert self._session is not None
        for url in self._urls:
            # Any status is fine. If the connection fails, the requests fail, too, and become records.
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                address = f"{url}{self._target.dialect.warm_path}"
                async with self._session.get(address, timeout=CONNECT_AHEAD, allow_redirects=False) as response:
                    await response.read()
        while self._bodies.prepare(float("inf")):
            pass

    @property
    def prepared(self) -> bool:
        """Whether all bodies are made."""
        return self._bodies.complete

    def prepare(self, within_s: float) -> bool:
        return self._bodies.prepare(within_s)

    def ask(self, request: Request, instance: int, ended: WhenEnded) -> None:
        try:
            body: bytes | Unquotable = self._bodies.take(request)
        except Unquotable as error:
            body = error
        answer = self._begin(self._clock())
        self._moments.begins(len(self._in_flight))
        work = self._serve(request, instance, body, answer, ended)
        task = asyncio.get_running_loop().create_task(work)
        self._in_flight.add(task)
        task.add_done_callback(partial(self._over, request, answer, ended))

    async def _serve(
        self, request: Request, instance: int, body: bytes | Unquotable, answer: Answer, ended: WhenEnded
    ) -> None:
        if isinstance(body, Unquotable):
            answer.error = str(body)
        else:
            await self._post(instance, body, answer)
        if (task := asyncio.current_task()) is not None:
            self._in_flight.discard(task)  # the next request may begin in `ended`
        ended(self._outcome(request, answer))

    def _over(self, request: Request, answer: Answer, ended: WhenEnded, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        if not task.cancelled():
            if (error := task.exception()) is not None:
                ended(error)
        elif self._lost is not None:
            answer.error = self._lost
            ended(self._outcome(request, answer))

    def _outcome(self, request: Request, answer: Answer) -> RequestOutcome:
        error, usage = answer.failure(request.prompt_tokens), answer.usage
        if answer.token_ids is not None:
            self._bodies.answered(request, None if error is not None else answer.token_ids)
        return RequestOutcome(
            sent_s=answer.sent_s,
            first_chunk_s=answer.first_chunk_s,
            token_s=tuple(answer.token_s),
            output_tokens=usage.completion_tokens if usage else None,
            cached_tokens=usage.cached_tokens if usage else None,
            tokens_by_tier=usage.tokens_by_tier if usage else {},
            error=error,
        )

    async def _post(self, instance: int, body: bytes, answer: Answer) -> None:
        """Posts the body and feeds what arrives to the answer."""
        assert self._session is not None
        address = self._addresses[instance]
        post = self._session.post(address, data=_StampedBody(body, answer, self._moments), allow_redirects=False)
        try:
            async with post as response:
                answer.status, answer.content_type = response.status, response.content_type
                self._moments.came()  # the headers, before the first token
                while answer.wants_more and (data := await response.content.readany()):
                    answer.feed(data, self._moments.came())
                answer.end(self._moments.came())
        except aiohttp.ClientConnectorError as error:
            # A negative number comes from a name look-up, whose error carries its own text.
            number = error.errno or 0
            reason = os.strerror(number) if number > 0 else error.strerror or error
            answer.error = f"cannot connect to {urlsplit(address).netloc}: {reason}"
        except TimeoutError:
            answer.error = f"no complete answer within {self._target.timeout_s:g} s"
        except aiohttp.ClientResponseError as error:
            answer.error = f"not an HTTP/1 answer: {error.message}"
        except aiohttp.ClientError as error:
            when = "midway through the answer" if answer.status else "before any answer"
            answer.error = answer.error or f"the connection was lost {when}: {error}"

    def give_up(self, reason: str) -> None:
        self._lost = reason
        for task in self._in_flight:
            task.cancel()

    async def drop(self) -> None:
        self._lost = None
        tasks = list(self._in_flight)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
