"""What the load loop and its client processes tell each other: msgpack messages over a socket, each after its length.

The socket is a pair that only the two processes have, so that an API key and a pickled dialect may pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec

from harness.engines.http.sender import RequestOutcome
from traces.request import Request

_LENGTH_BYTES = 8


class ClientSetup(msgspec.Struct, array_like=True, tag=0):
    """target: the pickled Target. origin_s: what time.perf_counter says at second 0 of the run's clock."""

    target: bytes
    origin_s: float


class Begin(msgspec.Struct, array_like=True, tag=1):
    """Drops the load before, and makes the next one ready. requests: the client's own. quotes: whether any of the whole
    load quotes an answer. room_bytes: for bodies made ahead. Answered by Ready of the same number."""

    number: int
    requests: tuple[Request, ...]
    quotes: bool
    room_bytes: int


class SendNow(msgspec.Struct, array_like=True, tag=2):
    """The request of this place in Begin.requests is due. Answered by Told, unless it is dropped."""

    place: int
    instance: int


class Idle(msgspec.Struct, array_like=True, tag=3):
    """No request is due before this moment of the run's clock."""

    until_s: float


class GiveUp(msgspec.Struct, array_like=True, tag=4):
    """Ends what is in flight; each is answered by Told with this error."""

    reason: str


class Ready(msgspec.Struct, array_like=True, tag=5):
    """prepared: all bodies are made."""

    number: int
    prepared: bool


class Told(msgspec.Struct, array_like=True, tag=6):
    """What came of a request."""

    place: int
    outcome: RequestOutcome


ToClient = ClientSetup | Begin | SendNow | Idle | GiveUp
FromClient = Ready | Told


class ClientLink(asyncio.Protocol):
    """One end. reads: the type of what the other end sends. took: is called with each message; lost: when the other
    end is gone."""

    def __init__(self, reads: Any, took: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._decode = msgspec.msgpack.Decoder(reads).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._took, self._lost = took, lost
        self._buffer = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is one in all but its bases

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        self._lost()

    def data_received(self, data: bytes) -> None:
        buffer, start = self._buffer, 0
        buffer += data
        while (begin := start + _LENGTH_BYTES) <= len(buffer):
            end = begin + int.from_bytes(buffer[start:begin], "little")
            if end > len(buffer):
                break
            start, message = end, self._decode(bytes(buffer[begin:end]))
            self._took(message)
        del buffer[:start]

    def send(self, message: ToClient | FromClient) -> None:
        """Does nothing where the other end is gone."""
        if self._transport is not None:
            body = self._encode(message)
            self._transport.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
