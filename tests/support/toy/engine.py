"""An engine made of the fake, with a cache server of its own: what a new engine's folder holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from harness.caches import CACHES
from harness.caches.base import CachePlan, CacheServer, EngineSide
from harness.collectors.prometheus import Metrics
from harness.engines.fake.engine import FakeEngine
from harness.experiment.model import Experiment
from harness.records import Counters, Resolved, SchedulerLimits
from simulator.models import ModelSpec
from tests.support.toy.cache import STORE, StoreClient
from tests.support.toy.settings import ToySettings
from traces.request import Request, RequestRecord
from traces.tiers import PAGE_CACHE

_DECODED_S = 1e-3


class ToyEngine(FakeEngine):
    """Takes all requests at once, and serves one at a time. Its settings say whether its seconds are made up, or those
    of a process that moves the disk tier's bytes."""

    name = "toy"

    def __init__(self, experiment: Experiment, model: ModelSpec, folder: Path, clock: Callable[[], float]) -> None:
        super().__init__(experiment, model)
        settings = experiment.engines.of(ToySettings)
        self._clock, self._moves, self._slowness = clock, settings.disk == "real", settings.slowness
        self.capabilities = msgspec.structs.replace(self.capabilities, virtual_time=not self._moves)
        # It counts no stores, and what an engine does not count it does not report.
        del self._totals["stores_begun"], self._totals["stores_ended"]
        self._chunk_tokens = experiment.cache.chunk_tokens
        cache = experiment.cache
        if cache.disk is not None and settings.folder is not None:
            disk = cache.disk.model_copy(update={"path": settings.folder})
            cache = cache.model_copy(update={"disk": disk})
        plan = CachePlan(
            engine=self.name,
            python=Path("python"),
            cache=cache,
            folder=folder,
            cores=settings.cores.client,
            args=(STORE, str(self._chunk_tokens * self._per_token)) if self._moves else (),
        )
        self._cache: CacheServer = CACHES[settings.connector].make(plan)
        self._store: StoreClient | None = None

    async def start(self) -> None:
        self._cache.start()
        await self._cache.ready()
        if arguments := self._cache.connection().arguments:
            self._store = StoreClient(int(arguments[1]))
        await super().start()

    async def ready(self) -> Resolved:
        resolved, behind, backend = await super().ready(), await self._cache.resolved(), self._cache.backend
        block_bytes = self._experiment.cache.block_tokens * self._per_token
        return msgspec.structs.replace(
            resolved,
            gpu_blocks=self._experiment.cache.gpu // block_bytes,
            max_prompt_tokens=100_000,
            io_pids=self._cache.pids,
            disk_file_system=backend.file_system if backend else None,
            scheduler=SchedulerLimits(max_sequences=1),
            versions={"toy": "1"} | behind.versions,
        )

    def now_s(self) -> float:
        return self._clock() if self._moves else super().now_s()

    async def reset(self, what: frozenset[str]) -> None:
        await super().reset(what)
        for tier in sorted(what & {"disk", PAGE_CACHE}) if self._moves else ():
            await self._cache.clear(tier)

    def _serve(self, request: Request, scheduled_s: float) -> RequestRecord:
        """Like the fake's, and each output token takes a millisecond; the request has waited for those before it."""
        if self._moves:
            self._now_s = self._clock()
            record = super()._serve(request, self._now_s)
            self._now_s = self._clock()
            seen = dict.fromkeys(("first_chunk_s", "first_token_s", "last_token_s"), self._now_s)
            return msgspec.structs.replace(record, **seen)
        before_s = self._now_s
        record = super()._serve(request, scheduled_s)
        self._now_s = before_s + self._slowness * (self._now_s - before_s)
        first_s = self._now_s
        self._now_s += _DECODED_S * (request.output_tokens - 1)
        return msgspec.structs.replace(
            record, sent_s=scheduled_s, first_chunk_s=first_s, first_token_s=first_s, last_token_s=self._now_s
        )

    def _look_up(self, request: Request) -> tuple[int, str, bool]:
        prefix = request.prompt[0]
        in_ram, stored = (prefix in self._tiers[tier] for tier in ("cpu", "disk"))
        hit, tier, from_device = super()._look_up(request)
        if tier == "gpu" and in_ram:
            # The cache server looks up every prompt, those too of which the engine has the prefix itself.
            self._totals["cpu_hit_tokens"] += hit
        if self._store is not None and (not stored or tier == "disk"):
            self._store.move("read" if stored else "write", f"{prefix.hash_id:x}", prefix.tokens // self._chunk_tokens)
        return hit, tier, from_device

    async def metrics(self) -> Counters:
        """The cache server counts what it sees; the rest is the engine's."""
        behind = await self._cache.settle(EngineSide(metrics=Metrics(""), read_bytes=None))
        return Counters.of({**(await super().metrics()).named(), **behind.counters})

    async def stop(self) -> None:
        if self._store is not None:
            self._store.close()
        await self._cache.stop()
        await super().stop()
