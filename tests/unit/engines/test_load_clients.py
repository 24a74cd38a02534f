"""A load that several processes send: the same requests and answers as from one, and nothing lost when one dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import uvloop
from msgspec import UNSET

from harness.engines.http import clients as module
from harness.engines.http.clients import Clients, deal
from harness.engines.http.dialect import Completions
from harness.engines.http.replay import HttpReplay
from harness.errors import EngineError
from harness.records import CUT_SHORT
from tests.support.instant_server import Server, serve
from tests.support.paths import ROOT
from tests.support.processes import alive, all_gone
from traces.load import Load
from traces.request import Request, RequestRecord, Segment, TokenSource
from traces.rounds import RoundSpec, rounds_load
from traces.routing import Router
from traces.synth import SessionSpec, conversation

KEY = "sk-very-secret"
DIALECT = Completions("instant", count_tokens=True)


class Played(NamedTuple):
    """load: as it was left. bodies: what the server got."""

    load: Load
    rows: list[RequestRecord]
    bodies: list[bytes]
    max_in_flight: int


def replayer(urls: str | list[str], folder: Path, clients: int, **options: Any) -> HttpReplay:
    (folder / "logs").mkdir(exist_ok=True)
    several = Clients.if_several(clients, folder)
    tokens = TokenSource(1, 1000)
    return HttpReplay(urls, DIALECT, tokens, time.perf_counter, api_key=KEY, clients=several, **options)


def play(load: Load, folder: Path, clients: int, **server_options: Any) -> Played:
    async def run() -> Played:
        server, rows = await serve(**server_options), list[RequestRecord]()
        async with replayer(server.url, folder, clients) as client:
            await client.replay(load, rows.append)
        await server.close()
        return Played(load, rows, [body for _, body in server.seen], server.max_in_flight)

    return uvloop.run(run())


def asked(name: str, tokens: int = 12, **fields: Any) -> Request:
    return Request(id=name, prompt=(Segment(1, 20), Segment(len(name), tokens)), output_tokens=3, **fields)


def pids_of(client: HttpReplay) -> list[int]:
    return [pid for child in client.children if (pid := child.pid) is not None]


def timed() -> Load:
    return Load([asked(f"r{n}", n, at_s=n * 0.002) for n in range(1, 60)])


def limited() -> Load:
    return Load([asked(f"r{n}", n) for n in range(1, 60)], concurrency=5)


def sessions() -> Load:
    return Load([asked(f"{session}{turn}", session=session, turn=turn) for turn in range(4) for session in "abcdefg"])


def quoted() -> Load:
    found = rounds_load(RoundSpec(clients=7, rounds=3, first_tokens=40, turn_tokens=9, output_tokens=3,
                                  answers="quoted"), 5)  # fmt: skip
    return Load(found.requests, concurrency=4, gaps_s=found.gaps_s, fifo=found.fifo)


@pytest.mark.parametrize("make", [timed, limited, sessions, quoted])
def test_three_clients_send_what_one_process_sends(make: Callable[[], Load], tmp_path: Path) -> None:
    one, three = (play(make(), tmp_path, clients, ttft_ms=3) for clients in (1, 3))

    def told(row: RequestRecord) -> tuple[object, ...]:
        counts = (row.prompt_tokens, row.output_tokens, row.cached_tokens, len(row.token_s))
        return (row.id, row.error, row.session, row.turn, row.instance, *counts)

    assert sorted(map(told, one.rows)) == sorted(map(told, three.rows))
    assert {row.error for row in three.rows} == {None} and len(three.rows) == len(three.load.requests)
    assert Counter(one.bodies) == Counter(three.bodies) and one.load.unsent == three.load.unsent == 0
    assert {row.client for row in one.rows} == {UNSET}
    homes = dict(zip((r.id for r in three.load.requests), deal(three.load.requests, 3), strict=True))
    assert {row.id: row.client for row in three.rows} == homes and set(homes.values()) == {0, 1, 2}
    for row in three.rows:
        assert row.scheduled_s <= row.sent_s <= (row.first_chunk_s or 0.0) <= (row.first_token_s or 0.0)


def test_a_timed_load_keeps_its_intended_moments(tmp_path: Path) -> None:
    rows = play(timed(), tmp_path, 3).rows
    start_s = min(row.scheduled_s for row in rows)
    due_s = {request.id: request.at_s for request in timed().requests}
    first_s = min(at_s for at_s in due_s.values() if at_s is not None)
    for row in rows:
        assert row.scheduled_s - start_s == pytest.approx((due_s[row.id] or 0.0) - first_s, abs=1e-9)


def test_a_limit_holds_over_all_clients(tmp_path: Path) -> None:
    assert play(limited(), tmp_path, 3, ttft_ms=5).max_in_flight == 5


def test_requests_one_at_a_time_end_in_the_order_of_one_process(tmp_path: Path) -> None:
    def load() -> Load:
        return Load([asked(f"r{n}") for n in range(9)], concurrency=1)

    one, three = (play(load(), tmp_path, clients).rows for clients in (1, 3))
    assert [row.id for row in one] == [row.id for row in three]
    assert all(later.sent_s > before.token_s[-1] for before, later in pairwise(three))


def test_each_session_is_one_clients_and_its_turns_follow_one_another(tmp_path: Path) -> None:
    rows = play(sessions(), tmp_path, 3, ttft_ms=2).rows
    for session in "abcdefg":
        mine = [row for row in rows if row.session == session]
        assert len({row.client for row in mine}) == 1 and [row.turn for row in mine] == [0, 1, 2, 3]
        assert all(later.sent_s > before.token_s[-1] for before, later in pairwise(mine))


def test_sessions_and_lone_requests_are_dealt_in_turn() -> None:
    named = [asked("a", session="x"), asked("b"), asked("c", session="y"), asked("d", session="x"), asked("e"),
             asked("f", session="z")]  # fmt: skip
    assert deal(named, 2) == [0, 0, 1, 0, 1, 0] and deal(named, 64) == [0, 0, 1, 0, 1, 2]


def test_the_router_still_chooses_the_instance(tmp_path: Path) -> None:
    load = Load([asked(f"r{n}") for n in range(8)], concurrency=1)

    async def run() -> tuple[list[RequestRecord], list[int]]:
        servers, rows = [await serve(), await serve()], list[RequestRecord]()
        urls = [server.url for server in servers]
        async with replayer(urls, tmp_path, 3, router=Router("round-robin", 2)) as client:
            await client.replay(load, rows.append)
        for server in servers:
            await server.close()
        return rows, [len(server.seen) for server in servers]

    rows, seen = uvloop.run(run())
    assert [row.instance for row in rows] == [0, 1] * 4 and seen == [4, 4]
    assert [row.client for row in rows] == [0, 1, 2, 0, 1, 2, 0, 1]


def test_bodies_beyond_the_room_for_them_are_made_in_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PREPARED_BYTES", 1000)
    for make in (timed, limited):
        one, two = (play(make(), tmp_path, clients, ttft_ms=2) for clients in (1, 2))
        assert {row.error for row in two.rows} == {None} and Counter(one.bodies) == Counter(two.bodies)


def test_an_end_in_the_middle_keeps_what_had_arrived(tmp_path: Path) -> None:
    load = Load([asked(f"r{n}", at_s=0.0) for n in range(6)], duration_s=0.15, drain=False)
    played = play(load, tmp_path, 2, ttft_ms=10, itl_ms=400)
    assert len(played.rows) == 6 and {row.error for row in played.rows} == {CUT_SHORT}
    assert all(len(row.token_s) == 1 and row.sent_s < row.token_s[0] for row in played.rows)
    assert {row.client for row in played.rows} == {0, 1}


def test_a_dead_server_is_a_row_each(tmp_path: Path) -> None:
    async def run() -> list[RequestRecord]:
        server, rows = await serve(), list[RequestRecord]()
        await server.close()
        await asyncio.sleep(0.01)
        async with replayer(server.url, tmp_path, 2) as client:
            await client.replay(Load([asked("a"), asked("bb")], concurrency=1), rows.append)
        return rows

    rows = uvloop.run(run())
    assert [(row.id, row.client) for row in rows] == [("a", 0), ("bb", 1)]
    assert all((row.error or "").endswith(": Connection refused") for row in rows)


# ---- a client that ends, and ends of the load


def interrupted(
    folder: Path, do: Callable[[HttpReplay, asyncio.Task[None]], object], **server_options: Any
) -> tuple[Load, list[RequestRecord], BaseException | None, list[int]]:
    """Does something in the middle of a load that three clients send: the load, its rows, how the replay ended, and the
    clients' processes, which have all ended."""
    load = Load([asked(f"r{n}") for n in range(400)], concurrency=12)

    async def run() -> tuple[Load, list[RequestRecord], BaseException | None, list[int]]:
        server, rows = await serve(**{"ttft_ms": 20, **server_options}), list[RequestRecord]()
        async with replayer(server.url, folder, 3) as client:
            task = asyncio.create_task(client.replay(load, rows.append))
            while len(rows) < 20:
                await asyncio.sleep(0.001)
            pids = pids_of(client)
            assert len(pids) == 3 and all(map(alive, pids))
            do(client, task)
            [ended] = await asyncio.gather(task, return_exceptions=True)
            await asyncio.sleep(0.05)
            assert server.in_flight == 0, "no connection goes on"
        assert not any(map(alive, pids))
        await server.close()
        return load, rows, ended, pids

    return uvloop.run(run())


def test_a_killed_client_ends_the_load_with_its_name_and_every_request_is_a_row(tmp_path: Path) -> None:
    load, rows, ended, _ = interrupted(tmp_path, lambda client, _: os.kill(pids_of(client)[1], signal.SIGKILL))
    assert isinstance(ended, EngineError)
    expected = f"load client 1 ended during the run (killed by SIGKILL); {tmp_path}/logs/client-1.log tells of no error"
    assert str(ended).startswith(expected)
    assert len({row.id for row in rows}) == len(rows) == len(load.requests) - load.unsent
    lost = [row for row in rows if row.error is not None]
    assert 0 < len(lost) <= 12 and 1 in {row.client for row in lost}
    assert all((row.error or "").startswith("load client 1 ended during the run") for row in lost)


def test_a_client_that_is_dead_when_a_load_begins_is_told(tmp_path: Path) -> None:
    async def run() -> None:
        server = await serve()
        async with replayer(server.url, tmp_path, 2) as client:
            await client.replay(Load([asked("a"), asked("b")]), lambda _: None)
            os.kill(pids_of(client)[0], signal.SIGKILL)
            with pytest.raises(EngineError, match=r"load client 0 ended during the run \(killed by SIGKILL\)"):
                await client.replay(Load([asked("a"), asked("b")]), lambda _: None)
        await server.close()

    uvloop.run(run())


def test_cancelling_ends_the_requests_and_closing_the_processes(tmp_path: Path) -> None:
    _, rows, ended, _ = interrupted(tmp_path, lambda _, task: task.cancel())
    assert isinstance(ended, asyncio.CancelledError) and {row.error for row in rows} == {None}


def test_giving_up_makes_rows_of_what_is_in_flight(tmp_path: Path) -> None:
    load, rows, ended, _ = interrupted(tmp_path, lambda client, _: client.give_up("the cache server ended"))
    assert ended is None and len(rows) == len(load.requests) - load.unsent
    errors = Counter(row.error for row in rows)
    assert set(errors) == {None, "the cache server ended"} and errors["the cache server ended"] <= 12


def test_a_client_that_stands_still_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    stopped: list[int] = []

    async def run() -> tuple[Load, list[RequestRecord]]:
        load = Load([asked(f"r{n}") for n in range(40)], concurrency=6)
        server, rows = await serve(ttft_ms=20), list[RequestRecord]()
        async with replayer(server.url, tmp_path, 2) as client:
            task = asyncio.create_task(client.replay(load, rows.append))
            while len(rows) < 6:
                await asyncio.sleep(0.001)
            stopped.append(pids_of(client)[0])
            os.kill(stopped[0], signal.SIGSTOP)
            await asyncio.sleep(0.05)
            client.give_up("the cache server ended")
            await task
        await server.close()
        return load, rows

    load, rows = uvloop.run(run())
    assert len(rows) == len(load.requests) - load.unsent and not alive(stopped[0])
    assert {row.error for row in rows} == {None, "the cache server ended"}


def test_an_error_of_emit_leaves_nothing_and_the_clients_go_on(tmp_path: Path) -> None:
    async def run() -> None:
        server, rows = await serve(ttft_ms=10), list[RequestRecord]()

        def full(_row: RequestRecord) -> None:
            raise OSError("disk full")

        async with replayer(server.url, tmp_path, 2) as client:
            with pytest.raises(OSError, match="disk full"):
                await client.replay(Load([asked(f"r{n}") for n in range(30)], concurrency=8), full)
            assert server.in_flight == 0
            await client.replay(Load([asked("again"), asked("once more")]), rows.append)
        await server.close()
        assert sorted((row.id, row.error) for row in rows) == [("again", None), ("once more", None)]

    uvloop.run(run())


HARNESS = """
import asyncio, sys, time
from pathlib import Path
from harness.engines.http.clients import Clients
from harness.engines.http.dialect import Completions
from harness.engines.http.replay import HttpReplay
from traces.request import TokenSource

async def main():
    clients, tokens = Clients(2, Path(sys.argv[1])), TokenSource(1, 1000)
    replay = HttpReplay("http://127.0.0.1:9", Completions("m"), tokens, time.perf_counter, clients=clients)
    await replay.open()
    while None in (pids := [child.pid for child in replay.children]):
        await asyncio.sleep(0.01)
    print(*pids, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_clients_end_with_a_harness_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HARNESS, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as harness:
        assert harness.stdout is not None
        pids = list(map(int, harness.stdout.readline().split()))
        assert len(pids) == 2 and all(map(alive, pids))
        harness.kill()
    assert all_gone(pids, within_s=20)


def test_a_key_and_cores_reach_the_clients_and_the_key_stands_nowhere(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    found: list[tuple[set[int], bytes]] = []

    async def run() -> Server:
        server = await serve()
        (tmp_path / "logs").mkdir()
        several = Clients.if_several(2, tmp_path, (core,))
        tokens = TokenSource(1, 1000)
        async with HttpReplay(server.url, DIALECT, tokens, time.perf_counter, api_key=KEY, clients=several) as client:
            await client.replay(Load([asked("a"), asked("b")]), lambda _: None)
            for pid in pids_of(client):
                about = [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
                found.append((os.sched_getaffinity(pid), b"".join(about)))
        await server.close()
        return server

    server = uvloop.run(run())
    assert all(f"Authorization: Bearer {KEY}".encode() in head for head, _ in server.seen) and len(server.seen) == 2
    assert [cores for cores, _ in found] == [{core}] * 2
    assert all(KEY.encode() not in about for _, about in found)
    assert all(KEY not in log.read_text() for log in (tmp_path / "logs").iterdir())


def test_every_kind_of_request_can_be_told_to_a_client() -> None:
    spec = SessionSpec(sessions=2, turns=2, user_tokens=9, output_tokens=3, answers="quoted")
    loads = [quoted().requests, tuple(conversation(spec, seed=1)), timed().requests]
    for requests in loads:
        packed = msgspec.msgpack.encode(requests)
        assert msgspec.msgpack.decode(packed, type=tuple[Request, ...]) == requests
