"""LMCache's multi-process server."""

from __future__ import annotations

import msgspec

from simulator.errors import ModelError
from simulator.policies.engines import Connector
from simulator.policies.tiers import TierPolicy

LMCACHE = TierPolicy(
    name="lmcache-0.5.6-mp",
    end_uses=True,
    evict_on_demand=False,
    tick_s=1.0,
    watermark=0.8,
    evict_ratio=0.2,
    keep_prefetched=False,
    # One for the acknowledgement, one for the answer (vllm_multi_process_adapter.py, check_lookup_result).
    # One more of an idle engine, whose polls are shorter than the server's work: of 46 lone look-ups of vLLM 0.32 of up
    # to 6 chunks on a quiet machine, 33 took 3 and 7 took 4. An engine looks for the ends of loads once it has
    # scheduled (v1/worker/kv_connector_model_runner_mixin.py, get_transfer_results), and goes on a pass later.
    connector=Connector(lookup_polls=2, wake_polls=1, load_polls=1),
    max_prefetches=8,
    disk_evicts=False,
)

# By the names of the server's --eviction-policy. The server has two more, which drop nothing from CPU RAM: noop, and
# IsolatedLRU. IsolatedLRU gets no cache_salt, and its error ends the evicting thread at the first tick.
LMCACHE_EVICTIONS = {"lru": "lru", "arc": "lmcache-arc"}


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
