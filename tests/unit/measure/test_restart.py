"""The state after a restart: what is placed in which order, what proves it, who refuses it, and what it costs."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from harness.engines.fake.engine import FakeEngine
from harness.engines.sim.engine import SimEngine
from harness.errors import NotComparable, PreflightError
from harness.experiment.measure import Measure, Until
from harness.measure.placing import Way, way_to
from harness.measure.run import run
from harness.measure.sampling import Sampler
from harness.records import Capabilities, Resolved
from harness.report.refresh import seal
from harness.results.folder import read_rows, read_samples
from harness.results.manifest import read_manifest
from harness.validation.validate import Validation, validate
from simulator.calibration import load_calibration
from simulator.models import load_model
from simulator.policies import engine_policy, tier_policy
from simulator.simulate import Simulator
from tests.unit.measure import test_run_sim
from tests.unit.measure.test_run_loop import Quiet, measured, request, start_slow_run
from traces.load import Load
from traces.request import Request, Segment
from traces.tiers import state_named, states_in

STATES = ["recompute", "gpu", "cpu", "disk", "disk_cold", "disk_restart"]


class Watched(FakeEngine):
    """Notes what it is asked for."""

    asked: list[str]

    async def start(self) -> None:
        Watched.asked.append("start")
        await super().start()

    async def reset(self, what: frozenset[str]) -> None:
        Watched.asked.append(f"reset {' '.join(sorted(what))}")
        await super().reset(what)

    async def restart(self) -> Resolved:
        Watched.asked.append("restart")
        return await super().restart()

    async def metrics(self) -> Any:
        Watched.asked.append("metrics")
        return await super().metrics()

    async def replay(self, load: Load, emit: Any) -> None:
        Watched.asked.append("replay")
        await super().replay(load, emit)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("harness.engines.fake.engine.FakeEngine", Watched)
    Watched.asked = []
    return Watched.asked


def test_stores_end_before_the_restart_and_counters_are_read_after_it(tmp_path: Path, asked: list[str]) -> None:
    folder = run(request(tmp_path, measure={"tiers": ["disk_restart"], "samples": 2}), Quiet())
    first = ["replay", "metrics", "restart", "reset page_cache", "metrics", "replay", "metrics"]
    assert asked == ["start", *["reset cpu disk gpu"] * 2, *first, *first[2:]], (
        "the second sample finds its prefix on disk, and sends nothing before the restart"
    )
    assert {(row.expected_tier, row.verdict) for row in measured(folder)} == {("disk_restart", "proven")}
    for sample in read_samples(folder):
        assert sample.observed == sample.expected or sample.observed.stores_begun == 0
        assert sample.observed.hit_tokens == {"gpu": 0, "cpu": 0, "disk": 512}
        assert sample.observed.device_read_bytes == {"disk": 512 * 32768} == sample.expected.device_read_bytes


def test_it_comes_last_and_the_next_cell_gets_an_engine_of_its_own(tmp_path: Path, asked: list[str]) -> None:
    sweep = {"workload.hit_rate": [0.5, 1.0]}
    folder = run(request(tmp_path, measure={"tiers": STATES, "samples": 2}, sweep=sweep), Quiet())
    one = STATES[:-1] * 2 + STATES[-1:] * 2
    assert [row.expected_tier for row in measured(folder)] == one * 2
    assert {(row.verdict, row.verdict_reason) for row in measured(folder)} == {("proven", None)}
    assert (asked.count("start"), asked.count("restart")) == (2, 4)
    summary = seal(folder)
    assert (
        list(summary.cells[0].tiers) == STATES
        and "first request after a restart" in (folder / "report.html").read_text()
    )


def test_a_store_that_does_not_survive_is_contradicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgets(FakeEngine):
        async def restart(self) -> Resolved:
            self._tiers["disk"].clear()
            return await super().restart()

    monkeypatch.setattr("harness.engines.fake.engine.FakeEngine", Forgets)
    folder = run(request(tmp_path, measure={"tiers": ["disk_cold", "disk_restart"], "samples": 1}), Quiet())
    told = {row.expected_tier: (row.verdict, row.verdict_reason) for row in measured(folder)}
    assert told["disk_cold"] == ("proven", None)
    assert told["disk_restart"] == ("contradicted", "computed_tokens moved by 1025, disk_restart needs 513")


def test_a_restart_is_told_and_counted_in_its_state_s_time(tmp_path: Path) -> None:
    class Told(Quiet):
        def state(self, text: str) -> None:
            states.append(text)

    states: list[str] = []
    run(request(tmp_path, measure={"tiers": ["cpu", "disk_restart"], "samples": 2, "warm_up": 1}), Told())
    told = [text for text in states if "restarting" in text]
    assert told == [
        "disk_restart #1, restarting engine and cache server first",
        "disk_restart #2 TTFT 564 ms, restarting engine and cache server first (the last time 30 s)",
    ]
    assert not any("disk_restart warming up" in text for text in states)


def test_it_takes_its_share_of_a_limited_time_and_the_least_samples() -> None:
    until = Until(half_width=0.001, min_samples=4, max_samples=1000)
    tiers = ("recompute", "disk_cold", "disk_restart")
    sampler = Sampler(Measure.model_validate({"tiers": tiers, "until": until, "budget": "300s"}))
    order, elapsed_s, value = list[str](), 0.0, 0.0
    while due := sampler.round(elapsed_s):
        for tier in due:
            placing_s, value = 30.0 if tier == "disk_restart" else 1.0, value + 1
            elapsed_s += placing_s + 1.0
            order.append(tier)
            sampler.add(tier, [value], proven=True, placing_s=placing_s, took_s=1.0)
    assert 200 <= len(order[: order.index("disk_restart")]) * 2 <= 204
    assert order[order.index("disk_restart") :] == ["disk_restart"] * 4, "100 s are left, and the fourth begins in them"
    wide = Sampler(Measure(tiers=("disk_restart",), until=until))
    while due := wide.round(0.0):
        value *= 2
        wide.add(due[0], [value], proven=True)
    assert wide.samples_of("disk_restart") == 4


@pytest.mark.parametrize(
    ("engine", "engines", "words"),
    [
        ("fake", {"fake": {"keeps": []}}, r"the fake is told to keep nothing; set engines\.fake\.keeps, or remove"),
        ("openai", {"openai": {"url": "http://h:1", "model": "m"}}, "the harness does not start it; use an engine"),
        ("vllm", {"vllm": {"attach": {"url": "http://h:1"}}}, r"it runs already, .*; remove engines\.vllm\.attach"),
        ("sglang", {"sglang": {"attach": {"url": "http://h:1"}}}, r"it runs already, .*remove engines\.sglang\.attach"),
        ("vllm", {"vllm": {"connector": "in_process"}}, r"its own process wrote; set engines\.vllm\.connector to mp"),
        ("vllm", {"vllm": {"connector": "mooncake"}}, "Mooncake's SSD lacks what its RAM has not evicted"),
    ],
)
def test_who_cannot_says_so_in_one_line_with_the_cure(
    tmp_path: Path, engine: str, engines: dict[str, Any], words: str
) -> None:
    measure = {"tiers": ["disk_restart"], "samples": 1}
    with pytest.raises(PreflightError, match=words) as told:
        run(request(tmp_path, engine=engine, measure=measure, engines=engines), Quiet())
    message = str(told.value)
    assert message.startswith(f"measure.tiers disk_restart: engine {engine}, as configured, cannot be restarted")
    assert "\n" not in message and not (tmp_path / "out").exists()


def test_a_pool_s_disk_is_no_store_of_what_the_pool_holds() -> None:
    kept = SimEngine(lambda: pytest.fail("never started"), tiers=("gpu", "cpu", "disk")).capabilities
    lost = SimEngine(lambda: pytest.fail("never started"), tiers=("gpu", "pool", "disk")).capabilities
    assert kept.keeps == {"disk"} and "disk_restart" in kept.evidence
    assert not lost.keeps and "disk_restart" not in lost.evidence and "remove cache.pool" in lost.no_restart


def test_a_trace_of_processes_that_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.measure.run.check_run_storage", lambda *_: None)
    measure = {"tiers": ["disk_restart"], "samples": 1}
    with pytest.raises(PreflightError, match=r"^measure\.tiers disk_restart: a restart ends .* storage\.trace follows"):
        run(request(tmp_path, measure=measure, storage={"trace": True}), Quiet())


def test_what_a_restart_empties_needs_no_reset() -> None:
    """Of an engine that can empty nothing but the page cache."""
    tiers = frozenset({"gpu", "cpu", "disk"})
    can = Capabilities(tiers=tiers, resets=frozenset({frozenset({"page_cache"})}), keeps=frozenset({"disk"}))
    way = Way(frozenset({"page_cache"}), frozenset(), frozenset(), frozenset({"gpu", "cpu"}))
    assert way_to(state_named("disk_restart"), can) == way
    assert way_to(state_named("disk_cold"), can).pushes == {"gpu", "cpu"}


def test_the_simulator_reads_what_lay_on_disk_and_models_no_time_of_the_restart(tmp_path: Path) -> None:
    config = {**test_run_sim.TIERS, "measure": {"tiers": STATES, "samples": 2}}
    folder = run(test_run_sim.request(tmp_path, config), Quiet())
    rows = measured(folder)
    assert len(rows) == 6 * 6 * 2 and {(row.verdict, row.verdict_reason) for row in rows} == {("proven", None)}
    times = {(row.cell, row.expected_tier, row.sample): row.ttft_s for row in rows}
    for (cell, tier, sample), ttft_s in times.items():
        if tier == "disk_restart":
            assert ttft_s == pytest.approx(times[cell, "disk_cold", sample])
    last = [sample for sample in read_samples(folder) if sample.tier == "disk_restart"][-1]
    assert last.observed.device_read_bytes["disk"] == 1024 * 32768 and last.observed.hit_tokens["cpu"] == 0


def test_the_simulator_keeps_of_a_prefix_what_the_disk_has_room_for() -> None:
    """A disk too small for the prefix: what it dropped is computed after the restart, though CPU RAM had it before."""
    model, tokens = load_model("tiny-llama"), 1024
    engine = SimEngine(
        lambda: Simulator(
            model,
            load_calibration("cpu-2core"),
            engine_policy("vllm-0.32"),
            tier_policy("lmcache-0.5.6-mp"),
            gpu_blocks=512,
            block_tokens=32,
            chunk_tokens=256,
            cpu_bytes=2**30,
            disk_bytes=2 * 256 * model.kv_bytes_per_token,
            max_num_batched_tokens=2048,
            max_num_seqs=8,
        )
    )

    async def hits() -> list[int | None]:
        found: list[int | None] = []
        await engine.start()
        await engine.ready()
        for number in range(3):
            if number == 2:
                await engine.metrics()
                await engine.restart()
            prompt = (Segment(1, tokens), Segment(100 + number, 1))
            asked = Request(id=str(number), prompt=prompt, output_tokens=1, at_s=0.0)
            await engine.replay(Load([asked]), lambda row: found.append(row.cached_tokens))
        return found

    cold, warm, restarted = asyncio.run(hits())
    assert (cold, warm) == (0, tokens) and restarted is not None and restarted < tokens


def test_a_run_killed_between_restarts_goes_on(tmp_path: Path) -> None:
    measure = {"tiers": STATES, "samples": 3}
    process, deadline = start_slow_run(tmp_path, f"measure={measure}"), time.monotonic() + 60
    while not any(row.expected_tier == "disk_restart" for row in rows_of(tmp_path / "out")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    folder = run(request(tmp_path, resume=tmp_path / "out", measure=measure), Quiet())
    rows = measured(folder)
    assert len(rows) == 18 == len({(row.expected_tier, row.sample) for row in rows})
    assert {row.verdict for row in rows} == {"proven"} and {row.attempt for row in rows} == {0, 1}
    assert read_manifest(folder).status == "complete"


def rows_of(folder: Path) -> list[Any]:
    return list(read_rows(folder)) if (folder / "rows.jsonl").exists() else []


def test_nothing_takes_it_up_unasked(tmp_path: Path) -> None:
    """`harness init` proposes states by their tiers, and a validation has no simulated restart to compare with."""
    assert "disk_restart" not in states_in({"gpu", "cpu", "disk"}) and "disk_cold" in states_in({"disk"})
    asked = request(tmp_path, measure={"tiers": STATES, "samples": 2})
    with pytest.raises(
        NotComparable, match=r"base disk_restart: the simulator restarts in no time.*; remove disk_rest"
    ):
        validate(
            Validation(
                name="loop",
                cells=asked.cells,
                engine="vllm",
                calibration="cpu-2core",
                experiment=asked.experiment,
                folder=tmp_path / "validation",
            ),
            Quiet(),
        )
    assert not (tmp_path / "validation").exists()
