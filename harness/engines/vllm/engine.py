"""A real vLLM with LMCache behind it, over HTTP: started here as child processes, or attached to.

Flags and metrics are those of vLLM 0.32 and LMCache 0.5.6. Two connectors: multi-process (an LMCache server, which
also runs without a GPU) and in-process (GPU builds of vLLM; on CPU it silently recomputes, which the evidence shows).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness.caches import CACHES, attaching, make_servers
from harness.caches.base import (
    Attached,
    CachePlan,
    CacheResolved,
    CacheServer,
)
from harness.caches.stores import uncounted, unreachable
from harness.collectors.prometheus import Metrics
from harness.engines.accelerator import PLUGIN, Accelerator
from harness.engines.http.clients import Clients
from harness.engines.http.dialect import Completions
from harness.engines.http.engine import Instance, Look, ServedEngine, runs_already, total
from harness.engines.vllm.process import SERVED_NAME, VllmProcess
from harness.engines.vllm.settings import VllmSettings
from harness.errors import EngineError
from harness.experiment.model import Experiment
from harness.processes.child import open_to_all
from harness.records import Capabilities, EvictionRules, Resolved, evidence_in, singly
from simulator.models import ModelSpec
from traces.routing import ROUTINGS
from traces.tiers import PAGE_CACHE


class VllmEngine(ServedEngine[VllmProcess]):
    """vLLM behind the Engine seam. `folder` is the run's; `clock` gives the run's time in seconds."""

    name = "vllm"
    prompt_tokens = "vllm:prompt_tokens_total"
    own_tiers = frozenset({"gpu"})

    def __init__(self, experiment: Experiment, model: ModelSpec, folder: Path, clock: Callable[[], float]) -> None:
        self._settings: VllmSettings = experiment.engines.of(VllmSettings)
        name, attach = self._settings.accelerator, self._settings.attach
        self._accelerator = Accelerator(name, self._settings.link, model) if name else None
        shape = self._accelerator.shape if self._accelerator else model
        count = range(experiment.deployment.instances)
        super().__init__(
            experiment,
            shape,
            folder,
            clock,
            processes=[VllmProcess(experiment, model, folder, self._accelerator, number) for number in count],
            caches=_cache_servers(experiment, shape, folder),
            dialect=Completions((attach.model if attach else None) or SERVED_NAME, count_tokens=True),
            capabilities=_capabilities(experiment),
            clients=Clients.if_several(self._settings.clients, folder, self._settings.cores.client),
        )

    async def _resolved(self, look: Look, behind: Sequence[CacheResolved]) -> Resolved:
        for one, metrics in zip(self._instances, look.engines, strict=True):
            self._check(one, metrics, CacheResolved() if one.cache is None else behind[one.cache])
        cache, first, server = (
            self._experiment.cache,
            self._instances[0].process,
            behind[0] if behind else CacheResolved(),
        )
        info = look.engines[0].labels("vllm:cache_config_info")
        blocks, block_tokens, per_token = _blocks(info), int(info["block_size"]), self._model.kv_bytes_per_token
        backend = self.caches[0].backend if self.caches else None
        return Resolved(
            gpu_bytes=blocks * block_tokens * per_token * len(self._instances),
            cpu_bytes=total([one.cpu_bytes for one in behind]),
            pool_bytes=total([one.pool_bytes for one in behind]),
            disk_bytes=self._disk_bytes(),
            remote_bytes=cache.bytes_of("remote"),
            gpu_blocks=blocks,
            block_tokens=block_tokens,
            chunk_tokens=cache.chunk_tokens,
            kv_bytes_per_token=per_token,
            max_prompt_tokens=await first.max_prompt_tokens(),
            vocab_size=self._model.vocab_size,
            io_pids=tuple(pid for one in self.caches for pid in one.pids),
            versions={"vllm": await first.version()} | server.versions,
            cache_config=info,
            url=first.url,
            connector=self._settings.connector,
            eviction=server.eviction,
            cluster=self._cluster,
            open_to_all=open_to_all(self._children),
            disk_file_system=backend.file_system if backend else None,
            disk_device=backend.device if backend else None,
            remote_store=server.remote_store,
            scheduler=await first.scheduler(),
            accelerator=self._accelerator.facts if self._accelerator else None,
        )

    def _check(self, one: Instance[VllmProcess], metrics: Metrics, behind: CacheResolved) -> None:
        """Whether a server and its cache server are as the experiment has them. Raises EngineError."""
        info, cache, url = metrics.labels("vllm:cache_config_info"), self._experiment.cache, one.process.url
        block_tokens, chunk_tokens, evicts = int(info["block_size"]), behind.chunk_tokens, behind.eviction
        if block_tokens != cache.block_tokens or chunk_tokens not in (None, cache.chunk_tokens):
            raise EngineError(
                f"the engine at {url} has blocks of {block_tokens} and chunks of {chunk_tokens} tokens, the experiment"
                f" {cache.block_tokens} and {cache.chunk_tokens}; correct the experiment"
            )
        wanted = None if cache.eviction is None else EvictionRules(**cache.eviction.model_dump())
        if None not in (evicts, wanted) and evicts != wanted:
            raise EngineError(
                f"the LMCache server behind {url} evicts by {evicts}, the experiment's cache.eviction is"
                f" {wanted}; correct it, or what the server is started with"
            )

    async def _empty(self, process: VllmProcess, _what: frozenset[str]) -> None:
        await process.reset()

    def _counted(self, metrics: Metrics) -> Mapping[str, int | None]:
        # A source that served nothing yet has no sample: the metric itself is there from the first request on.
        def by_source(source: str) -> int:
            return metrics.total("vllm:prompt_tokens_by_source_total", source=source) or 0

        return {
            "computed_tokens": by_source("local_compute"),
            "gpu_hit_tokens": by_source("local_cache_hit"),
            "external_tokens": by_source("external_kv_transfer"),
        }


def _blocks(info: Mapping[str, str]) -> int:
    return int(info["num_gpu_blocks"])


def _cache_servers(experiment: Experiment, model: ModelSpec, folder: Path) -> Sequence[CacheServer]:
    """What stands behind vLLM."""
    cache, settings = experiment.cache, experiment.engines.of(VllmSettings)
    attach = settings.attach
    attached, connector = None, settings.connector
    if attach is not None:
        if attach.lmcache_url is None:
            return ()
        disk_path = Path(attach.disk_path) if attach.disk_path else None
        attached = Attached(url=attach.lmcache_url, pid=attach.lmcache_pid, disk_path=disk_path)
        connector = attaching(VllmEngine.name)
    elif cache.cpu is None and cache.pool is None:
        return ()
    plan = CachePlan(
        engine=VllmEngine.name,
        python=Path(settings.python),
        cache=cache,
        folder=folder,
        cores=settings.cores.client,
        shared_memory=settings.device == "cpu" and settings.transport == "shm",
        page_locked_by=None if settings.accelerator is None else PLUGIN,
        kv_bytes_per_token=model.kv_bytes_per_token,
        args=settings.mooncake_args if cache.pool else settings.lmcache_args,
        store_args=settings.mooncake_args if cache.remote else (),
        start_timeout_s=settings.start_timeout,
        attached=attached,
    )
    return make_servers(connector, plan, experiment.deployment)


def _capabilities(experiment: Experiment) -> Capabilities:
    """What can be emptied and proven follows from what stands behind vLLM."""
    cache, settings = experiment.cache, experiment.engines.of(VllmSettings)
    routings = frozenset(ROUTINGS if settings.attach is None else ())
    if settings.connector == "in_process" and settings.attach is None:
        # With a disk, LMCache's RAM is a buffer on the way to it. It counts hits in one total, and no loaded chunks.
        tiers = cache.tiers - ({"cpu"} if cache.disk else set())
        evidence = {name: needed - {"disk_loaded_chunks"} for name, needed in evidence_in(tiers).items()}
        evidence.pop("disk_cold", None)
        return Capabilities(
            tiers=tiers,
            resets=singly({"gpu"}),
            evidence=evidence,
            quotes=True,
            routings=routings,
            no_restart=CACHES[settings.connector].no_restart,
        )
    tiers, known = cache.tiers, cache.tiers
    if settings.attach is not None:
        # A server that runs already may hold what the experiment does not name; it proves what it lets us reach.
        served = set() if settings.attach.lmcache_url is None else {"cpu"}
        served |= {"disk"} if served and settings.attach.disk_path is not None else set()
        known = frozenset({"gpu"} | served)
        tiers |= known
    kind = CACHES[settings.connector if settings.attach is None else attaching("vllm")]
    unknown = kind.uncounted | uncounted(cache)
    keeps = kind.keeps & cache.tiers if settings.attach is None else frozenset[str]()
    evidence = {name: needed - unknown for name, needed in _counted(evidence_in(known, keeps), settings).items()}
    for state in unreachable(cache):
        evidence.pop(state, None)
    pages = {PAGE_CACHE} if "disk" in known or "remote_cold" in evidence else set()
    return Capabilities(
        tiers=tiers,
        resets=kind.resets(known) | singly({"gpu"} | pages),
        evidence=evidence,
        quotes=True,
        routings=routings,
        starts_empty=settings.attach is None,
        keeps=keeps,
        no_restart=kind.no_restart if settings.attach is None else runs_already("vllm"),
    )


def _counted(evidence: dict[str, frozenset[str]], settings: VllmSettings) -> dict[str, frozenset[str]]:
    """Without what only the bytes of a process prove, where nothing says which process that is."""
    if settings.attach is None or settings.attach.lmcache_pid is not None:
        return evidence
    return {name: needed for name, needed in evidence.items() if "disk_device_read_bytes" not in needed}
