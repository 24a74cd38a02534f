"""`harness serve`: OpenAI's protocol outside, the simulator's decisions inside, token for token."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import pytest
import uvloop
from aiohttp import web

from harness.collectors.prometheus import Metrics
from harness.engines.http.dialect import Completions
from harness.engines.http.replay import HttpReplay
from harness.engines.sim.engine import SimEngine
from harness.engines.sim.make import simulator_maker
from harness.experiment.read import load_experiment
from harness.serving.app import App
from harness.serving.pacer import Pacer
from harness.serving.prompts import from_ids, from_text
from simulator.models import load_model
from simulator.simulate import Simulator
from tests.support.paths import ROOT
from traces.load import Load
from traces.request import Request, RequestRecord, Segment, TokenSource

QUICKSTART = ROOT / "configs/experiments/quickstart.yaml"
COMMAND = [sys.executable, "-m", "harness", "serve", str(QUICKSTART)]
CHAT = "/v1/chat/completions"


def simulator(*overrides: str) -> Simulator:
    experiment = load_experiment(QUICKSTART, overrides).experiment
    return simulator_maker(experiment, load_model(experiment.model), token_times=True)()


def served(use: Callable[[str, aiohttp.ClientSession], Awaitable[Any]], key: str | None = None) -> Any:
    """What `use` makes of a fresh server."""

    async def run() -> Any:
        pacer = Pacer(simulator())
        runner = web.ServerRunner(web.Server(App(pacer, key), access_log=None), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            async with aiohttp.ClientSession() as session:
                return await use(f"http://127.0.0.1:{port}", session)
        finally:
            pacer.close("over")
            await runner.cleanup()

    return uvloop.run(run())


async def post(session: aiohttp.ClientSession, url: str, **body: Any) -> tuple[int, Any]:
    async with session.post(url, json=body) as response:
        return response.status, await response.json(content_type=None)


async def events(session: aiohttp.ClientSession, url: str, **body: Any) -> list[Any]:
    async with session.post(url, json={**body, "stream": True}) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        text = (await response.read()).decode()
    assert text.endswith("data: [DONE]\n\n")
    return [msgspec.json.decode(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]


def shared_prefixes() -> list[Request]:
    """One after another, so that what is hit does not depend on when."""
    return [
        Request(
            id=f"r{i}",
            prompt=(Segment(i % 3, 700 + 64 * (i % 4)), Segment(100 + i, 33)),
            output_tokens=1 + i % 3,
        )
        for i in range(14)
    ]


def test_hits_are_those_of_the_simulator() -> None:
    async def over_http(url: str, _session: aiohttp.ClientSession) -> list[RequestRecord]:
        rows: list[RequestRecord] = []
        tokens = TokenSource(1, 4096)
        async with HttpReplay(url, Completions("tiny-llama", count_tokens=True), tokens, time.perf_counter) as client:
            await client.replay(Load(shared_prefixes(), concurrency=1), rows.append)
        return rows

    async def directly() -> list[RequestRecord]:
        rows: list[RequestRecord] = []
        engine = SimEngine(simulator)
        await engine.start()
        await engine.replay(Load(shared_prefixes(), concurrency=1), rows.append)
        return rows

    rows, expected = served(over_http), asyncio.run(directly())
    assert [row.error for row in rows] == [None] * 14
    for field in ("id", "cached_tokens", "prompt_tokens", "output_tokens"):
        assert [getattr(row, field) for row in rows] == [getattr(row, field) for row in expected]
    assert sum(row.cached_tokens or 0 for row in rows) > 0
    assert [len(row.token_s) for row in rows] == [row.output_tokens for row in expected]
    # A server may be late against the model, and never early.
    assert all((row.ttft_s or 0) > (model.ttft_s or 9) for row, model in zip(rows, expected, strict=True))


def test_a_completion_has_openais_shape_and_the_models_times() -> None:
    async def use(url: str, session: aiohttp.ClientSession) -> None:
        ask = {"model": "tiny-llama", "prompt": [[*range(100)]], "max_tokens": 3, "temperature": 0.7, "seed": 1}
        began_s = time.monotonic()
        status, said = await post(session, f"{url}/v1/completions", **ask)
        assert (status, said["object"], said["model"]) == (200, "text_completion", "tiny-llama")
        [choice] = said["choices"]
        assert (choice["text"], choice["finish_reason"]) == (" tok1" * 3, "length")
        counts = {"prompt_tokens": 100, "completion_tokens": 3, "total_tokens": 103}
        assert said["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}
        assert began_s < said["simulated"]["first_token_s"] < said["simulated"]["last_token_s"] < time.monotonic()
        _, said = await post(session, f"{url}/v1/completions", **ask)
        assert said["usage"]["prompt_tokens_details"] == {"cached_tokens": 96}
        assert said["simulated"]["gpu_tokens"] == 96

    served(use)


@pytest.mark.parametrize("usage", [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": 1}])
def test_streams_have_a_chunk_a_token_and_the_usage_asked_for(usage: dict[str, Any] | None) -> None:
    usage = None if usage is None else {name: bool(value) for name, value in usage.items()}

    async def use(url: str, session: aiohttp.ClientSession) -> None:
        chat = await events(
            session, url + CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=3, stream_options=usage
        )
        text = await events(session, f"{url}/v1/completions", prompt="hi", max_tokens=3, stream_options=usage)
        deltas = [event["choices"][0]["delta"] for event in chat if event["choices"]]
        assert deltas == [{"role": "assistant", "content": ""}, *[{"content": " tok1"}] * 3]
        reasons = [(e["choices"][0]["text"], e["choices"][0]["finish_reason"]) for e in text if e["choices"]]
        assert reasons == [(" tok2", None), (" tok2", None), (" tok2", "length")]
        assert len({event["id"] for event in text}) == 1
        running = [event.get("usage", "none") for event in text]
        if usage is None:
            assert running == ["none"] * 3
            return
        assert text[-1]["choices"] == [] and running[-1]["completion_tokens"] == 3
        counts = [None if one is None else one["completion_tokens"] for one in running[:-1]]
        assert counts == ([1, 2, 3] if "continuous_usage_stats" in usage else [None] * 3)

    served(use)


def test_the_next_turn_of_a_chat_hits_the_reply_too() -> None:
    async def use(url: str, session: aiohttp.ClientSession) -> int:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "tell me something long " * 20}]
        _, said = await post(session, url + CHAT, messages=messages, max_completion_tokens=200)
        prompt_tokens = said["usage"]["prompt_tokens"]
        messages += [said["choices"][0]["message"], {"role": "user", "content": [{"type": "text", "text": "go on"}]}]
        _, said = await post(session, url + CHAT, messages=messages, max_tokens=1)
        # The last token's KV was never computed; whole blocks of 32 are found.
        assert said["usage"]["prompt_tokens_details"]["cached_tokens"] == (prompt_tokens + 199) // 32 * 32
        return 0

    served(use)


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {}, "missing required field"),
    ("/v1/completions", {"prompt": []}, "0 prompts"),
    ("/v1/completions", {"prompt": ["a", "b"]}, "2 prompts"),
    ("/v1/completions", {"prompt": ""}, "0 in its prompt"),
    ("/v1/completions", {"prompt": [-1]}, "a value that is not a token id"),
    ("/v1/completions", {"prompt": [4096]}, "out of vocabulary"),
    ("/v1/completions", {"prompt": [1.5]}, "got `float`"),
    ("/v1/completions", {"prompt": "a", "n": 2}, "n must be 1"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "between 1 and"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 70000}, "exceed the model's 65536 positions"),
    ("/v1/completions", {"prompt": [7] * 40000}, "can never fit"),
    ("/v1/completions", {"prompt": "a", "echo": True}, "echo"),
    ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}, "stream=true"),
    (CHAT, {"messages": []}, "at least one"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "send text"),
    (CHAT, {"messages": [{"content": "x"}]}, "role"),
]


@pytest.mark.parametrize(("path", "body", "message"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_is_a_400_of_one_line(path: str, body: dict[str, Any], message: str, stream: bool) -> None:
    stream = stream and "stream_options" not in body
    status, said = served(lambda url, session: post(session, url + path, **body, stream=stream))
    assert (status, said["error"]["code"], said["error"]["type"]) == (400, 400, "BadRequestError")
    assert message in said["error"]["message"] and "\n" not in said["error"]["message"]


def test_other_refusals_and_what_is_no_json() -> None:
    async def use(url: str, session: aiohttp.ClientSession) -> None:
        assert (await post(session, f"{url}/v1/completions", prompt="a", model="other"))[0] == 404
        assert (await post(session, f"{url}/v1/nothing"))[0] == 404
        async with session.get(f"{url}/v1/completions") as response:
            assert response.status == 405
        for body in (b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"prompt":"\\ud800","max_tokens":"1"}'):
            async with session.post(f"{url}/v1/completions", data=body) as response:
                assert response.status == 400 and "error" in await response.json()

    served(use)


def test_the_key_is_asked_for() -> None:
    async def use(url: str, session: aiohttp.ClientSession) -> list[int]:
        statuses = []
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer s3cret"}):
            async with session.get(f"{url}/v1/models", headers=header) as response:
                statuses.append(response.status)
        async with session.get(f"{url}/health") as response:
            return [*statuses, response.status]

    assert served(use, key="s3cret") == [401, 401, 200, 200]


def test_metrics_have_vllms_names_and_a_reset_empties_what_it_says() -> None:
    async def use(url: str, session: aiohttp.ClientSession) -> list[tuple[int, ...]]:
        seen = []
        for query in (None, "", "?reset_external=true"):
            if query is not None:
                async with session.post(f"{url}/reset_prefix_cache{query}") as response:
                    assert await response.json() == {"success": True}
            await post(session, f"{url}/v1/completions", prompt=[7] * 513, max_tokens=1)
            await asyncio.sleep(0.2)  # its chunks are stored
            async with session.get(f"{url}/metrics") as response:
                metrics = Metrics(await response.text())
            assert metrics.total("vllm:num_requests_running") == metrics.total("vllm:num_requests_waiting") == 0
            sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
            counts = [metrics.total("vllm:prompt_tokens_by_source_total", source=source) or 0 for source in sources]
            assert metrics.total("vllm:prompt_tokens_total") == sum(counts)
            seen.append(tuple(counts))
        assert metrics.labels("vllm:cache_config_info")["num_gpu_blocks"] == "1024"
        assert metrics.total("vllm:generation_tokens_total") == 3
        return seen

    assert served(use) == [(513, 0, 0), (514, 0, 512), (1027, 0, 512)]


def test_a_reset_fails_while_a_request_runs_and_a_client_that_goes_hurts_nobody() -> None:
    async def use(url: str, session: aiohttp.ClientSession) -> None:
        response = await session.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 40, "stream": True})
        assert await post(session, f"{url}/reset_prefix_cache") == (200, {"success": False})
        response.close()
        status, said = await post(session, f"{url}/v1/completions", prompt="b", max_tokens=60)
        assert (status, said["usage"]["completion_tokens"]) == (200, 60)

    served(use)


def test_equal_prefixes_are_equal_segments() -> None:
    ids = [*range(1000, 1100)]
    assert from_ids(ids, 32)[:3] == from_ids(ids[:96], 32) == from_ids([*ids[:96], 5], 32)[:3]
    assert from_ids(ids, 32)[0] != from_ids([1, *ids[1:]], 32)[0]
    assert sum(segment.tokens for segment in from_ids(ids, 32)) == 100
    text = "a line of words, some of them lengthy; and an emoji \U0001f600\n" * 9
    longer = from_text(text + "and more", 16)
    assert longer[: len(from_text(text, 16)) - 1] == from_text(text, 16)[:-1]
    assert from_text("x tok3 tok3 tok3 y", 16)[1].tokens == 3
    assert from_text("x tok3x", 16)[0].tokens == sum(s.tokens for s in from_text("x tok3x", 16))


def test_tokens_taken_so_far_are_those_of_a_run_to_the_end() -> None:
    """What later requests do to the timing never concerns a token that was handed out."""

    def ask(i: int) -> Request:
        return Request(id=f"r{i}", prompt=(Segment(i, 300 + 50 * i),), output_tokens=30)

    whole, stepped = simulator(), simulator()
    expected: dict[str, tuple[float, ...]] = {}
    seen: dict[str, int] = {f"r{i}": 0 for i in range(6)}
    for i in range(6):
        whole.submit(ask(i), at_s=0.011 * (10 * i))
    while done := whole.advance():
        expected |= {one.id: one.token_s for one in done}
    for tick in range(400):
        now_s = 0.011 * tick
        while done := stepped.advance(now_s):
            seen |= {one.id: one.output_tokens for one in done}
        for name, tokens in itertools.chain(stepped.take_tokens(True), stepped.take_tokens(False)):
            seen[name] += tokens
        assert seen == {name: sum(at_s <= now_s for at_s in times) for name, times in expected.items()}
        assert stepped.next_event_s is None or stepped.next_event_s > now_s
        if tick % 10 == 0 and tick < 60:
            stepped.submit(ask(tick // 10), at_s=now_s)
    assert sum(seen.values()) == 180


def test_the_command_serves_and_ends_cleanly() -> None:
    process = subprocess.Popen([*COMMAND, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving tiny-llama as cpu-2core on http://127.0.0.1:")
        port = int(line.split("127.0.0.1:")[1].split(";")[0])
        taken = subprocess.run([*COMMAND, "--port", str(port)], capture_output=True, text=True, timeout=60)
        assert taken.returncode == 2 and taken.stderr.count("\n") == 1 and "choose another port" in taken.stderr
        with socket.create_connection(("127.0.0.1", port)) as client:
            body = b'{"prompt":"a","max_tokens":5000,"stream":true}'
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
            process.terminate()
            out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err) == (0, "", "")
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "70000"], "not a port"),
        (["--port", "0", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY"),
        (["--port", "0", "--set", "engines.sim.hardware=none"], "no file of that name"),
    ],
)
def test_mistakes_are_told_on_one_line(words: list[str], said: str) -> None:
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr
