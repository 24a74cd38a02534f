"""Makes the simulator's engines from an experiment: one, a cluster, one with a real disk, or tiers alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from harness.caches.files import ADAPTERS
from harness.engines.base import Engine
from harness.engines.sim.engine import SimEngine
from harness.engines.sim.levels import simulated_levels
from harness.engines.sim.real_tiers import RealLevel, RealTiers
from harness.engines.sim.settings import SimSettings
from harness.engines.sim.storage import StorageDevice, StorageEngine
from harness.engines.sim.tiers_only import TiersOnlyEngine
from harness.engines.vllm.settings import VllmSettings
from harness.errors import SettingsError
from harness.experiment.model import Experiment
from simulator.calibration import at_host_time, load_calibration, with_disk_of, without_compute
from simulator.cluster import Cluster
from simulator.models import ModelSpec
from simulator.policies import TierPolicy, engine_policy, lmcache_evicting, tier_policy
from simulator.simulate import Simulator
from simulator.storage import DeviceKind, StoreSettings
from traces.tiers import tier_names


def _disk_limit(experiment: Experiment) -> int | None:
    """What a reference device lets through; None: no such device, or none in bytes."""
    device = experiment.storage.device if experiment.storage else None
    if device is None:
        return None
    limit = device.read_bandwidth or device.bandwidth
    return None if limit is None else round(limit)


def _pool_rules(experiment: Experiment) -> TierPolicy:
    """Raises SettingsError."""
    settings, disk = experiment.engines.of(SimSettings), experiment.cache.disk
    rules = tier_policy(settings.pool_policy)
    if settings.pool_lease is not None:
        if not rules.lease_s:
            raise SettingsError(f"engines.sim.pool_lease: {rules.name} has no leases; remove it, or change pool_policy")
        rules = msgspec.structs.replace(rules, lease_s=settings.pool_lease)
    if disk is not None and disk.buffer is not None:
        rules = msgspec.structs.replace(rules, disk_buffer_bytes=disk.buffer)
    return rules


def simulator_maker(
    experiment: Experiment, model: ModelSpec, *, token_times: bool, real_disk: bool = False
) -> Callable[[], Simulator]:
    """Makes fresh simulators as the experiment has them. Raises SettingsError now if it cannot.

    real_disk: the caller makes the disk's transfers on a real device.
    """
    cache, settings = experiment.cache, experiment.engines.of(SimSettings)
    if settings.mode != "model" and not real_disk:
        raise SettingsError(
            f"engines.sim.mode {settings.mode}: the server's devices are modelled only; set mode to model"
        )
    calibration = load_calibration(settings.hardware)
    if settings.disk is not None:
        calibration = with_disk_of(calibration, load_calibration(settings.disk))
    if real_disk and settings.storage.compute == "none":
        calibration = without_compute(calibration)
    calibration = at_host_time(calibration, settings.host_time)
    engine_rules, tier_rules = engine_policy(settings.engine_policy), tier_policy(settings.tier_policy)
    pool_rules = _pool_rules(experiment)
    if evicts := cache.eviction:
        try:
            tier_rules = lmcache_evicting(tier_rules, evicts.policy, evicts.watermark, evicts.ratio)
        except ValueError as error:
            raise SettingsError(f"cache.eviction: {error}; remove it, or change engines.sim.tier_policy") from None

    if cache.save_decode_cache:
        tier_rules = replace(tier_rules, stores_replies=True)

    def fresh() -> Simulator:
        return Simulator(
            model,
            calibration,
            engine_rules,
            tier_rules,
            gpu_blocks=cache.gpu // (model.kv_bytes_per_token * cache.block_tokens),
            block_tokens=cache.block_tokens,
            chunk_tokens=cache.chunk_tokens,
            pool_pack=pool_rules,
            levels=simulated_levels(experiment, tier_rules, pool_rules),
            odirect=real_disk or (cache.disk.odirect if cache.disk else False),
            external_disk=real_disk,
            disk_bytes_per_s=_disk_limit(experiment),
            disk_depth=ADAPTERS[cache.disk.adapter].depth if cache.disk else 1,
            max_num_batched_tokens=settings.max_batched_tokens,
            max_num_seqs=settings.max_sequences,
            record_token_times=token_times,
            seed=experiment.seed,
        )

    try:
        fresh()
    except ValueError as error:
        raise SettingsError(f"engines.sim: {error}") from None
    return fresh


def make_engine(experiment: Experiment, model: ModelSpec, folder: Path) -> Engine:
    """The engine that engines.sim describes; nothing of it has started. Raises SettingsError."""
    real = {"storage": _storage, "tiers": _tiers}.get(experiment.engines.of(SimSettings).mode)
    if real is not None:
        return real(experiment, model, folder)
    fresh = simulator_maker(experiment, model, token_times=experiment.engines.of(SimSettings).token_times)
    several = experiment.deployment.instances > 1
    return SimEngine(_cluster_maker(experiment, fresh) if several else fresh, tiers=experiment.cache.tiers)


def _cluster_maker(experiment: Experiment, like: Callable[[], Simulator]) -> Callable[[], Cluster]:
    asked = experiment.deployment

    def fresh() -> Cluster:
        return Cluster(like(), instances=asked.instances, routing=asked.routing, shared=asked.shared)

    try:
        fresh()
    except ValueError as error:
        raise SettingsError(f"deployment.{error}") from None
    return fresh


def _store_settings(experiment: Experiment, model: ModelSpec, tier: str, folder: Path) -> StoreSettings:
    """How the bytes of a tier move: the disk's as engines.sim.storage says, those of memory by copies."""
    cache, settings = experiment.cache, experiment.engines.of(SimSettings)
    storage, chunk_bytes = settings.storage, cache.chunk_tokens * model.kv_bytes_per_token
    slots = (cache.bytes_of(tier) or 0) // chunk_bytes
    if tier != "disk":
        device: DeviceKind = settings.tiers.gpu if tier == "gpu" else "ram"
        return StoreSettings(
            device=device, chunk_bytes=chunk_bytes, slots=slots, verify=storage.verify, reserve_bytes=storage.reserve
        )
    assert cache.disk is not None
    files, place = storage.layout == "files", Path(cache.disk.path) if cache.disk.path else folder
    return StoreSettings(
        device=storage.device,
        layout=storage.layout,
        adapter=cache.disk.adapter,
        model_name=experiment.engines.of(VllmSettings).model_path or str((folder / "model").absolute()),
        folder=place / f"kv-harness-{folder.name}" if files else place,
        chunk_bytes=chunk_bytes,
        slots=slots,
        depth=storage.depth,
        io=storage.io,
        direct=cache.disk.odirect if files else storage.direct,
        fsync=storage.fsync,
        verify=storage.verify,
        reserve_bytes=storage.reserve,
        keep_files=storage.keep_files,
    )


def _storage(experiment: Experiment, model: ModelSpec, folder: Path) -> Engine:
    """The simulator with a real disk."""
    device = StorageDevice(_store_settings(experiment, model, "disk", folder))
    token_times = experiment.engines.of(SimSettings).token_times
    fresh = simulator_maker(experiment, model, token_times=token_times, real_disk=True)
    return StorageEngine(fresh, device, experiment.cache.tiers)


def _tiers(experiment: Experiment, model: ModelSpec, folder: Path) -> Engine:
    """Every tier of the cache on a real device, and no engine."""
    levels = [
        RealLevel(tier, StorageDevice(_store_settings(experiment, model, tier, folder)))
        for tier in tier_names()
        if experiment.cache.bytes_of(tier)
    ]
    settings = experiment.engines.of(SimSettings).tiers
    return TiersOnlyEngine(experiment, model, RealTiers(levels, settings, experiment.cache.chunk_tokens))
