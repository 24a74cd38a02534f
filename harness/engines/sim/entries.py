"""What a request's prompt is kept as: KV entries of whole chunks of tokens, or one for each part of the prompt.

A part is what one turn adds, a system prompt, or a document: a segment of the request. An entry's name says all that
its KV depends on, so far as the tiers are concerned: equal names are equal KV.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from traces.request import Request, stable_id

Grain = Literal["chunk", "turn"]
# The content of an entry's n-th slot has the name key + n.
_KEYS = 2**63


class WantedEntry(NamedTuple):
    """An entry that a request looks up. units: slots of one chunk that it takes. kind: 'system', 'document', 'history'
    (of an earlier turn), or 'new' (only this turn brings it)."""

    key: int
    units: int
    tokens: int
    kind: str


def chunk_keys(request: Request, chunk_tokens: int) -> list[int]:
    """Names of the prompt's whole chunks: two names are equal if all tokens up to the chunks' ends are."""
    keys: list[int] = []
    part: list[object] = []
    filled = 0
    for segment in request.prompt:
        start = 0
        while start < segment.tokens:
            taken = min(segment.tokens - start, chunk_tokens - filled)
            part += [segment.hash_id, start, taken]
            start, filled = start + taken, filled + taken
            if filled == chunk_tokens:
                keys.append(stable_id(keys[-1] if keys else "chunk", *part))
                part, filled = [], 0
    return keys


def entries_of(request: Request, grain: Grain, chunk_tokens: int) -> list[WantedEntry]:
    """The prompt's entries in their order. A chunk's kind is that of the segment with its last token."""
    kinds = _kinds(request)
    if grain == "turn":
        return [
            WantedEntry(
                stable_id("turn", segment.hash_id, segment.tokens),
                -(-segment.tokens // chunk_tokens),
                segment.tokens,
                kind,
            )
            for segment, kind in zip(request.prompt, kinds, strict=True)
        ]
    ends, total = [], 0
    for segment in request.prompt:
        total += segment.tokens
        ends.append(total)
    found, at = [], 0
    for number, key in enumerate(chunk_keys(request, chunk_tokens), 1):
        while ends[at] < number * chunk_tokens:
            at += 1
        found.append(WantedEntry(key, 1, chunk_tokens, kinds[at]))
    return found


def slots_of(request: Request, grain: Grain, chunk_tokens: int) -> int:
    """The slots that all entries of the prompt take."""
    if grain == "turn":
        return sum(-(-segment.tokens // chunk_tokens) for segment in request.prompt)
    return request.prompt_tokens // chunk_tokens


def slot_keys(key: int, units: int) -> list[int]:
    """The names of an entry's slots."""
    return [(key + number) % _KEYS for number in range(units)]


def _kinds(request: Request) -> list[str]:
    """Of each segment. The load names those in front; of the others the last is new, the rest is of earlier turns."""
    earlier = max(0, len(request.prompt) - len(request.kinds) - 1)
    return [*request.kinds, *["history"] * earlier, "new"][: len(request.prompt)]
