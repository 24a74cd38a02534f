"""What engines and cache servers of a named release do, as data.

The rules were read in the releases' sources; each field says what differs between releases, nothing else is a knob.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from simulator import SettingError, _core

Pack = TypeVar("Pack")
EVICTIONS = ("lru", "fifo", "lfu", "s3-fifo", "arc")


class EnginePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """null_blocks: blocks of the engine's own count that never hold a request's tokens."""

    name: str
    null_blocks: int


class TierPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How a cache server fills and empties its tiers. All of them keep whole chunks of prompts, never of replies.

    eviction: which chunk goes next in each tier, "lru", "fifo", "lfu", "s3-fifo", "arc" or "lease". A chunk that is
        read or written never goes. A look-up uses the chunks that it finds; a store, and a load from below, bring
        chunks in, the prompt's last first.
    end_uses: a request's end uses its prompt's chunks once more, as in LMCache; otherwise a store uses those of its
        chunks that are there already.
    evict_on_demand: a write that needs room evicts; otherwise only ticks do, and a write without room is given up.
    tick_s, watermark, evict_ratio: each tick at or above the watermark drops int(ratio x keys) of them, at least
        one.
    keep_prefetched: chunks read from disk stay in the CPU tier.
    max_prefetches: requests that read from disk at a time; further ones wait.
    disk_evicts: a full disk drops chunks; otherwise it takes no more.
    """

    name: str
    eviction: str
    end_uses: bool
    evict_on_demand: bool
    tick_s: float
    watermark: float
    evict_ratio: float
    keep_prefetched: bool
    max_prefetches: int
    disk_evicts: bool


ENGINE_POLICIES = {"vllm-0.32": EnginePolicy(name="vllm-0.32", null_blocks=1)}

LMCACHE = TierPolicy(
    name="lmcache-0.5.6-mp",
    eviction="lru",
    end_uses=True,
    evict_on_demand=False,
    tick_s=1.0,
    watermark=0.8,
    evict_ratio=0.2,
    keep_prefetched=False,
    max_prefetches=8,
    disk_evicts=False,
)

# Textbook caches: what is used is kept in every tier, and each write takes the place of as many chunks as it needs.
LRU = TierPolicy(
    name="lru",
    eviction="lru",
    end_uses=False,
    evict_on_demand=True,
    tick_s=0.0,
    watermark=1.0,
    evict_ratio=0.0,
    keep_prefetched=True,
    max_prefetches=8,
    disk_evicts=True,
)
TEXTBOOK = [msgspec.structs.replace(LRU, name=name, eviction=name) for name in EVICTIONS]

TIER_POLICIES = {pack.name: pack for pack in (LMCACHE, *TEXTBOOK)}


def engine_policy(name: str) -> EnginePolicy:
    """The pack of that name; ValueError names the known ones."""
    return _pick("engine policy", ENGINE_POLICIES, name)


def tier_policy(name: str) -> TierPolicy:
    """The pack of that name; ValueError names the known ones."""
    return _pick("tier policy", TIER_POLICIES, name)


def cache_hits(eviction: str, capacity: int, keys: Iterable[int]) -> list[bool]:
    """Which of these uses hit a cache of so many chunks that starts empty and takes each chunk that it lacks.

    One tier on its own, by the code that the tiers run. ValueError names the known policies.
    """
    return [flag == 1 for flag in _core.cache_hits(eviction, capacity, array("q", keys))]


def _pick(what: str, packs: dict[str, Pack], name: str) -> Pack:
    if name not in packs:
        raise SettingError(f"no {what} {name!r}: use one of {', '.join(sorted(packs))}")
    return packs[name]
