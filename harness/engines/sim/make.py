"""Makes the simulator's engines from an experiment: one, a cluster, one with a real disk, or the disk alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness.caches.files import ADAPTERS
from harness.engines.base import Engine
from harness.engines.sim.engine import SimEngine
from harness.engines.sim.settings import SimSettings
from harness.engines.sim.storage import StorageDevice, StorageEngine
from harness.engines.sim.storage_only import StorageOnlyEngine
from harness.engines.vllm.settings import VllmSettings
from harness.errors import SettingsError
from harness.experiment.model import Experiment
from simulator.calibration import load_calibration, with_disk_of, without_compute
from simulator.cluster import Cluster
from simulator.models import ModelSpec
from simulator.policies import engine_policy, lmcache_evicting, tier_policy
from simulator.simulate import Simulator
from simulator.storage import StoreSettings


def _disk_limit(experiment: Experiment) -> int | None:
    """What a reference device lets through; None: no such device, or none in bytes."""
    device = experiment.storage.device if experiment.storage else None
    if device is None:
        return None
    limit = device.read_bandwidth or device.bandwidth
    return None if limit is None else round(limit)


def simulator_maker(
    experiment: Experiment, model: ModelSpec, *, token_times: bool, real_disk: bool = False
) -> Callable[[], Simulator]:
    """Makes fresh simulators as the experiment has them. Raises SettingsError now if it cannot.

    real_disk: the caller makes the disk's transfers on a real device.
    """
    cache, settings = experiment.cache, experiment.engines.of(SimSettings)
    if settings.mode == "storage" and not real_disk:
        raise SettingsError("engines.sim.mode storage: the server's devices are modelled only; set mode to model")
    calibration = load_calibration(settings.hardware)
    if settings.disk is not None:
        calibration = with_disk_of(calibration, load_calibration(settings.disk))
    if real_disk and settings.storage.compute == "none":
        calibration = without_compute(calibration)
    engine_rules, tier_rules = engine_policy(settings.engine_policy), tier_policy(settings.tier_policy)
    if evicts := cache.eviction:
        try:
            tier_rules = lmcache_evicting(tier_rules, evicts.policy, evicts.watermark, evicts.ratio)
        except ValueError as error:
            raise SettingsError(f"cache.eviction: {error}; remove it, or change engines.sim.tier_policy") from None

    def fresh() -> Simulator:
        return Simulator(
            model,
            calibration,
            engine_rules,
            tier_rules,
            gpu_blocks=cache.gpu // (model.kv_bytes_per_token * cache.block_tokens),
            block_tokens=cache.block_tokens,
            chunk_tokens=cache.chunk_tokens,
            cpu_bytes=cache.cpu,
            disk_bytes=cache.disk.capacity if cache.disk else None,
            odirect=real_disk or (cache.disk.odirect if cache.disk else False),
            external_disk=real_disk,
            disk_bytes_per_s=_disk_limit(experiment),
            disk_depth=ADAPTERS[cache.disk.adapter].depth if cache.disk else 1,
            max_num_batched_tokens=settings.max_batched_tokens,
            max_num_seqs=settings.max_sequences,
            record_token_times=token_times,
        )

    try:
        fresh()
    except ValueError as error:
        raise SettingsError(f"engines.sim: {error}") from None
    return fresh


def make_engine(experiment: Experiment, model: ModelSpec, folder: Path) -> Engine:
    """The engine that engines.sim describes; nothing of it has started. Raises SettingsError."""
    if experiment.engines.of(SimSettings).mode == "storage":
        return _storage(experiment, model, folder)
    fresh = simulator_maker(experiment, model, token_times=experiment.engines.of(SimSettings).token_times)
    if experiment.deployment.instances == 1:
        return SimEngine(fresh, tiers=experiment.cache.tiers)
    return SimEngine(_cluster_maker(experiment, fresh), cluster=True, tiers=experiment.cache.tiers)


def _cluster_maker(experiment: Experiment, like: Callable[[], Simulator]) -> Callable[[], Cluster]:
    asked = experiment.deployment

    def fresh() -> Cluster:
        return Cluster(like(), instances=asked.instances, routing=asked.routing, shared=asked.shared)

    try:
        fresh()
    except ValueError as error:
        raise SettingsError(f"deployment.{error}") from None
    return fresh


def _storage(experiment: Experiment, model: ModelSpec, folder: Path) -> Engine:
    """The simulator with a real disk; without a GPU tier the disk alone."""
    cache, settings = experiment.cache, experiment.engines.of(SimSettings).storage
    assert cache.disk is not None
    chunk_bytes = cache.chunk_tokens * model.kv_bytes_per_token
    files, place = settings.layout == "files", Path(cache.disk.path) if cache.disk.path else folder
    store = StoreSettings(
        device=settings.device,
        layout=settings.layout,
        adapter=cache.disk.adapter,
        model_name=experiment.engines.of(VllmSettings).model_path or str((folder / "model").absolute()),
        folder=place / f"kv-harness-{folder.name}" if files else place,
        chunk_bytes=chunk_bytes,
        slots=cache.disk.capacity // chunk_bytes,
        depth=settings.depth,
        io=settings.io,
        direct=cache.disk.odirect if files else settings.direct,
        fsync=settings.fsync,
        verify=settings.verify,
        reserve_bytes=settings.reserve,
        keep_files=settings.keep_files,
    )
    device = StorageDevice(store)
    if not cache.gpu:
        return StorageOnlyEngine(experiment, model, device)
    token_times = experiment.engines.of(SimSettings).token_times
    fresh = simulator_maker(experiment, model, token_times=token_times, real_disk=True)
    return StorageEngine(fresh, device, cache.tiers)
