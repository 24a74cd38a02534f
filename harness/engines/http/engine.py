"""Real servers behind the Engine seam: what is the same for every engine that we start, or attach to, over HTTP.

An engine's own module says what its servers have resolved, what they count, and how they are emptied. Several instances
are one engine here: a router of ours chooses one for each request, and counters are totals over all.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from harness.caches.base import CacheResolved, CacheServer, Connection, EngineSide, Reading, clear_tiers
from harness.collectors.prometheus import Metrics
from harness.engines.base import Emit
from harness.engines.http.clients import Clients
from harness.engines.http.dialect import Dialect
from harness.engines.http.process import ServerProcess
from harness.engines.http.replay import HttpReplay
from harness.experiment.model import Experiment
from harness.processes.child import Child, child_environment, outlive
from harness.records import Capabilities, ClusterShape, Counters, Resolved
from simulator.models import ModelSpec
from traces.load import Load
from traces.request import RequestRecord, TokenSource
from traces.routing import Router
from traces.tiers import all_tiers

# How long an engine's counters may lag its answers.
_COUNTER_LAG_S = 10.0
P = TypeVar("P", bound=ServerProcess)


@dataclass
class Instance(Generic[P]):
    """process: a server of the engine. cache: the place of its cache server among the engine's; None: it has none.
    base_tokens: prompt tokens that it had counted before the first request. sent_tokens: of what was answered."""

    process: P
    cache: int | None
    base_tokens: int = 0
    sent_tokens: int = 0


class Look(NamedTuple):
    """Counters of all servers at one time: by instance, and by cache server."""

    engines: tuple[Metrics, ...]
    caches: tuple[Reading, ...]


class ServedEngine(ABC, Generic[P]):
    """processes: the engine's servers, one an instance. caches: what stands behind them: nothing, one cache server, or
    one for each. model: of which the KV is. folder: the run's. clock: gives the run's time in seconds. clients: the
    processes that send the load; None: this one.

    prompt_tokens: the counter of prompt tokens in a server's metrics. own_tiers: tiers that a server empties by itself.
    look_s: the time between two looks at counters that lag.
    """

    name: str
    look_s = 0.02
    prompt_tokens: str
    own_tiers: frozenset[str]

    def __init__(
        self,
        experiment: Experiment,
        model: ModelSpec,
        folder: Path,
        clock: Callable[[], float],
        *,
        processes: Sequence[P],
        caches: Sequence[CacheServer],
        dialect: Dialect,
        capabilities: Capabilities,
        clients: Clients | None = None,
    ) -> None:
        self._experiment, self._model, self._folder, self._clock = experiment, model, folder, clock
        # The closest of a few: this process may lose its core between the two clocks.
        self._origin_s = min(time.perf_counter() - clock() for _ in range(9))
        self.caches, self.capabilities = tuple(caches), capabilities
        place = [number if len(caches) > 1 else 0 for number in range(len(processes))]
        self._instances = [Instance(process, place[n] if caches else None) for n, process in enumerate(processes)]
        self._dialect, self._router, self._clients = dialect, _router(experiment), clients
        self._replay: HttpReplay | None = None
        self._at_rest = False  # nothing was sent since the counters had settled
        # By cache server: requests of those answered that it has to look up, and those that it had before the first.
        self._lookups_due, self._base_lookups = [0] * len(caches), [0] * len(caches)

    # ---- what an engine says

    @abstractmethod
    async def _resolved(self, look: Look, behind: Sequence[CacheResolved]) -> Resolved:
        """What the servers, which answer, say of themselves; behind: what each cache server says. Raises EngineError
        where the experiment contradicts it."""

    async def _warm_up(self) -> None:
        """What its caches need before the first request that counts."""

    @abstractmethod
    async def _empty(self, process: P, what: frozenset[str]) -> None:
        """Empties these of own_tiers in a server; waits until done. EngineError."""

    @abstractmethod
    def _counted(self, metrics: Metrics) -> Mapping[str, int | None]:
        """What a server counts of itself, by the names of Counters.named."""

    def _rests(self, _look: Look, _counters: Counters) -> bool:
        """Whether nothing that a cache server does not wait for is under way, some time after the last answer."""
        return True

    # ---- lifecycle

    async def start(self) -> None:
        for cache in self.caches:
            cache.start()
        for cache in self.caches:
            if cache.precedes:
                await cache.ready()
        for one in self._instances:
            known = one.cache is not None and not one.process.attached
            one.process.start(self.caches[one.cache or 0].connection() if known else Connection())

    async def ready(self) -> Resolved:
        resolved = await self._come_up()
        await self._warm_up()
        return resolved

    async def restart(self) -> Resolved:
        # Between the old processes and the new ones, it alone deletes the files after a SIGKILL of ours.
        stored = [folder for cache in self.caches if cache.backend for folder in cache.backend.scratch]
        log, env = self._folder / "logs" / "restart.log", child_environment({})
        keeper = Child("keeper of the storage", ["sleep", "infinity"], log=log, env=env, stored=stored)
        keeper.start()
        restarted = False
        try:
            await self._end(keep=True)
            self._at_rest = False
            for one in self._instances:
                one.sent_tokens = 0
            self._lookups_due = [0] * len(self.caches)
            if self._router is not None:
                self._router.forget(blocks=True, chunks=False)
            await self.start()
            restarted = True
            return await self._come_up()
        finally:
            if not restarted:
                await asyncio.shield(self.stop())
            await asyncio.shield(keeper.stop(keep=restarted))

    async def _come_up(self) -> Resolved:
        for cache in self.caches:
            if not cache.precedes:
                await cache.ready()
        # An engine whose cache server is gone would come up minutes later, or never.
        await outlive([child for cache in self.caches for child in cache.children], self._all_ready())
        behind = [await cache.resolved() for cache in self.caches]
        look = await self._look()
        resolved = await self._resolved(look, behind)
        self._base_lookups = [reading.lookups or 0 for reading in look.caches]
        for one, metrics in zip(self._instances, look.engines, strict=True):
            one.base_tokens = metrics.total(self.prompt_tokens) or 0
        self._replay = HttpReplay(
            [one.process.url for one in self._instances],
            self._dialect,
            TokenSource(self._experiment.seed, self._model.vocab_size),
            self._clock,
            router=self._router,
            request_timeout_s=self._experiment.measure.request_timeout,
            clients=self._clients,
        )
        await self._replay.open()
        return resolved

    async def _all_ready(self) -> None:
        for one in self._instances:
            await one.process.ready()

    async def stop(self) -> None:
        await self._end(keep=False)

    async def _end(self, *, keep: bool) -> None:
        """keep: what lies in storage stays, and `start` may follow."""
        if self._replay is not None:
            await self._replay.close()
        await asyncio.gather(*(one.process.stop(keep=keep) for one in self._instances))
        await asyncio.gather(*(cache.stop(keep=keep) for cache in self.caches))

    # ---- work

    async def replay(self, load: Load, emit: Emit) -> None:
        assert self._replay is not None, "replay before ready"
        self._at_rest = False

        def count_and_emit(record: RequestRecord) -> None:
            one = self._instances[record.instance or 0]
            if record.error is None:
                one.sent_tokens += record.prompt_tokens
                if one.cache is not None:
                    self._lookups_due[one.cache] += record.prompt_tokens > self._experiment.cache.chunk_tokens
            emit(record)

        await outlive(self._children, self._replay.replay(load, count_and_emit), self._replay.give_up)

    def pids(self) -> tuple[int, ...]:
        return tuple(pid for child in self._children for pid in child.pids)

    @property
    def _children(self) -> tuple[Child, ...]:
        """Cache servers first: without its own, vLLM waits a minute for each load, and then goes on without."""
        caches = [child for cache in self.caches for child in cache.children]
        return (*caches, *(one.process.child for one in self._instances if one.process.child))

    async def reset(self, what: frozenset[str]) -> None:
        await outlive(self._children, self._reset(what))

    async def _reset(self, what: frozenset[str]) -> None:
        if own := what & self.own_tiers:
            await asyncio.gather(*(self._empty(one.process, own) for one in self._instances))
        await clear_tiers(self.caches, what - self.own_tiers)
        if self._router is not None:
            below = {tier.name for tier in all_tiers() if tier.offload} & self.capabilities.tiers
            self._router.forget(blocks="gpu" in what, chunks=below <= what)

    def now_s(self) -> float:
        return self._clock()

    async def metrics(self) -> Counters:
        """All servers' counters, once they account for every request that was answered: they lag the responses."""
        counters = await outlive(self._children, self._now() if self._at_rest else self._settled())
        self._at_rest = True
        return counters

    async def _now(self) -> Counters:
        return self._counters(await self._look())

    async def _settled(self) -> Counters:
        lagging = time.monotonic() + _COUNTER_LAG_S
        while True:
            look = await self._look()
            counters = self._counters(look)
            rests = self._rests(look, counters)
            if rests and (self._accounted(look) or time.monotonic() > lagging):
                return counters
            await asyncio.sleep(self.look_s)

    async def _look(self) -> Look:
        engines = [await one.process.metrics() for one in self._instances]
        caches = []
        for place, cache in enumerate(self.caches):
            # One that several instances have is no part of theirs, and reads nothing of them.
            number = next(n for n, one in enumerate(self._instances) if one.cache == place)
            side = EngineSide(metrics=engines[number], read_bytes=self._instances[number].process.read_bytes())
            caches.append(await cache.settle(side))
        return Look(tuple(engines), tuple(caches))

    def _accounted(self, look: Look) -> bool:
        """Whether the counters have all that was answered."""
        for one, metrics in zip(self._instances, look.engines, strict=True):
            if (metrics.total(self.prompt_tokens) or 0) - one.base_tokens < one.sent_tokens:
                return False
        told = zip(look.caches, self._base_lookups, self._lookups_due, strict=True)
        return all(reading.lookups is None or reading.lookups - base >= due for reading, base, due in told)

    def _counters(self, look: Look) -> Counters:
        alone = len(self.caches) == len(self._instances)
        each = []
        for one, metrics in zip(self._instances, look.engines, strict=True):
            behind = look.caches[one.cache].counters if alone and one.cache is not None else {}
            each.append({**self._counted(metrics), **behind, **one.process.pace(self._origin_s)})
        # The last one looked when the others had settled: its store's account lacks nothing that they have loaded.
        below = look.caches[-1].of_store if look.caches else {}
        shared = look.caches[0].counters if look.caches and not alone else {}
        return Counters.of_all(each, {**shared, **below})

    # ---- several instances

    @property
    def _cluster(self) -> ClusterShape | None:
        asked = self._experiment.deployment
        if asked.instances == 1:
            return None
        return ClusterShape(instances=asked.instances, routing=asked.routing, shared=asked.shared)

    def _disk_bytes(self) -> int | None:
        """The disk tier of all instances together."""
        disk = self._experiment.cache.disk
        return None if disk is None else disk.capacity * self._experiment.deployment.copies("disk")


def _router(experiment: Experiment) -> Router | None:
    """None: one instance gets all."""
    asked, cache = experiment.deployment, experiment.cache
    if asked.instances == 1:
        return None
    below = any(tier.offload for tier in all_tiers() if tier.name in cache.tiers)
    return Router(
        asked.routing,
        asked.instances,
        block_tokens=cache.block_tokens,
        chunk_tokens=cache.chunk_tokens if below else None,
        shared=bool(asked.shared),
    )


def runs_already(section: str) -> str:
    """Why servers that are attached to are not restarted, and the cure."""
    return f"it runs already, and the harness restarts only what it has started; remove engines.{section}.attach"


def total(sizes: Sequence[int | None]) -> int | None:
    """Bytes of several servers; None where one does not say, or there is none."""
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None
