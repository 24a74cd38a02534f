"""SGLang with HiCache."""

from __future__ import annotations

from simulator.policies.tiers import NO_LIMIT, TierPolicy

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
