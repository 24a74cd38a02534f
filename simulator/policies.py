"""What engines and cache servers of a named release do, as data.

The rules were read in the releases' sources; each field says what differs between releases, nothing else is a knob.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from simulator import _core
from simulator.errors import ModelError

Pack = TypeVar("Pack")
EVICTIONS = ("lru", "fifo", "lfu", "s3-fifo", "arc")


class EnginePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """null_blocks: blocks of the engine's own count that never hold a request's tokens."""

    name: str
    null_blocks: int


class TierPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How a cache server fills and empties its tiers. All of them keep whole chunks of prompts, never of replies.

    eviction, disk_eviction: which chunk goes next in the CPU tier and on disk: "lru", "fifo", "lfu", "s3-fifo", "arc",
        "lease" or "lmcache-arc" (LMCache's own, which is not the paper's). A chunk that is read or written never goes.
        A look-up uses the chunks that it finds; a store, and a load from below, bring chunks in, the prompt's last
        first.
    lease_s: for "lease": a look-up keeps a chunk for so long; then those go first whose lease ran out first.
    end_uses: a request's end uses its prompt's chunks once more, as in LMCache; otherwise a store uses those of its
        chunks that are there already.
    placement: "copy": stores go to the CPU tier and are copied to disk. "waterfall": to the CPU tier, where they evict
        on demand, and what goes there moves to disk. "spillover": to the CPU tier while that is filled below the
        watermark, else to disk; nothing moves.
    partial_stores: a store without room for all of its chunks keeps the first ones; otherwise none.
    evict_on_demand: a write that needs room evicts; otherwise only ticks do, and a write without room is given up.
    tick_s, watermark, evict_ratio, tick_share: when and what ticks drop. "ratio": at or above the watermark
        int(ratio x keys), at least one. "surplus": above the watermark, or after a store without room,
        ceil(max(ratio, usage - watermark + ratio) x keys).
    keep_prefetched: chunks read from disk stay in the CPU tier.
    read_in_place: chunks read from disk take no room in the CPU tier, and do not stay.
    lookup_polls: so many more schedules of the engine, at least, pass until it sees the answer to a look-up.
    max_prefetches: requests that read from disk at a time, 65,534 at most; further ones wait.
    min_prefetch_tokens: hits of fewer tokens on disk are not read.
    prefetch_share: nothing more is read while this share of the CPU tier is being read into; None: no limit.
    prefetch_timeout_s, prefetch_token_s: a read from disk ends after so long and so much more for each token, with what
        it has by then; None: when all is read.
    disk_evicts: a full disk drops chunks; otherwise it takes no more.
    disk_watermark, disk_target: a write beyond the first share of a disk that evicts empties it to the second one.
    """

    name: str
    eviction: str = "lru"
    disk_eviction: str = "lru"
    lease_s: float = 0.0
    end_uses: bool = False
    placement: str = "copy"
    partial_stores: bool = False
    evict_on_demand: bool
    tick_s: float = 0.0
    watermark: float = 1.0
    evict_ratio: float = 0.0
    tick_share: str = "ratio"
    keep_prefetched: bool
    read_in_place: bool = False
    lookup_polls: int = 0
    max_prefetches: int
    min_prefetch_tokens: int = 0
    prefetch_share: float | None = None
    prefetch_timeout_s: float | None = None
    prefetch_token_s: float = 0.0
    disk_evicts: bool
    disk_watermark: float = 1.0
    disk_target: float = 1.0


ENGINE_POLICIES = {"vllm-0.32": EnginePolicy(name="vllm-0.32", null_blocks=1)}

NO_LIMIT = 1 << 32

LMCACHE = TierPolicy(
    name="lmcache-0.5.6-mp",
    end_uses=True,
    evict_on_demand=False,
    tick_s=1.0,
    watermark=0.8,
    evict_ratio=0.2,
    keep_prefetched=False,
    # One for the acknowledgement, one for the answer (vllm_multi_process_adapter.py, check_lookup_result).
    lookup_polls=2,
    max_prefetches=8,
    disk_evicts=False,
)

# By the names of its server's --eviction-policy. It has two more, which drop nothing from CPU RAM: noop, and
# IsolatedLRU, whose error (it is given no cache_salt) ends the thread that evicts at its first tick.
LMCACHE_EVICTIONS = {"lru": "lru", "arc": "lmcache-arc"}

# Textbook caches: what is used is kept in every tier, and each write takes the place of as many chunks as it needs.
LRU = TierPolicy(name="lru", evict_on_demand=True, keep_prefetched=True, max_prefetches=8, disk_evicts=True)
TEXTBOOK = [msgspec.structs.replace(LRU, name=name, eviction=name, disk_eviction=name) for name in EVICTIONS]

# The two placements of the MLPerf Storage KV-cache benchmark, chunk by chunk where it moves whole prompts. Its GPU tier
# is the engine's own cache here: chunks that are in that are in the CPU tier as well, from when they were computed. A
# hit is read where it lies. A chunk that moves down is in neither tier until the disk has it.
WATERFALL = TierPolicy(
    name="waterfall",
    placement="waterfall",
    evict_on_demand=True,
    keep_prefetched=False,
    read_in_place=True,
    max_prefetches=NO_LIMIT,
    disk_evicts=True,
)
SPILLOVER = TierPolicy(
    name="spillover",
    placement="spillover",
    evict_on_demand=False,
    watermark=0.8,
    keep_prefetched=False,
    read_in_place=True,
    max_prefetches=NO_LIMIT,
    disk_evicts=False,
)

# SGLang's defaults: write_through (server_args.py: hicache_write_policy), prefetch policy timeout. Paths are below
# sglang/srt/. Pages (chunks here) reach the host when they are computed, and storage from there; both keep the order of
# LRU, tail first, as only leaves go (mem_cache/evict_policy.py 18-20). What the prefetch brings stays on the host.
#   256 tokens at least              mem_cache/unified_radix_cache.py 2144, managers/cache_controller.py 623
#   half of the host pool at most    managers/cache_controller.py 634, 1284
#   1 s and 0.25 s a Ki-token        mem_cache/hybrid_cache/hybrid_cache_controller.py 405-408
# Look-ups end at the first page that is in neither tier. Not here: write_back and write_through_selective, which wait
# for the GPU's evictions and for second hits; the host keeps a page while the GPU has it; prefetches begin when a
# request is queued, not when its turn comes; storage is read in batches of pages; the minimum of 10 tokens to load
# back (unified_radix_cache.py 576), which a page of 16 or more always has.
SGLANG = TierPolicy(
    name="sglang-0.5.23-hicache",
    evict_on_demand=True,
    keep_prefetched=True,
    max_prefetches=NO_LIMIT,
    min_prefetch_tokens=256,
    prefetch_share=0.5,
    prefetch_timeout_s=1.0,
    prefetch_token_s=0.25 / 1024,
    disk_evicts=False,
)

# Mooncake's master (mooncake-store/src/master_service.cpp: GrantLease, EvictionThreadFunc, BatchEvict) and its SSD
# offload at the end of each put, where the oldest go first (mooncake-store/include/storage_backend.h:
# BucketEvictionPolicy::FIFO, which drops buckets; here chunks). A look-up leases what it finds, a put does not; each
# chunk is put on its own. The release's wheel holds binaries: the rules were read in its repository, at no release of
# its own, and the figures are those of an installed master. Not here: the master's 1,024 shards, each of which picks
# its own share (here all chunks are one); replicas, soft pins, promotion and offload on eviction, which are off unless
# asked for.
MOONCAKE = TierPolicy(
    name="mooncake-0.3.13",
    eviction="lease",
    disk_eviction="fifo",
    lease_s=10.0,
    partial_stores=True,
    evict_on_demand=False,
    tick_s=0.01,
    watermark=0.9,
    evict_ratio=0.05,
    tick_share="surplus",
    keep_prefetched=False,
    read_in_place=True,
    max_prefetches=NO_LIMIT,
    disk_evicts=True,
    disk_watermark=0.9,
    disk_target=0.8,
)

TIER_POLICIES = {pack.name: pack for pack in (LMCACHE, *TEXTBOOK, WATERFALL, SPILLOVER, SGLANG, MOONCAKE)}


def engine_policy(name: str) -> EnginePolicy:
    """The pack of that name; ValueError names the known ones."""
    return _pick("engine policy", ENGINE_POLICIES, name)


def tier_policy(name: str) -> TierPolicy:
    """The pack of that name; ValueError names the known ones."""
    return _pick("tier policy", TIER_POLICIES, name)


def lmcache_evicting(pack: TierPolicy, eviction: str, watermark: float, ratio: float) -> TierPolicy:
    """LMCache's pack with the eviction that its server was started with. ValueError for any other pack."""
    if pack.name != LMCACHE.name:
        raise ModelError(f"only {LMCACHE.name} has these settings of eviction, {pack.name} has its own")
    return msgspec.structs.replace(pack, eviction=LMCACHE_EVICTIONS[eviction], watermark=watermark, evict_ratio=ratio)


def lmcache_eviction(pack: TierPolicy) -> dict[str, str | float] | None:
    """The settings that `lmcache_evicting` takes, as LMCache's pack has them; None for any other pack."""
    names = {ours: theirs for theirs, ours in LMCACHE_EVICTIONS.items()}
    if pack.name != LMCACHE.name:
        return None
    return {"policy": names[pack.eviction], "watermark": pack.watermark, "ratio": pack.evict_ratio}


def cache_hits(eviction: str, capacity: int, keys: Iterable[int]) -> list[bool]:
    """Which of these uses hit a cache of so many chunks that starts empty and takes each chunk that it lacks.

    One tier on its own, by the code that the tiers run. ValueError names the known policies.
    """
    return [flag == 1 for flag in _core.cache_hits(eviction, capacity, array("q", keys))]


def _pick(what: str, packs: dict[str, Pack], name: str) -> Pack:
    if name not in packs:
        raise ModelError(f"no {what} {name!r}: use one of {', '.join(sorted(packs))}")
    return packs[name]
