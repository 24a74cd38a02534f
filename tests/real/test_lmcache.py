"""The LMCache server alone: the eviction settings that it uses and reports, and how its RAM is mapped."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from harness.caches.base import CachePlan
from harness.caches.lmcache import LMCacheServer, make_server
from harness.engines.accelerator import PLUGIN
from harness.experiment.cache import Cache, Eviction
from harness.records import EvictionRules
from simulator.policies import LMCACHE, lmcache_eviction
from tests.real.test_vllm import PYTHON

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not PYTHON.exists(), reason="no engine environment; `scripts/engine_env vllm` makes it"),
]


T = TypeVar("T")


def started(folder: Path, eviction: Eviction, ask: Callable[[LMCacheServer], Awaitable[T]], **more: Any) -> T:
    """What a server of 1 GiB says once it is ready."""
    cache = Cache.model_validate({"gpu": "1GiB", "cpu": "1GiB", "chunk_tokens": 64, "eviction": eviction})
    plan = CachePlan(engine="vllm", python=PYTHON, cache=cache, folder=folder, start_timeout_s=120.0, **more)
    (folder / "logs").mkdir(parents=True)

    async def whole() -> T:
        server = make_server(plan)
        server.start()
        try:
            await server.ready()
            return await ask(server)
        finally:
            await server.stop()

    return asyncio.run(whole())


async def shared_bytes_mapped(server: LMCacheServer) -> int:
    """Of the RAM that the server shares with the engine, what its own processes have mapped."""
    areas = [area for pid in server.pids for area in psutil.Process(pid).memory_maps()]
    return sum(area.rss for area in areas if area.path.startswith("/dev/shm/") and "kv-harness" in area.path)


def test_the_server_uses_and_reports_the_given_eviction_settings(tmp_path: Path) -> None:
    told = Eviction(policy="arc", watermark=0.5, ratio=0.3)
    found = started(tmp_path / "run", told, LMCacheServer.resolved)
    rules = EvictionRules(**told.model_dump())
    assert (found.cpu_bytes, found.chunk_tokens, found.eviction) == (2**30, 64, rules)
    # What the experiment leaves out is what the simulator's pack has.
    assert Eviction().model_dump() == lmcache_eviction(LMCACHE)


def test_beside_an_accelerator_all_of_the_server_s_ram_is_mapped_as_if_it_were_locked(tmp_path: Path) -> None:
    mapped = started(tmp_path / "run", Eviction(), shared_bytes_mapped, shared_memory=True, page_locked_by=PLUGIN)
    assert 0 <= mapped - 2**30 < 2**20
