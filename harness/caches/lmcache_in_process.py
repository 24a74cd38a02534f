"""LMCache within the engine's own process: configured by a file, counted by the engine's metrics, never emptied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from harness.caches.base import CachePlan, CacheResolved, Connection, EngineSide, Reading, numbered
from harness.caches.files import FilesBackend
from harness.errors import EngineError
from harness.processes.child import Child

_GIB = 2**30


class InProcessLMCache:
    """A CacheServer without a process of its own. With a disk, its RAM is a buffer on the way there."""

    children: tuple[Child, ...] = ()
    pids: tuple[int, ...] = ()
    precedes = False

    def __init__(self, plan: CachePlan) -> None:
        self._plan = plan
        self.backend = FilesBackend(plan.disk_folder) if plan.cache.disk else None

    def start(self) -> None:
        cache = self._plan.cache
        config: dict[str, Any] = {"chunk_size": cache.chunk_tokens, "local_cpu": cache.disk is None}
        config["max_local_cpu_size"] = (cache.cpu or 0) / _GIB
        config["save_decode_cache"] = cache.save_decode_cache
        if cache.disk is not None:
            config |= {"local_disk": f"file://{self._plan.disk_folder.absolute()}/"}
            config |= {"max_local_disk_size": cache.disk.capacity / _GIB}
        self._path.write_text(yaml.safe_dump(config))

    @property
    def _path(self) -> Path:
        return self._plan.folder / f"{numbered('lmcache', self._plan.number)}.yaml"

    async def ready(self) -> None:
        """It is ready when the engine is."""

    def connection(self) -> Connection:
        connector = json.dumps({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"})
        environment = {"LMCACHE_CONFIG_FILE": str(self._path)}
        return Connection(arguments=("--kv-transfer-config", connector), environment=environment)

    async def resolved(self) -> CacheResolved:
        return CacheResolved()

    async def settle(self, engine: EngineSide) -> Reading:
        """It tells hits in one total: those of the last tier."""
        tier = "disk" if self._plan.cache.disk else "cpu"
        hits = engine.metrics.total("lmcache:num_hit_tokens_total")
        return Reading(counters={f"{tier}_hit_tokens": hits, "disk_device_read_bytes": engine.read_bytes})

    async def clear(self, tier: str) -> None:
        raise EngineError(f"LMCache within an engine cannot empty {tier}; set engines.vllm.connector to mp")

    async def stop(self, *, keep: bool = False) -> None:
        """It ends with the engine."""
