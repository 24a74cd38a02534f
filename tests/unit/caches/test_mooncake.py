"""What is read of Mooncake: hits in tokens, puts under way, the lease; and what engines are told of it."""

import asyncio
import json
from pathlib import Path

import pytest

from harness.caches import CACHES
from harness.caches.base import CachePlan, EngineSide
from harness.caches.mooncake import MooncakeServer, lease_s, make_mooncake, puts, served_bytes
from harness.collectors.prometheus import Metrics
from harness.experiment.cache import Cache

PAGE = """# TYPE mem_cache_hit_bytes_total counter
mem_cache_hit_bytes_total 8388608
# TYPE file_cache_hit_bytes_total counter
file_cache_hit_bytes_total 4194304
# TYPE master_allocated_file_size_bytes gauge
master_allocated_file_size_bytes 2097152
# TYPE master_put_start_requests_total counter
master_put_start_requests_total 7
# TYPE master_put_start_failures_total counter
master_put_start_failures_total 2
# TYPE master_put_end_requests_total counter
master_put_end_requests_total 4
# TYPE master_batch_put_start_items_total counter
master_batch_put_start_items_total 30
# TYPE master_batch_put_start_failed_items_total counter
master_batch_put_start_failed_items_total 10
# TYPE master_batch_put_end_items_total counter
master_batch_put_end_items_total 15
# TYPE master_batch_put_revoke_items_total counter
master_batch_put_revoke_items_total 1
"""


def test_what_is_written_to_files_is_not_what_ram_served() -> None:
    assert served_bytes(Metrics(PAGE)) == (8388608 - 2097152, 4194304)
    assert served_bytes(Metrics("")) == (0, 0)
    evicted = PAGE + "master_evict_disk_replica_requests_total 1\n"
    assert served_bytes(Metrics(evicted)) == (None, 4194304), "how much was written is no longer known"


def test_a_put_is_under_way_until_it_is_ended_or_revoked() -> None:
    assert puts(Metrics(PAGE)) == (25, 20)


ROOM = PAGE.replace("master_put_start_failures_total 2", "master_put_start_failures_total 0")
ROOM = ROOM.replace("start_failed_items_total 10", "start_failed_items_total 0")
TOLD = """# TYPE sglang:hicache_backup_tokens_total counter
sglang:hicache_backup_tokens_total 640
# TYPE sglang:backuped_tokens_total counter
sglang:backuped_tokens_total 512
"""


@pytest.mark.parametrize(("page", "ended"), [(PAGE, 10), (ROOM, 8)])
def test_a_store_that_the_master_refused_has_ended_once_nothing_moves(
    page: str, ended: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache.model_validate({"gpu": "64MiB", "pool": "1GiB", "block_tokens": 64, "chunk_tokens": 64})
    server = MooncakeServer(CachePlan(engine="sglang", python=Path("python"), cache=cache, folder=tmp_path))
    engine, now_s = EngineSide(metrics=Metrics(TOLD), read_bytes=None), [100.0]

    async def settled(_server: MooncakeServer) -> Metrics:
        return Metrics(page)

    async def stores() -> tuple[int | None, int | None]:
        counters = (await server.settle(engine)).counters
        return counters["stores_begun"], counters["stores_ended"]

    monkeypatch.setattr(MooncakeServer, "_settled", settled)
    monkeypatch.setattr("harness.caches.mooncake.time.monotonic", lambda: now_s[0])
    assert asyncio.run(stores()) == (10, 8)
    now_s[0] += 2.9
    assert asyncio.run(stores()) == (10, 8), "they may still be on their way"
    now_s[0] += 0.2
    assert asyncio.run(stores()) == (10, ended)


@pytest.mark.parametrize(
    ("args", "seconds"),
    [((), 10.0), (("--default_kv_lease_ttl=500",), 0.5), (("-default_kv_lease_ttl=3s", "--v=1"), 3.0)],
)
def test_the_lease_is_what_the_master_was_told(args: tuple[str, ...], seconds: float) -> None:
    assert lease_s(args) == seconds


@pytest.mark.parametrize("engine", sorted(CACHES["mooncake"].engines))
def test_each_engine_is_told_where_the_master_is_and_lends_no_memory(engine: str, tmp_path: Path) -> None:
    cache = Cache.model_validate({"gpu": "64MiB", "pool": "1GiB", "disk": {"capacity": "1GiB"}})
    server = make_mooncake(CachePlan(engine=engine, python=Path("python"), cache=cache, folder=tmp_path))
    told = server.connection()
    said = told.environment | {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert (
        any("127.0.0.1:" in text for text in said.values()) and told.environment["MC_TCP_BIND_ADDRESS"] == "127.0.0.1"
    )
    if "mooncake.json" in said:
        assert json.loads(said["mooncake.json"])["global_segment_size"] == 0
    else:
        assert said["MOONCAKE_GLOBAL_SEGMENT_SIZE"] == "0"
