"""SGLang's `/generate`, whose `meta_info` tells each request's cached tokens by tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from harness.engines.http.dialect import Dialect, Event
from traces.request import TokensByTier
from traces.tiers import COMPUTED


class _Sources(msgspec.Struct, frozen=True):
    """Cached tokens by where they were when the request came. storage None: the server has none."""

    device: int
    host: int
    storage: int | None = None


class _Meta(msgspec.Struct):
    """tiers: of SGLang's storage, where it is one tier; see Generate."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int | None = None
    cached_tokens_details: _Sources | None = None
    finish_reason: Any = None
    below: tuple[str, ...] = ()

    @property
    def tokens_by_tier(self) -> TokensByTier:
        """Without details where nothing was cached: SGLang leaves them out then."""
        found = self.cached_tokens_details
        if found is None:
            return {COMPUTED: self.prompt_tokens, "gpu": 0} if self.cached_tokens == 0 else {}
        stored = found.storage or 0
        # Where storage is several tiers, the request does not say which of them served it.
        storage = {tier: stored if len(self.below) == 1 or not stored else None for tier in self.below}
        computed = self.prompt_tokens - found.device - found.host - stored
        return {COMPUTED: computed, "gpu": found.device, "cpu": found.host, **storage}


class _Event(msgspec.Struct):
    """text: all of the reply so far; None for an event in its middle. output_ids: those that are new."""

    meta_info: _Meta | None = None
    text: str | None = None
    output_ids: list[int] = []
    error: Any = None

    @property
    def usage(self) -> _Meta | None:
        return self.meta_info

    @property
    def token_ids(self) -> Sequence[int]:
        return self.output_ids


_decode = msgspec.json.Decoder(_Event).decode


class Generate:
    """A Dialect. storage_tiers: the tiers that SGLang's storage stands for in the experiment."""

    path = "/generate"
    warm_path = "/model_info"

    def __init__(self, storage_tiers: tuple[str, ...] = ()) -> None:
        self._storage_tiers = storage_tiers

    def encode(self, prompt: bytes, output_tokens: int) -> bytes:
        sampling = b'{"temperature":0,"ignore_eos":true,"max_new_tokens":%d}' % output_tokens
        return b'{"stream":true,"sampling_params":%b,"input_ids":%b}' % (sampling, prompt)

    def decode(self, data: bytes) -> Event:
        event = _decode(data)
        if event.meta_info is not None:
            event.meta_info.below = self._storage_tiers
            if event.text is None:
                event.text = ""  # the running count says whether the event carries tokens
        return event

    def telling_ids(self) -> Dialect:
        """It always tells them."""
        return self
