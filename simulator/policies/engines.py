"""The rules of an engine's scheduler, and of what joins it to a cache server, as data."""

from __future__ import annotations

import msgspec


class EnginePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """null_blocks: blocks of the engine's own count that never hold a request's tokens. prefills_first: a step prefills
    or decodes; the requests that begin in it all keep their cached prefixes before it takes room for what it computes,
    with a block more for each request; one begins if the reply that it asks for fits, too. reads_ahead: the
    tiers begin to read for a request when it arrives, into CPU memory, and the engine looks there at its turn.
    loads_by_layer: a request computes while its cached blocks come, layer by layer. whole_nodes: what one insertion
    added is evicted as a whole, and a block that is there already is not kept twice; a prompt's blocks are inserted
    when the step that computes them ends, a reply's when its request does."""

    name: str
    null_blocks: int
    prefills_first: bool = False
    reads_ahead: bool = False
    loads_by_layer: bool = False
    whole_nodes: bool = False


class Connector(msgspec.Struct, frozen=True, kw_only=True):
    """lookup_polls: at least so many more schedules of the engine pass until it sees the answer to a look-up."""

    lookup_polls: int = 0
