"""The load loop against a server that misbehaves on purpose: every failure is a row, every count is exact."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import uvloop

from harness.engines.http.dialect import Completions
from harness.engines.http.replay import HttpReplay
from harness.records import CUT_SHORT
from tests.support.instant_server import Fault, Server, serve
from traces.load import Load
from traces.request import Request, RequestRecord, Segment, TokenSource, reply_stream

KEY = "sk-very-secret"
Options = dict[str, Any]


PLAIN = Completions("instant")


def client(url: str, dialect: Completions = PLAIN, **options: Any) -> HttpReplay:
    return HttpReplay(url, dialect, TokenSource(1, 1000), time.perf_counter, api_key=KEY, **options)


def request(name: str, **fields: Any) -> Request:
    return Request(id=name, prompt=(Segment(1, 20), Segment(len(name), 12)), output_tokens=3, **fields)


def play(load: Load, server_options: Options, **options: Any) -> tuple[list[RequestRecord], Server]:
    """Replays a load once against a fresh server."""

    async def run() -> tuple[list[RequestRecord], Server]:
        server, rows = await serve(**server_options), list[RequestRecord]()
        async with client(server.url, **options) as replayer:
            await replayer.replay(load, rows.append)
        await server.close()
        return rows, server

    return uvloop.run(run())


def test_a_good_answer_is_counted_exactly() -> None:
    [row], server = play(Load([request("a", session="s")]), {})
    assert (row.error, row.id, row.session, row.turn) == (None, "a", "s", 0)
    assert (row.prompt_tokens, row.output_tokens, row.cached_tokens, len(row.token_s)) == (32, 3, 16, 3)
    assert row.first_chunk_s is not None
    assert row.scheduled_s <= row.sent_s <= row.first_chunk_s
    assert (row.first_chunk_s, row.last_token_s) == (row.token_s[0], row.token_s[-1])
    [(head, body)] = server.seen
    assert f"Authorization: Bearer {KEY}".encode() in head
    assert msgspec.json.decode(body) == {
        "model": "instant",
        "prompt": TokenSource(1, 1000).expand(request("a").prompt),
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


FAULTS: list[tuple[Fault, str, int]] = [
    ("status500", "HTTP 500: <html> Internal Server Error </html>", 0),
    ("json_error", "HTTP 400: prompt is too long", 0),
    ("echo_key", "HTTP 401: no such key: [api key]", 0),
    ("not_http", "not an HTTP/1 answer: Bad status line", 0),
    ("plain_json", 'the answer is \'application/json\', not an event stream: {"text":"all at once"}', 0),
    ("reset_midstream", "the connection was lost midway through the answer: ", 1),
    ("cut_chunk", "the connection was lost midway through the answer: ", 1),
    ("no_done", "the stream ended without [DONE]", 3),
    ("no_usage", "the server reported no usage: it must support stream_options.include_usage", 3),
    ("wrong_prompt_count", "server counted 33 prompt tokens, sent 32", 3),
    ("hang", "no complete answer within 0.3 s", 0),
    ("error_event", "the server reported an error in the stream: the engine died", 3),
    ("bad_event", "unreadable event in the stream (JSON is malformed: object keys must be strings", 3),
    ("empty_texts", "no chunk carried a token, usage says 3; if its texts are empty, use count_tokens", 0),
]


@pytest.mark.parametrize(("fault", "error", "tokens"), FAULTS, ids=[fault for fault, _, _ in FAULTS])
def test_every_fault_is_a_row_with_one_line_of_error(fault: Fault, error: str, tokens: int) -> None:
    load = Load([request("a"), request("bb"), request("ccc")], concurrency=1)
    rows, _ = play(load, {"fault": fault}, request_timeout_s=0.3)
    assert [row.id for row in rows] == ["a", "bb", "ccc"]
    for row in rows:
        assert row.error is not None
        assert row.error.startswith(error)
        assert "\n" not in row.error
        assert len(row.token_s) == tokens
        assert KEY.encode() not in msgspec.json.encode(row)


@pytest.mark.parametrize("fault", ["split_events", "slow", "empty_text_first", "close_delimited", "usage_beside_text"])
def test_unusual_streams_are_read_in_full(fault: Fault) -> None:
    rows, _ = play(Load([request("a"), request("bb")]), {"fault": fault})
    assert [(row.error, len(row.token_s), row.output_tokens) for row in rows] == [(None, 3, 3)] * 2


def test_first_chunk_and_first_token_are_two_things() -> None:
    [row], _ = play(Load([request("a")]), {"fault": "empty_text_first", "itl_ms": 5})
    assert row.first_chunk_s is not None
    assert row.first_token_s is not None
    assert row.first_chunk_s < row.first_token_s == row.token_s[0]


@pytest.mark.parametrize("fault", [None, "empty_texts", "empty_text_first", "usage_beside_text"])
def test_a_running_count_says_which_chunks_carry_tokens(fault: Fault | None) -> None:
    [row], server = play(
        Load([request("a")]), {"fault": fault, "itl_ms": 1}, dialect=Completions("instant", count_tokens=True)
    )
    assert (row.error, len(row.token_s), row.output_tokens, row.cached_tokens) == (None, 3, 3, 16)
    assert (row.first_chunk_s == row.first_token_s) is (fault != "empty_text_first")
    asked = msgspec.json.decode(server.seen[0][1])
    assert asked["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert "return_token_ids" not in asked  # the prompt's would be sent back too


def test_extra_body_adds_to_and_overrides_the_defaults() -> None:
    _, server = play(
        Load([request("a")]), {}, dialect=Completions("instant", extra_body={"temperature": 0.5, "seed": 3})
    )
    body = msgspec.json.decode(server.seen[0][1])
    assert (body["temperature"], body["seed"], body["stream"]) == (0.5, 3, True)


def test_open_loop_keeps_the_intended_moments() -> None:
    moments = [0.03, 0.0, 0.01, 0.01, 0.06]
    load = Load([request(f"r{number}", at_s=at) for number, at in enumerate(moments)])
    rows, _ = play(load, {"ttft_ms": 20})
    start_s = min(row.scheduled_s for row in rows)
    by_id = {row.id: row for row in rows}
    for number, at_s in enumerate(moments):
        row = by_id[f"r{number}"]
        assert row.scheduled_s - start_s == pytest.approx(at_s, abs=1e-9)
        assert row.sent_s >= row.scheduled_s
        assert row.error is None


@pytest.mark.parametrize("drain", [True, False])
def test_a_load_ends_with_its_time_and_what_is_under_way_drains_or_is_ended(drain: bool) -> None:
    asked = [request(name, at_s=at_s) for name, at_s in (("a", 0.0), ("b", 0.05), ("c", 0.3))]
    load = Load(asked, duration_s=0.1, drain=drain)
    rows, server = play(load, {"ttft_ms": 200})
    assert (sorted(row.id for row in rows), load.unsent, load.unfinished, len(server.seen)) == (["a", "b"], 1, 2, 2)
    assert {row.error for row in rows} == {None if drain else CUT_SHORT}
    assert all((row.last_token_s is None) is not drain for row in rows)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_closed_loop_fills_its_slots_and_never_more(concurrency: int) -> None:
    load = Load([request(f"r{number}") for number in range(20)], concurrency=concurrency)
    rows, server = play(load, {"ttft_ms": 5})
    assert len(rows) == 20
    assert server.max_in_flight == concurrency


def test_more_than_max_connections_wait_and_are_stamped_when_they_go() -> None:
    rows, server = play(Load([request(f"r{n}", at_s=0.0) for n in range(6)]), {"ttft_ms": 20}, max_connections=2)
    assert [row.error for row in rows] == [None] * 6
    assert (server.max_in_flight, server.connections) == (2, 2)
    sent_s = sorted(row.sent_s - row.scheduled_s for row in rows)
    assert sent_s[2] > 0.015  # they cannot go before the first two were answered
    assert sent_s[4] > 0.03


def test_turns_of_a_session_follow_one_another() -> None:
    turns = [request(f"{session}{k}", session=session, turn=k) for k in range(4) for session in "ab"]
    rows, _ = play(Load(turns), {"ttft_ms": 2})
    for session in "ab":
        mine = [row for row in rows if row.session == session]
        assert [row.turn for row in mine] == [0, 1, 2, 3]
        assert all(later.sent_s > before.token_s[-1] for before, later in pairwise(mine))


def test_a_connection_serves_many_replays() -> None:
    async def run() -> None:
        server, rows = await serve(), list[RequestRecord]()
        async with client(server.url) as replayer:
            for name in ("a", "bb", "ccc"):
                await replayer.replay(Load([request(name)]), rows.append)
        await server.close()
        assert [row.error for row in rows] == [None] * 3
        assert server.connections == 1

    uvloop.run(run())


def test_nobody_listening_is_a_row() -> None:
    async def run() -> list[RequestRecord]:
        server, rows = await serve(), list[RequestRecord]()
        await server.close()
        await asyncio.sleep(0.01)
        async with client(server.url) as replayer:
            await replayer.replay(Load([request("a"), request("bb")], concurrency=1), rows.append)
        return rows

    rows = uvloop.run(run())
    assert [row.id for row in rows] == ["a", "bb"]
    assert all((row.error or "").endswith(": Connection refused") for row in rows)


def spoil(happen: Callable[[HttpReplay, list[RequestRecord], Server], Awaitable[None]]) -> list[RequestRecord]:
    """Runs `happen`, then sees that no task is left and that the same client still works."""

    async def run() -> list[RequestRecord]:
        server, rows = await serve(ttft_ms=100), list[RequestRecord]()
        async with client(server.url) as replayer:
            await happen(replayer, rows, server)
            mine = {asyncio.current_task()}
            await asyncio.sleep(
                0.2
            )  # longer than an answer takes; the server's own tasks end when their connections do
            assert asyncio.all_tasks() == mine
            before = list(rows)
            await replayer.replay(Load([request("again")]), rows.append)
            assert [(row.id, row.error) for row in rows[len(before) :]] == [("again", None)]
        await server.close()
        return before

    return uvloop.run(run())


def test_cancellation_keeps_the_finished_rows_and_leaves_nothing_behind() -> None:
    kept: list[RequestRecord] = []

    async def happen(replayer: HttpReplay, rows: list[RequestRecord], server: Server) -> None:
        load = Load([request(f"r{n}") for n in range(9)], concurrency=3)
        task = asyncio.create_task(replayer.replay(load, rows.append))
        while len(rows) < 3 or server.in_flight == 0:
            await asyncio.sleep(0.001)
        kept.extend(rows)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert spoil(happen) == kept


def test_giving_up_makes_rows_of_what_is_in_flight_and_sends_no_more() -> None:
    kept: list[RequestRecord] = []

    async def happen(replayer: HttpReplay, rows: list[RequestRecord], server: Server) -> None:
        load = Load([request(f"r{n}") for n in range(9)], concurrency=3)
        task = asyncio.create_task(replayer.replay(load, rows.append))
        while len(rows) < 3 or server.in_flight == 0:
            await asyncio.sleep(0.001)
        kept.extend(rows)
        replayer.give_up("the cache server ended")
        await asyncio.wait_for(task, 1)
        replayer.give_up("again, when nothing is under way")

    rows = spoil(happen)
    assert rows[: len(kept)] == kept and {row.error for row in kept} == {None}
    assert {row.error for row in rows[len(kept) :]} == {"the cache server ended"} and len(kept) < len(rows) < 9


def test_an_error_of_emit_leaves_the_replay_and_nothing_behind() -> None:
    async def happen(replayer: HttpReplay, rows: list[RequestRecord], _server: Server) -> None:
        def full(row: RequestRecord) -> None:
            rows.append(row)
            raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            await replayer.replay(Load([request(f"r{n}") for n in range(9)], concurrency=3), full)

    assert len(spoil(happen)) >= 1


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "http://",
        "http://me:pw@host:1",
        "ftp://host",
        "http://h?key=1",
        "http://h:99999",
        "http://a..b",
        "http://[::1",
    ],
)
def test_an_unusable_url_is_refused_without_repeating_its_secrets(url: str) -> None:
    with pytest.raises(ValueError, match="url must look like") as caught:
        client(url)
    assert "pw" not in str(caught.value)
    assert "key=1" not in str(caught.value)


def test_a_key_with_a_line_break_is_refused() -> None:
    with pytest.raises(ValueError, match="line break") as caught:
        HttpReplay("http://h:1", Completions("m"), TokenSource(1, 1000), time.perf_counter, api_key="secret\n")
    assert "secret" not in str(caught.value)


# ---- quoted answers


def conversation(count: int, output_tokens: int = 3, session: str = "s", first: int = 30) -> list[Request]:
    """Turns of which each quotes all answers before it."""
    turns: list[Request] = []
    prompt: tuple[Segment, ...] = (Segment(7, first),)
    quotes: tuple[str, ...] = ()
    for turn in range(count):
        name = f"{session}{turn}"
        turns.append(
            Request(id=name, prompt=prompt, output_tokens=output_tokens, session=session, turn=turn, quotes=quotes)
        )
        prompt += (Segment(reply_stream(name), output_tokens), Segment(100 + turn, 4))
        quotes += (name,)
    return turns


def test_the_servers_own_answers_go_into_the_next_prompts() -> None:
    turns = conversation(4)
    rows, server = play(Load([*turns, request("alone")]), {}, dialect=Completions("instant", count_tokens=True))
    assert {row.error for row in rows} == {None} and len(rows) == 5
    asked = [msgspec.json.decode(body) for _, body in server.seen]
    assert all(one["return_token_ids"] is True for one in asked)
    tokens = TokenSource(1, 1000)
    expected = tokens.expand(turns[0].prompt)
    sent = sorted((one["prompt"] for one in asked if one["prompt"][:3] == expected[:3]), key=len)
    for turn, prompt in enumerate(sent[-4:]):
        assert prompt == expected, turn
        # The server numbers its tokens from the prompt's length on.
        expected = [*expected, *range(len(expected), len(expected) + 3), *tokens.expand((Segment(100 + turn, 4),))]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("no_token_ids", "not sent, because its prompt quotes the answer to s0: the server told no token ids of it"),
        ("fewer_token_ids", "not sent, because its prompt quotes the answer to s0: it has 2 tokens in place of 3"),
        ("status500", "not sent, because its prompt quotes the answer to s0: it failed"),
    ],
)
def test_an_answer_that_is_not_known_is_not_guessed(fault: Fault, reason: str) -> None:
    rows, server = play(Load(conversation(3)), {"fault": fault})
    assert [row.id for row in rows] == ["s0", "s1", "s2"] and len(server.seen) == 1
    assert rows[1].error == reason and rows[2].error is not None and rows[2].error.startswith("not sent, because ")


def test_a_load_that_quotes_nothing_asks_for_no_ids() -> None:
    _, server = play(Load([request("a")]), {})
    assert "return_token_ids" not in msgspec.json.decode(server.seen[0][1])


def test_a_prompt_that_goes_on_from_one_that_was_not_sent_is_made_anew() -> None:
    """Requests of one session that run side by side, and one that follows the first of them only."""
    first, second = conversation(2)
    beside = msgspec.structs.replace(first, id="beside", turn=1, after=("s0",))
    rows, server = play(
        Load([first, beside, msgspec.structs.replace(second, turn=2, after=("s0",))]),
        {"ttft_ms": 5},
        request_timeout_s=5,
    )
    assert [row.error for row in rows] == [None] * 3
    tokens = TokenSource(1, 1000)
    start = tokens.expand(first.prompt)
    expected = [*start, *range(len(start), len(start) + 3), *tokens.expand((Segment(100, 4),))]
    assert expected in [msgspec.json.decode(body)["prompt"] for _, body in server.seen]
