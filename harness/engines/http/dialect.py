"""What one kind of server speaks over HTTP: a path, a request's JSON, and the events of a streamed answer.

The load loop (replay.py) and the reader of streams (stream.py) know no field of any server. A further kind of server
is one class: here that of OpenAI's interface, and SGLang's `/generate` in the engine's own folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, ClassVar, Protocol

import msgspec

from traces.request import TokensByTier


class Usage(Protocol):
    """A server's own count of one request's tokens, so far."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the server did not compute; None if it does not report them."""

    @property
    def tokens_by_tier(self) -> TokensByTier:
        """Prompt tokens by where their KV came from; empty if it does not report that for a request."""


class Event(Protocol):
    """One event of a stream. error: what the server reported in place of tokens, of any JSON shape."""

    @property
    def text(self) -> str | None:
        """The text of the reply's next tokens; None if the event carries no part of the reply."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The ids of those tokens, from a dialect that asked for them."""

    @property
    def usage(self) -> Usage | None: ...
    @property
    def error(self) -> Any: ...


class Dialect(Protocol):
    """What the load loop asks of a kind of server. It holds no state of a request.

    path: where requests are posted, below the server's URL.
    warm_path: a GET there costs the server nothing; it opens a connection ahead of the first request.
    """

    path: str
    warm_path: str

    def encode(self, prompt: bytes, output_tokens: int) -> bytes:
        """The body of a request that streams output_tokens tokens in reply to a prompt: token ids as a JSON array."""

    def decode(self, data: bytes) -> Event:
        """The event in a `data` field. Raises msgspec.MsgspecError or UnicodeDecodeError."""

    def telling_ids(self) -> Dialect:
        """The same, asking for the token ids of each answer."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None

    tokens_by_tier: ClassVar[TokensByTier] = {}

    @property
    def cached_tokens(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Choice(msgspec.Struct):
    text: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None

    token_ids: ClassVar[Sequence[int]] = ()

    @property
    def text(self) -> str | None:
        return (self.choices[0].text or "") if self.choices else None


class _TellingChoice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None


class _TellingEvent(msgspec.Struct):
    choices: list[_TellingChoice] = []
    usage: _Usage | None = None
    error: Any = None

    @property
    def text(self) -> str | None:
        return (self.choices[0].text or "") if self.choices else None

    @property
    def token_ids(self) -> Sequence[int]:
        return (self.choices[0].token_ids or ()) if self.choices else ()


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_telling_event = msgspec.json.Decoder(_TellingEvent).decode


class Completions:
    """OpenAI's `/v1/completions`, with token ids as the prompt.

    extra_body: added to every request's JSON, over the defaults (temperature 0, ignore_eos).
    count_tokens: asks for the running count of tokens with each event (`continuous_usage_stats`, vLLM), because text
    can be empty for a token that is half a character. Where the server sends no count, an event's text tells
    whether it carries tokens.
    `telling_ids` asks for `return_token_ids` (vLLM): the first event then brings the prompt's ids back, too.
    """

    path = "/v1/completions"
    warm_path = "/v1/models"

    def __init__(self, model: str, *, extra_body: Mapping[str, Any] = {}, count_tokens: bool = False) -> None:
        stream_options = {"include_usage": True} | ({"continuous_usage_stats": True} if count_tokens else {})
        fields = {"model": model, "temperature": 0, "ignore_eos": True, **extra_body}
        self._fields = msgspec.json.encode(fields | {"stream": True, "stream_options": stream_options})[:-1]

    def encode(self, prompt: bytes, output_tokens: int) -> bytes:
        return b'%b,"max_tokens":%d,"prompt":%b}' % (self._fields, output_tokens, prompt)

    # The load loop decodes each token's event: a method around the decoder would cost it a call more.
    decode: Callable[[bytes], Event] = staticmethod(_decode_event)

    def telling_ids(self) -> Dialect:
        telling = copy(self)
        telling._fields = self._fields + b',"return_token_ids":true'
        telling.decode = _decode_telling_event
        return telling
