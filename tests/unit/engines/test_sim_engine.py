"""The simulator behind the Engine seam: loads in, records out, in virtual time."""

from __future__ import annotations

import asyncio
import itertools

import msgspec
import pytest

from harness.engines.base import Engine
from harness.engines.sim.engine import SimEngine
from harness.errors import EngineError
from simulator.calibration import load_calibration
from simulator.models import load_model
from simulator.simulate import Simulator
from traces.load import Load
from traces.request import Request, RequestRecord, Segment


def make(gpu_blocks: int = 1024) -> Simulator:
    return Simulator(
        load_model("tiny-llama"),
        load_calibration("cpu-2core"),
        "vllm-0.32",
        "lmcache-0.5.6-mp",
        gpu_blocks=gpu_blocks,
        block_tokens=32,
        chunk_tokens=256,
        cpu_bytes=1 << 30,
        disk_bytes=1 << 30,
        max_num_batched_tokens=2048,
        max_num_seqs=16,
    )


def started() -> SimEngine:
    engine = SimEngine(make)
    asyncio.run(engine.start())
    return engine


def replay(engine: Engine, load: Load) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    asyncio.run(engine.replay(load, records.append))
    return records


def ask(name: str, stream: int, tokens: int = 1025, **more: object) -> Request:
    return msgspec.structs.replace(Request(id=name, prompt=(Segment(stream, tokens),), output_tokens=8), **more)


def test_an_open_load_is_sent_at_its_times_in_each_replay() -> None:
    engine = started()
    for attempt in range(3):
        begin_s = engine.now_s()
        at_s = (0.0, 0.1, 7.7)
        records = replay(engine, Load(ask(f"{attempt}-{i}", attempt, at_s=at) for i, at in enumerate(at_s)))
        assert [r.scheduled_s - begin_s for r in records] == pytest.approx(at_s)
        assert [r.sent_s for r in records] == pytest.approx([r.scheduled_s for r in records])
        assert all(r.ttft_s is not None and r.ttft_s > 0 and r.output_tokens == 8 for r in records)
        assert engine.now_s() == records[-1].last_token_s


def test_a_closed_load_keeps_its_slots_full() -> None:
    records = replay(started(), Load((ask(f"r{i}", i) for i in range(7)), concurrency=2))
    assert len(records) == 7
    moments = sorted({r.sent_s for r in records})
    assert moments[0] == 0.0
    ends = {r.last_token_s for r in records}
    assert all(moment in ends for moment in moments[1:])


def test_sessions_wait_for_their_turn_and_their_delay() -> None:
    turns = [ask(f"t{i}", 1, 600 + 300 * i, session="s", turn=i, delay_s=0.25 if i else 0.0) for i in range(3)]
    records = replay(started(), Load(turns))
    for before, after in itertools.pairwise(records):
        assert before.last_token_s is not None
        assert after.sent_s == pytest.approx(before.last_token_s + 0.25)
        assert after.cached_tokens is not None and after.cached_tokens >= before.prompt_tokens - 32


def test_records_say_which_tier_served_and_metrics_agree() -> None:
    engine = started()
    seen = []
    for step, emptied in enumerate((set(), set(), {"gpu"}, {"gpu", "cpu"})):
        asyncio.run(engine.reset(frozenset(emptied)))
        (record,) = replay(engine, Load([ask(f"r{step}", 1)]))
        seen.append((record.tokens_by_tier, record.cached_tokens))
    assert seen == [
        ({"computed": 1025, "gpu": 0, "cpu": 0, "disk": 0}, 0),
        ({"computed": 1, "gpu": 1024, "cpu": 0, "disk": 0}, 1024),
        ({"computed": 1, "gpu": 0, "cpu": 1024, "disk": 0}, 1024),
        ({"computed": 1, "gpu": 0, "cpu": 0, "disk": 1024}, 1024),
    ]
    counters = asyncio.run(engine.metrics())
    assert (counters.computed_tokens, counters.hit_tokens["gpu"], counters.external_tokens) == (1028, 1024, 2048)
    assert counters.stores_begun == counters.stores_ended == 4


def test_a_failed_request_is_a_row() -> None:
    bad, good = replay(started(), Load([ask("bad", 1, 60_000, at_s=0.0), ask("good", 2, at_s=0.0)], concurrency=1))
    assert bad.error is not None and "never fit" in bad.error
    assert (bad.first_token_s, bad.cached_tokens, bad.tokens_by_tier) == (None, None, {})
    assert good.error is None


def test_the_same_load_gives_the_same_bytes() -> None:
    def rows() -> bytes:
        load = Load((ask(f"r{i}", i % 5, 500 + 37 * i, at_s=0.03 * i) for i in range(60)), concurrency=9)
        return msgspec.json.encode(replay(started(), load))

    assert rows() == rows()


def test_ready_says_what_the_simulator_has() -> None:
    resolved = asyncio.run(started().ready())
    assert (resolved.gpu_blocks, resolved.block_tokens, resolved.chunk_tokens) == (1024, 32, 256)
    assert (resolved.gpu_bytes, resolved.kv_bytes_per_token) == (1024 * 32 * 32768, 32768)
    assert resolved.versions["engine_policy"] == "vllm-0.32"


def test_use_out_of_order_and_a_bad_factory_are_engine_errors() -> None:
    engine = SimEngine(make)
    with pytest.raises(EngineError, match="call start first"):
        asyncio.run(engine.ready())

    def broken() -> Simulator:
        raise ValueError("gpu_blocks must be more than 1, not 1")

    with pytest.raises(EngineError, match="gpu_blocks must be more than 1"):
        asyncio.run(SimEngine(broken).start())
    asyncio.run(engine.stop())
    asyncio.run(engine.stop())


def test_others_get_a_turn_while_a_long_load_runs() -> None:
    async def both() -> int:
        engine = SimEngine(make)
        await engine.start()
        ticks = 0

        async def bar() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(bar())
        await engine.replay(Load((ask(f"r{i}", i, 40) for i in range(2000)), concurrency=4), lambda _: None)
        task.cancel()
        return ticks

    assert asyncio.run(both()) >= 10


def test_rows_tell_how_often_the_engine_preempted_them() -> None:
    """31 blocks hold both prompts of 15 blocks, and not both replies: the younger request gives its blocks back."""
    engine = SimEngine(lambda: make(gpu_blocks=32))
    asyncio.run(engine.start())
    both = [Request(id=name, prompt=(Segment(i, 480),), output_tokens=64) for i, name in enumerate("ab")]
    rows = {row.id: row for row in replay(engine, Load(both, concurrency=2))}
    assert (rows["a"].preemptions, rows["b"].preemptions) == (0, 1)
    (refused,) = replay(engine, Load([Request(id="c", prompt=(Segment(9, 4096),), output_tokens=1)]))
    assert refused.error is not None and refused.preemptions is None
