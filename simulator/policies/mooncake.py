"""Mooncake's master and its SSD offload."""

from __future__ import annotations

import msgspec

from simulator.policies.tiers import NO_LIMIT, TierPolicy

# Mooncake's master (mooncake-store/src/master_service.cpp: GrantLease, EvictionThreadFunc, BatchEvict) and its SSD
# offload at the end of each put, where the oldest go first (mooncake-store/include/storage_backend.h:
# BucketEvictionPolicy::FIFO, which drops buckets; here chunks). A look-up leases what it finds, a put does not; each
# chunk is put on its own, after a question whether it is there, which leases it (the client's batch_is_exist). A file
# on the SSD does not come back into memory, unless promotion_on_hit is set. The release's wheel holds binaries: the
# rules were read in its repository, at no release of its own, and the figures are those of an installed master. Not
# here: replicas and soft pins, which are off unless asked for; the two objects, keys and values, that SGLang makes of a
# page (here one chunk).
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
    counts_taken=True,
    max_prefetches=NO_LIMIT,
    disk_evicts=True,
    disk_watermark=0.9,
    disk_target=0.8,
    writes_use=True,
    disk_buffer_bytes=20 << 30,
)
# With the master's offload_on_evict: the SSD gets what memory drops, and not each put.
MOONCAKE_OFFLOADS_EVICTED = msgspec.structs.replace(
    MOONCAKE, name="mooncake-0.3.13-offload-on-evict", disk_takes="offloaded", disk_heartbeat_s=1.0
)
# The master before it picked among all chunks (its repository's pull request 2286, June 2026), with the defaults of
# that time: of each of its 1,024 shards a share goes. A page's two objects lie in two shards; a level whose chunks are
# half a page has as many.
MOONCAKE_BY_SHARDS = msgspec.structs.replace(
    MOONCAKE, name="mooncake-by-shards", eviction="sharded-lease", lease_s=5.0, watermark=0.95
)
