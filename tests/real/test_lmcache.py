"""The LMCache server on its own: it evicts as it was told, and says so."""

import asyncio
from pathlib import Path

import pytest

from harness.caches.lmcache import LMCacheServer, LMCacheSpec
from harness.experiment.cache import Eviction
from harness.records import EvictionRules
from simulator.policies import LMCACHE, lmcache_eviction
from tests.real.test_vllm import PYTHON

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not PYTHON.exists(), reason="no engine environment; `scripts/engine_env vllm` makes it"),
]


def resolved(folder: Path, eviction: Eviction) -> tuple[int, int, EvictionRules]:
    spec = LMCacheSpec(
        python=PYTHON, chunk_tokens=64, cpu_bytes=2**30, disk_path=None, adapter="fs", odirect=False,
        log=folder / "lmcache.log", cores=None, shared_memory=False, eviction=eviction, args=(), start_timeout_s=120.0,
    )  # fmt: skip

    async def ask() -> tuple[int, int, EvictionRules]:
        server = LMCacheServer(spec)
        server.start()
        try:
            await server.ready()
            return await server.resolved()
        finally:
            await server.stop()

    return asyncio.run(ask())


def test_the_server_evicts_as_it_was_told(tmp_path: Path) -> None:
    told = Eviction(policy="arc", watermark=0.5, ratio=0.3)
    assert resolved(tmp_path, told) == (2**30, 64, EvictionRules(**told.model_dump()))
    # What the experiment leaves out is what the simulator's pack has.
    assert Eviction().model_dump() == lmcache_eviction(LMCACHE)
