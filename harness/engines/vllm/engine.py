"""A real vLLM with LMCache behind it, over HTTP: started here as child processes, or attached to.

Flags and metrics are those of vLLM 0.32 and LMCache 0.5.6. Two connectors: multi-process (an LMCache server, which
also runs without a GPU) and in-process (GPU builds of vLLM; on CPU it silently recomputes, which the evidence shows).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from harness.caches import CACHES, caches_of
from harness.caches.base import Attached, CachePlan, CacheResolved, CacheServer, Connection, EngineSide, Reading
from harness.collectors.prometheus import Metrics
from harness.engines.accelerator import Accelerator
from harness.engines.base import Emit
from harness.engines.http.dialect import Completions
from harness.engines.http.replay import HttpReplay
from harness.engines.vllm.process import SERVED_NAME, VllmProcess
from harness.engines.vllm.settings import VllmSettings
from harness.errors import EngineError
from harness.experiment.model import Experiment
from harness.processes.child import Child, outlive
from harness.records import Capabilities, Counters, EvictionRules, Resolved, evidence_in, singly
from simulator.models import ModelSpec
from traces.load import Load
from traces.request import RequestRecord, TokenSource
from traces.tiers import PAGE_CACHE

_COUNTER_LAG_S = 10.0


class VllmEngine:
    """vLLM behind the Engine seam. `folder` is the run's; `clock` gives the run's time in seconds."""

    name = "vllm"

    def __init__(self, experiment: Experiment, model: ModelSpec, folder: Path, clock: Callable[[], float]) -> None:
        self._experiment, self._folder, self._clock = experiment, folder, clock
        self._settings: VllmSettings = experiment.engines.of(VllmSettings)
        name = self._settings.accelerator
        self._accelerator = Accelerator(name, self._settings.link, model) if name else None
        self._model = self._accelerator.shape if self._accelerator else model
        self.capabilities = _capabilities(experiment)
        self.cache_server = self._make_cache_server()
        self._vllm = VllmProcess(experiment, model, folder, accelerator=self._accelerator)
        self._replay: HttpReplay | None = None
        self._sent_tokens = self._lookups_due = 0
        self._base_tokens = self._base_lookups = 0

    # ---- lifecycle

    async def start(self) -> None:
        if self.cache_server is not None:
            self.cache_server.start()
            # vLLM registers with the cache server as it comes up, so that one has to answer first.
            await self.cache_server.ready()
        self._vllm.start(self.cache_server.connection() if self.cache_server else Connection())

    def _make_cache_server(self) -> CacheServer | None:
        cache, settings, attach = self._experiment.cache, self._settings, self._settings.attach
        attached, connector = None, settings.connector
        if attach is not None:
            if attach.lmcache_url is None:
                return None
            disk_path = Path(attach.disk_path) if attach.disk_path else None
            attached = Attached(url=attach.lmcache_url, pid=attach.lmcache_pid, disk_path=disk_path)
            connector = next(name for name in caches_of(self.name) if CACHES[name].attaches)
        elif cache.cpu is None:
            return None
        plan = CachePlan(
            engine=self.name,
            python=Path(settings.python),
            cache=cache,
            folder=self._folder,
            cores=settings.cores.client,
            shared_memory=settings.device == "cpu" and settings.transport == "shm",
            args=settings.lmcache_args,
            start_timeout_s=settings.start_timeout,
            attached=attached,
        )
        return CACHES[connector].make(plan)

    async def ready(self) -> Resolved:
        # A vLLM whose cache server is gone would come up minutes later, or never.
        await outlive(self.cache_server.children if self.cache_server else (), self._vllm.ready())
        metrics = await self._vllm.metrics()
        info = metrics.labels("vllm:cache_config_info")
        blocks, block_tokens = int(info["num_gpu_blocks"]), int(info["block_size"])
        cache = self._experiment.cache
        behind = await self.cache_server.resolved() if self.cache_server else CacheResolved()
        chunk_tokens, evicts = behind.chunk_tokens, behind.eviction
        if block_tokens != cache.block_tokens or chunk_tokens not in (None, cache.chunk_tokens):
            raise EngineError(
                f"the engine at {self._vllm.url} has blocks of {block_tokens} and chunks of {chunk_tokens} tokens, the"
                f" experiment {cache.block_tokens} and {cache.chunk_tokens}; correct the experiment"
            )
        wanted = None if cache.eviction is None else EvictionRules(**cache.eviction.model_dump())
        if None not in (evicts, wanted) and evicts != wanted:
            raise EngineError(
                f"the LMCache server behind {self._vllm.url} evicts by {evicts}, the experiment's cache.eviction is"
                f" {wanted}; correct it, or what the server is started with"
            )
        per_token, backend = self._model.kv_bytes_per_token, self.cache_server.backend if self.cache_server else None
        self._base_tokens = metrics.total("vllm:prompt_tokens_total") or 0
        self._base_lookups = (await self._read_cache(metrics)).lookups or 0
        await self._open_replay()
        return Resolved(
            gpu_bytes=blocks * block_tokens * per_token,
            cpu_bytes=behind.cpu_bytes,
            disk_bytes=cache.disk.capacity if cache.disk else None,
            gpu_blocks=blocks,
            block_tokens=block_tokens,
            chunk_tokens=cache.chunk_tokens,
            kv_bytes_per_token=per_token,
            max_prompt_tokens=await self._vllm.max_prompt_tokens(),
            vocab_size=self._model.vocab_size,
            io_pids=self.cache_server.pids if self.cache_server else (),
            versions={"vllm": await self._vllm.version()} | behind.versions,
            cache_config=info,
            url=self._vllm.url,
            connector=self._settings.connector,
            eviction=evicts,
            disk_file_system=backend.file_system if backend else None,
            disk_device=backend.device if backend else None,
            scheduler=await self._vllm.scheduler(),
            accelerator=self._accelerator.facts if self._accelerator else None,
        )

    async def _open_replay(self) -> None:
        attach = self._settings.attach
        self._replay = HttpReplay(
            self._vllm.url,
            Completions((attach.model if attach else None) or SERVED_NAME, count_tokens=True),
            TokenSource(self._experiment.seed, self._model.vocab_size),
            self._clock,
            request_timeout_s=self._experiment.measure.request_timeout,
        )
        await self._replay.open()

    async def stop(self) -> None:
        if self._replay is not None:
            await self._replay.close()
        await self._vllm.stop()
        if self.cache_server is not None:
            await self.cache_server.stop()

    # ---- work

    async def replay(self, load: Load, emit: Emit) -> None:
        assert self._replay is not None, "replay before ready"

        def count_and_emit(record: RequestRecord) -> None:
            if record.error is None:
                self._sent_tokens += record.prompt_tokens
                self._lookups_due += record.prompt_tokens > self._experiment.cache.chunk_tokens
            emit(record)

        await outlive(self._children, self._replay.replay(load, count_and_emit), self._replay.give_up)

    @property
    def _children(self) -> tuple[Child, ...]:
        """The cache server first: without it vLLM waits a minute for each load, and then goes on without."""
        cache = self.cache_server.children if self.cache_server else ()
        return (*cache, self._vllm.child) if self._vllm.child else cache

    async def reset(self, what: frozenset[str]) -> None:
        await outlive(self._children, self._reset(what))

    async def _reset(self, what: frozenset[str]) -> None:
        if "gpu" in what:
            await self._vllm.reset()
        if self.cache_server is not None:
            # A disk that is emptied has nothing in the page cache.
            covered = {"page_cache"} if "disk" in what else set()
            for tier in sorted(what - {"gpu"} - covered):
                await self.cache_server.clear(tier)

    def now_s(self) -> float:
        return self._clock()

    async def metrics(self) -> Counters:
        """Both sides' counters, once they account for every request that was answered: they lag the responses."""
        return await outlive(self._children, self._settled())

    async def _settled(self) -> Counters:
        deadline = time.monotonic() + _COUNTER_LAG_S
        while True:
            engine = await self._vllm.metrics()
            cache = await self._read_cache(engine)
            sent = (engine.total("vllm:prompt_tokens_total") or 0) - self._base_tokens
            looked = self._lookups_due if cache.lookups is None else cache.lookups - self._base_lookups
            if (sent >= self._sent_tokens and looked >= self._lookups_due) or time.monotonic() > deadline:
                return self._counters(engine, cache)
            await asyncio.sleep(0.02)

    async def _read_cache(self, metrics: Metrics) -> Reading:
        if self.cache_server is None:
            return Reading()
        return await self.cache_server.settle(EngineSide(metrics=metrics, read_bytes=self._vllm.read_bytes()))

    def _counters(self, engine: Metrics, cache: Reading) -> Counters:
        # A source that served nothing yet has no sample: the metric itself is there from the first request on.
        def by_source(source: str) -> int:
            return engine.total("vllm:prompt_tokens_by_source_total", source=source) or 0

        own = {
            "computed_tokens": by_source("local_compute"),
            "gpu_hit_tokens": by_source("local_cache_hit"),
            "external_tokens": by_source("external_kv_transfer"),
        }
        return Counters.of({**own, **cache.counters, **self._vllm.pace()})


def _capabilities(experiment: Experiment) -> Capabilities:
    """What can be emptied and proven follows from what stands behind vLLM."""
    cache, settings = experiment.cache, experiment.engines.of(VllmSettings)
    if settings.connector == "in_process" and settings.attach is None:
        # With a disk, LMCache's RAM is a buffer on the way to it. It counts hits in one total, and no loaded chunks.
        tiers = cache.tiers - ({"cpu"} if cache.disk else set())
        evidence = {name: needed - {"disk_loaded_chunks"} for name, needed in evidence_in(tiers).items()}
        evidence.pop("disk_cold", None)
        return Capabilities(tiers=tiers, resets=singly({"gpu"}), evidence=evidence)
    tiers, known = cache.tiers, cache.tiers
    if settings.attach is not None:
        # A server that runs already may hold what the experiment does not name; it proves what it lets us reach.
        served = set() if settings.attach.lmcache_url is None else {"cpu"}
        served |= {"disk"} if served and settings.attach.disk_path is not None else set()
        known = frozenset({"gpu"} | served)
        tiers |= known
    return Capabilities(
        tiers=tiers,
        resets=singly(known | ({PAGE_CACHE} if "disk" in known else set())),
        evidence=_counted(evidence_in(known), settings),
    )


def _counted(evidence: dict[str, frozenset[str]], settings: VllmSettings) -> dict[str, frozenset[str]]:
    """Without what only the bytes of a process prove, where nothing says which process that is."""
    if settings.attach is None or settings.attach.lmcache_pid is not None:
        return evidence
    return {name: needed for name, needed in evidence.items() if "disk_device_read_bytes" not in needed}
