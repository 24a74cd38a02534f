"""The LMCache server (multi-process mode) that stands behind an engine: its life, its counters, its two tiers.

Rules and metrics are those of LMCache 0.5.6, read in its sources and seen: L1 is CPU RAM in whole GiB, L2 is a folder
with one file a chunk, whose existence is checked at each look-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec

from harness.collectors.prometheus import Metrics, scrape
from harness.errors import EngineError
from harness.experiment.cache import Eviction
from harness.processes.child import Child, child_environment, control_client, free_port, storage_read_bytes
from harness.processes.keeper import drop_from_page_cache
from harness.records import EvictionRules

_GIB = 2**30
_SETTLE_TIMEOUT_S = 120.0
_PREFIX = "lmcache_mp_"


class LMCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to start. cpu_bytes is whole GiB; disk_path is deleted at the end; None: no storage tier."""

    python: Path
    chunk_tokens: int
    cpu_bytes: int
    disk_path: Path | None
    adapter: str
    odirect: bool
    log: Path
    cores: tuple[int, ...] | None
    shared_memory: bool
    eviction: Eviction
    args: tuple[str, ...]
    start_timeout_s: float


class LMCacheServer:
    """A server that we started, or one that runs already (url and pid given)."""

    def __init__(self, spec: LMCacheSpec | None, *, url: str = "", pid: int | None = None, disk: Path | None = None):
        self._spec, self.url, self._pid = spec, url, pid
        self.disk_path = spec.disk_path if spec else disk
        self.port = 0
        self._child: Child | None = None
        self._http = control_client(30)

    def start(self) -> None:
        """Starts the child. Raises EngineError."""
        if self._spec is None:
            return
        spec, http_port, self.port = self._spec, free_port(), free_port()
        if spec.disk_path:
            spec.disk_path.mkdir(parents=True, exist_ok=True)
        self.url = f"http://127.0.0.1:{http_port}"
        # The metrics port is a second door to what /metrics on the HTTP port already tells.
        argv = [str(spec.python), "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        argv += ["--http-host", "127.0.0.1", "--http-port", str(http_port), "--prometheus-port", str(free_port())]
        argv += ["--supported-transfer-mode", "auto", "--chunk-size", str(spec.chunk_tokens)]
        argv += ["--l1-size-gb", str(spec.cpu_bytes // _GIB), "--l1-init-size-gb", str(spec.cpu_bytes // _GIB)]
        argv += ["--no-l1-use-lazy", "--metrics-sample-rate", "1.0", *self._storage()]
        argv += ["--eviction-policy", spec.eviction.policy.upper(), "--eviction-ratio", str(spec.eviction.ratio)]
        argv += ["--eviction-trigger-watermark", str(spec.eviction.watermark)]
        scratch = [spec.disk_path] if spec.disk_path else []
        if spec.shared_memory:
            name = f"kv-harness-{os.getpid()}-{self.port}"
            argv += ["--shm-name", name]
            scratch.append(Path("/dev/shm") / name)
        env = child_environment({"LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1"})
        self._child = Child(
            "LMCache server", [*argv, *spec.args], log=spec.log, env=env, cores=spec.cores, scratch=scratch
        )
        self._child.start()

    def _storage(self) -> list[str]:
        if self._spec is None or self._spec.disk_path is None:
            return []
        adapter = {"type": self._spec.adapter, "base_path": str(self._spec.disk_path.absolute())}
        return ["--l2-adapter", json.dumps(adapter | ({"use_odirect": True} if self._spec.odirect else {}))]

    async def ready(self) -> None:
        """Raises EngineError with the log's end when it does not come up, or does not answer at all."""
        cure = "try its command by hand, or `harness doctor`"
        if self._child is not None and self._spec is not None:
            await self._child.wait_until(self._healthy, self._spec.start_timeout_s, cure)
        elif not await self._healthy():
            raise EngineError(f"no LMCache server answers at {self.url}; start it, or correct attach.lmcache_url")

    async def _healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return (await self._http.get(f"{self.url}/healthcheck")).status_code == 200
        return False

    @property
    def children(self) -> tuple[Child, ...]:
        """The process that we started, if it was us."""
        return (self._child,) if self._child else ()

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else self._pid

    @property
    def pids(self) -> tuple[int, ...]:
        """The server's process and those below it."""
        return self._child.pids if self._child else (self._pid,) if self._pid else ()

    def _see(self) -> str:
        return f"see {self._spec.log}" if self._spec else "see its log"

    async def metrics(self) -> Metrics:
        try:
            return await scrape(self._http, f"{self.url}/metrics")
        except httpx.HTTPError as error:
            raise EngineError(f"LMCache at {self.url} no longer tells its metrics ({error!r}); {self._see()}") from None

    async def settle(self) -> Metrics:
        """Waits until every store that was begun has ended, and nothing is locked. Raises EngineError after 120 s."""
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        while True:
            metrics = await self.metrics()
            if await self._idle() and stores(metrics)[0] == stores(metrics)[1]:
                return metrics
            if time.monotonic() > deadline:
                begun, ended = stores(metrics)
                raise EngineError(
                    f"LMCache at {self.url} still stores after {_SETTLE_TIMEOUT_S:g} s ({ended} of {begun} objects);"
                    " is the disk full, or too slow for this prompt length?"
                )
            await asyncio.sleep(0.02)

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
            raise EngineError(f"LMCache at {self.url} no longer tells its status ({error!r}); {self._see()}") from None

    async def resolved(self) -> tuple[int, int, EvictionRules]:
        """Bytes of L1, tokens a chunk, and the eviction's settings, as the server has them."""
        status = await self._status()
        manager = status["storage_manager"]
        evicts = manager["l1_eviction_controller"]
        eviction = EvictionRules(
            policy=evicts["eviction_policy"].lower(),
            watermark=evicts["trigger_watermark"],
            ratio=evicts["eviction_ratio"],
        )
        return manager["l1_manager"]["memory_total_bytes"], status["chunk_size"], eviction

    async def clear_cpu(self) -> None:
        """Empties L1 and sees that it is empty. Raises EngineError."""
        await self.settle()
        for _ in range(50):
            try:
                await self._http.post(f"{self.url}/cache/clear", json={"tier": "l1"})
            except httpx.HTTPError as error:
                raise EngineError(f"LMCache at {self.url} no longer answers ({error!r}); {self._see()}") from None
            if (await self._status())["storage_manager"]["l1_manager"]["total_object_count"] == 0:
                return
            await asyncio.sleep(0.1)
        raise EngineError(f"LMCache at {self.url} keeps objects in L1 after /cache/clear; is a request still running?")

    async def clear_disk(self) -> None:
        """Deletes the chunk files of L2."""
        await self.settle()
        for file in self._files():
            file.unlink(missing_ok=True)

    async def drop_page_cache(self) -> None:
        """Writes the chunk files back and drops them from the page cache, so that a read reaches the device."""
        await self.settle()
        drop_from_page_cache(self._files())

    def _files(self) -> Iterator[Path]:
        return self.disk_path.glob("**/*.data") if self.disk_path else iter(())

    def storage_read_bytes(self) -> int | None:
        """Bytes that the server has fetched from storage devices; None where its process is not known."""
        if self._child is not None:
            return self._child.storage_read_bytes()
        return None if self._pid is None else storage_read_bytes(self._pid)

    async def stop(self) -> None:
        if self._child is not None:
            await self._child.stop()
        await self._http.aclose()


def stores(metrics: Metrics) -> tuple[int, int]:
    """Objects whose store to L2 was begun, and ended."""
    begun = metrics.total(f"{_PREFIX}l2_store_submitted_objects_chunks_total")
    ended = metrics.total(f"{_PREFIX}l2_store_completed_objects_chunks_total")
    return begun or 0, ended or 0


def hits(metrics: Metrics) -> dict[str, int]:
    """LMCache's side of the evidence, by the names of Counters: its L1 is CPU RAM, its L2 the storage below.

    Its counters appear at their first increment.
    """
    names = {
        "cpu_hit_tokens": "lookup_hit_l1_tokens_total",
        "disk_hit_tokens": "lookup_hit_l2_tokens_total",
        "disk_loaded_chunks": "l2_prefetch_load_completed_chunks_total",
    }
    return {name: metrics.total(_PREFIX + theirs) or 0 for name, theirs in names.items()}


def lookups(metrics: Metrics) -> int:
    return metrics.total(f"{_PREFIX}lookups_requests_total") or 0


def mp_connector(port: int) -> str:
    """vLLM's --kv-transfer-config for a server on this machine. Short heartbeats: a lost server shows in seconds."""
    extra = {
        "lmcache.mp.host": "tcp://127.0.0.1",
        "lmcache.mp.port": port,
        "lmcache.mp.heartbeat_interval": 2.0,
        "lmcache.mp.mq_timeout": 60.0,
    }
    return json.dumps({"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra})
