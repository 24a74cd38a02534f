"""What a server of an engine would fail by before it starts, whichever engine it is. Raises PreflightError."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from harness.caches.mooncake import BUFFER_BYTES
from harness.caches.stores import STORES
from harness.collectors.room import check_disk, check_memory
from harness.errors import PreflightError
from harness.experiment.model import Experiment
from simulator.models import load_model

_DISK_RESERVE_BYTES = 2 * 2**30


class _Settings(Protocol):
    @property
    def python(self) -> str: ...
    @property
    def model_path(self) -> str | None: ...


def check_program(settings: _Settings, section: str, model: str) -> None:
    """The engine's Python, and the weights. section: the settings are engines.SECTION. model: the experiment's."""
    if not os.access(settings.python, os.X_OK):
        raise PreflightError(
            f"engines.{section}.python: {settings.python} is no program; run scripts/engine_env {section}, or name"
            " your own"
        )
    if settings.model_path is None and not load_model(model).full_attention:
        raise PreflightError(
            f"model {model}: random weights have full attention in all layers, and it has others; name its weights"
            f" with engines.{section}.model_path"
        )
    if settings.model_path is not None and not Path(settings.model_path).exists():
        raise PreflightError(
            f"engines.{section}.model_path: {settings.model_path} does not exist; null makes random weights"
        )


def check_room(experiment: Experiment, results: Path, words: str, *, gpu_in_ram: bool) -> None:
    """Memory for the tiers and a device that lies in it, and the disk tier's room. words: what shares the memory.
    results: where the disk tier is unless cache.disk.path says otherwise."""
    cache, times = experiment.cache, experiment.deployment.copies
    device = experiment.storage.device if experiment.storage else None
    memory = times("cpu") * (cache.cpu or 0) + times("pool") * (cache.pool or 0)
    memory += times("gpu") * cache.gpu if gpu_in_ram else 0
    memory += (cache.disk.buffer or BUFFER_BYTES) if cache.pool and cache.disk else 0
    own_ram = cache.remote is not None and cache.remote.endpoint is None and not STORES[cache.remote.adapter].has_disk
    memory += cache.bytes_of("remote") or 0 if own_ram else 0
    memory += device.size if device and device.backing is None else 0
    check_memory(memory, words)
    if cache.disk is not None and device is None:
        folder = Path(cache.disk.path) if cache.disk.path else results
        check_disk(folder, times("disk") * cache.disk.capacity, _DISK_RESERVE_BYTES)
