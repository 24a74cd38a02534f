"""A real SGLang with HiCache behind it, over HTTP: started here as a child process, or attached to.

Flags, routes and metrics are SGLang 0.5.23's. Its device tier is `gpu`, its host pool `cpu`, and its storage the tiers
of the cache server that `engines.sglang.hicache.storage` names. Without a GPU, an accelerator stands for it
(replaced.py).
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness.caches import CACHES, make_servers
from harness.caches.base import (
    Attached,
    CachePlan,
    CacheResolved,
    CacheServer,
)
from harness.collectors.prometheus import Metrics
from harness.engines.http.clients import Clients
from harness.engines.http.engine import Look, ServedEngine, runs_already, total
from harness.engines.sglang.causes import cause, lost_tokens
from harness.engines.sglang.dialect import Generate
from harness.engines.sglang.process import ServerInfo, SglangProcess, accelerator_of
from harness.engines.sglang.replaced import replaced
from harness.engines.sglang.settings import SglangSettings
from harness.errors import EngineError
from harness.experiment.model import Experiment
from harness.processes.child import open_to_all
from harness.records import Capabilities, Counters, Resolved, SchedulerLimits, evidence_in
from simulator.models import ModelSpec
from traces.load import Load
from traces.request import Request, Segment, stable_id
from traces.routing import ROUTINGS
from traces.tiers import PAGE_CACHE, all_tiers

_SETTLE_TIMEOUT_S = 120.0
# Copies from GPU to host count when they have ended: counters that stand still for so many looks have none under way.
_LOOKS = 3
# The first reads of its storage after a start take seconds: so many prompts go there and back before the load.
_STORAGE_WARM_UPS = 2


class SglangEngine(ServedEngine[SglangProcess]):
    """SGLang behind the Engine seam. `folder` is the run's; `clock` gives the run's time in seconds."""

    name = "sglang"
    prompt_tokens = "sglang:prompt_tokens_total"
    look_s = 0.03

    def __init__(self, experiment: Experiment, model: ModelSpec, folder: Path, clock: Callable[[], float]) -> None:
        self._settings: SglangSettings = experiment.engines.of(SglangSettings)
        self._accelerator = accelerator_of(self._settings, model)
        shape = self._accelerator.shape if self._accelerator else model
        self._stored = tuple(tier.name for tier in all_tiers() if tier.name in experiment.cache.tiers - {"gpu", "cpu"})
        self.own_tiers = frozenset({"gpu", "cpu"}) & experiment.cache.tiers
        count = range(experiment.deployment.instances)
        super().__init__(
            experiment,
            shape,
            folder,
            clock,
            processes=[SglangProcess(experiment, model, folder, self._accelerator, number) for number in count],
            caches=_cache_servers(experiment, shape, folder),
            dialect=Generate(self._stored),
            capabilities=_capabilities(experiment),
            clients=Clients.if_several(self._settings.clients, folder, self._settings.cores.client),
        )
        self._lost: tuple[dict[str, int], dict[str, int]] = ({}, {})  # at the last two looks
        self._seen, self._looks, self._began_s = Counters(), 0, 0.0

    # ---- lifecycle

    async def _resolved(self, look: Look, behind: Sequence[CacheResolved]) -> Resolved:
        told = [await one.process.info() for one in self._instances]
        for one, info in zip(self._instances, told, strict=True):
            self._check(one.process.url, info)
        per_token, count = self._model.kv_bytes_per_token, len(self._instances)
        info, first, server = told[0], self._instances[0].process, behind[0] if behind else CacheResolved()
        hosts = [metrics.total("sglang:hicache_host_total_tokens") for metrics in look.engines]
        host_tokens = total(hosts) if info.enable_hierarchical_cache else None
        backend = self.caches[0].backend if self.caches else None
        hicache = {"hicache": info.version} if info.enable_hierarchical_cache else {}
        outside = tuple(pid for one in self.caches for pid in one.pids)
        inside = tuple(pid for one in self._instances for pid in one.process.pids)
        return Resolved(
            gpu_bytes=info.max_total_num_tokens * per_token * count,
            cpu_bytes=None if host_tokens is None else host_tokens * per_token,
            pool_bytes=total([one.pool_bytes for one in behind]),
            disk_bytes=self._disk_bytes(),
            gpu_blocks=info.max_total_num_tokens // info.page_size,
            block_tokens=info.page_size,
            chunk_tokens=info.page_size,
            kv_bytes_per_token=per_token,
            max_prompt_tokens=None if info.max_req_input_len is None else info.max_req_input_len - 1,
            vocab_size=self._model.vocab_size,
            io_pids=(outside or inside) if self.caches else (),
            versions={"sglang": info.version} | hicache | server.versions,
            cache_config=info.hicache,
            url=first.url,
            connector=info.hicache_storage_backend,
            disk_file_system=backend.file_system if backend else None,
            disk_device=backend.device if backend else None,
            open_to_all=open_to_all(self._children),
            cluster=self._cluster,
            scheduler=SchedulerLimits(max_batched_tokens=info.chunked_prefill_size, max_sequences=info.max_sequences),
            accelerator=self._accelerator.facts if self._accelerator else None,
            replaced=replaced() if self._accelerator else (),
        )

    def _check(self, url: str, info: ServerInfo) -> None:
        """Whether a server is as the experiment has it. Raises EngineError."""
        cache = self._experiment.cache
        if info.page_size != cache.block_tokens:
            raise EngineError(
                f"the engine at {url} has pages of {info.page_size} tokens, cache.block_tokens is"
                f" {cache.block_tokens}; correct the experiment"
            )
        if cache.cpu is not None and not info.enable_hierarchical_cache:
            raise EngineError(f"the engine at {url} has no HiCache; remove cache.cpu, or start it with one")

    async def _warm_up(self) -> None:
        """Sends prompts of two prefetches' length to storage of our own and fetches them from there."""
        if not self.caches or self._settings.attach is not None:
            return
        page, hicache = self._experiment.cache.block_tokens, self._settings.hicache
        tokens = 2 * max(page, -(-hicache.prefetch_threshold // page) * page) + 1
        for instance, number in itertools.product(range(len(self._instances)), range(_STORAGE_WARM_UPS)):
            name = ("storage warm-up", self._experiment.seed, number) + ((instance,) if instance else ())
            prompt = (Segment(stable_id(*name), tokens),)
            for turn in range(2):
                named = f"storage-warm-up-{instance}-{number}-{turn}"
                request = Request(id=named, prompt=prompt, output_tokens=1, instance=instance)
                await self.replay(Load([request], concurrency=1), lambda _record: None)
                await self.metrics()
                await self.reset(frozenset({"gpu", "cpu"}))
        await self.reset(frozenset(self._stored))

    # ---- work

    async def _empty(self, process: SglangProcess, what: frozenset[str]) -> None:
        if what != self.own_tiers:
            raise EngineError(f"SGLang empties {' and '.join(sorted(self.own_tiers))} together; ask for all of them")
        await process.flush()

    async def _settled(self) -> Counters:
        self._seen, self._looks, self._began_s = Counters(), 0, time.monotonic()
        return await super()._settled()

    def _rests(self, look: Look, counters: Counters) -> bool:
        still, self._seen = counters == self._seen, counters
        self._looks = self._looks + 1 if still else 0
        begun, ended = counters.stores_begun or 0, counters.stores_ended or 0
        if self._looks >= _LOOKS and begun <= ended:
            lost = Counter[str]()
            for metrics in look.engines:
                lost.update(lost_tokens(metrics))
            self._lost = self._lost[1], dict(lost)
            return True
        if time.monotonic() > self._began_s + _SETTLE_TIMEOUT_S:
            raise EngineError(
                f"SGLang at {self._instances[0].process.url} still stores after {_SETTLE_TIMEOUT_S:g} s ({ended} of"
                f" {begun} pages); is the disk full, or too slow for this prompt length?"
            )
        return False

    def cause(self) -> str | None:
        return cause(*self._lost)

    def _counted(self, metrics: Metrics) -> Mapping[str, int | None]:
        """A source that served nothing yet has no sample."""

        def cached(source: str) -> int:
            return metrics.total("sglang:cached_tokens_total", cache_source=source) or 0

        own = {
            "computed_tokens": metrics.total("sglang:realtime_tokens_total", mode="prefill_compute") or 0,
            "gpu_hit_tokens": cached("device"),
            "external_tokens": metrics.total("sglang:load_back_tokens_total") or 0,
        }
        return own | ({"cpu_hit_tokens": cached("host")} if "cpu" in self.capabilities.tiers else {})


def _cache_servers(experiment: Experiment, model: ModelSpec, folder: Path) -> Sequence[CacheServer]:
    """What lies below the host pools."""
    cache, settings = experiment.cache, experiment.engines.of(SglangSettings)
    attach = settings.attach
    if not cache.tiers - {"gpu", "cpu"}:
        return ()
    attached = None
    if attach is not None:
        path = Path(attach.disk_path) if attach.disk_path else None
        attached = Attached(url=attach.url, pid=attach.pid, disk_path=path)
    plan = CachePlan(
        engine=SglangEngine.name,
        python=Path(settings.python),
        cache=cache,
        folder=folder,
        cores=settings.cores.client,
        kv_bytes_per_token=model.kv_bytes_per_token,
        args=settings.mooncake_args if cache.pool else (),
        start_timeout_s=settings.start_timeout,
        attached=attached,
    )
    return make_servers(settings.hicache.storage, plan, experiment.deployment)


def _capabilities(experiment: Experiment) -> Capabilities:
    """What can be emptied and proven follows from what lies below the GPU. GPU and host pool are flushed together."""
    cache, settings = experiment.cache, experiment.engines.of(SglangSettings)
    attach, kind = settings.attach, CACHES[settings.hicache.storage]
    tiers = cache.tiers
    own = frozenset({"gpu", "cpu"}) & tiers
    stored = {name for name in tiers - own if attach is None or attach.disk_path is not None}
    resets = {own, *kind.resets(stored)}
    resets |= {frozenset({PAGE_CACHE})} if "disk" in stored else set()
    keeps = kind.keeps & cache.tiers if attach is None else frozenset[str]()
    evidence = {name: needed - kind.uncounted for name, needed in evidence_in(own | stored, keeps).items()}
    if attach is not None and attach.pid is None:
        evidence = {name: needed for name, needed in evidence.items() if "disk_device_read_bytes" not in needed}
    return Capabilities(
        tiers=tiers,
        resets=frozenset(resets),
        evidence=evidence,
        quotes=attach is None,
        routings=frozenset(ROUTINGS if attach is None else ()),
        starts_empty=attach is None,
        keeps=keeps,
        no_restart=kind.no_restart if attach is None else runs_already("sglang"),
        evicts_when_full=cache.pool is None,
    )
