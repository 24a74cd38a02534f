"""What a sample stores or reads finds memory that the harness held until then, so that no host has taken it."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.collectors.memory import HeldMemory
from harness.engines.fake.engine import FakeEngine
from harness.measure.run import run
from simulator.models import load_model
from tests.unit.measure.test_run_loop import EXPERIMENT, Quiet, request

# Of what is stored four times, and half more; of what is read half more.
RECOMPUTE_TOKENS, COLD_TOKENS = 6 * 1025, 6 * 513 + 512 * 3 // 2


class Ledger(HeldMemory):
    """Counts bytes instead of taking them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.events: list[tuple[str, int]] = []

    @property
    def held_bytes(self) -> int:
        return self.bytes

    def hold(self, size_bytes: int) -> float | None:
        self.bytes = max(self.bytes, size_bytes)
        self.events.append(("hold", self.bytes))
        return None

    def let_go(self, size_bytes: int | None = None) -> None:
        self.bytes = 0 if size_bytes is None else max(0, self.bytes - size_bytes)


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """Of a run on an engine of real time; its events also have what was held while requests were sent."""
    ledger = Ledger()
    monkeypatch.setattr("harness.measure.group.HeldMemory", lambda: ledger)

    class Watching(FakeEngine):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.capabilities = msgspec.structs.replace(self.capabilities, virtual_time=False)

        async def replay(self, load: Any, emit: Any) -> None:
            ledger.events.append((load.requests[0].id.split("-")[0], ledger.held_bytes))
            await super().replay(load, emit)

    monkeypatch.setattr("harness.engines.fake.engine.FakeEngine", Watching)
    return ledger


def test_memory_is_let_go_for_what_a_sample_stores_or_reads_and_held_again_after_it(
    tmp_path: Path, ledger: Ledger
) -> None:
    each = load_model("tiny-llama").kv_bytes_per_token
    measure = {"tiers": ["recompute", "disk_cold"], "samples": 2}
    run(request(tmp_path, model="tiny-llama", measure=measure), Quiet())
    sent = [event for event in ledger.events if event[0] != "hold"]
    assert [name for name, _ in sent] == ["recompute", "disk_cold"] * 2
    most = RECOMPUTE_TOKENS * each
    assert {held for name, held in sent if name == "recompute"} == {0}
    assert {held for name, held in sent if name == "disk_cold"} == {most - COLD_TOKENS * each}
    after = [
        ledger.events[place + 1 : place + 3] for place, event in enumerate(ledger.events) if event[0] == "recompute"
    ]
    # At once what the stores that are still going on leave, then what they have left.
    assert after == [[("hold", most - 2 * 1025 * each), ("hold", most - 1025 * each)]] * 2
    assert ledger.held_bytes == 0, "a run that has ended holds nothing"


def test_hits_in_memory_keep_the_memory(tmp_path: Path, ledger: Ledger) -> None:
    whole = {**EXPERIMENT["workload"], "hit_rate": 1.0}
    measure = {"tiers": ["recompute", "gpu"], "samples": 2}
    run(request(tmp_path, model="tiny-llama", workload=whole, measure=measure), Quiet())
    each = load_model("tiny-llama").kv_bytes_per_token
    held = [held for name, held in ledger.events if name == "gpu"]
    assert len(held) == 2 and min(held) >= (RECOMPUTE_TOKENS - 1025 - 12) * each


def test_what_is_computed_to_place_a_prefix_finds_the_memory_too(tmp_path: Path, ledger: Ledger) -> None:
    run(request(tmp_path, model="tiny-llama", measure={"tiers": ["cpu", "disk"], "samples": 2}), Quiet())
    warm = [place for place, event in enumerate(ledger.events) if event[0] == "warm"]
    assert len(warm) == 2 and all(ledger.events[place][1] == 0 for place in warm)
    assert ledger.events[warm[1] - 1][1] > 0, "it was held until then"
