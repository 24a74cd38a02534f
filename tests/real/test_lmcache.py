"""The LMCache server alone: it uses the given eviction settings and reports them."""

import asyncio
from pathlib import Path

import pytest

from harness.caches.base import CachePlan, CacheResolved
from harness.caches.lmcache import make_server
from harness.experiment.cache import Cache, Eviction
from harness.records import EvictionRules
from simulator.policies import LMCACHE, lmcache_eviction
from tests.real.test_vllm import PYTHON

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not PYTHON.exists(), reason="no engine environment; `scripts/engine_env vllm` makes it"),
]


def resolved(folder: Path, eviction: Eviction) -> CacheResolved:
    cache = Cache.model_validate({"gpu": "1GiB", "cpu": "1GiB", "chunk_tokens": 64, "eviction": eviction})
    plan = CachePlan(engine="vllm", python=PYTHON, cache=cache, folder=folder, start_timeout_s=120.0)

    (folder / "logs").mkdir()

    async def ask() -> CacheResolved:
        server = make_server(plan)
        server.start()
        try:
            await server.ready()
            return await server.resolved()
        finally:
            await server.stop()

    return asyncio.run(ask())


def test_the_server_uses_and_reports_the_given_eviction_settings(tmp_path: Path) -> None:
    told = Eviction(policy="arc", watermark=0.5, ratio=0.3)
    found = resolved(tmp_path, told)
    rules = EvictionRules(**told.model_dump())
    assert (found.cpu_bytes, found.chunk_tokens, found.eviction) == (2**30, 64, rules)
    # What the experiment leaves out is what the simulator's pack has.
    assert Eviction().model_dump() == lmcache_eviction(LMCACHE)
