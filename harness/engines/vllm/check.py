"""What vLLM and LMCache would fail by on this machine, known before they start. Raises PreflightError."""

from __future__ import annotations

from pathlib import Path

from harness.caches import CACHES, attaching, check_shared, check_tiers
from harness.caches.stores import STORES
from harness.collectors.room import check_cores
from harness.engines.http.check import check_program, check_room
from harness.engines.vllm.settings import VllmSettings
from harness.errors import PreflightError
from harness.experiment.model import Experiment

# Of vLLM 0.32: its attention on CPU knows no other block sizes.
_CPU_ATTENTION_BLOCK = 32


def check(experiment: Experiment, results: Path) -> None:
    """results: where the disk tier is unless cache.disk.path says otherwise."""
    cache, settings = experiment.cache, experiment.engines.of(VllmSettings)
    check_cores(settings.cores, "engines.vllm.cores")
    check_tiers(
        cache, "vllm", "engines.vllm.connector", settings.connector if settings.attach is None else attaching("vllm")
    )
    if settings.attach is not None:
        return
    check_shared(cache, experiment.deployment, settings.connector)
    CACHES[settings.connector].check(cache)
    _check_settings(experiment, settings)
    gpu = "gpu, which lies in RAM with an accelerator," if settings.accelerator else "gpu"
    below = "and cpu" if cache.pool is None else "with cpu and pool"
    check_room(experiment, results, f"{gpu} {below} (and a device)", gpu_in_ram=settings.device == "cpu")
    if cache.remote is not None:
        STORES[cache.remote.adapter].check(cache.remote, Path(settings.python))


def _check_settings(experiment: Experiment, settings: VllmSettings) -> None:
    cache = experiment.cache
    check_program(settings, "vllm", experiment.model)
    if settings.device == "cpu" and cache.block_tokens % _CPU_ATTENTION_BLOCK:
        raise PreflightError(
            f"cache.block_tokens {cache.block_tokens}: vLLM without a GPU takes multiples of {_CPU_ATTENTION_BLOCK}"
        )
