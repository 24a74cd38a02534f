"""SGLang, as the rest of the harness sees it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from harness.engines.kind import Clock, DiskTier, EngineKind, Environment, Packs, Traits

if TYPE_CHECKING:
    from harness.engines.base import Engine
    from harness.engines.proposal import Proposal, Wanted
    from harness.engines.sglang.settings import SglangSettings
    from harness.experiment.model import Experiment
    from simulator.models import ModelSpec


def _settings() -> type[SglangSettings]:
    from harness.engines.sglang.settings import SglangSettings

    return SglangSettings


def _section(experiment: Experiment) -> SglangSettings:
    return experiment.engines.of(_settings())


def _make(experiment: Experiment, model: ModelSpec, folder: Path, clock: Clock) -> Engine:
    from harness.engines.sglang.engine import SglangEngine

    return SglangEngine(experiment, model, folder, clock)


def _disk(experiment: Experiment) -> DiskTier:
    attach = _section(experiment).attach
    if attach is None or (attach.pid and attach.disk_path):
        return DiskTier("real")
    missing = "pid" if attach.disk_path else "disk_path"
    return DiskTier("none", f"nothing says where the attached server's I/O is; add engines.sglang.attach.{missing}")


def _disk_path(experiment: Experiment, results: Path) -> Path:
    attach, disk = _section(experiment).attach, experiment.cache.disk
    if attach is not None and attach.disk_path is not None:
        return Path(attach.disk_path)
    return Path(disk.path) if disk and disk.path else results


def _traits(experiment: Experiment) -> Traits:
    """A step waits for a loaded prefix layer by layer, beside it. The file backend reads one page after another, and
    copies each to the host's pool (cache_controller.py, _generic_page_get). A scheduler that waits for it gives its
    core up to the front end again and again, where they have only one."""
    files = experiment.cache.disk is not None
    one_core = len(_section(experiment).cores.of_engines or ()) == 1
    return Traits(yields_core=one_core, serial_chunks=files, copied_reads=files)


def _given(experiment: Experiment) -> Mapping[str, float]:
    from harness.engines.sglang.process import accelerator_of
    from simulator.models import load_model

    accelerator = accelerator_of(_section(experiment), load_model(experiment.model))
    return accelerator.constants if accelerator else {}


def _packs(experiment: Experiment) -> Packs:
    """HiCache over what the file has; how long a request waits for its prefetch is the pack's."""
    from harness.caches import CACHES

    waits = {"wait_complete": "-wait", "timeout": "", "best_effort": "-best-effort"}
    settings = _section(experiment)
    hicache = Packs("sglang-0.5.23", f"sglang-0.5.23-hicache{waits[settings.hicache.prefetch]}")
    below = CACHES[settings.hicache.storage]
    if experiment.cache.pool is None:
        return hicache
    lease_s = below.lease_s(settings.mooncake_args) if below.lease_s else None
    return hicache._replace(pool_policy=below.tier_policy, pool_lease=lease_s)


def _consistent(experiment: Experiment) -> None:
    device = experiment.storage.device if experiment.storage else None
    if device is not None and _section(experiment).attach is not None:
        raise ValueError("storage.device: a server that runs already has its own disk; remove it, or remove attach")


def _check(experiment: Experiment, results: Path) -> None:
    from harness.engines.sglang.check import check_sglang

    check_sglang(experiment, results)


def _unproven(experiment: Experiment) -> str:
    attach = _section(experiment).attach
    if attach is None:
        return ""
    missing = [
        f"engines.sglang.attach.{key} ({where})" for key, where in _WHERE.items() if getattr(attach, key) is None
    ]
    return f"add {' and '.join(missing)}" if missing else ""


# What an attached server does not say of itself, and where a user finds it.
_WHERE = {
    "disk_path": "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR of its start",
    "pid": "of `pgrep -f sglang.launch_server`",
}


def _propose(wanted: Wanted) -> Proposal:
    from harness.engines.sglang.proposal import propose_sglang

    return propose_sglang(wanted)


KIND = EngineKind(
    settings=_settings,
    make=_make,
    disk=_disk,
    traits=_traits,
    given=_given,
    packs=_packs,
    propose=_propose,
    attaches=True,
    consistent=_consistent,
    check=_check,
    cores=lambda experiment: _section(experiment).cores,
    disk_path=_disk_path,
    unproven=_unproven,
    untold="let the harness start SGLang: an attached one may tell its answers from their beginning each time",
    runs_already=lambda experiment: _section(experiment).attach is not None,
    environment=Environment(("sglang",)),
    traps="HiCache fetches nothing below 256 tokens (hicache.prefetch_threshold), cuts fetches off unless"
    " hicache.prefetch is wait_complete, into half of cache.cpu at most; /flush_cache refuses while stores go on",
)
