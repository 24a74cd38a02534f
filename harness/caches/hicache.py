"""HiCache's file backend below SGLang's host pool: no process of its own, one file a page (SGLang 0.5.23).

    sglang/srt/mem_cache/hicache_storage.py 728   HASH_MODEL_RANK_SIZE.bin; existence is looked up at each request

SGLang itself reads and writes the files, and counts them: the engine's metrics are this server's, too.
"""

from __future__ import annotations

from harness.caches.base import CachePlan, CacheResolved, Connection, EngineSide, Reading
from harness.caches.files import FilesBackend
from harness.errors import EngineError
from harness.processes.child import Child

_PAGES = "*.bin"


class HiCacheFile:
    """A CacheServer within SGLang."""

    children: tuple[Child, ...] = ()
    pids: tuple[int, ...] = ()
    precedes = False

    def __init__(self, plan: CachePlan) -> None:
        self._plan = plan
        attached = plan.attached
        if attached is None:
            self.backend: FilesBackend | None = FilesBackend(plan.disk_folder, "hicache", files=_PAGES)
        else:
            self.backend = FilesBackend(attached.disk_path, files=_PAGES) if attached.disk_path else None

    def start(self) -> None:
        if self.backend is not None:
            self.backend.prepare()

    async def ready(self) -> None:
        """It is ready when the engine is."""

    def connection(self) -> Connection:
        assert self.backend is not None, "of a server that we start"
        folder = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self.backend.folder.absolute())}
        arguments = ("--hicache-storage-backend", "file")
        return Connection(arguments=arguments, environment=folder, stored=self.backend.scratch)

    async def resolved(self) -> CacheResolved:
        return CacheResolved()

    async def settle(self, engine: EngineSide) -> Reading:
        """Totals of the engine's scrape, in which stores may be under way: begun from the host pool, ended in files."""
        metrics, page = engine.metrics, self._plan.cache.block_tokens
        begun, ended = (metrics.total(f"sglang:{name}_tokens_total") or 0 for name in ("hicache_backup", "backuped"))
        loaded = metrics.total("sglang:prefetched_tokens_total") or 0
        counters = {
            "disk_hit_tokens": metrics.total("sglang:cached_tokens_total", cache_source="storage") or 0,
            "disk_loaded_chunks": loaded // page,
            "disk_device_read_bytes": engine.read_bytes,
            "stores_begun": begun // page,
            "stores_ended": ended // page,
        }
        return Reading(counters=counters)

    async def clear(self, tier: str) -> None:
        if self.backend is None:
            raise EngineError(f"the storage of the attached SGLang is not known: cannot empty {tier}; name its folder")
        if tier == "disk":
            self.backend.clear()
        elif tier == "page_cache":
            self.backend.make_cold()
        else:
            raise EngineError(f"HiCache's file backend has no {tier} to empty; SGLang flushes it")

    async def stop(self, *, keep: bool = False) -> None:
        """It ends with the engine, and its folder with the engine's process."""
