"""Mooncake as a cache server of its own: a master, which knows every object, and a client, which lends RAM (the pool)
and, below it, files on an SSD. Engines reach both over TCP on this machine.

Flags, routes and metrics are those of Mooncake 0.3.13, seen with it. What has to be known:
- Objects go to the SSD when they are evicted from RAM (offload_on_evict): with Mooncake's default, which copies them as
  they are put, quick puts lose some.
- The master evicts what was asked for longest ago, and nothing within its lease: 10 s after it was last asked for.
- A put that finds no room is refused, and SGLang, which counts what it stores, neither tries again nor counts it.
- What was served from RAM and from files is counted by the master, in bytes. What the client reads from RAM to write
  it to a file counts as served as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from harness.caches.base import CachePlan, CacheResolved, Connection, EngineSide, Reading
from harness.caches.files import BucketFiles
from harness.caches.mooncake_pool import CLIENT_SIDE, MooncakePool, PoolPlan
from harness.collectors.prometheus import Metrics
from harness.errors import EngineError
from harness.processes.child import Child

_SETTLE_TIMEOUT_S = 120.0
_HEARTBEAT_S = 1
# No counter moves for so long: what an engine stores after its answer has begun by then, and ended.
_STILL_S = 0.15
# What is on its way to the SSD waits for the client's next heartbeat.
_OFFLOAD_STILL_S = 2.5 * _HEARTBEAT_S
# After a refused put: what an engine has begun to store, and what does not end for so long, it has given up.
_GIVEN_UP_S = 3.0
_PUSH = Path(__file__).with_name("mooncake_push.py")
_LEASE_FLAG = re.compile(r"-{1,2}default_kv_lease_ttl=(\d+)(ms|s|m|h)?$")
_LEASE_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1e-3}
LEASE_S = 10.0
# Mooncake's own size of the buffer through which objects go to files and come back.
BUFFER_BYTES = 1280 * 2**20


class Addresses(NamedTuple):
    """Where the master answers, whether there is an SSD, and how large the buffer before it is."""

    master: str
    ssd: bool
    buffer_bytes: int


class MooncakeServer:
    """A CacheServer: a master and a client as our children. cache.pool is the client's segment, cache.disk its SSD."""

    precedes = True  # an engine's client registers with the master once, and fails without one

    def __init__(self, plan: CachePlan) -> None:
        self._plan, disk = plan, plan.cache.disk
        self.backend = BucketFiles(plan.disk_folder, direct=disk.odirect) if disk else None
        self._pool = MooncakePool(
            PoolPlan(
                engine=plan.engine,
                python=plan.python,
                log=plan.log,
                segment_bytes=plan.cache.pool or 0,
                cores=plan.cores,
                master_args=plan.args,
                start_timeout_s=plan.start_timeout_s,
                offload=self._offload(),
                stored=tuple(self.backend.scratch) if self.backend else (),
            )
        )
        self._moved_at_s = time.monotonic()
        self._evicted = 0
        # What moved when a settling last looked, and since when nothing has.
        self._rest: tuple[tuple[int | None, ...], float] = ((), 0.0)
        # Bytes that the counters of RAM and of files moved by while tiers were emptied: no request was served them.
        self._ours = (0, 0)

    # ---- lifecycle

    def start(self) -> None:
        if self.backend is not None:
            self.backend.prepare()
        self._pool.start()

    def _offload(self) -> dict[str, str]:
        disk = self._plan.cache.disk
        if disk is None or self.backend is None:
            return {}
        return {
            "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(self.backend.folder.absolute()),
            "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(disk.buffer or BUFFER_BYTES),
            "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": str(disk.capacity),
            "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": str(_HEARTBEAT_S),
            "MOONCAKE_OFFLOAD_USE_URING": str(int(disk.odirect)),
            # Objects wait until they fill a file: by default 500 of them, or 256 MiB.
            "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "1",
        }

    async def ready(self) -> None:
        await self._pool.ready()

    @property
    def children(self) -> tuple[Child, ...]:
        return self._pool.children

    @property
    def pids(self) -> tuple[int, ...]:
        """The client's: it alone reads and writes files."""
        return self._pool.client.pids if self._pool.client else ()

    def connection(self) -> Connection:
        disk = self._plan.cache.disk
        buffer_bytes = (disk.buffer if disk else None) or BUFFER_BYTES
        told = Addresses(self._pool.master, disk is not None, buffer_bytes)
        return CONNECTIONS[self._plan.engine](told, self._plan)

    async def resolved(self) -> CacheResolved:
        """The segment's bytes as the master has them."""
        metrics, version = await self._pool.metrics(), self._pool.version()
        return CacheResolved(
            pool_bytes=metrics.total("master_total_capacity_bytes"),
            versions={"mooncake": version} if version else {},
        )

    async def stop(self, *, keep: bool = False) -> None:
        await self._pool.stop(keep=keep)

    # ---- what it holds, and has counted

    async def settle(self, engine: EngineSide) -> Reading:
        def tell(size: int | None, ours: int) -> int | None:
            return None if size is None else (size - ours) // self._plan.kv_bytes_per_token

        metrics = await self._settled()
        told = STORES.get(self._plan.engine)
        begun, ended = told(engine.metrics, self._plan.cache.block_tokens) if told else puts(metrics)
        if ended < begun and refused_puts(metrics) and self._rested_s((begun, ended, *_moving(metrics))) > _GIVEN_UP_S:
            ended = begun
        ram, files = (tell(size, ours) for size, ours in zip(served_bytes(metrics), self._ours, strict=True))
        counters = {"pool_hit_tokens": ram, "disk_hit_tokens": files, "stores_begun": begun, "stores_ended": ended}
        if self.backend is not None:
            client = self._pool.client
            own = client.storage_read_bytes() if client else None
            counters["disk_device_read_bytes"] = self.backend.read_bytes(own)
        return Reading(counters=counters)

    def _rested_s(self, moving: tuple[int | None, ...]) -> float:
        now_s = time.monotonic()
        if moving != self._rest[0]:
            self._rest = moving, now_s
        return now_s - self._rest[1]

    async def _settled(self) -> Metrics:
        """Waits until puts and moves to the SSD have ended, and nothing moves. Raises EngineError after 120 s."""
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        seen, since_s = None, time.monotonic()
        while True:
            metrics = await self._pool.metrics()
            now_s, here = time.monotonic(), _moving(metrics)
            if here != seen:
                seen, since_s, self._moved_at_s = here, now_s, now_s
            evicted = metrics.total("master_evicted_key_count_mem") or 0
            enough_s = _OFFLOAD_STILL_S if self.backend and evicted != self._evicted else _STILL_S
            begun, ended = puts(metrics)
            if begun == ended and now_s - since_s >= enough_s:
                self._evicted = evicted
                return metrics
            if now_s > deadline:
                raise EngineError(
                    f"Mooncake at {self._pool.url} still stores after {_SETTLE_TIMEOUT_S:g} s ({ended} of {begun}"
                    " objects); is the disk full, or the pool too small for this prompt length?"
                )
            await asyncio.sleep(0.03)

    # ---- emptying

    async def clear(self, tier: str) -> None:
        """'pool' with an SSD below it: its objects go there, as if newer ones had pushed them out. 'disk' empties the
        pool too: Mooncake removes an object wherever it is."""
        before = served_bytes(await self._settled())
        if tier == "page_cache":
            assert self.backend is not None
            self.backend.make_cold()
        elif tier == "pool" and self.backend is not None:
            await self._push_out()
        else:
            await self._pool.remove_all(lambda: self.backend is None or not self.backend.holds_any)
        after = served_bytes(await self._settled())
        moved = [(new or 0) - (old or 0) for new, old in zip(after, before, strict=True)]
        self._ours = (self._ours[0] + moved[0], self._ours[1] + moved[1])

    async def _push_out(self) -> None:
        """Objects leave the RAM only by eviction, and none within its lease."""
        metrics = await self._pool.metrics()
        if not metrics.total("master_allocated_bytes"):
            return
        await asyncio.sleep(max(0.0, self._moved_at_s + lease_s(self._plan.args) - time.monotonic()))
        argv = [
            str(self._plan.python),
            "-I",
            str(_PUSH),
            self._pool.master,
            self._pool.url,
            str(self._plan.cache.pool),
        ]
        pusher = self._pool.child("Mooncake push", argv)
        pusher.start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(pusher.ended(), _SETTLE_TIMEOUT_S)
        await pusher.stop()
        metrics = await self._settled()
        if left := metrics.total("master_allocated_bytes"):
            raise EngineError(f"Mooncake keeps {left} bytes in its pool after newer objects came; {pusher.obituary()}")


def make_mooncake(plan: CachePlan) -> MooncakeServer:
    """The servers that a plan asks for; nothing has started."""
    return MooncakeServer(plan)


def served_bytes(metrics: Metrics) -> tuple[int | None, int]:
    """Bytes served from RAM and from files. An object's size, and so its count of tokens, is the engine's choice: bytes
    are what all engines have in common.

    What is in files was read from RAM to get there. RAM None: objects have left the files by themselves, so that
    nothing says how many those reads were.
    """
    names = ("mem_cache_hit_bytes_total", "master_allocated_file_size_bytes", "file_cache_hit_bytes_total")
    ram, written, files = (metrics.total(name) or 0 for name in names)
    dropped = metrics.total("master_evict_disk_replica_requests_total")
    return None if dropped else ram - written, files


def puts(metrics: Metrics) -> tuple[int, int]:
    """Objects whose put was begun, and ended: stored, or revoked."""

    def total(name: str) -> int:
        return metrics.total(f"master_{name}_total") or 0

    def items(step: str) -> int:
        one = total(f"{step}_requests") - total(f"{step}_failures")
        return one + total(f"batch_{step}_items") - total(f"batch_{step}_failed_items")

    return items("put_start"), items("put_end") + items("put_revoke")


def refused_puts(metrics: Metrics) -> int:
    """Objects for which the master had no room."""
    names = ("put_start_failures", "batch_put_start_failed_items")
    return sum(metrics.total(f"master_{name}_total") or 0 for name in names)


def _moving(metrics: Metrics) -> tuple[int | None, ...]:
    """What changes while anything is asked for, put, evicted or moved."""
    served = ("mem_cache_hit_bytes_total", "file_cache_hit_bytes_total")
    held = ("master_key_count", "master_allocated_bytes", "file_cache_nums_")
    moved = ("master_evicted_key_count_mem", "master_promotion_in_flight")
    return (*puts(metrics), *(metrics.total(name) for name in (*served, *held, *moved)))


def lease_s(args: Iterable[str]) -> float:
    """How long the master evicts nothing that was asked for: as its arguments say, else Mooncake's default."""
    found = [match for arg in args if (match := _LEASE_FLAG.match(arg))]
    return int(found[-1][1]) * _LEASE_UNITS_S[found[-1][2]] if found else LEASE_S


# ---- how each engine reaches it

# Engines put and get without copies: what they need beside is small.
_LOCAL_BUFFER_BYTES = 64 * 2**20


def _for_vllm(told: Addresses, plan: CachePlan) -> Connection:
    """vLLM's own MooncakeStoreConnector. It takes the buffer before the SSD to be of Mooncake's own size."""
    config = {
        "mode": "standalone-store",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": told.master,
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": 0,
        "local_buffer_size": _LOCAL_BUFFER_BYTES,
        "enable_offload": told.ssd,
    }
    path = plan.folder / "mooncake.json"
    path.write_text(json.dumps(config))
    connector = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    environment = {"MOONCAKE_CONFIG_PATH": str(path.absolute()), "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "127.0.0.1"}
    environment["VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO"] = str(0.9 * min(1.0, told.buffer_bytes / BUFFER_BYTES))
    return Connection(arguments=("--kv-transfer-config", json.dumps(connector)), environment=CLIENT_SIDE | environment)


def _for_sglang(told: Addresses, _plan: CachePlan) -> Connection:
    """HiCache's storage backend of that name."""
    environment = {
        "MOONCAKE_MASTER": told.master,
        "MOONCAKE_PROTOCOL": "tcp",
        "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "0",
        "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
    }
    return Connection(arguments=("--hicache-storage-backend", "mooncake"), environment=CLIENT_SIDE | environment)


CONNECTIONS: dict[str, Callable[[Addresses, CachePlan], Connection]] = {"vllm": _for_vllm, "sglang": _for_sglang}


def _sglang_stores(metrics: Metrics, block_tokens: int) -> tuple[int, int]:
    """Pages that left the GPU for the host pool, and those of them that have come below it."""
    begun, ended = (metrics.total(f"sglang:{name}_tokens_total") or 0 for name in ("hicache_backup", "backuped"))
    return begun // block_tokens, ended // block_tokens


# Of engines that count themselves what they store: stores begun and ended, before the master knows of them.
STORES: dict[str, Callable[[Metrics, int], tuple[int, int]]] = {"sglang": _sglang_stores}
