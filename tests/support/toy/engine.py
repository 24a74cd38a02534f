"""An engine made of the fake, with a cache server of its own: what a new engine's folder holds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from harness.caches import CACHES
from harness.caches.base import CachePlan, CacheResolved, CacheServer, Connection, EngineSide, Reading
from harness.collectors.prometheus import Metrics
from harness.engines.fake.engine import FakeEngine
from harness.errors import EngineError
from harness.experiment.model import Experiment
from harness.records import Resolved
from simulator.models import ModelSpec
from tests.support.toy.settings import ToySettings
from traces.request import Request, RequestRecord


class ToyCache:
    """A CacheServer without a process."""

    children = pids = ()
    backend = None

    def __init__(self, _plan: CachePlan) -> None:
        self.running = False

    def start(self) -> None:
        self.running = True

    async def ready(self) -> None:
        await asyncio.sleep(0)

    def connection(self) -> Connection:
        return Connection(arguments=("--cache", "toy"))

    async def resolved(self) -> CacheResolved:
        return CacheResolved(versions={"toy-cache": "2"})

    async def settle(self, _engine: EngineSide) -> Reading:
        return Reading()

    async def clear(self, tier: str) -> None:
        raise EngineError(f"the toy cache cannot empty {tier}; leave it")

    async def stop(self) -> None:
        self.running = False


class ToyEngine(FakeEngine):
    """Asks its cache server what an engine asks."""

    name = "toy"

    def __init__(self, experiment: Experiment, model: ModelSpec, folder: Path) -> None:
        super().__init__(experiment, model)
        settings = experiment.engines.of(ToySettings)
        plan = CachePlan(engine=self.name, python=Path("python"), cache=experiment.cache, folder=folder)
        self._cache: CacheServer = CACHES[settings.connector].make(plan)

    async def start(self) -> None:
        self._cache.start()
        await self._cache.ready()
        await super().start()

    async def ready(self) -> Resolved:
        resolved, behind = await super().ready(), await self._cache.resolved()
        await self._cache.settle(EngineSide(metrics=Metrics(""), read_bytes=None))
        return msgspec.structs.replace(
            resolved, gpu_blocks=1000, max_prompt_tokens=100_000, versions={"toy": "1"} | behind.versions
        )

    def _serve(self, request: Request, scheduled_s: float) -> RequestRecord:
        """Like the fake's, and each output token takes a millisecond."""
        record = super()._serve(request, scheduled_s)
        self._now_s += 1e-3 * (request.output_tokens - 1)
        return msgspec.structs.replace(record, last_token_s=self._now_s)

    async def stop(self) -> None:
        await self._cache.stop()
        await super().stop()
