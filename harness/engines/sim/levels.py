"""The tiers below the GPU as the simulator takes them, from an experiment."""

from __future__ import annotations

import math

from msgspec.structs import replace

from harness.engines.sim.settings import RemoteDeviceSettings, SimSettings
from harness.experiment.model import Experiment
from simulator.levels import Level, RemoteDevice, standard_levels
from simulator.policies import TierPolicy, tier_policy
from traces.tiers import all_tiers

# Operations that LMCache's adapters have in flight (lmcache/v1/distributed/l2_adapters: s3_num_io_threads,
# num_workers).
CONNECTIONS = {"s3": 64, "resp": 8}


def simulated_levels(experiment: Experiment, first: TierPolicy, below: TierPolicy) -> tuple[Level, ...]:
    """The tiers below the GPU, with the packs and devices that engines.sim names. Raises ValueError for an unknown
    pack."""
    cache, settings = experiment.cache, experiment.engines.of(SimSettings)
    sizes = {tier.name: cache.bytes_of(tier.name) for tier in all_tiers()}
    devices: dict[str, str | RemoteDevice] = {
        name: of if isinstance(of, str) else _remote_device(of) for name, of in settings.devices.items()
    }
    if cache.remote is not None and (link := cache.remote.network) is not None:
        # A link that all instances have in common: one alone gets all of it.
        whole = RemoteDevice(
            latency_s=link.latency,
            bytes_per_s=link.bandwidth,
            total_bytes_per_s=link.bandwidth,
            connections=CONNECTIONS[cache.remote.adapter],
        )
        devices.setdefault("remote", whole)
    if absent := [name for name in (*settings.policies, *settings.devices) if not sizes[name]]:
        raise ValueError(f"policies and devices are of tiers that cache has; remove {absent[0]}, or give it a size")
    levels = []
    for level in standard_levels(first, below, sizes):
        named = settings.policies.get(level.name)
        policy = level.policy if named is None else tier_policy(named)
        levels.append(replace(level, policy=policy, device=devices.get(level.name)))
    return tuple(levels)


def _remote_device(settings: RemoteDeviceSettings) -> RemoteDevice:
    return RemoteDevice(
        latency_s=settings.latency,
        overhead_s=settings.overhead,
        bytes_per_s=settings.bandwidth,
        total_bytes_per_s=math.inf if settings.total_bandwidth is None else settings.total_bandwidth,
        connections=settings.connections,
    )
