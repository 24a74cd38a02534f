"""The simulator as an engine: the same loads, records and counters as a real one, in virtual time.

A cluster of simulated engines is one engine here; each record says which instance served it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from typing import get_args

import msgspec

from harness.engines.base import Emit
from harness.errors import EngineError
from harness.records import Capabilities, ClusterShape, Counters, EvictionRules, Resolved, evidence_in, singly
from simulator.cluster import Cluster, Routing, SharedTier
from simulator.policies import lmcache_eviction
from simulator.simulate import Completion, Simulator
from traces.load import Blocked, Done, Load, Send, WaitUntil
from traces.request import RequestRecord, TokensByTier
from traces.tiers import COMPUTED, PAGE_CACHE

# What a simulator can hold KV in.
SIMULATED_TIERS = ("gpu", "cpu", "disk")
# So many turns of the loop before others (a progress bar) get one.
TURNS_BEFORE_YIELD = 64


class SimEngine:
    """An engine around a fresh simulator a start. Record times are the simulator's seconds since that start.

    cluster: `make` makes clusters. A prefix is then on one instance and the next request perhaps on another, so that
    no tier's state can be proven for it. tiers: those that its simulators have.
    """

    name = "sim"

    def __init__(
        self,
        make: Callable[[], Simulator | Cluster],
        *,
        cluster: bool = False,
        tiers: Collection[str] = SIMULATED_TIERS,
    ) -> None:
        self._make = make
        self._running: Simulator | Cluster | None = None
        self.capabilities = Capabilities(
            tiers=frozenset(tiers),
            resets=singly((*SIMULATED_TIERS, PAGE_CACHE)),
            evidence={} if cluster else evidence_in(tiers),
            deterministic=True,
            virtual_time=True,
            routings=frozenset(get_args(Routing)),
        )

    async def start(self) -> None:
        try:
            self._running = self._make()
        except ValueError as error:
            raise EngineError(f"the simulator does not start: {error}") from error

    async def ready(self) -> Resolved:
        running = self._simulator
        one = running.like if isinstance(running, Cluster) else running
        instances, shared = (running.instances, running.shared) if isinstance(running, Cluster) else (1, ())
        bytes_per_token = one.model.kv_bytes_per_token
        room = (one.gpu_blocks - 1) * one.block_tokens  # one block is the engine's own
        rules = None if one.cpu_bytes is None else lmcache_eviction(one.tier_policy)
        cluster = None
        if isinstance(running, Cluster):
            cluster = ClusterShape(instances=instances, routing=running.routing, shared=tuple(shared))

        def of_all(tier: SharedTier, size: int | None) -> int | None:
            return None if size is None else size * (1 if tier in shared else instances)

        return Resolved(
            gpu_bytes=one.gpu_blocks * one.block_tokens * bytes_per_token * instances,
            cpu_bytes=of_all("cpu", one.cpu_bytes),
            disk_bytes=of_all("disk", one.disk_bytes),
            gpu_blocks=one.gpu_blocks,
            block_tokens=one.block_tokens,
            chunk_tokens=one.chunk_tokens,
            kv_bytes_per_token=bytes_per_token,
            max_prompt_tokens=min(one.model.max_position, room) - 1,
            vocab_size=one.model.vocab_size,
            versions={
                "engine_policy": one.engine_policy.name,
                "tier_policy": one.tier_policy.name,
                "calibration": one.calibration.name,
            },
            eviction=None if rules is None else msgspec.convert(rules, EvictionRules),
            cluster=cluster,
            calibration_source=one.calibration.source,
        )

    async def reset(self, what: frozenset[str]) -> None:
        self._simulator.drain()
        self._simulator.reset(what)

    async def replay(self, load: Load, emit: Emit) -> None:
        await _Replay(self._simulator, load, emit).run()

    def now_s(self) -> float:
        return 0.0 if self._running is None else self._running.now_s

    async def metrics(self) -> Counters:
        self._simulator.drain()
        totals = self._simulator.counters()
        return Counters.of(
            {
                "computed_tokens": totals.computed_tokens,
                "gpu_hit_tokens": totals.gpu_hit_tokens,
                "external_tokens": totals.external_tokens,
                "cpu_hit_tokens": totals.l1_hit_tokens,
                "disk_hit_tokens": totals.l2_hit_tokens,
                "disk_loaded_chunks": totals.l2_loaded_chunks,
                "stores_begun": totals.stores_begun,
                "stores_ended": totals.stores_ended,
                "disk_device_read_bytes": totals.storage_read_bytes,
            }
        )

    async def stop(self) -> None:
        self._running = None

    @property
    def _simulator(self) -> Simulator | Cluster:
        if self._running is None:
            raise EngineError("the simulator has not been started: call start first")
        return self._running


class _Replay:
    """One load on a simulator. The load's time 0 is the simulator's time at the beginning."""

    def __init__(self, simulator: Simulator | Cluster, load: Load, emit: Emit) -> None:
        self._simulator, self._load, self._emit = simulator, load, emit
        self._start_s = simulator.now_s
        self._load_s = 0.0
        self._sent: dict[str, tuple[Send, float]] = {}

    async def run(self) -> None:
        turn = 0
        while not isinstance(action := self._load.next(self._load_s), Done) or self._sent:
            if isinstance(action, Send):
                self._send(action)
            else:
                self._advance(action)
            turn += 1
            if turn % TURNS_BEFORE_YIELD == 0:
                await asyncio.sleep(0)

    def _send(self, send: Send) -> None:
        now_s = self._simulator.now_s
        self._simulator.submit(send.request, now_s)
        self._sent[send.request.id] = (send, now_s)

    def _advance(self, action: WaitUntil | Blocked | Done) -> None:
        until_s = self._start_s + action.at_s if isinstance(action, WaitUntil) else math.inf
        try:
            completions = self._simulator.advance(until_s)
        except RuntimeError as error:
            raise EngineError(f"the simulator cannot go on: {error}") from error
        self._load_s = self._simulator.now_s - self._start_s
        if not completions:
            if not isinstance(action, WaitUntil):
                raise EngineError("the load waits for a completion and nothing is in flight: check its sessions")
            # The difference of two moments may fall short of the intended one by a rounding.
            self._load_s = max(self._load_s, action.at_s)
        for completion in completions:
            send, sent_s = self._sent.pop(completion.id)
            instance = completion.instance if isinstance(self._simulator, Cluster) else None
            self._emit(record_of(completion, send, sent_s, self._start_s, instance))
            self._load.completed(completion.id, self._load_s)


def record_of(
    completion: Completion, send: Send, sent_s: float, start_s: float, instance: int | None = None
) -> RequestRecord:
    failed = completion.error is not None
    by_tier: TokensByTier = {source: getattr(completion, source) for source in (COMPUTED, *SIMULATED_TIERS)}
    return RequestRecord(
        id=completion.id,
        scheduled_s=start_s + send.scheduled_s,
        sent_s=sent_s,
        first_chunk_s=completion.first_token_s,
        first_token_s=completion.first_token_s,
        last_token_s=completion.last_token_s,
        token_s=completion.token_s,
        prompt_tokens=completion.prompt_tokens,
        output_tokens=None if failed else completion.output_tokens,
        cached_tokens=None if failed else completion.prompt_tokens - completion.computed,
        tokens_by_tier={} if failed else by_tier,
        session=send.request.session,
        turn=send.request.turn,
        instance=instance,
        preemptions=None if failed else completion.preemptions,
        error=completion.error,
    )
