"""SGLang with HiCache."""

from __future__ import annotations

import msgspec

from simulator.policies.engines import EnginePolicy
from simulator.policies.tiers import TierPolicy

# SGLang's defaults: write_through (server_args.py: hicache_write_policy), prefetch policy timeout. Paths are below
# sglang/srt/. Pages (chunks here) reach the host when they are computed, and storage from there; both keep the order of
# LRU, tail first, as only leaves go (mem_cache/evict_policy.py 18-20). The insertion at a request's end writes its
# reply's pages, and uses all pages of its prompt (mem_cache/unified_radix_cache.py, insert). What the prefetch brings
# stays on the host.
#   256 tokens at least              mem_cache/unified_radix_cache.py 2144, managers/cache_controller.py 623
#   half of the host pool at most    managers/cache_controller.py 634, 1284
#   1 s and 0.25 s a Ki-token        mem_cache/hybrid_cache/hybrid_cache_controller.py 405-408
# Look-ups end at the first page that is in neither tier. One thread reads from storage, one request after another
# (managers/cache_controller.py, prefetch_io_aux_func). Not here: write_back and write_through_selective, which wait for
# the GPU's evictions and for second hits; the host evicts whole nodes, and never what the GPU holds; storage is read in
# batches of pages.
SGLANG_HICACHE = TierPolicy(
    name="sglang-0.5.23-hicache",
    end_uses=True,
    stores_replies=True,
    write_end_uses=False,
    evict_on_demand=True,
    keep_prefetched=True,
    max_prefetches=1,
    min_prefetch_tokens=256,
    prefetch_share=0.5,
    prefetch_timeout_s=1.0,
    prefetch_token_s=0.25 / 1024,
    disk_evicts=False,
)

# The other two of --hicache-storage-prefetch-policy (hybrid_cache_controller.py, can_terminate_prefetch): wait for all
# of it, or take what is there when the scheduler first asks.
SGLANG_HICACHE_WAIT = msgspec.structs.replace(
    SGLANG_HICACHE, name="sglang-0.5.23-hicache-wait", prefetch_timeout_s=None, prefetch_token_s=0.0
)
SGLANG_HICACHE_BEST_EFFORT = msgspec.structs.replace(
    SGLANG_HICACHE, name="sglang-0.5.23-hicache-best-effort", prefetch_timeout_s=0.0, prefetch_token_s=0.0
)

# The schedule is that without overlap and mixed chunks: a batch prefills or decodes, and prefill goes first
# (managers/scheduler.py: get_next_batch_to_run). A pass matches requests, which makes their prefixes the newest, and
# locks them one after another (init_next_round_input, PrefillAdder.add_one_req); the batch then evicts for all of them,
# for what they compute and a page for each (mem_cache/allocation.py 185, 584). Admission counts whole pages against the
# chunk, and keeps room for all that requests may still write: exact with ignore_eos, where new_token_ratio has no say
# (schedule_policy.py: _get_running_request_total_token_offset). A request that did not fit closes the door until one
# ends (batch_is_full). Every 32nd pass uses the prefixes of waiting requests (_touch_waiting_prefixes).
# The tree's nodes are what one insertion added: a chunk of prefill, a reply with the page that it shares with its
# prompt (mem_cache/unified_radix_cache.py 1240-1260), or what a prefetch brought. It evicts whole nodes
# (components/full.py: _evict_device_next_node). A match that ends inside of a node cuts it and makes both parts new
# (unified_tree_core.py: _split_node). A page that was computed again is freed (_insert_overlap_step).
# Requests are taken in between two steps (ingest_requests). With storage, each is matched then, which makes its prefix
# the newest, and storage is asked for the rest (_prefetch_kvcache), and again when the tree has lost some of what it
# held then (_prefetch_after_device_hit_loss). The next pass takes the answer, makes room on the host and has it read; a
# later one takes what was read into the tree (check_hicache_events). A chunk of a prompt comes into the tree when the
# next one is chosen, after the requests that came meanwhile (stash_chunked_request). At its turn the scheduler matches
# the tree and loads back from the host 10 tokens or more, layer by layer, while the batch runs (unified_radix_cache.py
# 576; managers/cache_controller.py, start_loading). Requests that find no page while they decode are preempted as
# vLLM's are.
SGLANG = EnginePolicy(
    name="sglang-0.5.23",
    null_blocks=0,
    prefills_first=True,
    reads_ahead=True,
    min_load_tokens=10,
    parses_whole=True,
)
