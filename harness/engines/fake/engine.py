"""An engine that does as it is told: for what a real one cannot be made to do on demand.

It keeps exact books of its tiers, answers at made-up but repeatable times, and misbehaves as FakeSettings say:
requests that fail, a start that fails, and, after a number of requests, an offload tier that silently recomputes.
"""

from __future__ import annotations

import asyncio

from harness.engines.base import Emit
from harness.engines.fake.settings import FakeSettings
from harness.errors import EngineError
from harness.experiment.model import Experiment
from harness.records import Capabilities, Counters, Resolved
from simulator.models import ModelSpec
from traces.load import Blocked, Done, Load, WaitUntil
from traces.request import Request, RequestRecord, Segment

_S_PER_TOKEN = {"computed": 1e-3, "gpu": 1e-6, "cpu": 1e-5, "disk": 5e-5, "disk_cold": 1e-4}


class FakeEngine:
    """One request at a time, one prefix segment a request; a clock that moves by what it serves."""

    name = "fake"
    capabilities = Capabilities(
        resets=frozenset({"gpu", "cpu", "disk", "page_cache"}),
        proves=frozenset({"recompute", "gpu", "cpu", "disk", "disk_cold"}),
        virtual_time=True,
    )

    def __init__(self, experiment: Experiment, model: ModelSpec) -> None:
        self._experiment, self._settings = experiment, experiment.engines.of(FakeSettings)
        self._per_token = model.kv_bytes_per_token
        self._now_s = 0.0
        self._served = 0
        self._tiers: dict[str, set[Segment]] = {tier: set() for tier in ("gpu", "cpu", "disk", "page_cache")}
        self._totals = dict.fromkeys(
            (
                "computed_tokens",
                "gpu_hit_tokens",
                "external_tokens",
                "cpu_hit_tokens",
                "disk_hit_tokens",
                "disk_loaded_chunks",
                "disk_device_read_bytes",
                "stores_begun",
                "stores_ended",
            ),
            0,
        )
        self.running = False

    async def start(self) -> None:
        if self._settings.start_error is not None:
            raise EngineError(self._settings.start_error)
        self.running = True

    async def ready(self) -> Resolved:
        cache = self._experiment.cache
        return Resolved(
            gpu_bytes=cache.gpu,
            cpu_bytes=cache.cpu,
            disk_bytes=cache.disk.capacity if cache.disk else None,
            chunk_tokens=cache.chunk_tokens,
            block_tokens=cache.block_tokens,
            kv_bytes_per_token=self._per_token,
            versions={"fake": "1"},
        )

    def now_s(self) -> float:
        return self._now_s

    async def reset(self, what: frozenset[str]) -> None:
        for tier in what:
            self._tiers[tier].clear()

    async def replay(self, load: Load, emit: Emit) -> None:
        start_s = self._now_s
        while not isinstance(action := load.next(self._now_s - start_s), Done):
            if isinstance(action, WaitUntil):
                self._now_s = start_s + action.at_s
                continue
            assert not isinstance(action, Blocked), "one request at a time never blocks"
            await asyncio.sleep(self._settings.delay)
            record = self._serve(action.request, start_s + action.scheduled_s)
            load.completed(action.request.id, self._now_s - start_s)
            emit(record)

    def _serve(self, request: Request, scheduled_s: float) -> RequestRecord:
        self._served += 1
        sent_s = self._now_s
        fields = {"scheduled_s": scheduled_s, "sent_s": sent_s, "prompt_tokens": request.prompt_tokens}
        identity = {"id": request.id, "session": request.session, "turn": request.turn}
        every = self._settings.fail_every
        if every and self._served % every == 0:
            return RequestRecord(**identity, **fields, error="the fake fails every so often")  # type: ignore[arg-type]
        hit, tier = self._look_up(request)
        self._count(request, hit, tier)
        self._now_s += (request.prompt_tokens - hit) * _S_PER_TOKEN["computed"] + hit * _S_PER_TOKEN[tier]
        seen = {name: self._now_s for name in ("first_chunk_s", "first_token_s", "last_token_s")}
        return RequestRecord(**identity, **fields, **seen, output_tokens=request.output_tokens, cached_tokens=hit)  # type: ignore[arg-type]

    def _look_up(self, request: Request) -> tuple[int, str]:
        """Tokens of the first segment that are cached, and where they were found."""
        prefix = request.prompt[0]
        degraded = self._settings.degrade_after is not None and self._served > self._settings.degrade_after
        found = next((t for t in ("gpu", "cpu", "disk") if prefix in self._tiers[t]), None)
        cold = prefix not in self._tiers["page_cache"]
        for tier in ("gpu", "cpu", "disk", "page_cache"):
            self._tiers[tier].add(prefix)
        if found == "disk":
            self._tiers["cpu"].discard(prefix)
        if found is None or (found != "gpu" and degraded):
            return 0, "gpu"
        return prefix.tokens, "disk_cold" if found == "disk" and cold else found

    def _count(self, request: Request, hit: int, tier: str) -> None:
        totals = self._totals
        totals["computed_tokens"] += request.prompt_tokens - hit
        totals["gpu_hit_tokens"] += hit if tier == "gpu" else 0
        totals["external_tokens"] += 0 if tier == "gpu" else hit
        totals["cpu_hit_tokens"] += hit if tier == "cpu" else 0
        from_disk = hit if tier.startswith("disk") else 0
        totals["disk_hit_tokens"] += from_disk
        totals["disk_loaded_chunks"] += from_disk // self._experiment.cache.chunk_tokens
        totals["disk_device_read_bytes"] += from_disk * self._per_token if tier == "disk_cold" else 0

    async def metrics(self) -> Counters:
        return Counters.of(self._totals)

    async def stop(self) -> None:
        self.running = False
