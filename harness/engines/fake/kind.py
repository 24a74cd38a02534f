"""The fake, as the rest of the harness sees it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.engines.kind import Clock, DiskTier, EngineKind, Traits, packs_of_the_file

if TYPE_CHECKING:
    from harness.engines.base import Engine
    from harness.engines.fake.settings import FakeSettings
    from harness.experiment.model import Experiment
    from simulator.models import ModelSpec


def _settings() -> type[FakeSettings]:
    from harness.engines.fake.settings import FakeSettings

    return FakeSettings


def _make(experiment: Experiment, model: ModelSpec, _folder: Path, _clock: Clock) -> Engine:
    from harness.engines.fake.engine import FakeEngine

    return FakeEngine(experiment, model)


KIND = EngineKind(
    settings=_settings,
    make=_make,
    disk=lambda _: DiskTier("none", "the fake has no files; remove it"),
    traits=lambda _: Traits(),
    packs=packs_of_the_file,
)
