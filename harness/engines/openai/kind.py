"""A server behind a URL, as the rest of the harness sees it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.engines.kind import Clock, DiskTier, EngineKind, Traits, packs_of_the_file

if TYPE_CHECKING:
    from harness.engines.base import Engine
    from harness.engines.openai.settings import OpenAISettings
    from harness.experiment.model import Experiment
    from simulator.models import ModelSpec


def _settings() -> type[OpenAISettings]:
    from harness.engines.openai.settings import OpenAISettings

    return OpenAISettings


def _make(experiment: Experiment, model: ModelSpec, folder: Path, clock: Clock) -> Engine:
    from harness.engines.openai.engine import OpenAIEngine

    return OpenAIEngine(experiment, model, folder, clock)


KIND = EngineKind(
    settings=_settings,
    make=_make,
    disk=lambda _: DiskTier("none", "a server behind a URL has storage of its own; remove it"),
    traits=lambda _: Traits(),
    packs=packs_of_the_file,
    untold="set engines.openai.token_ids true if the server takes return_token_ids, as vLLM does",
)
