"""The rules of an engine's scheduler, and of what joins it to a cache server, as data."""

from __future__ import annotations

import msgspec


class EnginePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """null_blocks: blocks of the engine's own count that never hold a request's tokens."""

    name: str
    null_blocks: int


class Connector(msgspec.Struct, frozen=True, kw_only=True):
    """lookup_polls: at least so many more schedules of the engine pass until it sees the answer to a look-up."""

    lookup_polls: int = 0
