"""The most that any cache of a size could serve of a load: what hit rates are held against.

    sum(most_hits([request.prompt for request in requests], capacity_tokens=1_000_000))

The cache knows all prompts beforehand, takes any token of a prompt that has come, and gives up what is used again last
(Belady's rule). No cache of that size serves more of the same prompts in the same order. A prompt's tokens hit only
behind hits of all tokens before them, token by token: an engine, which hits whole blocks or chunks, serves less.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from simulator import _core
from traces.request import Segment

UNLIMITED_TOKENS = 2**63 - 1


def most_hits(prompts: Iterable[Sequence[Segment]], capacity_tokens: int = UNLIMITED_TOKENS) -> list[int]:
    """For each prompt, in the order in which they come: how many of its first tokens such a cache could hold."""
    hash_ids, tokens, ends = array("q"), array("q"), array("q")
    for prompt in prompts:
        for segment in prompt:
            hash_ids.append(segment.hash_id)
            tokens.append(segment.tokens)
        ends.append(len(tokens))
    return _core.most_hits(hash_ids, tokens, ends, min(capacity_tokens, UNLIMITED_TOKENS))
