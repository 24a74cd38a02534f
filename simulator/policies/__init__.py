"""What engines and cache servers of a named release do, as data: the packs by name.

The rules were read in the releases' sources. Each field names a difference between releases.
"""

from __future__ import annotations

from typing import TypeVar

from simulator.errors import ModelError
from simulator.policies.engines import Connector as Connector
from simulator.policies.engines import EnginePolicy as EnginePolicy
from simulator.policies.eviction import EVICTIONS as EVICTIONS
from simulator.policies.eviction import cache_hits as cache_hits
from simulator.policies.lmcache import LMCACHE as LMCACHE
from simulator.policies.lmcache import lmcache_evicting as lmcache_evicting
from simulator.policies.lmcache import lmcache_eviction as lmcache_eviction
from simulator.policies.mooncake import MOONCAKE, MOONCAKE_BY_SHARDS, MOONCAKE_OFFLOADS_EVICTED
from simulator.policies.sglang import SGLANG, SGLANG_HICACHE, SGLANG_HICACHE_BEST_EFFORT, SGLANG_HICACHE_WAIT
from simulator.policies.textbook import SPILLOVER, TEXTBOOK, WATERFALL
from simulator.policies.tiers import TierPolicy as TierPolicy
from simulator.policies.vllm import VLLM

Pack = TypeVar("Pack")

ENGINE_POLICIES = {pack.name: pack for pack in (VLLM, SGLANG)}
_TIER_PACKS = (
    LMCACHE,
    *TEXTBOOK,
    WATERFALL,
    SPILLOVER,
    SGLANG_HICACHE,
    SGLANG_HICACHE_WAIT,
    SGLANG_HICACHE_BEST_EFFORT,
    MOONCAKE,
    MOONCAKE_OFFLOADS_EVICTED,
    MOONCAKE_BY_SHARDS,
)
TIER_POLICIES = {pack.name: pack for pack in _TIER_PACKS}


def engine_policy(name: str) -> EnginePolicy:
    """The pack of that name; ValueError names the known ones."""
    return _pick("engine policy", ENGINE_POLICIES, name)


def tier_policy(name: str) -> TierPolicy:
    """The pack of that name; ValueError names the known ones."""
    return _pick("tier policy", TIER_POLICIES, name)


def _pick(what: str, packs: dict[str, Pack], name: str) -> Pack:
    if name not in packs:
        raise ModelError(f"no {what} {name!r}: use one of {', '.join(sorted(packs))}")
    return packs[name]
