"""The rules of an engine's scheduler, and of what joins it to a cache server, as data."""

from __future__ import annotations

import msgspec


class EnginePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """null_blocks: blocks of the engine's own count that never hold a request's tokens. prefills_first: SGLang's
    schedule and its tree. A step prefills or decodes. The requests that begin in it all keep their cached prefixes
    before it takes room for what it computes, with a block more for each; one begins if the reply that it asks for
    fits, too. What one insertion added to the GPU's cache is evicted as a whole, and no block is kept twice; a prompt's
    blocks are inserted when the step that computes them ends, a reply's when its request does. A request computes
    while the blocks that it loads come, layer by layer. reads_ahead: the tiers begin to read for a request when it
    arrives, into CPU memory, and the engine looks there at its turn. min_load_tokens: with prefills_first, a hit of
    fewer tokens beyond the GPU's is not loaded. parses_whole: the front end parses a request to its end before it reads
    the next one, and not a third of each first."""

    name: str
    null_blocks: int
    prefills_first: bool = False
    reads_ahead: bool = False
    min_load_tokens: int = 0
    parses_whole: bool = False


class Connector(msgspec.Struct, frozen=True, kw_only=True):
    """lookup_polls: at least so many more schedules of the engine pass until it sees the answer to a look-up.
    wake_polls: so many more of an idle engine's, which asks sooner than the server answers. Only with lookup_polls.
    load_polls: so many more schedules pass until it sees that a load has ended, where its own thread does not copy what
    it loads."""

    lookup_polls: int = 0
    wake_polls: int = 0
    load_polls: int = 0
