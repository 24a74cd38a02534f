"""Mooncake below LMCache, without either: what the plugin tells LMCache of its batches, what is read of the master, and
what is refused before a start."""

from __future__ import annotations

import asyncio
import importlib
import json
import select
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from harness.caches.mooncake_pool import MooncakePool
from harness.caches.stores import STORES
from harness.caches.stores.base import StorePlan
from harness.caches.stores.mooncake import PLUGIN
from harness.collectors.prometheus import Metrics
from harness.errors import PreflightError
from harness.experiment.cache import Remote
from tests.support.paths import ROOT

KEYS = ["there", "lost", "also there"]
NO_ROOM, NOT_FOUND = -200, -704
PAGE = """# TYPE mem_cache_hit_nums_ counter
mem_cache_hit_nums_ 10
# TYPE mem_cache_hit_bytes_total counter
mem_cache_hit_bytes_total 20971520
"""


def remote(**config: Any) -> Remote:
    return Remote.model_validate({"capacity": "1GiB", "adapter": "mooncake", **config})


class StandIn:
    """Mooncake's store: refuses to keep, and never finds, what is called 'lost'."""

    told: ClassVar[dict[str, str]] = {}

    def setup(self, told: dict[str, str]) -> int:
        StandIn.told = told
        return -1 if told.get("master_server_addr") == "nowhere" else 0

    def put_from(self, key: str, _address: int, _size: int) -> int:
        return NO_ROOM if key == "lost" else 0

    def get_into(self, key: str, _address: int, size: int) -> int:
        return {"lost": NOT_FOUND, "short": size - 1}.get(key, size)

    def is_exist(self, key: str) -> int:
        return {"lost": 0, "broken": -1}.get(key, 1)

    def close(self) -> None:
        self.told.clear()


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plugin's module, over the stand-in."""
    store = types.ModuleType("mooncake.store")
    store.MooncakeDistributedStore = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", store)
    monkeypatch.syspath_prepend(str(PLUGIN))
    yield importlib.import_module("kv_mooncake")
    sys.modules.pop("kv_mooncake", None)


def ended(client: Any) -> Any:
    """The one batch that has ended, as LMCache's thread learns of it."""
    poller = select.poll()
    poller.register(client.event_fd(), select.POLLIN)
    assert poller.poll(10_000), "no batch has ended"
    [completion] = client.drain_completions()
    assert client.drain_completions() == []
    return completion


def views(count: int) -> list[memoryview]:
    return [memoryview(bytearray(64)) for _ in range(count)]


def test_a_batch_tells_of_each_chunk_and_why_it_failed(plugin: Any, capsys: pytest.CaptureFixture[str]) -> None:
    client = plugin.MooncakeClient(setup={"master_server_addr": "here"}, num_workers=2)
    stored = client.submit_batch_set(KEYS, views(3))
    assert ended(client) == (stored, False, f"Mooncake's put_from failed: code {NO_ROOM}", [True, False, True])
    got = client.submit_batch_get([*KEYS, "short"], views(4))
    told = f"Mooncake's get_into failed: 63 of 64 bytes, code {NOT_FOUND}"
    assert ended(client) == (got, False, told, [True, False, True, False])
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {told}"
    asked = client.submit_batch_exists(KEYS)
    assert ended(client) == (asked, True, "", [True, False, True]), "a chunk that is not there is an answer"
    broken = client.submit_batch_exists(["broken"])
    assert ended(client) == (broken, False, "Mooncake's is_exist failed: code -1", [False])
    none = client.submit_batch_get([], [])
    assert ended(client) == (none, True, "", []) and len({stored, got, asked, broken, none}) == 5
    client.close()
    assert StandIn.told == {}, "Mooncake's own client was closed"


def test_a_client_without_a_master_does_not_start(plugin: Any) -> None:
    with pytest.raises(RuntimeError, match=r"does not start \(code -1\)"):
        plugin.MooncakeClient(setup={"master_server_addr": "nowhere"})


def test_lmcache_is_told_of_the_plugin_and_lends_no_memory(plugin: Any, tmp_path: Path) -> None:
    store = STORES["mooncake"].make(StorePlan(remote=remote(threads=3), folder=tmp_path))
    spec = json.loads(json.dumps(store.spec()))
    assert spec["type"] == "native_plugin" and store.environment()["PYTHONPATH"] == str(ROOT / PLUGIN)
    client = getattr(plugin, spec["class_name"])(**spec["adapter_params"])
    assert spec["module_path"] == plugin.__name__ and spec["adapter_params"]["num_workers"] == 3
    assert StandIn.told["global_segment_size"] == "0" and StandIn.told["master_server_addr"].startswith("127.0.0.1:")
    client.close()


def test_the_master_s_counters_are_the_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = [PAGE]

    async def metrics(_pool: MooncakePool) -> Metrics:
        return Metrics(page[0])

    monkeypatch.setattr(MooncakePool, "metrics", metrics)
    store = STORES["mooncake"].make(StorePlan(remote=remote(), folder=tmp_path))
    account = asyncio.run(store.account(10))
    assert (account.sent_bytes, account.reads, account.device_bytes) == (20971520, 10, None)
    page[0] = ""
    account = asyncio.run(store.account(0))
    assert (account.sent_bytes, account.reads) == (0, 0)


def test_an_environment_without_mooncake_is_refused(tmp_path: Path) -> None:
    def told() -> str:
        with pytest.raises(PreflightError) as refused:
            STORES["mooncake"].check(remote(), python)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ImportError: libibverbs.so.1: cannot open' >&2\nexit 1\n")
    python.chmod(0o755)
    assert "no mooncake_master beside" in told() and "run scripts/engine_env vllm" in told()
    (tmp_path / "mooncake_master").touch()
    assert "cannot load Mooncake (ImportError: libibverbs.so.1: cannot open); sudo apt-get" in told()
    python.write_text("#!/bin/sh\nexit 0\n")
    STORES["mooncake"].check(remote(), python)
