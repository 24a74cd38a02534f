"""The LMCache server (multi-process mode) that stands behind an engine: its life, its counters, its two tiers.

Rules and metrics are those of LMCache 0.5.6, read in its sources and seen: L1 is CPU RAM in whole GiB. L2 is a folder
with one file a chunk, whose existence is checked at each look-up, or a store behind a network (stores/).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from harness.caches.base import Backend, CachePlan, CacheResolved, Connection, EngineSide, Reading, numbered
from harness.caches.files import FilesBackend
from harness.caches.stores import STORES
from harness.caches.stores.base import RemoteStore, StorePlan
from harness.collectors.prometheus import Metrics, scrape
from harness.errors import EngineError
from harness.experiment.cache import Eviction
from harness.processes.child import Child, child_environment, control_client, free_port, tree_read_bytes
from harness.processes.names import with_names
from harness.records import EvictionRules

_GIB = 2**30
_SETTLE_TIMEOUT_S = 120.0
_SOON_BYTES = 16 * _GIB  # of RAM, which the server takes at a GiB a second or faster
_PREFIX = "lmcache_mp_"


def make_server(plan: CachePlan) -> LMCacheServer:
    """The server that a plan asks for, with what is below it; nothing has started."""
    disk, remote, attached = plan.cache.disk, plan.cache.remote, plan.attached
    if attached is not None:
        return LMCacheServer(plan, FilesBackend(attached.disk_path) if attached.disk_path else None)
    backend = FilesBackend(plan.disk_folder, disk.adapter, odirect=disk.odirect) if disk else None
    if remote is None:
        return LMCacheServer(plan, backend)
    beside = [server for server in plan.beside if isinstance(server, LMCacheServer)]
    if beside:
        return LMCacheServer(plan, backend, beside[0].store, beside)
    own = StorePlan(remote=remote, folder=plan.folder, python=plan.python, cores=plan.cores, args=plan.store_args)
    return LMCacheServer(plan, backend, STORES[remote.adapter].make(own))


class LMCacheServer:
    """A CacheServer that we start, or one that runs already (the plan's `attached`). cache.cpu is whole GiB.

    beside: the servers over the same store, the first of which starts and ends it.
    """

    def __init__(
        self,
        plan: CachePlan,
        backend: Backend | None,
        store: RemoteStore | None = None,
        beside: Sequence[LMCacheServer] = (),
    ) -> None:
        self._plan, self.backend, self.store, self._beside = plan, backend, store, tuple(beside)
        self._own_store = None if beside else store
        self._store_name: str | None = None
        self.loaded_chunks = 0  # from storage, when it settled last
        self._forgotten: list[str] = []
        self.url = plan.attached.url.rstrip("/") if plan.attached else ""
        self._port = 0
        self._child: Child | None = None
        self._http = control_client(30)

    def start(self) -> None:
        if self._own_store is not None:
            self._own_store.start()
        if self.store is None and self._plan.attached is None:
            self._start_server()  # else it connects to its store as it comes up: see `ready`

    def _start_server(self) -> None:
        scratch, stored = list[Path](), self.backend.scratch if self.backend else ()
        if self.backend is not None:
            self.backend.prepare()
        http_port, self._port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{http_port}"
        argv = self._command(http_port)
        if self._plan.shared_memory:
            name = f"kv-harness-{os.getpid()}-{self._port}"
            argv += ["--shm-name", name]
            scratch.append(Path("/dev/shm") / name)
        env = child_environment({"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", **self._environment()})
        argv += self._plan.args
        if self.store is not None:
            hosts = self._plan.folder / numbered(f"kv-harness-{self._plan.folder.name}-hosts", self._plan.number)
            argv = with_names(argv, self.store.names, hosts)
            scratch.append(hosts)
        cores = self._plan.cores
        self._child = Child("LMCache server", argv, log=self._log, env=env, cores=cores, scratch=scratch, stored=stored)
        self._child.start()

    def _environment(self) -> dict[str, str]:
        """The store's variables, secrets among them, and where Python finds what the server is run by."""
        below = self.store.environment() if self.store else {}
        if self._plan.page_locked_by is None:
            return below
        folders = [str(self._plan.page_locked_by), below.get("PYTHONPATH")]
        return {**below, "PYTHONPATH": os.pathsep.join(folder for folder in folders if folder)}

    def _command(self, http_port: int) -> list[str]:
        cache, eviction = self._plan.cache, self._plan.cache.eviction or Eviction()
        gib = str((cache.cpu or 0) // _GIB)
        runner = ["kv_accelerator.page_locked"] if self._plan.page_locked_by else []
        argv = [str(self._plan.python), "-m", *runner, "lmcache.cli.main", "server"]
        argv += ["--host", "127.0.0.1", "--port", str(self._port)]
        # The metrics port is a second door to what /metrics on the HTTP port already tells.
        argv += ["--http-host", "127.0.0.1", "--http-port", str(http_port), "--prometheus-port", str(free_port())]
        argv += ["--supported-transfer-mode", "auto", "--chunk-size", str(cache.chunk_tokens)]
        argv += ["--l1-size-gb", gib, "--l1-init-size-gb", gib, "--no-l1-use-lazy", "--metrics-sample-rate", "1.0"]
        below = self.store or self.backend
        argv += ["--l2-adapter", json.dumps(below.spec())] if below else []
        argv += ["--eviction-policy", eviction.policy.upper(), "--eviction-ratio", str(eviction.ratio)]
        return [*argv, "--eviction-trigger-watermark", str(eviction.watermark)]

    def connection(self) -> Connection:
        """vLLM's --kv-transfer-config for a server on this machine. Heartbeats are short: a lost server shows in
        seconds."""
        extra = {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": self._port,
            "lmcache.mp.heartbeat_interval": 2.0,
            "lmcache.mp.mq_timeout": 60.0,
            "lmcache.mp.save_decode_cache": self._plan.cache.save_decode_cache,
        }
        connector = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        return Connection(arguments=("--kv-transfer-config", json.dumps(connector)))

    @property
    def _log(self) -> Path:
        return self._plan.log("lmcache")

    async def ready(self) -> None:
        """Raises EngineError with the log's end when it does not come up, or does not answer at all."""
        cure = "try its command by hand, or `harness doctor`"
        if self.store is not None and self._child is None:
            self._store_name = await self.store.ready()
            self._start_server()
        if self._child is not None:
            await self._child.wait_until(self._healthy, self._plan.start_timeout_s, cure)
        elif not await self._healthy():
            raise EngineError(f"no LMCache server answers at {self.url}; start it, or correct attach.lmcache_url")

    async def _healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return (await self._http.get(f"{self.url}/healthcheck")).status_code == 200
        return False

    @property
    def children(self) -> tuple[Child, ...]:
        """The processes that we started, if it was us: those of a store that no server before it has, then its own."""
        below = self._own_store.children if self._own_store else ()
        return (*below, self._child) if self._child else below

    @property
    def precedes(self) -> bool:
        """vLLM asks for it seconds after its own start, and then waits for a minute: much RAM may take longer to come.
        Which port it has is known once its store answers."""
        slow = (self._plan.cache.cpu or 0) > _SOON_BYTES
        return slow or self.store is not None or self._plan.attached is not None

    @property
    def pids(self) -> tuple[int, ...]:
        """The server's process and those below it."""
        if self._child is not None:
            return self._child.pids
        pid = self._plan.attached.pid if self._plan.attached else None
        return (pid,) if pid else ()

    def _see(self) -> str:
        return "see its log" if self._plan.attached else f"see {self._log}"

    async def _metrics(self) -> Metrics:
        try:
            return await scrape(self._http, f"{self.url}/metrics")
        except httpx.HTTPError as error:
            raise EngineError(
                f"LMCache at {self.url} no longer reports its metrics ({error!r}); {self._see()}"
            ) from None

    async def settle(self, _engine: EngineSide) -> Reading:
        metrics = await self._settled()
        # It counts stores to storage only, which there may be none of.
        begun, ended = stores(metrics) if self._plan.cache.disk or self.store else (None, None)
        counters: dict[str, int | None] = {"stores_begun": begun, "stores_ended": ended}
        of_store: dict[str, int | None] = {}
        if self.store is None:
            counters |= {**hits(metrics, "disk"), "disk_device_read_bytes": self._device_read_bytes()}
        else:
            served = hits(metrics, "remote")
            self.loaded_chunks = served["remote_loaded_chunks"]
            account = await self.store.account(sum(one.loaded_chunks for one in (*self._beside, self)))
            counters |= served
            of_store = {"remote_sent_bytes": account.sent_bytes, "remote_reads": account.reads}
            of_store["remote_device_read_bytes"] = account.device_bytes
        lookups = metrics.total(f"{_PREFIX}lookups_requests_total") or 0
        return Reading(lookups=lookups, counters=counters, of_store=of_store)

    async def _settled(self) -> Metrics:
        """Waits until every store that was begun has ended, and nothing is locked. Raises EngineError where a store has
        failed, or after 120 s."""
        deadline, failed = time.monotonic() + _SETTLE_TIMEOUT_S, False
        while True:
            metrics = await self._metrics()
            begun, ended = stores(metrics)
            if await self._idle():
                if begun == ended:
                    return metrics
                # Its objects are counted after its request: the first look may fall between the two.
                if failed and all_stores_answered(metrics):
                    raise await self._not_stored(begun - ended, begun)
                failed = all_stores_answered(metrics)
            if time.monotonic() > deadline:
                raise EngineError(
                    f"LMCache at {self.url} still stores after {_SETTLE_TIMEOUT_S:g} s ({ended} of {begun} objects);"
                    " is the disk full, or too slow for this prompt length?"
                )
            await asyncio.sleep(0.02)

    async def _not_stored(self, missing: int, begun: int) -> EngineError:
        if self.store is not None:
            await self.store.account(0)  # a store that is gone says so itself
        told = self._child.last_error() if self._child else None
        cure = "is the store there, and large enough?" if self.store else "is the disk full, or read-only?"
        why = f" ({told})" if told else ""
        return EngineError(
            f"LMCache at {self.url} could not store {missing} of {begun} objects{why}; {cure} {self._see()}"
        )

    async def _idle(self) -> bool:
        status = await self._status()
        manager = status["storage_manager"]
        store, l1 = manager["store_controller"], manager["l1_manager"]
        waiting = store["pending_keys_count"] + store["in_flight_task_count"]
        return not (waiting or l1["write_locked_count"] or l1["read_locked_count"])

    async def _status(self) -> Any:
        try:
            return (await self._http.get(f"{self.url}/status")).json()
        except (httpx.HTTPError, ValueError) as error:
            raise EngineError(
                f"LMCache at {self.url} no longer reports its status ({error!r}); {self._see()}"
            ) from None

    async def resolved(self) -> CacheResolved:
        """Bytes of L1, tokens a chunk, and the eviction's settings, as the server has them."""
        status = await self._status()
        manager = status["storage_manager"]
        evicts = manager["l1_eviction_controller"]
        eviction = EvictionRules(
            policy=evicts["eviction_policy"].lower(),
            watermark=evicts["trigger_watermark"],
            ratio=evicts["eviction_ratio"],
        )
        versions: dict[str, str] = {}
        with contextlib.suppress(httpx.HTTPError, ValueError):
            versions["lmcache"] = str((await self._http.get(f"{self.url}/version")).json())
        return CacheResolved(
            cpu_bytes=manager["l1_manager"]["memory_total_bytes"],
            remote_store=self._store_name,
            chunk_tokens=status["chunk_size"],
            eviction=eviction,
            versions=versions,
        )

    async def clear(self, tier: str) -> None:
        await self._settled()
        if tier == "cpu":
            await self._clear_l1()
        elif self.store is not None:
            if tier == "remote":
                await self.store.clear(self._forget)
            else:
                self.store.make_cold()
        elif self.backend is None:
            raise EngineError(f"the LMCache server at {self.url} has no storage that we know of: cannot empty {tier}")
        elif tier == "disk":
            self.backend.clear()
        else:
            self.backend.make_cold()

    async def _clear_l1(self) -> None:
        """Empties L1 and sees that it is empty."""
        for _ in range(50):
            try:
                await self._http.post(f"{self.url}/cache/clear", json={"tier": "l1"})
            except httpx.HTTPError as error:
                raise EngineError(f"LMCache at {self.url} no longer answers ({error!r}); {self._see()}") from None
            if (await self._status())["storage_manager"]["l1_manager"]["total_object_count"] == 0:
                return
            await asyncio.sleep(0.1)
        raise EngineError(f"LMCache at {self.url} keeps objects in L1 after /cache/clear; is a request still running?")

    async def _forget(self) -> None:
        """Removes all that the server lists in its storage, through its own interface; and what a server before it has
        removed from their store, of which this one still believes that it is there."""
        url = f"{self.url}/cache/objects"
        believed, self._forgotten = list(self._beside[0]._forgotten) if self._beside else [], []
        try:
            while keys := believed or [entry["key"] for entry in (await self._http.get(url)).json()["entries"]]:
                done = (await self._http.request("DELETE", url, json={"keys": keys})).json()
                if not done["deleted"]:
                    raise EngineError(f"LMCache at {self.url} does not remove objects from its store; {self._see()}")
                self._forgotten += keys
                believed = []
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise EngineError(f"LMCache at {self.url} cannot list its store ({error!r}); {self._see()}") from None

    def _device_read_bytes(self) -> int | None:
        """Bytes that the server has fetched from storage devices; None where its process is not known."""
        pid = self._plan.attached.pid if self._plan.attached else None
        own = self._child.storage_read_bytes() if self._child else None if pid is None else tree_read_bytes(pid)
        return self.backend.read_bytes(own) if self.backend else own

    async def stop(self, *, keep: bool = False) -> None:
        if self._child is not None:
            await self._child.stop(keep=keep)
        if keep:
            return
        if self._own_store is not None:
            await self._own_store.stop()
        await self._http.aclose()


def stores(metrics: Metrics) -> tuple[int, int]:
    """Objects whose store to L2 was begun, and ended."""
    begun = metrics.total(f"{_PREFIX}l2_store_submitted_objects_chunks_total")
    ended = metrics.total(f"{_PREFIX}l2_store_completed_objects_chunks_total")
    return begun or 0, ended or 0


def all_stores_answered(metrics: Metrics) -> bool:
    """Whether each store request to L2 has ended, well or not: objects of one that failed never count as ended."""
    begun, ended = (metrics.total(f"{_PREFIX}l2_store_{what}_requests_total") for what in ("submitted", "completed"))
    return begun == ended


def hits(metrics: Metrics, below: str) -> dict[str, int]:
    """LMCache's side of the evidence, by the names of Counters: its L1 is CPU RAM, its L2 the tier below.

    Its counters appear at their first increment.
    """
    names = {
        "cpu_hit_tokens": "lookup_hit_l1_tokens_total",
        f"{below}_hit_tokens": "lookup_hit_l2_tokens_total",
        f"{below}_loaded_chunks": "l2_prefetch_load_completed_chunks_total",
    }
    return {name: metrics.total(_PREFIX + theirs) or 0 for name, theirs in names.items()}
