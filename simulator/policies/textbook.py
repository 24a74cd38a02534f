"""Textbook caches, and the two placements of the MLPerf Storage KV-cache benchmark."""

from __future__ import annotations

import msgspec

from simulator.policies.eviction import EVICTIONS
from simulator.policies.tiers import NO_LIMIT, TierPolicy

# Each tier keeps the chunks that requests use, and each write evicts as many chunks as it needs room for.
LRU = TierPolicy(name="lru", evict_on_demand=True, keep_prefetched=True, max_prefetches=8, disk_evicts=True)
TEXTBOOK = [msgspec.structs.replace(LRU, name=name, eviction=name, disk_eviction=name) for name in EVICTIONS]

# The two placements of the MLPerf Storage KV-cache benchmark move chunks here, where it moves whole prompts.
# The benchmark's GPU tier is the engine's own cache here: its chunks are in the CPU tier as well, from when the GPU
# computed them. A hit is read where it lies. A chunk that moves down is in neither tier until the disk has it.
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
