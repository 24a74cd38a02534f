"""The nouns of load: what is asked (Request) and what came of it (RequestRecord)."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

Phase = Literal["warm", "measure", "drain"]
Verdict = Literal["proven", "contradicted", "unproven"]


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """`tokens` leading tokens of the endless token stream that `hash_id` names."""

    hash_id: int
    tokens: int


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request: the recipe of its prompt and when it wants to be sent.

    at_s: intended send time in seconds from the load's start; None: as soon as a slot is free.
    session, turn: turn k+1 of a session is sent `delay_s` after turn k completed, not before `at_s`, and not before
    `interval_s` have passed since turn k was to be sent.
    after: ids of earlier requests of its session; it waits for all of them, in place of the turn before.
    wave: the request waits until all requests of lower waves have completed.
    instance: the one that has to serve it, from 0; None: the router chooses.
    quotes: requests, by id, whose answers the prompt holds token for token, as the segments that reply_stream names.
    kinds: what the prompt's first segments are, one name each: 'system' or 'document'. The rest is the conversation.
    service: its class of service. priority: of all that may be sent, what has the lowest goes first.
    """

    id: str
    prompt: tuple[Segment, ...]
    output_tokens: int
    at_s: float | None = None
    session: str | None = None
    turn: int = 0
    delay_s: float = 0.0
    interval_s: float = 0.0
    after: tuple[str, ...] = ()
    wave: int = 0
    instance: int | None = None
    quotes: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    service: str | None = None
    priority: int = 0

    @property
    def prompt_tokens(self) -> int:
        return sum([segment.tokens for segment in self.prompt])


# Prompt tokens by where their KV came from: 'computed', or the tier. No entry, or None: the engine does not say; it is
# not zero.
TokensByTier = dict[str, int | None]


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One row: what was intended, what was seen.

    Times are seconds on the run's own clock (the manifest says when it started); None: it did not happen.
    scheduled_s is the intended send time, sent_s the actual one. first_chunk_s is the first streamed chunk,
    first_token_s the first chunk that carried a token. token_s holds the arrival of every chunk with tokens.
    expected_tier is the name of the warm state (tiers.STATES), None for free load.
    cached_tokens is what the engine's own usage says for this request. instance: which engine of a cluster served it.
    phase: whether the row is measured, came before (warm), or ended after the time that counts (drain).
    preemptions: how often the engine took back the request's blocks; None: it does not report that.
    service: the class of service; None: the load has none. client: which of several processes sent it; UNSET, and
    not in the file: there is one.
    """

    id: str
    cell: str = ""
    phase: Phase = "measure"
    sample: int = 0
    attempt: int = 0
    expected_tier: str | None = None
    expected_hit_tokens: int | None = None
    verdict: Verdict | None = None
    verdict_reason: str | None = None
    scheduled_s: float
    sent_s: float
    first_chunk_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    token_s: tuple[float, ...] = ()
    prompt_tokens: int
    output_tokens: int | None = None
    cached_tokens: int | None = None
    tokens_by_tier: TokensByTier = {}
    session: str | None = None
    turn: int = 0
    instance: int | None = None
    preemptions: int | None = None
    service: str | None = None
    error: str | None = None
    client: int | UnsetType = UNSET

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token, from the actual send; None for a failed request."""
        return None if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.last_token_s is None else self.last_token_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None with fewer than two tokens."""
        tokens = self.output_tokens
        if self.first_token_s is None or self.last_token_s is None or tokens is None or tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (tokens - 1)


class TokenSource:
    """Expands prompt recipes into token ids. The same seed and hash id give the same tokens, always.

    Ids lie in [reserved, vocab_size): the first ones are special tokens in most vocabularies.
    """

    def __init__(self, seed: int, vocab_size: int, reserved: int = 256) -> None:
        if vocab_size <= reserved:
            raise ValueError(f"vocab_size {vocab_size} must be larger than the {reserved} reserved ids")
        self._seed, self._low, self._high = seed, reserved, vocab_size
        self._streams: dict[int, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
        # One generator for all streams, begun again with each one's key: a new one first draws a seed from the system.
        self._philox = np.random.Philox(key=[seed, 0])
        self._rng, self._unused = np.random.Generator(self._philox), self._philox.state
        self._state = self._unused["state"]

    def expand(self, prompt: tuple[Segment, ...]) -> list[int]:
        """Token ids of a prompt, prompt_tokens of them."""
        ids: list[int] = []
        for segment in prompt:
            ids.extend(self._stream(segment.hash_id, segment.tokens)[: segment.tokens].tolist())
        return ids

    def _stream(self, hash_id: int, tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        known = self._streams.get(hash_id)
        if known is None or len(known) < tokens:
            # A stream of a given key only ever grows at its end, so a longer look keeps the shorter one's tokens.
            self._state["key"] = np.array([self._seed, hash_id]).astype(np.uint64)
            self._philox.state = self._unused
            known = self._rng.integers(self._low, self._high, size=tokens, dtype=np.int64)
            if len(self._streams) > 4096:
                self._streams.clear()
            self._streams[hash_id] = known
        return known


def reply_stream(request_id: str) -> int:
    """The hash id of the stream that a request's generated tokens lead. A later prompt may name it."""
    return stable_id("reply", request_id)


def stable_id(*parts: object) -> int:
    """A hash id from names: 63 bits, the same on every machine and run."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
