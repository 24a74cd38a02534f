"""The toy engine and the toy cache server, as the rest of the harness sees them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.caches import CACHES
from harness.caches.kind import CacheKind
from harness.engines.kind import Clock, DiskTier, EngineKind, Packs, Traits
from simulator.policies import EnginePolicy, TierPolicy

if TYPE_CHECKING:
    from harness.caches.base import CachePlan, CacheServer
    from harness.engines.base import Engine
    from harness.experiment.model import Experiment
    from simulator.models import ModelSpec
    from tests.support.toy.settings import ToySettings


def _settings() -> type[ToySettings]:
    from tests.support.toy.settings import ToySettings

    return ToySettings


def _section(experiment: Experiment) -> ToySettings:
    return experiment.engines.of(_settings())


def _make(experiment: Experiment, model: ModelSpec, folder: Path, clock: Clock) -> Engine:
    from tests.support.toy.engine import ToyEngine

    return ToyEngine(experiment, model, folder, clock)


def _make_cache(plan: CachePlan) -> CacheServer:
    from tests.support.toy.cache import ToyCache

    return ToyCache(plan)


def _check(experiment: Experiment, _results: Path) -> None:
    from harness.collectors.room import check_cores

    check_cores(_section(experiment).cores, "engines.toy.cores")


def _disk_path(experiment: Experiment, results: Path) -> Path:
    disk, folder = experiment.cache.disk, _section(experiment).folder
    return Path(folder or (disk.path if disk else None) or results)


def _packs(experiment: Experiment) -> Packs | None:
    settings = _section(experiment)
    return Packs(ENGINE_PACK.name, CACHES[settings.connector].tier_policy) if settings.packs else None


ENGINE_PACK = EnginePolicy(name="toy-1", null_blocks=0)
CACHE_PACK = TierPolicy(
    name="toy-cache-2", evict_on_demand=True, keep_prefetched=False, max_prefetches=1, disk_evicts=True
)
KIND = EngineKind(
    settings=_settings,
    make=_make,
    disk=lambda experiment: DiskTier(_section(experiment).disk, "the toy has no files; remove it"),
    traits=lambda experiment: Traits(synchronous_loads=_section(experiment).synchronous_loads),
    packs=_packs,
    check=_check,
    cores=lambda experiment: _section(experiment).cores,
    disk_path=_disk_path,
)
CACHE = CacheKind(
    engines=frozenset({"toy"}),
    tiers=frozenset({"cpu"}),
    make=_make_cache,
    check=lambda _: None,
    tier_policy=CACHE_PACK.name,
)
