"""What vLLM and LMCache would fail by on this machine, known before they start. Raises PreflightError."""

from __future__ import annotations

import os
from pathlib import Path

from harness.caches import CACHES
from harness.collectors.room import check_cores, check_disk, check_memory
from harness.engines.vllm.settings import VllmSettings
from harness.errors import PreflightError
from harness.experiment.model import Experiment

_GIB = 2**30
_DISK_RESERVE_BYTES = 2 * _GIB
# Of vLLM 0.32: its attention on CPU knows no other block sizes.
_CPU_ATTENTION_BLOCK = 32


def check(experiment: Experiment, results: Path) -> None:
    """results: where the disk tier is unless cache.disk.path says otherwise."""
    cache, settings = experiment.cache, experiment.engines.of(VllmSettings)
    check_cores(settings.cores, "engines.vllm.cores")
    if settings.attach is not None:
        return
    CACHES[settings.connector].check(cache)
    _check_settings(experiment, settings)
    device = experiment.storage.device if experiment.storage else None
    memory = (cache.cpu or 0) + (cache.gpu if settings.device == "cpu" else 0)
    memory += device.size if device and device.backing is None else 0
    what = "gpu, which lies in RAM with an accelerator, and cpu" if settings.accelerator else "gpu and cpu"
    check_memory(memory, f"{what} (and a device)")
    if cache.disk is not None and device is None:
        check_disk(Path(cache.disk.path) if cache.disk.path else results, cache.disk.capacity, _DISK_RESERVE_BYTES)


def _check_settings(experiment: Experiment, settings: VllmSettings) -> None:
    cache = experiment.cache
    if not os.access(settings.python, os.X_OK):
        raise PreflightError(
            f"engines.vllm.python: {settings.python} is no program; run scripts/engine_env vllm, or name your own"
        )
    if settings.device == "cpu" and cache.block_tokens % _CPU_ATTENTION_BLOCK:
        raise PreflightError(
            f"cache.block_tokens {cache.block_tokens}: vLLM without a GPU takes multiples of {_CPU_ATTENTION_BLOCK}"
        )
    if settings.model_path is not None and not Path(settings.model_path).exists():
        raise PreflightError(
            f"engines.vllm.model_path: {settings.model_path} does not exist; null makes random weights"
        )
