"""The bodies of a load's requests, made before they are due as far as that is possible."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from harness.engines.http.dialect import Dialect
from traces.request import Request, Segment, TokenSource, reply_stream

PREPARED_BYTES = 256 << 20
# The longest time that a prompt takes to prepare, to judge whether it fits into a pause (usual: 0.1 µs a token).
PREPARE_S, PREPARE_S_PER_TOKEN = 0.0002, 1e-6
# Stands for an answer in a text of token ids.
_ANSWER = b"?"


class Unquotable(Exception):
    """An answer that a prompt has to hold is not there. The text says why."""


class Bodies(Protocol):
    @property
    def complete(self) -> bool:
        """Whether nothing is left to prepare."""

    def prepare(self, within_s: float) -> bool:
        """Makes ready what one request needs, if that surely takes less than within_s. Returns whether it did."""

    def take(self, request: Request) -> bytes:
        """The request's body, made now as far as it is not ready. Raises Unquotable."""

    def answered(self, request: Request, token_ids: Sequence[int] | None) -> None:
        """Takes the answer's token ids; None: it failed."""


def bodies_of(
    requests: tuple[Request, ...], dialect: Dialect, tokens: TokenSource, room_bytes: int = PREPARED_BYTES
) -> Bodies:
    """dialect: where a request quotes an answer, one that tells the ids of answers. room_bytes: for prepared ones."""
    if any(request.quotes for request in requests):
        return _Quoting(requests, dialect, tokens, room_bytes)
    return Prepared(requests, lambda r: dialect.encode(b"[%b]" % _text(r.prompt, tokens), r.output_tokens), room_bytes)


def _text(prompt: Sequence[Segment], tokens: TokenSource) -> bytes:
    """The ids as JSON, without the brackets."""
    return msgspec.json.encode(tokens.expand(tuple(prompt)))[1:-1]


class Prepared:
    """Encodes requests before they are due, up to room_bytes, in the order in which they will be needed."""

    def __init__(self, requests: tuple[Request, ...], encode: Callable[[Request], bytes], room_bytes: int) -> None:
        self._encode, self._room_bytes, self._bytes = encode, room_bytes, 0
        self._ready: dict[int, bytes] = {}
        self._taken: set[int] = set()
        # A later turn has no time of its own; it is needed some time after its session's first turn.
        begins_s: dict[str | None, float] = {}
        due_s = []
        for request in requests:
            if request.at_s is None and request.session is not None and request.session in begins_s:
                begins_s[request.session] += request.interval_s
            elif request.session is not None:
                begins_s.setdefault(request.session, request.at_s or 0.0)
            due_s.append(begins_s.get(request.session, 0.0) if request.at_s is None else request.at_s)
        wanted = sorted(range(len(requests)), key=lambda order: (requests[order].wave, due_s[order]))
        self._queue = deque(requests[order] for order in wanted)

    @property
    def complete(self) -> bool:
        return not self._queue

    def prepare(self, within_s: float) -> bool:
        while self._queue and id(self._queue[0]) in self._taken:
            self._queue.popleft()
        if not self._queue or self._bytes >= self._room_bytes:
            return False
        if within_s < PREPARE_S + PREPARE_S_PER_TOKEN * self._queue[0].prompt_tokens:
            return False
        request = self._queue.popleft()
        self._ready[id(request)] = body = self._encode(request)
        self._bytes += len(body)
        return True

    def take(self, request: Request) -> bytes:
        body = self._ready.pop(id(request), None)
        if body is None:
            self._taken.add(id(request))
            return self._encode(request)
        self._bytes -= len(body)
        return body

    def answered(self, request: Request, token_ids: Sequence[int] | None) -> None:
        """Nothing needs it."""


class _Quoting:
    """Bodies with the server's own answers in them. Only what a turn adds to the one before it is encoded, beforehand;
    once it is due, its answers are put in and the text of the turn before it is put in front."""

    def __init__(self, requests: tuple[Request, ...], dialect: Dialect, tokens: TokenSource, room_bytes: int) -> None:
        self._dialect, self._tokens = dialect, tokens
        quoted = {name for request in requests for name in request.quotes}
        self._names = {reply_stream(name): name for name in quoted}
        # By request: the one before it in its session, if its prompt goes on from that one's.
        self._before: dict[int, Request] = {}
        # By request that another one goes on from: the ids of its prompt as text, once it was sent.
        self._sent: dict[int, bytes | None] = {}
        # By the quoted request's stream: the answer's ids as text, or why there is none.
        self._answers: dict[int, bytes | str] = {}
        last: dict[str, Request] = {}
        for request in requests:
            if request.session is None:
                continue
            before = last.get(request.session)
            if before is not None and request.prompt[: len(before.prompt)] == before.prompt:
                self._before[id(request)], self._sent[id(before)] = before, None
            last[request.session] = request
        self._last = {id(request) for request in last.values()}
        self._new = Prepared(requests, self._added, room_bytes)

    def _added(self, request: Request) -> bytes:
        """The ids that this turn adds, with a mark for each answer."""
        before = self._before.get(id(request))
        added = request.prompt[len(before.prompt) if before else 0 :]
        return b",".join(_ANSWER if part.hash_id in self._names else _text((part,), self._tokens) for part in added)

    @property
    def complete(self) -> bool:
        return self._new.complete

    def prepare(self, within_s: float) -> bool:
        return self._new.prepare(within_s)

    def take(self, request: Request) -> bytes:
        text, before = self._new.take(request), self._before.get(id(request))
        for segment in request.prompt[len(before.prompt) if before else 0 :]:
            if segment.hash_id in self._names:
                text = text.replace(_ANSWER, self._answer(segment), 1)
        if before is not None:
            earlier = self._sent.pop(id(before), None)
            earlier = self._whole(before) if earlier is None else earlier
            text = b"%b,%b" % (earlier, text) if text else earlier
        if id(request) in self._sent:
            self._sent[id(request)] = text
        if id(request) in self._last:
            for name in request.quotes:
                self._answers.pop(reply_stream(name), None)
        return self._dialect.encode(b"[%b]" % text, request.output_tokens)

    def _whole(self, request: Request) -> bytes:
        """The ids of a prompt that has not been sent."""
        return b",".join(
            self._answer(part) if part.hash_id in self._names else _text((part,), self._tokens)
            for part in request.prompt
        )

    def _answer(self, segment: Segment) -> bytes:
        name = self._names[segment.hash_id]
        answer = self._answers.get(segment.hash_id, "it has not come")
        if isinstance(answer, str):
            raise Unquotable(f"not sent, because its prompt quotes the answer to {name}: {answer}")
        if answer.count(b",") + 1 != segment.tokens:
            told = f"{answer.count(b',') + 1} tokens in place of {segment.tokens}"
            raise Unquotable(f"not sent, because its prompt quotes the answer to {name}: it has {told}")
        return answer

    def answered(self, request: Request, token_ids: Sequence[int] | None) -> None:
        stream = reply_stream(request.id)
        if stream not in self._names:
            return
        if token_ids is None:
            self._answers[stream] = "it failed"
        elif not token_ids:
            self._answers[stream] = "the server told no token ids of it"
        else:
            self._answers[stream] = msgspec.json.encode(token_ids)[1:-1]
