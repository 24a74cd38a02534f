"""The simulator, as the rest of the harness sees it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.engines.kind import Clock, DiskTier, EngineKind, Traits, packs_of_the_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.engines.base import Engine
    from harness.engines.proposal import Proposal, Wanted
    from harness.engines.sim.settings import SimSettings
    from harness.experiment.model import Experiment
    from simulator.models import ModelSpec
    from traces.request import Request


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
    if experiment.cache.disk is None and settings.mode == "tiers":
        return DiskTier("none", "there is no cache.disk; add it, or remove this")
    if settings.mode == "model":
        return DiskTier("modelled", "the simulator models its disk; set engines.sim.mode to storage, or remove it")
    if settings.storage.device == "file":
        return DiskTier("real")
    return DiskTier("none", f"engines.sim.storage.device is {settings.storage.device}; set it to file, or remove it")


def _traits(experiment: Experiment) -> Traits:
    """It does as its calibration says."""
    from simulator.calibration import load_calibration

    known = load_calibration(_section(experiment).hardware)
    return Traits(*(getattr(known, name) for name in Traits._fields))


def _consistent(experiment: Experiment) -> None:
    """Refuses what modes storage and tiers cannot do, and what only they can."""
    cache, settings = experiment.cache, _section(experiment)
    if settings.mode == "storage" and cache.disk is None:
        raise ValueError("engines.sim.mode storage needs cache.disk: its bytes are what moves; add it")
    if settings.mode != "model" and experiment.deployment.instances > 1:
        raise ValueError(f"deployment.instances must be 1 with engines.sim.mode {settings.mode}: it has the devices")
    if settings.mode == "tiers":
        _consistent_tiers(experiment)
    elif not cache.gpu:
        raise ValueError(
            "cache: gpu has capacity 0: tiers without an engine, which only engines.sim.mode tiers does; set it"
        )


def _consistent_tiers(experiment: Experiment) -> None:
    from harness.experiment.workloads import PrefixWorkload

    cache = experiment.cache
    moved = ("gpu", "cpu", "disk")
    if odd := sorted(cache.tiers - set(moved)):
        raise ValueError(f"engines.sim.mode tiers has no {odd[0]}; remove cache.{odd[0]}, or use {', '.join(moved)}")
    if not cache.tiers:
        raise ValueError("engines.sim.mode tiers needs a tier; give cache.gpu, cache.cpu or cache.disk a size")
    if isinstance(experiment.workload, PrefixWorkload):
        raise ValueError("engines.sim.mode tiers has no engine whose states a prefix could be in; use a free load")


def _check(experiment: Experiment, results: Path) -> None:
    from harness.collectors.room import check_disk
    from harness.errors import PreflightError

    disk, settings = experiment.cache.disk, _section(experiment)
    if settings.mode == "tiers":
        _check_memory(experiment)
    made = experiment.storage is not None and experiment.storage.device is not None
    if settings.mode == "model" or disk is None or settings.storage.device != "file" or made:
        return
    if disk.path is not None and not Path(disk.path).is_dir():
        raise PreflightError(f"cache.disk.path: {disk.path} is no folder; make it, or name another")
    check_disk(Path(disk.path) if disk.path else results, disk.capacity, settings.storage.reserve)


def _check_memory(experiment: Experiment) -> None:
    """Whether the tiers in memory have the memory that they take."""
    from harness.collectors.room import check_memory
    from harness.errors import PreflightError
    from simulator.gpu_memory import why_no_gpu

    settings, cache = _section(experiment), experiment.cache
    on_gpu = settings.tiers.gpu == "gpu"
    if cache.gpu and on_gpu and (why := why_no_gpu()):
        raise PreflightError(
            f"cache.gpu: {why}; set it to 0B, or engines.sim.tiers.gpu to ram, which lets RAM stand for it"
        )
    in_ram = (cache.cpu or 0) + (0 if on_gpu else cache.gpu)
    check_memory(in_ram, "the tiers in memory")


def _check_load(experiment: Experiment, model: ModelSpec, requests: Sequence[Request]) -> None:
    """Whether the last tier has room for every request of a load by itself. Raises PreflightError."""
    from harness.engines.sim.entries import slots_of
    from harness.errors import PreflightError
    from harness.experiment.units import format_compared
    from traces.tiers import tier_names

    settings, chunk_tokens = _section(experiment), experiment.cache.chunk_tokens
    if settings.mode != "tiers":
        return
    tier = next(name for name in reversed(tier_names()) if name in experiment.cache.tiers)
    chunk_bytes, size = chunk_tokens * model.kv_bytes_per_token, experiment.cache.bytes_of(tier) or 0
    grain = settings.tiers.entry
    largest = max(requests, key=lambda request: slots_of(request, grain, chunk_tokens), default=None)
    if largest is not None and (need := slots_of(largest, grain, chunk_tokens)) > size // chunk_bytes:
        needed, held = format_compared(need * chunk_bytes, size)
        raise PreflightError(
            f"cache.{tier} {held} is the last tier, and the KV of request {largest.id} is {needed}; enlarge the tier,"
            " or shorten the requests"
        )


def _propose(wanted: Wanted) -> Proposal:
    from harness.engines.sim.proposal import propose_sim

    return propose_sim(wanted)


KIND = EngineKind(
    settings=_settings,
    make=_make,
    disk=_disk,
    traits=_traits,
    packs=packs_of_the_file,
    propose=_propose,
    consistent=_consistent,
    check=_check,
    check_load=_check_load,
    without_gpu=True,
    simulated=True,
)
