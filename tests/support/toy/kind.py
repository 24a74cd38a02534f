"""The toy engine and the toy cache server, as the rest of the harness sees them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.caches.kind import CacheKind
from harness.engines.kind import Clock, DiskTier, EngineKind, Packs, Traits

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


def _make(experiment: Experiment, model: ModelSpec, folder: Path, _clock: Clock) -> Engine:
    from tests.support.toy.engine import ToyEngine

    return ToyEngine(experiment, model, folder)


def _make_cache(plan: CachePlan) -> CacheServer:
    from tests.support.toy.engine import ToyCache

    return ToyCache(plan)


def _check(experiment: Experiment, _results: Path) -> None:
    from harness.collectors.room import check_cores

    check_cores(_section(experiment).cores, "engines.toy.cores")


KIND = EngineKind(
    settings=_settings,
    make=_make,
    disk=lambda experiment: DiskTier(_section(experiment).disk, "the toy has no files; remove it"),
    traits=lambda _: Traits(synchronous_loads=True),
    packs=lambda experiment: Packs("vllm-0.32", "lru") if _section(experiment).packs else None,
    check=_check,
    cores=lambda experiment: _section(experiment).cores,
)
CACHE = CacheKind(engines=frozenset({"toy"}), make=_make_cache, check=lambda _: None, tier_policy="lru")
