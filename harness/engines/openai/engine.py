"""Any OpenAI-compatible server: load goes in, latencies come out. No tier of it can be set or proven."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import httpx

from harness.engines.base import Emit
from harness.engines.http.clients import Clients
from harness.engines.http.dialect import Completions
from harness.engines.http.replay import HttpReplay
from harness.engines.openai.settings import OpenAISettings
from harness.errors import EngineError, SettingsError
from harness.experiment.model import Experiment
from harness.records import Capabilities, Counters, Resolved
from simulator.models import ModelSpec
from traces.load import Load
from traces.request import TokenSource


class OpenAIEngine:
    """An URL behind the Engine seam. folder: the run's. clock: gives the run's time in seconds."""

    name = "openai"

    def __init__(self, experiment: Experiment, model: ModelSpec, folder: Path, clock: Callable[[], float]) -> None:
        settings = experiment.engines.of(OpenAISettings)
        self._settings, self._clock = settings, clock
        self.capabilities = Capabilities(starts_empty=False, quotes=settings.token_ids)
        self._key = _key(settings.api_key_env)
        self._vocab_size = settings.vocab_size or model.vocab_size
        self._replay = HttpReplay(
            settings.url.rstrip("/"),
            Completions(settings.model),
            TokenSource(experiment.seed, self._vocab_size),
            clock,
            api_key=self._key,
            request_timeout_s=experiment.measure.request_timeout,
            clients=Clients.if_several(settings.clients, folder),
        )

    async def start(self) -> None:
        await self._replay.open()

    async def ready(self) -> Resolved:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        url = f"{self._settings.url.rstrip('/')}/v1/models"
        try:
            async with httpx.AsyncClient(timeout=10) as client:
                response = await client.get(url, headers=headers)
        except httpx.HTTPError as error:
            raise EngineError(f"{url} does not answer ({type(error).__name__}); correct engines.openai.url") from None
        if response.status_code in (401, 403):
            raise EngineError(f"{url} refuses the key (status {response.status_code}); set engines.openai.api_key_env")
        return Resolved(vocab_size=self._vocab_size, url=self._settings.url)

    def now_s(self) -> float:
        return self._clock()

    async def reset(self, what: frozenset[str]) -> None:
        if what:
            raise EngineError(f"engine openai cannot empty {', '.join(sorted(what))}; use a workload without tiers")

    async def replay(self, load: Load, emit: Emit) -> None:
        await self._replay.replay(load, emit)

    async def metrics(self) -> Counters:
        return Counters()

    async def stop(self) -> None:
        await self._replay.close()


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise SettingsError(
            f"engines.openai.api_key_env: the environment has no {variable}; export it, or remove the key"
        )
    return key
