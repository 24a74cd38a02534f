"""Mooncake's master and its SSD offload."""

from __future__ import annotations

from simulator.policies.tiers import NO_LIMIT, TierPolicy

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
