"""Reads what a server streams back, without any I/O: the pieces of a body go in, an Answer builds up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from harness.engines.http.dialect import Event, Usage

OTHER_BYTES = 4096
# The first event may bring a prompt of a million token ids back.
MAX_EVENT_BYTES = 16 << 20


class EventTooLong(Exception):
    """The stream goes on without the blank line that would end an event."""


class EventDecoder:
    """One stream: feed it what arrives, get the `data` of each event that is finished.

    Comments and other fields are skipped, '\\r\\n' and '\\n' end lines alike. (The lone '\\r' that the standard also
    allows is not known: no server of this kind sends it.)
    """

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, body: bytes) -> list[bytes]:
        """Raises EventTooLong past MAX_EVENT_BYTES without an event's end."""
        text = self._tail + body if self._tail else body
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        *blocks, self._tail = text.split(b"\n\n")
        if len(self._tail) > MAX_EVENT_BYTES:
            raise EventTooLong(f"an event of the stream is longer than {MAX_EVENT_BYTES} bytes")
        return [data for block in blocks if (data := _data(block)) is not None]

    def flush(self) -> list[bytes]:
        """The event that the end of the stream cut its blank line off, if there is one."""
        data, self._tail = _data(self._tail), b""
        return [] if data is None else [data]


def _data(block: bytes) -> bytes | None:
    if b"\n" not in block:
        return block[5:].removeprefix(b" ") if block.startswith(b"data:") else None
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


class Answer:
    """What has arrived for one request so far; token_s are the arrivals of the chunks that carried tokens.

    decode: the dialect's reader of one event. status is 0 until the answer's head is in. error: what broke the answer
    off. token_ids: the reply's, if the server `tells_ids`; else None. other: the first bytes of an answer that is no
    event stream.
    """

    __slots__ = (
        "_counts", "_decode", "_events", "_other", "_tokens", "content_type", "error", "finished", "first_chunk_s",
        "sent_s", "status", "token_ids", "token_s", "usage",
    )  # fmt: skip

    def __init__(self, sent_s: float, decode: Callable[[bytes], Event], *, tells_ids: bool = False) -> None:
        self.sent_s, self._decode = sent_s, decode
        self.status, self.content_type = 0, ""
        self.first_chunk_s: float | None = None
        self.token_s: list[float] = []
        self.token_ids: list[int] | None = [] if tells_ids else None
        self.usage: Usage | None = None
        self.finished = False
        self.error: str | None = None
        self._events, self._other = EventDecoder(), b""
        self._counts: bool | None = None
        self._tokens = 0

    @property
    def streams(self) -> bool:
        return self.status == 200 and self.content_type == "text/event-stream"

    @property
    def wants_more(self) -> bool:
        """False once nothing that may still come could be of use."""
        return self.error is None and len(self._other) < OTHER_BYTES

    def feed(self, data: bytes, now_s: float) -> None:
        """The next piece of the body, and when it came."""
        if not self.streams:
            self._other = (self._other + data)[:OTHER_BYTES]
            return
        try:
            events = self._events.feed(data)
        except EventTooLong as error:
            self.error = str(error)
            return
        for event in events:
            self._event(event, now_s)

    def end(self, now_s: float) -> None:
        """The body is over."""
        for event in self._events.flush():
            self._event(event, now_s)

    def _event(self, data: bytes, now_s: float) -> None:
        if self.finished or self.error is not None:
            return
        if data == b"[DONE]":
            self.finished = True
            return
        try:
            event = self._decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.error = f"unreadable event in the stream ({error}): {data[:80].decode(errors='replace')}"
            return
        if event.error is not None:
            self.error = f"the server reported an error in the stream: {_message({'error': event.error})}"
            return
        if self.first_chunk_s is None:
            self.first_chunk_s = now_s
        text, usage = event.text, event.usage
        if text is not None and self._carries_token(text, usage):
            self.token_s.append(now_s)
        if self.token_ids is not None:
            self.token_ids += event.token_ids
        if usage is not None:
            self.usage = usage

    def _carries_token(self, text: str, usage: Usage | None) -> bool:
        """By the server's running count if its first chunk has one, else by the text.

        Some servers send no running count and yet put the final one beside the last, empty text: that is no token.
        """
        if self._counts is None:
            self._counts = usage is not None
        if not self._counts or usage is None:
            return bool(text)
        before, self._tokens = self._tokens, usage.completion_tokens
        return self._tokens > before

    def failure(self, sent_tokens: int) -> str | None:
        """What went wrong with a request of sent_tokens, the most telling first; None if it was answered in full."""
        if self.status not in (0, 200):
            return f"HTTP {self.status}: {_server_text(self._other)}"
        if self.error is not None:
            return self.error
        if not self.streams:
            return f"the answer is {self.content_type!r}, not an event stream: {_server_text(self._other)}"
        if not self.finished:
            return "the stream ended without [DONE]"
        if self.usage is None:
            return "the server reported no usage: it must support stream_options.include_usage"
        if self.usage.prompt_tokens != sent_tokens:
            return f"server counted {self.usage.prompt_tokens} prompt tokens, sent {sent_tokens}"
        if not self.token_s:
            cure = "" if self.usage.completion_tokens == 0 else "; if its texts are empty, use count_tokens"
            return f"no chunk carried a token, usage says {self.usage.completion_tokens}{cure}"
        return None


def _server_text(body: bytes) -> str:
    """The message in an error answer, whatever its shape."""
    try:
        return _message(msgspec.json.decode(body))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return body.decode(errors="replace")


def _message(said: Any) -> str:
    if isinstance(said, dict):
        for key in ("error", "message", "detail"):
            if said.get(key) is not None:
                return _message(said[key])
    return said if isinstance(said, str) else msgspec.json.encode(said).decode()
