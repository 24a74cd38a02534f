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
from harness.records import (
    CUT_SHORT,
    Capabilities,
    ClusterShape,
    Counters,
    EvictionRules,
    PresetFacts,
    Resolved,
    evidence_in,
    singly,
)
from simulator.cluster import Cluster, Routing, SharedTier
from simulator.policies import lmcache_eviction
from simulator.simulate import Completion, SimCounters, Simulator
from traces.load import Blocked, Done, Load, Send, WaitUntil
from traces.request import RequestRecord, TokensByTier
from traces.tiers import COMPUTED, PAGE_CACHE, tier_named, tier_names

# What a simulator can hold KV in, and its rows name whether it has it or not.
SIMULATED_TIERS = ("gpu", "cpu", "disk")
# So many turns of the loop before others (a progress bar) get one.
TURNS_BEFORE_YIELD = 64


class SimEngine:
    """An engine around a fresh simulator a start. Record times are the simulator's seconds since that start.

    tiers: those that its simulators have.
    """

    name = "sim"

    def __init__(
        self,
        make: Callable[[], Simulator | Cluster],
        *,
        tiers: Collection[str] = SIMULATED_TIERS,
    ) -> None:
        self._make = make
        self._running: Simulator | Cluster | None = None
        keeps = _keeps(tiers)
        self.capabilities = Capabilities(
            tiers=frozenset(tiers),
            resets=singly((*tier_names(), PAGE_CACHE)),
            evidence=_evidence(tiers, keeps),
            deterministic=True,
            virtual_time=True,
            routings=frozenset(get_args(Routing)),
            quotes=True,
            keeps=keeps,
            no_restart="a pool's disk lacks what its RAM has not evicted; remove cache.pool",
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
        rules = None if one.bytes_of("cpu") is None else lmcache_eviction(one.tier_policy)
        cluster = None
        if isinstance(running, Cluster):
            cluster = ClusterShape(instances=instances, routing=running.routing, shared=tuple(shared))

        def of_all(tier: SharedTier) -> int | None:
            size = one.bytes_of(tier)
            return None if size is None else size * (1 if tier in shared else instances)

        return Resolved(
            gpu_bytes=one.gpu_blocks * one.block_tokens * bytes_per_token * instances,
            cpu_bytes=of_all("cpu"),
            pool_bytes=of_all("pool"),
            disk_bytes=of_all("disk"),
            remote_bytes=of_all("remote"),
            gpu_blocks=one.gpu_blocks,
            block_tokens=one.block_tokens,
            chunk_tokens=one.chunk_tokens,
            kv_bytes_per_token=bytes_per_token,
            max_prompt_tokens=min(one.model.max_position, room) - 1,
            vocab_size=one.model.vocab_size,
            versions={
                "engine_policy": one.engine_policy.name,
                "tier_policy": one.tier_policy.name,
                **({} if one.bytes_of("pool") is None else {"pool_policy": one.pool_policy.name}),
                "calibration": one.calibration.name,
            },
            eviction=None if rules is None else msgspec.convert(rules, EvictionRules),
            cluster=cluster,
            calibration_source=one.calibration.source,
            preset=PresetFacts(
                name=one.calibration.name,
                machine=one.calibration.machine,
                date=one.calibration.date,
                standing=one.calibration.standing,
            ),
        )

    async def reset(self, what: frozenset[str]) -> None:
        self._simulator.drain()
        self._simulator.reset(what)

    async def restart(self) -> Resolved:
        """Empties what is in memory. Neither it nor a fresh process's first steps take time; counters go on."""
        await self.reset(self.capabilities.tiers - self.capabilities.keeps)
        return await self.ready()

    async def replay(self, load: Load, emit: Emit) -> None:
        await _Replay(self._simulator, load, emit).run()

    def now_s(self) -> float:
        return 0.0 if self._running is None else self._running.now_s

    async def metrics(self) -> Counters:
        self._simulator.drain()
        running = self._simulator
        found = _named(running.counters())
        if isinstance(running, Cluster):
            each = tuple(Counters.of(_named(one)) for one in running.counters_by_instance())
            return msgspec.structs.replace(Counters.of(found), by_instance=each)
        return Counters.of(found)

    async def stop(self) -> None:
        self._running = None

    @property
    def _simulator(self) -> Simulator | Cluster:
        if self._running is None:
            raise EngineError("the simulator has not been started: call start first")
        return self._running


def _keeps(tiers: Collection[str]) -> frozenset[str]:
    """What lies in storage survives. A pool hands down what it evicts: none of it is below it for sure."""
    if "pool" in tiers:
        return frozenset()
    return frozenset(tier for tier in tiers if tier_named(tier).kind in ("storage", "store"))


def _evidence(tiers: Collection[str], keeps: Collection[str]) -> dict[str, frozenset[str]]:
    """What proves each state. A simulated store says what it sends; it has no device of its own behind that."""
    found = {name: needed - {"remote_device_read_bytes"} for name, needed in evidence_in(tiers, keeps).items()}
    return {name: needed for name, needed in found.items() if name != "remote_cold"}


def _named(totals: SimCounters) -> dict[str, int | None]:
    return {
        "computed_tokens": totals.computed_tokens,
        "gpu_hit_tokens": totals.gpu_hit_tokens,
        "external_tokens": totals.external_tokens,
        "cpu_hit_tokens": totals.l1_hit_tokens,
        "pool_hit_tokens": totals.pool_hit_tokens,
        "pool_loaded_chunks": totals.pool_loaded_chunks,
        "disk_hit_tokens": totals.l2_hit_tokens,
        "disk_loaded_chunks": totals.l2_loaded_chunks,
        "remote_hit_tokens": totals.remote_hit_tokens,
        "remote_loaded_chunks": totals.remote_loaded_chunks,
        "remote_sent_bytes": totals.remote_read_bytes,
        "stores_begun": totals.stores_begun,
        "stores_ended": totals.stores_ended,
        "disk_device_read_bytes": totals.storage_read_bytes,
    }


class _Replay:
    """One load on a simulator. The load's time 0 is the simulator's time at the beginning."""

    def __init__(self, simulator: Simulator | Cluster, load: Load, emit: Emit) -> None:
        self._simulator, self._load, self._emit = simulator, load, emit
        self._start_s = simulator.now_s
        self._load_s = 0.0
        self._sent: dict[str, tuple[Send, float]] = {}

    async def run(self) -> None:
        turn, cut_s = 0, self._load.cut_s
        while not isinstance(action := self._load.next(self._load_s), Done) or self._sent:
            if isinstance(action, Send):
                self._send(action)
            elif cut_s is not None and self._load_s >= cut_s:
                self._cut()
            else:
                self._advance(action)
            turn += 1
            if turn % TURNS_BEFORE_YIELD == 0:
                await asyncio.sleep(0)

    def _send(self, send: Send) -> None:
        now_s = self._simulator.now_s
        self._simulator.submit(send.request, now_s)
        self._sent[send.request.id] = (send, now_s)

    def _cut(self) -> None:
        """Ends the load's requests where they are. The simulator has no way to take one back: it serves them unseen."""
        for send, sent_s in self._sent.values():
            self._emit(cut_record(send, sent_s, self._start_s))
            self._load.completed(send.request.id, self._load_s)
        while self._sent:
            for completion in self._simulator.advance(math.inf):
                del self._sent[completion.id]

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


def cut_record(send: Send, sent_s: float, start_s: float) -> RequestRecord:
    """The row of a request that its load's time ended."""
    return RequestRecord(
        id=send.request.id,
        scheduled_s=start_s + send.scheduled_s,
        sent_s=sent_s,
        prompt_tokens=send.request.prompt_tokens,
        session=send.request.session,
        turn=send.request.turn,
        error=CUT_SHORT,
    )


def record_of(
    completion: Completion, send: Send, sent_s: float, start_s: float, instance: int | None = None
) -> RequestRecord:
    failed = completion.error is not None
    by_tier: TokensByTier = {source: getattr(completion, source) for source in (COMPUTED, *SIMULATED_TIERS)}
    by_tier |= {tier: tokens for tier in ("pool", "remote") if (tokens := getattr(completion, tier)) is not None}
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
