"""Several instances: which cache servers stand behind them, how their counters add up, where their requests go."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import uvloop

from harness.caches import check_shared, make_servers
from harness.caches.base import CachePlan
from harness.caches.files import FilesBackend
from harness.caches.lmcache import LMCacheServer
from harness.engines.http.dialect import Completions
from harness.engines.http.replay import HttpReplay
from harness.errors import PreflightError
from harness.experiment.cache import Cache
from harness.experiment.deployment import Deployment
from harness.experiment.fields import Cores
from harness.records import Counters
from tests.support.instant_server import serve
from traces.load import Load
from traces.request import Request, RequestRecord, Segment, TokenSource
from traces.routing import Router


def plan(folder: Path, **tiers: Any) -> CachePlan:
    cache = Cache.model_validate({"gpu": "64MiB", "cpu": "1GiB", "disk": {"capacity": "1GiB"}, **tiers})
    return CachePlan(engine="vllm", python=Path("python"), cache=cache, folder=folder)


@pytest.mark.parametrize(
    ("name", "shared", "folders"),
    [
        ("mp", (), ["kv-harness-out", "kv-harness-out-1", "kv-harness-out-2"]),
        ("mp", ("disk",), ["kv-harness-out"] * 3),
        ("mp", ("cpu", "disk"), ["kv-harness-out"]),
        ("file", (), ["kv-harness-out", "kv-harness-out-1", "kv-harness-out-2"]),
        ("file", ("disk",), ["kv-harness-out"] * 3),
    ],
)
def test_cache_servers_are_as_many_as_their_first_tier_and_folders_as_their_last(
    tmp_path: Path, name: str, shared: tuple[str, ...], folders: list[str]
) -> None:
    deployment = Deployment.model_validate({"instances": 3, "shared": shared})
    servers = make_servers(name, plan(tmp_path / "out"), deployment)
    backends = [server.backend for server in servers]
    assert [backend.folder.name for backend in backends if isinstance(backend, FilesBackend)] == folders
    assert len(make_servers(name, plan(tmp_path / "out"), Deployment())) == 1


@pytest.mark.parametrize(
    ("name", "tiers", "precedes"),
    [
        ("mp", {}, False),
        ("mp", {"cpu": "16GiB"}, False),
        ("mp", {"cpu": "17GiB"}, True),
        ("mp", {"disk": None, "remote": {"capacity": "1GiB", "adapter": "resp"}}, True),
        ("in_process", {}, False),
        ("file", {}, False),
        ("mooncake", {"cpu": None, "pool": "1GiB"}, True),
    ],
)
def test_an_engine_comes_up_beside_a_server_that_it_asks_later(
    tmp_path: Path, name: str, tiers: dict[str, Any], precedes: bool
) -> None:
    [server] = make_servers(name, plan(tmp_path / "out", **tiers), Deployment())
    assert server.precedes is precedes


@pytest.mark.parametrize(
    ("name", "shared", "said"),
    [
        ("mp", ("cpu",), "name disk as well"),
        ("mp", ("pool",), r"cannot share it \(of mp, instances can share cpu and disk and remote\)"),
        ("in_process", ("disk",), r"cannot share it \(none can\)"),
        ("file", ("cpu",), r"of file, instances can share disk"),
        ("mooncake", ("pool",), "cache has no such tier; give it a size"),
    ],
)
def test_what_instances_cannot_share_is_refused(name: str, shared: tuple[str, ...], said: str, tmp_path: Path) -> None:
    deployment = Deployment.model_validate({"instances": 2, "shared": shared})
    with pytest.raises(PreflightError, match=rf"^deployment.shared.*{said}"):
        check_shared(plan(tmp_path).cache, deployment, name)
    check_shared(plan(tmp_path).cache, Deployment(), name)


STORE = {"disk": None, "remote": {"capacity": "1GiB", "adapter": "resp"}}


@pytest.mark.parametrize(("shared", "count"), [(("remote",), 3), (("cpu", "remote"), 1)])
def test_servers_over_a_store_have_one_that_the_first_starts(
    tmp_path: Path, shared: tuple[str, ...], count: int
) -> None:
    deployment = Deployment.model_validate({"instances": 3, "shared": shared})
    found = make_servers("mp", plan(tmp_path / "out", **STORE), deployment)
    servers = [server for server in found if isinstance(server, LMCacheServer)]
    assert len(servers) == count and len({id(server.store) for server in servers}) == 1
    check_shared(plan(tmp_path, **STORE).cache, deployment, "mp")


def test_a_store_is_every_instances_or_refused(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"^cache.remote: .* one store, .*; name remote in deployment.shared$"):
        check_shared(plan(tmp_path, **STORE).cache, Deployment.model_validate({"instances": 2}), "mp")


def test_what_a_store_says_is_counted_once() -> None:
    """Each cache server over it tells the whole."""
    each = ({"remote_hit_tokens": 4}, {"remote_hit_tokens": 6})
    found = Counters.of_all(each, {"remote_sent_bytes": 10})
    assert found.named() == {"remote_hit_tokens": 10, "remote_sent_bytes": 10}
    assert [one.hit_tokens["remote"] for one in found.by_instance] == [4, 6]


def test_counters_of_instances_and_of_what_they_share_add_up() -> None:
    each = (
        {"computed_tokens": 3, "cpu_hit_tokens": None, "steps_paced": 5},
        {"computed_tokens": 4, "cpu_hit_tokens": 1},
    )
    found = Counters.of_all(each, {"disk_hit_tokens": 7})
    assert found.named() == {"computed_tokens": 7, "disk_hit_tokens": 7, "steps_paced": 5}, "what one lacks is no total"
    assert [one.computed_tokens for one in found.by_instance] == [3, 4]
    later = Counters.of_all(({**each[0], "computed_tokens": 13}, each[1]), {"disk_hit_tokens": 9}).since(found)
    assert (later.computed_tokens, later.hit_tokens["disk"]) == (10, 2)
    assert [one.computed_tokens for one in later.by_instance] == [10, 0]
    assert Counters.of_all([each[1]], {}).by_instance == (), "one instance is the whole"


def test_cores_are_for_all_instances_or_for_each() -> None:
    all_alike = Cores.model_validate({"engine": [0, 1]})
    assert [all_alike.of_instance(number) for number in range(2)] == [(0, 1), (0, 1)]
    each = Cores.model_validate({"engine": [[0], [2, 1]]})
    assert [each.of_instance(number) for number in range(3)] == [(0,), (2, 1), (0,)]
    assert (each.of_engines, Cores().of_engines, Cores().of_instance(1)) == ((0, 1, 2), None, None)
    pinned = Cores.model_validate({"engine": [2, 3], "client": [8, 9]})
    assert [cores.firsts for cores in (all_alike, each, Cores(), pinned)] == [(0,), (0, 2), (), (2, 8)]


@pytest.mark.parametrize("routing", ["round-robin", "session"])
def test_each_request_goes_where_the_router_says_and_its_row_names_it(routing: str) -> None:
    def asked(turn: int, session: int) -> Request:
        prompt = (Segment(1, 20), Segment(session, 12))
        return Request(
            id=f"{turn}-{session}", prompt=prompt, output_tokens=2, session=str(session), turn=turn, wave=turn
        )

    load = Load([asked(turn, session) for turn in range(2) for session in range(3)], concurrency=1)

    async def run() -> tuple[list[RequestRecord], list[int]]:
        servers, rows = [await serve(), await serve()], list[RequestRecord]()
        urls = [server.url for server in servers]
        replay = HttpReplay(urls, Completions("m"), TokenSource(1, 1000), time.perf_counter, router=Router(routing, 2))
        async with replay:
            await replay.replay(load, rows.append)
        for server in servers:
            await server.close()
        return rows, [len(server.seen) for server in servers]

    rows, seen = uvloop.run(run())
    assert all(row.error is None for row in rows)
    places = {"round-robin": [0, 1, 0, 1, 0, 1], "session": [0, 1, 0, 0, 1, 0]}[routing]
    assert [row.instance for row in rows] == places and seen == [places.count(0), places.count(1)]
