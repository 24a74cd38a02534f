"""An engine that does as it is told: for what a real one cannot be made to do on demand.

It keeps exact books of its tiers, answers at made-up but repeatable times, and misbehaves as FakeSettings say:
requests that fail, a start that fails, and, after a number of requests, an offload tier that silently recomputes.
"""

from __future__ import annotations

import asyncio

import msgspec

from harness.engines.base import Emit
from harness.engines.fake.settings import FakeSettings
from harness.errors import EngineError
from harness.experiment.cache import Cache
from harness.experiment.model import Experiment
from harness.records import CUT_SHORT, Capabilities, Counters, Resolved, evidence_in, singly
from simulator.models import ModelSpec
from traces.load import Blocked, Done, Load, WaitUntil
from traces.request import Request, RequestRecord, Segment
from traces.tiers import PAGE_CACHE, tier_named, tier_names

# Seconds a token: computed; served by the engine's own tier, by RAM, by storage and, where that asks the device, more.
_COMPUTED_S = 1e-3
_SERVED_S = {"engine": 1e-6, "memory": 1e-5, "storage": 5e-5, "store": 7e-5}
_DEVICE_S = 1e-4
_RESTART_S = 30.0
_STORED = ("storage", "store")


class FakeEngine:
    """One request at a time, one prefix segment a request; a clock that moves by what it serves.

    It has the tiers that the experiment sizes, and those that no experiment can; each evicts the prefix that was used
    longest ago.
    """

    name = "fake"

    def __init__(self, experiment: Experiment, model: ModelSpec) -> None:
        self._experiment, self._settings = experiment, experiment.engines.of(FakeSettings)
        self._per_token = model.kv_bytes_per_token
        self._now_s = 0.0
        self._served = 0
        cache = experiment.cache
        sized = Cache.model_fields
        self._names = tuple(name for name in tier_names() if name not in sized or cache.bytes_of(name) is not None)
        self._tiers: dict[str, dict[Segment, None]] = {name: {} for name in (*tier_names(), PAGE_CACHE)}
        together, keeps = self._settings.resets, self._settings.keeps
        if keeps is None:
            keeps = tuple(name for name in self._names if tier_named(name).kind in _STORED)
        self.capabilities = Capabilities(
            tiers=frozenset(self._names),
            resets=singly((*self._names, PAGE_CACHE)) if together is None else frozenset(map(frozenset, together)),
            evidence=evidence_in(self._names, keeps),
            virtual_time=True,
            keeps=frozenset(keeps),
            no_restart="the fake is told to keep nothing; set engines.fake.keeps",
        )
        self._totals = self._zeros()
        self.running = False

    def _zeros(self) -> dict[str, int]:
        counted = frozenset().union(*self.capabilities.evidence.values()) | {"stores_begun", "stores_ended"}
        return dict.fromkeys(sorted(counted), 0)

    async def start(self) -> None:
        if self._settings.start_error is not None:
            raise EngineError(self._settings.start_error)
        self.running = True

    async def ready(self) -> Resolved:
        cache = self._experiment.cache
        return Resolved(
            **cache.sizes,
            chunk_tokens=cache.chunk_tokens,
            block_tokens=cache.block_tokens,
            kv_bytes_per_token=self._per_token,
            versions={"fake": "1"},
        )

    def now_s(self) -> float:
        return self._now_s

    async def reset(self, what: frozenset[str]) -> None:
        for names in self.capabilities.resets:
            if names & what and not names <= what:
                raise EngineError(f"the fake empties {' and '.join(sorted(names))} together; ask for all of them")
        if odd := what.difference(*self.capabilities.resets):
            raise EngineError(f"the fake cannot empty {', '.join(sorted(odd))}")
        for tier in what:
            self._tiers[tier].clear()

    async def restart(self) -> Resolved:
        """Files stay in the page cache, as on a machine that runs on."""
        for tier in self.capabilities.tiers - self.capabilities.keeps:
            self._tiers[tier].clear()
        self._totals, self._now_s = self._zeros(), self._now_s + _RESTART_S
        return await self.ready()

    async def replay(self, load: Load, emit: Emit) -> None:
        start_s, load_s = self._now_s, 0.0
        while not isinstance(action := load.next(load_s), Done):
            if isinstance(action, WaitUntil):
                load_s = action.at_s
                self._now_s = start_s + load_s
                continue
            assert not isinstance(action, Blocked), "one request at a time never blocks"
            await asyncio.sleep(self._settings.delay)
            record = self._serve(action.request, start_s + action.scheduled_s)
            load_s = self._now_s - start_s
            if load.cut_s is not None and load_s > load.cut_s:
                load_s = load.cut_s
                self._now_s = start_s + load_s
                unseen = {name: None for name in ("first_chunk_s", "first_token_s", "last_token_s", "output_tokens")}
                record = msgspec.structs.replace(record, **unseen, cached_tokens=None, error=CUT_SHORT)
            load.completed(action.request.id, load_s)
            emit(record)

    def _serve(self, request: Request, scheduled_s: float) -> RequestRecord:
        self._served += 1
        sent_s = self._now_s
        fields = {"scheduled_s": scheduled_s, "sent_s": sent_s, "prompt_tokens": request.prompt_tokens}
        identity = {"id": request.id, "session": request.session, "turn": request.turn}
        every = self._settings.fail_every
        if every and self._served % every == 0:
            return RequestRecord(**identity, **fields, error="the fake fails every so often")  # type: ignore[arg-type]
        hit, tier, from_device = self._look_up(request)
        self._count(request, hit, tier, from_device)
        each_s = _DEVICE_S if from_device else _SERVED_S[tier_named(tier).kind]
        self._now_s += (request.prompt_tokens - hit) * _COMPUTED_S + hit * each_s
        seen = {name: self._now_s for name in ("first_chunk_s", "first_token_s", "last_token_s")}
        return RequestRecord(**identity, **fields, **seen, output_tokens=request.output_tokens, cached_tokens=hit)  # type: ignore[arg-type]

    def _look_up(self, request: Request) -> tuple[int, str, bool]:
        """Tokens of the first segment that are cached, the tier that has them, and whether its device was read."""
        prefix, own = request.prompt[0], self._names[0]
        degraded = self._settings.degrade_after is not None and self._served > self._settings.degrade_after
        found = next((tier for tier in self._names if prefix in self._tiers[tier]), None)
        stored = found is not None and tier_named(found).kind in _STORED
        cold = prefix not in self._tiers[PAGE_CACHE]
        for tier in self._tiers:
            # What only storage has comes up into the engine's own tier, and RAM gives its buffer back.
            if not (stored and tier in self._names and tier_named(tier).kind == "memory"):
                self._keep(tier, prefix)
        if found is None or (found != own and degraded):
            return 0, own, False
        return prefix.tokens, found, stored and cold

    def _keep(self, tier: str, prefix: Segment) -> None:
        kept = self._tiers[tier]
        kept.pop(prefix, None)
        kept[prefix] = None
        size = self._experiment.cache.bytes_of(tier)
        while size is not None and sum(each.tokens for each in kept) * self._per_token > size:
            kept.pop(next(iter(kept)))

    def _count(self, request: Request, hit: int, tier: str, from_device: bool) -> None:
        totals = self._totals
        totals["computed_tokens"] += request.prompt_tokens - hit
        totals[f"{tier}_hit_tokens"] += hit
        totals["external_tokens"] += hit if tier_named(tier).offload else 0
        if tier_named(tier).kind in _STORED:
            totals[f"{tier}_loaded_chunks"] += hit // self._experiment.cache.chunk_tokens
            totals[f"{tier}_device_read_bytes"] += hit * self._per_token if from_device else 0
            if tier_named(tier).kind == "store":
                totals[f"{tier}_sent_bytes"] += hit * self._per_token

    async def metrics(self) -> Counters:
        return Counters.of(self._totals)

    async def stop(self) -> None:
        self.running = False
