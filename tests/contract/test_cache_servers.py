"""Every cache server: lifecycle, how an engine reaches it, what it has counted, and refusals on one line."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from harness.caches import CACHES, caches_of
from harness.caches.base import Attached, CachePlan, CacheServer, EngineSide
from harness.collectors.prometheus import Metrics
from harness.errors import EngineError
from harness.experiment.cache import Cache
from harness.records import Counters
from tests.contract.cases import PYTHON, REAL

STATUS: dict[str, Any] = {
    "chunk_size": 256,
    "storage_manager": {
        "l1_eviction_controller": {"eviction_policy": "LRU", "trigger_watermark": 0.8, "eviction_ratio": 0.2},
        "l1_manager": {
            "memory_total_bytes": 2**30,
            "total_object_count": 0,
            "write_locked_count": 0,
            "read_locked_count": 0,
        },
        "store_controller": {"pending_keys_count": 0, "in_flight_task_count": 0},
    },
}
NOTHING = EngineSide(metrics=Metrics(""), read_bytes=None)


RAM = {"cpu": "1GiB"}
POOL = {"pool": "128MiB", "chunk_tokens": 32}


def plan(folder: Path, ram: dict[str, Any] = RAM, **more: Any) -> CachePlan:
    (folder / "logs").mkdir(exist_ok=True)
    cache = Cache.model_validate({"gpu": "64MiB", "disk": {"capacity": "256MiB"}, **ram})
    return CachePlan(engine="vllm", python=PYTHON, cache=cache, folder=folder, **more)


def _says(answer: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handler(_request: web.Request) -> web.Response:
        return web.Response(text=answer)

    return handler


@contextlib.asynccontextmanager
async def stand_in() -> AsyncIterator[str]:
    """Answers as an LMCache server does that has served nothing."""
    app = web.Application()
    for path, answer in (("healthcheck", ""), ("metrics", ""), ("version", '"0.5.6"'), ("status", json.dumps(STATUS))):
        app.router.add_get(f"/{path}", _says(answer))
    app.router.add_post("/cache/clear", _says("{}"))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def made(name: str, folder: Path) -> AsyncIterator[CacheServer]:
    """The server of that name; 'attached…' is one that runs already."""
    async with stand_in() as url:
        attached = Attached(url=url, disk_path=folder) if name.startswith("attached") else None
        kind = CACHES[{"attached": "mp", "attached file": "file"}.get(name, name)]
        server = kind.make(plan(folder, POOL if "pool" in kind.tiers else RAM, attached=attached))
        try:
            yield server
        finally:
            await server.stop()
            await server.stop()


REAL_SERVERS = ("mp", "mooncake")
every_server = pytest.mark.parametrize(
    "name", ["in_process", "attached", "file", *(pytest.param(name, marks=REAL) for name in REAL_SERVERS)]
)
TIERS = ("cpu", "disk", "page_cache")
# What each of these empties, and how its chunk files end.
EMPTIES = {"in_process": (), "attached": TIERS, "attached file": ("disk", "page_cache")}


@every_server
def test_a_server_lives_counts_and_ends(name: str, tmp_path: Path) -> None:
    async def live() -> tuple[Any, Any, dict[str, int], dict[str, int], tuple[Any, ...]]:
        async with made(name, tmp_path) as server:
            assert server.children == () and server.pids == ()
            server.start()
            await server.ready()
            children = server.children
            if name in REAL_SERVERS:  # their start takes long; the others are asked one by one below
                for tier in (*sorted(CACHES[name].tiers), "page_cache"):
                    await server.clear(tier)
            first, second = await server.settle(NOTHING), await server.settle(NOTHING)
            before, after = (Counters.of(reading.counters).named() for reading in (first, second))
            return server.connection(), await server.resolved(), before, after, children
        raise AssertionError

    connection, resolved, first, second, children = asyncio.run(live())
    assert connection.arguments or connection.environment
    assert all(second[name] >= value for name, value in first.items()) and first.keys() == second.keys()
    assert resolved.cpu_bytes in (None, 2**30) and resolved.chunk_tokens in (None, 256)
    assert resolved.pool_bytes == (128 * 2**20 if name == "mooncake" else None)
    assert not any(child.running for child in children)


@pytest.mark.parametrize("name", EMPTIES)
@pytest.mark.parametrize("tier", TIERS)
def test_clear_empties_a_tier_or_says_that_it_cannot(name: str, tier: str, tmp_path: Path) -> None:
    chunk = tmp_path / ("ab.bin" if name == "attached file" else "ab.data")
    chunk.write_bytes(b"k")

    async def live() -> str:
        async with made(name, tmp_path) as server:
            server.start()
            await server.ready()
            try:
                await server.clear(tier)
            except EngineError as error:
                return str(error)
            return ""

    refusal = asyncio.run(live())
    assert "\n" not in refusal and bool(refusal) == (tier not in EMPTIES[name])
    assert chunk.exists() == (tier != "disk" or name == "in_process")


@pytest.mark.parametrize("name", CACHES)
def test_a_server_that_never_started_is_stopped_all_the_same(name: str, tmp_path: Path) -> None:
    async def live() -> tuple[Any, ...]:
        server = CACHES[name].make(plan(tmp_path))
        await server.stop()
        await server.stop()
        return server.children

    assert asyncio.run(live()) == () and list(tmp_path.iterdir()) == [tmp_path / "logs"]


def test_a_server_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    async def live() -> None:
        server = CACHES["mp"].make(plan(tmp_path, attached=Attached(url="http://127.0.0.1:9")))
        server.start()
        try:
            await server.ready()
        finally:
            await server.stop()

    with pytest.raises(EngineError, match=r"no LMCache server answers .*attach\.lmcache_url"):
        asyncio.run(live())


def test_each_server_says_which_engines_can_have_it_and_what_stands_for_it() -> None:
    from simulator.policies import TIER_POLICIES

    assert caches_of("vllm") == ["mp", "in_process", "mooncake"] and caches_of("sglang") == ["mooncake", "file"]
    assert caches_of("fake") == []
    assert all(kind.engines and kind.tier_policy in TIER_POLICIES for kind in CACHES.values())
    with pytest.raises(ValueError, match="LMCache takes whole GiB"):
        CACHES["mp"].check(Cache.model_validate({"gpu": "64MiB", "cpu": "1000MiB"}))
    with pytest.raises(ValueError, match="one block of 32 tokens into an object of Mooncake's; set both"):
        CACHES["mooncake"].check(Cache.model_validate({"gpu": "64MiB", "pool": "1GiB"}))
    with pytest.raises(ValueError, match=r"Mooncake's SSD holds what its RAM drops; give cache\.pool"):
        CACHES["mooncake"].check(Cache.model_validate({"gpu": "64MiB", "cpu": "1GiB", "disk": {"capacity": "1GiB"}}))
