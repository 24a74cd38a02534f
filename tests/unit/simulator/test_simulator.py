"""The simulator through its Python face: which tier serves what, when, and what it refuses."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from simulator.calibration import load_calibration
from simulator.columns import CompletionColumns, RequestColumns
from simulator.models import load_model
from simulator.policies import engine_policy, tier_policy
from simulator.simulate import Completion, Simulator
from traces.catalogue import find_trace
from traces.formats import open_trace
from traces.request import Request, Segment, reply_stream

GIB = 1 << 30


def simulator(**settings: Any) -> Simulator:
    defaults: dict[str, Any] = {
        "gpu_blocks": 1024,
        "block_tokens": 32,
        "chunk_tokens": 256,
        "cpu_bytes": GIB,
        "disk_bytes": GIB,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 256,
    }
    return Simulator(
        load_model("tiny-llama"),
        load_calibration(settings.pop("calibration", "cpu-2core")),
        "vllm-0.32",
        settings.pop("tier_policy", "lmcache-0.5.6-mp"),
        **(defaults | settings),
    )


def request(name: str, tokens: int = 4097, stream: int = 1, output_tokens: int = 1) -> Request:
    return Request(id=name, prompt=(Segment(stream, tokens),), output_tokens=output_tokens)


def one(engine: Simulator, asked: Request) -> tuple[Completion, float]:
    """The completion of a request sent now, and its time to first token."""
    sent_s = engine.now_s
    engine.submit(asked, sent_s)
    (done,) = engine.advance()
    return done, math.nan if done.first_token_s is None else done.first_token_s - sent_s


def served(done: Completion) -> dict[str, int]:
    return {tier: getattr(done, tier) for tier in ("computed", "gpu", "cpu", "disk") if getattr(done, tier)}


def test_a_prompt_is_served_by_the_tier_it_was_left_in() -> None:
    engine = simulator()
    states = {
        "recompute": (set(), {"computed": 4097}),
        "gpu": (set(), {"computed": 1, "gpu": 4096}),
        "cpu": ({"gpu"}, {"computed": 1, "cpu": 4096}),
        "disk": ({"gpu", "cpu"}, {"computed": 1, "disk": 4096}),
        "disk_cold": ({"gpu", "cpu", "page_cache"}, {"computed": 1, "disk": 4096}),
        "recompute again": ({"gpu", "cpu", "disk"}, {"computed": 4097}),
    }
    ttft_s = {}
    for state, (emptied, expected) in states.items():
        engine.drain()
        engine.reset(emptied)
        done, ttft_s[state] = one(engine, request(state))
        assert served(done) == expected, state
    assert ttft_s["recompute"] == pytest.approx(ttft_s["recompute again"], rel=1e-12)
    assert ttft_s["recompute"] > ttft_s["disk_cold"] > ttft_s["disk"] > ttft_s["cpu"] > ttft_s["gpu"]


def test_a_prompt_of_whole_chunks_mixes_tiers_as_seen_on_the_real_engine() -> None:
    """vLLM 0.32 with blocks of 128 and LMCache served 4096 tokens as 3968 of its own and 127 loaded."""
    engine = simulator(block_tokens=128, gpu_blocks=256)
    one(engine, request("first", 4096))
    engine.drain()
    assert served(one(engine, request("again", 4096))[0]) == {"computed": 1, "gpu": 3968, "cpu": 127}


def test_counters_tell_both_sides_of_a_hit() -> None:
    engine = simulator()
    one(engine, request("compute"))
    engine.drain()
    before = engine.counters()
    assert (before.computed_tokens, before.stores_begun, before.stores_ended) == (4097, 16, 16)
    one(engine, request("gpu"))
    # The cache server is asked before anybody knows that its answer is not needed.
    after = engine.counters()
    assert (after.gpu_hit_tokens, after.external_tokens, after.l1_hit_tokens) == (4096, 0, 4096)
    engine.reset({"gpu", "cpu", "page_cache"})
    one(engine, request("cold"))
    last = engine.counters()
    assert (last.external_tokens, last.l2_hit_tokens, last.l2_loaded_chunks) == (4096, 4096, 16)
    assert last.storage_read_bytes == 4096 * 32768


def test_a_tier_that_is_not_there_is_not_counted() -> None:
    counters = simulator(cpu_bytes=None, disk_bytes=None).counters()
    assert (counters.computed_tokens, counters.l1_hit_tokens, counters.storage_read_bytes) == (0, None, None)


def test_odirect_reads_go_past_the_page_cache() -> None:
    engine = simulator(odirect=True)
    one(engine, request("compute"))
    engine.drain()
    engine.reset({"gpu", "cpu"})
    one(engine, request("disk"))
    assert engine.counters().storage_read_bytes == 4096 * 32768


def test_a_later_turn_hits_the_reply_that_the_engine_generated() -> None:
    engine = simulator(cpu_bytes=None, disk_bytes=None)
    first = request("first", 64, output_tokens=65)
    one(engine, first)
    reply = Segment(reply_stream(first.id), first.output_tokens)
    second = Request(id="second", prompt=(*first.prompt, reply, Segment(9, 10)), output_tokens=1)
    done, _ = one(engine, second)
    assert served(done) == {"computed": 64 + 65 + 10 - 128, "gpu": 128}


def test_advance_stops_at_the_first_completion_or_at_its_limit() -> None:
    engine = simulator()
    engine.submit(request("now", 100, 1), 0.0)
    engine.submit(request("later", 100, 2), 1.0)
    assert engine.advance(0.001) == []
    assert engine.now_s == 0.001
    (first,) = engine.advance()
    assert (first.id, engine.now_s) == ("now", first.last_token_s)
    assert engine.advance(0.5) == []
    assert engine.now_s == 0.5
    (second,) = engine.advance()
    assert second.id == "later"
    assert second.first_token_s is not None and second.first_token_s > 1.0
    assert engine.advance() == []


def test_token_times_are_kept_on_request() -> None:
    done, _ = one(simulator(record_token_times=True), request("a", 64, output_tokens=20))
    assert len(done.token_s) == 20
    assert (done.token_s[0], done.token_s[-1]) == (done.first_token_s, done.last_token_s)
    assert list(done.token_s) == sorted(set(done.token_s))
    assert one(simulator(), request("a", 64, output_tokens=20))[0].token_s == ()


def test_what_can_never_be_served_is_an_error_completion() -> None:
    engine = simulator(gpu_blocks=129)
    done, _ = one(engine, request("long", 4097))
    assert done.error == "129 blocks are needed and the GPU has 128: it can never fit"
    assert (done.first_token_s, done.computed, done.prompt_tokens) == (None, 0, 4097)
    done, _ = one(engine, request("longer", 65536))
    assert done.error == "65536 prompt and 1 output tokens exceed the model's 65536 positions"
    assert one(engine, request("fits", 4096))[0].error is None


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"gpu_blocks": 1}, "gpu_blocks must be more than 1"),
        ({"gpu_blocks": -1}, "not a usable value"),
        ({"block_tokens": 0}, "block_tokens must be at least 1"),
        ({"tier_policy": "clock"}, "no tier policy 'clock'"),
        ({"calibration": "rtx-a5000-nfs"}, "page_cache.read.latency_s is unknown"),
    ],
)
def test_settings_that_could_serve_nothing_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        simulator(**settings)
    assert "\n" not in str(caught.value)


def test_bad_use_is_refused() -> None:
    engine = simulator()
    engine.submit(request("a"), 0.5)
    bad_uses: list[Callable[[], None]] = [
        lambda: engine.submit(request("a"), 0.5),
        lambda: engine.reset({"gpu"}),
        engine.drain,
    ]
    for bad in bad_uses:
        with pytest.raises(ValueError, match=r"in flight|idle"):
            bad()
    with pytest.raises(ValueError, match="has passed"):
        engine.submit(request("b"), 0.0)
    with pytest.raises(ValueError, match="not NaN"):
        engine.submit(request("b"), math.nan)
    with pytest.raises(ValueError, match="not a usable value"):
        engine.submit(request("b", -4), 1.0)
    with pytest.raises(ValueError, match="ram is not one of"):
        engine.reset({"ram"})


def test_policy_packs_are_known_by_name() -> None:
    assert engine_policy("vllm-0.32").null_blocks == 1
    assert tier_policy("lmcache-0.5.6-mp").watermark == 0.8
    with pytest.raises(ValueError, match=r"no engine policy 'vllm': use one of sglang-0\.5\.23, vllm-0\.32"):
        engine_policy("vllm")


@pytest.mark.parametrize("tiers", ["lmcache-0.5.6-mp", "lru"])
def test_a_trace_runs_the_same_twice_and_with_single_steps(tiers: str) -> None:
    requests = open_trace(find_trace("tiny_conversation")).requests
    room = {"gpu_blocks": 700, "cpu_bytes": GIB // 2, "disk_bytes": 2 * GIB, "tier_policy": tiers}

    def run(macro_steps: bool) -> tuple[list[bytes], bytes]:
        engine = simulator(macro_steps=macro_steps, **room)
        for asked in requests:
            engine.submit(asked, asked.at_s or 0.0)
        rows = []
        while completions := engine.advance():
            rows += completions
        engine.drain()
        for done in rows:
            assert done.error is None
            assert done.computed + done.gpu + done.cpu + done.disk == done.prompt_tokens
        return [msgspec.json.encode(done) for done in rows], msgspec.json.encode(engine.counters())

    first = run(macro_steps=True)
    assert len(first[0]) == len(requests)
    assert first == run(macro_steps=True) == run(macro_steps=False)


def columns_and_singles(requests: tuple[Request, ...], **settings: Any) -> tuple[CompletionColumns, list[Completion]]:
    many, singly = simulator(**settings), simulator(**settings)
    many.submit_many(RequestColumns.of(requests))
    for asked in requests:
        singly.submit(asked, asked.at_s or 0.0)
    rows: list[Completion] = []
    while completions := singly.advance():
        rows += completions
    return many.advance_many(), rows


def test_no_requests_are_no_completions() -> None:
    engine = simulator()
    engine.submit_many(RequestColumns.of(()))
    assert engine.advance_many().ids == []


def test_columns_say_what_single_completions_say() -> None:
    requests = open_trace(find_trace("tiny_conversation")).requests
    done, rows = columns_and_singles((*requests, request("long", 70_000, 2)), gpu_blocks=700, cpu_bytes=GIB // 2)
    assert done.ids == [row.id for row in rows]
    assert done.errors == {i: row.error for i, row in enumerate(rows) if row.error is not None}
    assert len(done.errors) == 1
    for name in ("prompt_tokens", "output_tokens", "computed", "gpu", "cpu", "disk", "preemptions"):
        assert list(getattr(done, name)) == [getattr(row, name) for row in rows], name
    for name in ("first_token_s", "last_token_s"):
        times = [None if math.isnan(at_s) else at_s for at_s in getattr(done, name)]
        assert times == [getattr(row, name) for row in rows], name


@pytest.mark.parametrize(
    ("column", "values", "text"),
    [
        ("at_s", array("d", [0.0]), "at_s must have 2 entries, not 1"),
        ("segment_ends", array("q", [1, 3]), "segment_ends of request .b. must lie"),
        ("segment_ends", array("q", [2, 1]), "segment_ends of request .b. must lie"),
        ("segment_tokens", array("q", [5, -5]), "segment_tokens: -5 is not a usable value"),
        ("output_tokens", array("d", [1.0, 1.0]), "not a usable value|buffer"),
        ("ids", ["a", "a"], "in flight already"),
    ],
)
def test_bad_columns_are_refused(column: str, values: Any, text: str) -> None:
    good = RequestColumns.of((request("a", 100), request("b", 100)))
    with pytest.raises(ValueError, match=text) as caught:
        simulator().submit_many(replace(good, **{column: values}))
    assert "\n" not in str(caught.value)
