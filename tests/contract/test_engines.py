"""What every engine keeps, whatever it is: lifecycle, one record a request, honest counters, provable evidence."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from harness.engines import ENGINES
from harness.engines.base import Engine, Restarts
from harness.measure.run import RunRequest, run
from harness.records import Resolved, is_cut_off
from simulator.calibration import Calibration
from tests.contract.cases import ENGINE_CASES, REAL_ENGINE_PARAMS, Case
from tests.unit.measure.test_run_loop import Quiet, measured
from traces.load import Load
from traces.request import Request, RequestRecord, Segment, reply_stream


def ask(name: str, stream: int, tokens: int = 1025) -> Request:
    return Request(id=name, prompt=(Segment(stream, tokens - 1), Segment(stream + 1000, 1)), output_tokens=3, at_s=0.0)


async def answers(engine: Engine, *requests: Request) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    await engine.replay(Load(requests, concurrency=1), records.append)
    return records


async def started(engine: Engine) -> Resolved:
    await engine.start()
    return await engine.ready()


async def stopped_before_it_serves(case: Case, folder: Path) -> None:
    """An engine that was never started is stopped, and one that has not come up yet."""
    await case.make(folder).stop()
    engine = case.make(folder)
    try:
        await engine.start()
    finally:
        await engine.stop()


def left_in(folder: Path) -> list[Path]:
    """What an engine may not leave in its run's folder."""
    return [path for path in folder.iterdir() if path.name not in ("experiment.yaml", "logs", "model")]


@pytest.mark.parametrize("case", ENGINE_CASES.values(), ids=ENGINE_CASES)
def test_stop_is_safe_at_any_time_and_twice(case: Case, tmp_path: Path) -> None:
    async def live() -> list[RequestRecord]:
        await stopped_before_it_serves(case, tmp_path)
        engine = case.make(tmp_path)
        try:
            await started(engine)
            return await answers(engine, ask("a", 1))
        finally:
            await engine.stop()
            await engine.stop()

    [record] = asyncio.run(live())
    assert record.error is None
    assert left_in(tmp_path) == []


async def each_request_gives_one_record_with_times_in_order(engine: Engine, _tiers: frozenset[str]) -> None:
    began_s = engine.now_s()
    records = await answers(engine, *(ask(str(number), 10 + number % 3) for number in range(6)))
    ended_s = engine.now_s()
    assert sorted(record.id for record in records) == [str(number) for number in range(6)]
    for record in records:
        assert record.error is None and record.prompt_tokens == 1025 and record.output_tokens == 3
        assert record.sent_s is not None and record.first_token_s is not None and record.last_token_s is not None
        assert began_s <= record.sent_s <= record.first_token_s <= record.last_token_s <= ended_s


async def a_failed_request_is_a_record_and_the_next_one_is_served(engine: Engine, _tiers: frozenset[str]) -> None:
    [first] = await answers(engine, ask("first", 20))
    # More than any tier of the case holds.
    [failed] = await answers(engine, ask("failed", 21, 40_000))
    [last] = await answers(engine, ask("last", 20))
    assert (first.error, last.error) == (None, None)
    assert failed.id == "failed" and failed.error and "\n" not in failed.error and failed.output_tokens is None


async def counters_only_rise_and_always_have_the_same_names(engine: Engine, _tiers: frozenset[str]) -> None:
    seen = []
    for number in range(3):
        seen.append((await engine.metrics()).named())
        await answers(engine, ask(f"{number}a", 30), ask(f"{number}b", 30))
    seen.append((await engine.metrics()).named())
    assert len({frozenset(named) for named in seen}) == 1
    sources = ("computed_tokens", "gpu_hit_tokens", "external_tokens")
    for before, after in itertools.pairwise(seen):
        assert all(after[name] >= before[name] for name in before)
        if "computed_tokens" in before:
            assert sum(after[name] - before[name] for name in sources) == 2 * 1025


async def what_a_reset_empties_serves_nothing_afterwards(engine: Engine, tiers: frozenset[str]) -> None:
    everything = frozenset[str]().union(*engine.capabilities.resets)
    [cold, _] = await answers(engine, ask("cold", 40), ask("warm", 40))
    await engine.metrics()
    await engine.reset(everything)
    [again] = await answers(engine, ask("again", 40))
    assert tiers <= everything and cold.cached_tokens == again.cached_tokens == 0


async def a_load_ends_with_its_time(engine: Engine, _tiers: frozenset[str]) -> None:
    """Nothing is sent after it. What is under way ends in its own time, or there and then, and nothing stays behind."""
    await engine.reset(frozenset[str]().union(*engine.capabilities.resets))
    [_, alone] = await answers(engine, ask("first", 50), ask("alone", 51))
    assert alone.e2e_s is not None
    for number, drain in enumerate((True, False, True)):
        asked = [ask(f"{number}-{at}", 100 + 40 * number + at) for at in range(40)]
        load = Load(asked, concurrency=1, duration_s=1.5 * alone.e2e_s, drain=drain)
        records: list[RequestRecord] = []
        await engine.replay(load, records.append)
        await engine.metrics()
        assert len(records) + load.unsent == 40 and load.unsent > 0
        assert all(one.scheduled_s < records[0].scheduled_s + 1.5 * alone.e2e_s for one in records)
        cut, most = [one for one in records if one.error is not None], 0 if drain else load.unfinished
        # On the wall clock, an answer may come while the engine ends the request.
        assert len(cut) == most or (len(cut) < most and not engine.capabilities.virtual_time)
        assert load.unfinished <= 1
        assert all(is_cut_off(one.error) and one.last_token_s is None for one in cut)
        assert not engine.capabilities.virtual_time or load.unfinished == 1


async def quoted_answers_hit_what_was_decoded(engine: Engine, _tiers: frozenset[str]) -> None:
    """Whole blocks of prompt and answer, but for the answer's last token: no engine computes the KV of that one."""
    if not engine.capabilities.quotes:
        return
    await engine.reset(frozenset[str]().union(*engine.capabilities.resets))
    block_tokens = 32  # an experiment's default
    # Prompt and answer fill their last block but for two tokens, for one, exactly, and by one token more.
    turns: list[Request] = []
    prompt: tuple[Segment, ...] = (Segment(500, block_tokens),)
    expected, quotes = [0], tuple[str, ...]()
    for turn, beyond in enumerate((-2, -1, 0, 1)):
        asked = sum(segment.tokens for segment in prompt)
        output = 2 * block_tokens + beyond - asked % block_tokens
        turns.append(
            Request(
                id=f"q{turn}", prompt=prompt, output_tokens=output, session="q", turn=turn, instance=0, quotes=quotes
            )
        )
        expected.append((asked + output - 1) // block_tokens * block_tokens)
        prompt += (Segment(reply_stream(f"q{turn}"), output), Segment(600 + turn, 5))
        quotes += (f"q{turn}",)
    turns.append(Request(id="q4", prompt=prompt, output_tokens=1, session="q", turn=4, instance=0, quotes=quotes))
    records: list[RequestRecord] = []
    await engine.replay(Load(turns), records.append)
    assert [record.error for record in records] == [None] * 5
    assert [record.cached_tokens for record in records] == expected


async def a_restart_keeps_what_lies_in_storage_and_nothing_else(engine: Engine, tiers: frozenset[str]) -> None:
    keeps = engine.capabilities.keeps
    assert keeps <= tiers and (not keeps or isinstance(engine, Restarts))
    if not keeps or not isinstance(engine, Restarts):
        return
    [kept] = keeps
    await engine.reset(frozenset[str]().union(*engine.capabilities.resets))
    first, again = (msgspec.structs.replace(ask(name, 60), instance=0) for name in ("first", "again"))
    [computed] = await answers(engine, first)
    await engine.metrics()
    resolved = await engine.restart()
    before = await engine.metrics()
    [served] = await answers(engine, again)
    moved = (await engine.metrics()).since(before)
    assert (computed.cached_tokens, served.cached_tokens, served.error) == (0, 1024, None)
    assert moved.hit_tokens == {tier: 1024 if tier == kept else 0 for tier in moved.hit_tokens}
    assert moved.external_tokens == 1024 and moved.computed_tokens == 1 and resolved.kv_bytes_per_token


Check = Callable[[Engine, frozenset[str]], Awaitable[None]]
CHECKS: tuple[Check, ...] = (
    each_request_gives_one_record_with_times_in_order,
    a_failed_request_is_a_record_and_the_next_one_is_served,
    counters_only_rise_and_always_have_the_same_names,
    what_a_reset_empties_serves_nothing_afterwards,
    a_load_ends_with_its_time,
    quoted_answers_hit_what_was_decoded,
    a_restart_keeps_what_lies_in_storage_and_nothing_else,
)


async def checked(
    case: Case, folder: Path, checks: Sequence[Callable[[Engine, frozenset[str]], Awaitable[None]]]
) -> None:
    """All checks in one life of the engine."""
    engine, tiers = case.make(folder), frozenset(case.plan(folder).experiment.cache.tiers)
    try:
        await started(engine)
        for check in checks:
            await check(engine, tiers)
    finally:
        await engine.stop()
        await engine.stop()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", ENGINE_CASES.values(), ids=ENGINE_CASES)
def test_an_engine_keeps_its_contract(case: Case, check: Check, tmp_path: Path) -> None:
    if case.engine == "fake" and check is a_failed_request_is_a_record_and_the_next_one_is_served:
        case = Case(case.engine, {"engines": {"fake": {"fail_every": 2}}})
    asyncio.run(checked(case, tmp_path, [check]))


@pytest.mark.parametrize("case", REAL_ENGINE_PARAMS)
def test_a_real_engine_keeps_its_contract_in_one_life(case: Case, tmp_path: Path) -> None:
    """Also: it may be stopped before it serves, and twice, and leaves nothing."""
    asyncio.run(stopped_before_it_serves(case, tmp_path))
    # tests/real/test_restart.py restarts a vLLM in a run, and counts the same; a start takes half a minute.
    left_out = {"vllm": a_restart_keeps_what_lies_in_storage_and_nothing_else}.get(case.engine)
    asyncio.run(checked(case, tmp_path, [check for check in CHECKS if check is not left_out]))
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("case", ENGINE_CASES.values(), ids=ENGINE_CASES)
def test_a_deterministic_engine_gives_the_same_records_again(case: Case, tmp_path: Path) -> None:
    async def live() -> tuple[bool, list[bytes]]:
        engine = case.make(tmp_path)
        try:
            await started(engine)
            records = await answers(engine, *(ask(str(number), number % 2) for number in range(5)))
            return engine.capabilities.deterministic, [msgspec.json.encode(record) for record in records]
        finally:
            await engine.stop()

    (deterministic, first), (_, second) = asyncio.run(live()), asyncio.run(live())
    assert len(first) == len(second) == 5
    assert not deterministic or first == second


# tests/real/test_vllm.py measures all that vLLM claims.
@pytest.mark.parametrize("case", ENGINE_CASES.values(), ids=ENGINE_CASES)
def test_what_an_engine_says_it_proves_is_proven(case: Case, tmp_path: Path) -> None:
    claims = sorted(case.make(tmp_path).capabilities.evidence)
    if not claims:
        assert case in (ENGINE_CASES["sim-cluster"], ENGINE_CASES["sim-storage-alone"])
        return
    workload = {"kind": "prefix", "prompt_tokens": 1025, "hit_rate": 0.5}
    # Of the disk's two states, one is the page cache's: what bypasses it claims only the other.
    plan = case.plan(tmp_path, workload=workload, measure={"tiers": claims, "samples": 2})
    made = RunRequest(
        name="contract", cells=plan.cells(), engine=case.engine, experiment=plan.origin(), folder=tmp_path / "run"
    )
    rows = measured(run(made, Quiet()))
    assert {row.expected_tier for row in rows} == set(claims)
    assert {(row.expected_tier, row.verdict) for row in rows} == {(tier, "proven") for tier in claims}


def test_every_kind_answers_what_the_harness_asks(tmp_path: Path) -> None:
    for name, kind in ENGINES.items():
        experiment = Case(name, {"engines": {"openai": {"url": "http://h:1", "model": "m"}}}).plan(tmp_path).experiment
        assert isinstance(experiment.engines.of(kind.settings()), kind.settings())
        disk = kind.disk(experiment)
        assert disk.moves == "real" or disk.why, f"{name}: a refusal has a reason"
        packs = kind.packs(experiment)
        assert packs is None or (packs.engine_policy and packs.tier_policy)
        traits = kind.traits(experiment)
        assert {name: type(value) for name, value in traits._asdict().items()} == dict.fromkeys(traits._fields, bool)
        assert set(traits._fields) <= set(Calibration.__struct_fields__), f"{name}: a calibration keeps them"
        assert kind.cores(experiment).engine is None
