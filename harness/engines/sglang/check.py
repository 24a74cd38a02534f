"""What SGLang and HiCache would fail by on this machine, known before they start. Raises PreflightError.

Of SGLang 0.5.23: what storage holds of a prompt is fetched from a threshold of tokens on, and as long as prefetches
take less than half of the host pool (managers/cache_controller.py 623, 634).
"""

from __future__ import annotations

from pathlib import Path

from harness.caches import CACHES, check_shared, check_tiers
from harness.collectors.room import check_cores
from harness.engines.http.check import check_program, check_room
from harness.engines.sglang.settings import SglangSettings
from harness.errors import PreflightError
from harness.experiment.model import Experiment
from harness.experiment.units import format_bytes
from harness.experiment.workloads import PrefixWorkload, hit_tokens
from simulator.models import load_model
from traces.tiers import state_named, tier_named

# Of the host pool, what prefetches under way may take.
_PREFETCH_SHARE = 0.5


def check_sglang(experiment: Experiment, results: Path) -> None:
    """results: where the disk tier is unless cache.disk.path says otherwise."""
    cache, settings = experiment.cache, experiment.engines.of(SglangSettings)
    check_cores(settings.cores, "engines.sglang.cores")
    _check_states(experiment, settings)
    if settings.attach is not None:
        return
    check_tiers(cache, "sglang", "engines.sglang.hicache.storage", settings.hicache.storage, frozenset({"cpu"}))
    check_shared(cache, experiment.deployment, settings.hicache.storage)
    CACHES[settings.hicache.storage].check(cache)
    check_program(settings, "sglang", experiment.model)
    if cache.eviction is not None:
        raise PreflightError("cache.eviction is the LMCache server's, and HiCache drops what is oldest; remove it")
    words = "gpu, which lies in RAM with an accelerator, and cpu (and a device)"
    check_room(experiment, results, words, gpu_in_ram=bool(settings.paced_by))


def _check_states(experiment: Experiment, settings: SglangSettings) -> None:
    """Whether HiCache would ever serve the prefix from the tiers below the GPU."""
    workload, hicache = experiment.workload, settings.hicache
    if not isinstance(workload, PrefixWorkload):
        return
    states = [state_named(name) for name in experiment.measure.tiers]
    below = [state for state in states if state.served_by is not None and tier_named(state.served_by).offload]
    stored = [state for state in below if state.served_by is not None and tier_named(state.served_by).kind == "storage"]
    if below and hicache.write != "write_through":
        raise PreflightError(
            f"measure.tiers {below[0].name}: hicache.write {hicache.write} does not bring a prefix down when it is"
            " computed; use write_through, or a workload without tiers"
        )
    if not stored:
        return
    name, tokens = stored[0].name, hit_tokens(workload.prompt_tokens, workload.hit_rate, experiment.cache.chunk_tokens)
    if 0 < tokens < hicache.prefetch_threshold:
        raise PreflightError(
            f"measure.tiers {name}: a prefix of {tokens} tokens is below hicache.prefetch_threshold"
            f" {hicache.prefetch_threshold}, and is not fetched; lower it, or lengthen the prompt"
        )
    if hicache.prefetch == "best_effort":
        raise PreflightError(
            f"measure.tiers {name}: hicache.prefetch best_effort computes what storage has not brought when the"
            " request's turn comes, which is most of it; use wait_complete, or a workload without tiers"
        )
    need = workload.concurrency * tokens * load_model(experiment.model).kv_bytes_per_token
    room = int(_PREFETCH_SHARE * (experiment.cache.cpu or 0))
    if settings.attach is None and need > room:
        raise PreflightError(
            f"measure.tiers {name}: HiCache fetches into at most half of cache.cpu, {format_bytes(room)}, and the"
            f" prefixes are {format_bytes(need)}; enlarge cache.cpu, or lower workload.prompt_tokens or concurrency"
        )
