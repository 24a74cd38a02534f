"""The simulator, as the rest of the harness sees it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.engines.kind import Clock, DiskTier, EngineKind, Traits, packs_of_the_file

if TYPE_CHECKING:
    from harness.engines.base import Engine
    from harness.engines.sim.settings import SimSettings
    from harness.experiment.model import Experiment
    from simulator.models import ModelSpec


def _settings() -> type[SimSettings]:
    from harness.engines.sim.settings import SimSettings

    return SimSettings


def _section(experiment: Experiment) -> SimSettings:
    return experiment.engines.of(_settings())


def _make(experiment: Experiment, model: ModelSpec, folder: Path, _clock: Clock) -> Engine:
    from harness.engines.sim.make import make_engine

    return make_engine(experiment, model, folder)


def _disk(experiment: Experiment) -> DiskTier:
    settings = _section(experiment)
    if settings.mode == "model":
        return DiskTier("modelled", "the simulator models its disk; set engines.sim.mode to storage, or remove it")
    if settings.storage.device == "file":
        return DiskTier("real")
    return DiskTier("none", f"engines.sim.storage.device is {settings.storage.device}; set it to file, or remove it")


def _traits(experiment: Experiment) -> Traits:
    """It does as its calibration says."""
    from simulator.calibration import load_calibration

    known = load_calibration(_section(experiment).hardware)
    return Traits(known.synchronous_loads, known.shared_core, known.serial_chunks)


def _consistent(experiment: Experiment) -> None:
    """Refuses what mode storage cannot do, and what only mode storage can."""
    from harness.experiment.workloads import PrefixWorkload

    cache, settings = experiment.cache, _section(experiment)
    if settings.mode == "storage" and cache.disk is None:
        raise ValueError("engines.sim.mode storage needs cache.disk: its bytes are what moves; add it")
    if settings.mode == "storage" and experiment.deployment.instances > 1:
        raise ValueError("deployment.instances must be 1 with engines.sim.mode storage: one engine has the device")
    if cache.gpu:
        return
    if settings.mode != "storage":
        raise ValueError("cache.gpu is 0: all KV on disk, which only engines.sim.mode storage does; set it")
    if isinstance(experiment.workload, PrefixWorkload):
        raise ValueError("cache.gpu is 0: a prefix workload has no other tier to be in; use a free load")
    if settings.storage.compute != "none":
        raise ValueError("cache.gpu is 0: no engine is simulated; set engines.sim.storage.compute to none")


def _check(experiment: Experiment, results: Path) -> None:
    from harness.collectors.room import check_disk
    from harness.errors import PreflightError

    disk, settings = experiment.cache.disk, _section(experiment)
    made = experiment.storage is not None and experiment.storage.device is not None
    if settings.mode != "storage" or disk is None or settings.storage.device != "file" or made:
        return
    if disk.path is not None and not Path(disk.path).is_dir():
        raise PreflightError(f"cache.disk.path: {disk.path} is no folder; make it, or name another")
    check_disk(Path(disk.path) if disk.path else results, disk.capacity, settings.storage.reserve)


KIND = EngineKind(
    settings=_settings,
    make=_make,
    disk=_disk,
    traits=_traits,
    packs=packs_of_the_file,
    consistent=_consistent,
    check=_check,
    without_gpu=True,
    simulated=True,
)
