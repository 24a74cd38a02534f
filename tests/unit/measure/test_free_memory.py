"""What a sample stores or reads finds free memory that no host has taken, and quick cores where it waits for them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.collectors.memory import OwnMemory
from harness.engines.fake import engine as fake
from harness.engines.fake.engine import FakeEngine
from harness.measure.run import run
from harness.records import Counters
from harness.results.folder import read_samples
from simulator.models import load_model
from tests.unit.measure.test_run_loop import Quiet, request

# Of what is stored four times, and half more; of what is read half more.
RECOMPUTE_TOKENS, COLD_TOKENS = 6 * 1025, 6 * 513 + 512 * 3 // 2


class Ledger(OwnMemory):
    """Counts bytes instead of touching them."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0.0
        self.events: list[tuple[str, int]] = []

    def have(self, size_bytes: int) -> float | None:
        self.events.append(("have", size_bytes))
        return None

    def taken_share(self) -> float | None:
        return self.taken

    def let_go(self) -> None:
        self.events.append(("let go", 0))


class Touching:
    def __init__(self, ledger: Ledger, pids: Callable[[], Sequence[int]]) -> None:
        self._ledger, self._pids = ledger, pids

    def touch(self) -> float:
        self._ledger.events.append(("touch", sum(self._pids())))
        return 0.25


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """Of a run on an engine of real time; its events also have what was sent."""
    ledger = Ledger()
    monkeypatch.setattr("harness.measure.group.OwnMemory", lambda _rested: ledger)
    monkeypatch.setattr("harness.measure.cell.ResidentPages", lambda pids: Touching(ledger, pids))

    class Watching(FakeEngine):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.capabilities = msgspec.structs.replace(self.capabilities, virtual_time=False)

        def pids(self) -> tuple[int, ...]:
            return (7,)

        async def replay(self, load: Any, emit: Any) -> None:
            ledger.events.append((load.requests[0].id.split("-")[0], 0))
            await super().replay(load, emit)

    monkeypatch.setattr("harness.engines.fake.engine.FakeEngine", Watching)
    return ledger


def test_placing_finds_what_the_largest_sample_needs_and_each_sample_what_it_needs(
    tmp_path: Path, ledger: Ledger
) -> None:
    each = load_model("tiny-llama").kv_bytes_per_token
    measure = {"tiers": ["recompute", "disk_cold"], "samples": 2}
    run(request(tmp_path, model="tiny-llama", measure=measure), Quiet())
    most, cold = RECOMPUTE_TOKENS * each, COLD_TOKENS * each
    sample = [("have", most), ("have", most), ("recompute", 0), ("have", most), ("have", cold), ("disk_cold", 0)]
    assert ledger.events == [*sample * 2, ("let go", 0)], "a run that has ended keeps nothing"


@pytest.mark.parametrize(("taken", "touched_s"), [(0.02, 0.25), (0.005, None)])
def test_what_the_host_has_taken_of_the_engine_comes_back_before_a_sample(
    tmp_path: Path, ledger: Ledger, taken: float, touched_s: float | None
) -> None:
    ledger.taken = taken
    run(request(tmp_path, model="tiny-llama", measure={"tiers": ["gpu"], "samples": 1}), Quiet())
    touched, sent = [("touch", 7)], [("gpu", 0)]
    assert [event for event in ledger.events if event in touched + sent][-2:] == (touched if touched_s else []) + sent
    [folder] = {path.parent for path in tmp_path.rglob("samples.jsonl")}
    assert [sample.host.engine_touch_s for sample in read_samples(folder)] == [touched_s]


@pytest.mark.parametrize(("steady", "waited_s"), [("3s", 1.5), (None, None)])
def test_a_sample_waits_for_its_cores_where_it_is_asked_to(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, steady: str | None, waited_s: float | None
) -> None:
    class Waiting:
        def __init__(self, _cores: Sequence[int]) -> None:
            """Of a real engine's."""

        async def wait(self, at_most_s: float) -> float:
            ledger.events.append(("wait", int(at_most_s)))
            return 1.5

    monkeypatch.setattr("harness.measure.group.SteadyCores", Waiting)
    measure = {"tiers": ["gpu"], "samples": 1, "steady": steady}
    run(request(tmp_path, model="tiny-llama", measure=measure), Quiet())
    waiting, sent = [("wait", 3)], [("gpu", 0)]
    assert [event for event in ledger.events if event in waiting + sent][-2:] == (waiting if steady else []) + sent
    [folder] = {path.parent for path in tmp_path.rglob("samples.jsonl")}
    assert [sample.host.core_wait_s for sample in read_samples(folder)] == [waited_s]


@pytest.mark.usefixtures("ledger")
@pytest.mark.parametrize(("taken", "notes"), [(0.45, 1), (0.02, 0)])
def test_a_host_that_takes_memory_in_use_is_told_at_once_and_by_each_sample(
    tmp_path: Path, ledger: Ledger, taken: float, notes: int
) -> None:
    ledger.taken, told = taken, Quiet()
    run(request(tmp_path, model="tiny-llama", measure={"tiers": ["gpu"], "samples": 2}), told)
    assert len([note for note in told.notes if f"had taken {taken:.0%} of memory" in note]) == notes
    [folder] = {path.parent for path in tmp_path.rglob("samples.jsonl")}
    assert [sample.host.taken_share for sample in read_samples(folder)] == [taken, taken]


def test_an_engine_of_virtual_time_does_not_look(tmp_path: Path) -> None:
    run(request(tmp_path, model="tiny-llama", measure={"tiers": ["gpu"], "samples": 2}), Quiet())
    [folder] = {path.parent for path in tmp_path.rglob("samples.jsonl")}
    assert [sample.host.taken_share for sample in read_samples(folder)] == [None, None]


def test_a_load_finds_what_its_last_pass_stored_and_half_more(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the measured pass: of the second one that warms up. Prefixes are sent before each, and do not count."""

    class Storing(fake.FakeEngine):
        passes = 0

        async def replay(self, load: Any, emit: Any) -> None:
            self.passes += 1
            await super().replay(load, emit)

        async def metrics(self) -> Counters:
            return msgspec.structs.replace(await super().metrics(), stores_ended=2**self.passes)

    monkeypatch.setattr(fake, "FakeEngine", Storing)
    workload = {"kind": "synthetic", "requests": 6, "prompt_tokens": 1025, "output_tokens": 2, "concurrency": 1}
    run(request(tmp_path, model="tiny-llama", workload=workload, measure={"warm_up": 2}), Quiet())
    chunk_bytes = 256 * load_model("tiny-llama").kv_bytes_per_token
    assert [event for event in ledger.events if event[0] == "have"] == [("have", 8 * chunk_bytes * 3 // 2)]
