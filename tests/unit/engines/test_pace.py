"""The reference accelerator's arithmetic on a clock of our own: steps and transfers take the simulator's times."""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from harness.engines import ENGINES
from harness.engines.accelerator import Accelerator, read_report
from harness.engines.accelerator.plugin.kv_accelerator.pace import (
    CARRIED_S,
    LATE_S,
    Link,
    LinkCost,
    Report,
    StepCost,
    Steps,
    wake_precisely,
)
from harness.engines.accelerator.plugin.kv_accelerator.settings import Pacing
from harness.engines.vllm.check import check
from harness.errors import PreflightError, SettingsError
from harness.experiment.read import load_experiment
from harness.records import Counters
from simulator.calibration import STEP, load_calibration
from simulator.models import CONFIGS, load_model
from simulator.simulate import Simulator
from tests.support.oracle_cases import calibration
from traces.request import Request, Segment

COST = {"step_s": 0.01, "token_s": 1e-4, "attention_s": 2e-8, "attention_context_s": 3e-8, "context_s": 1e-6}


class Clock:
    """Sleeps to the nanosecond, and `late_s` longer."""

    def __init__(self) -> None:
        self.now_s, self.late_s, self.slept_s = 100.0, 0.0, 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.now_s += seconds + self.late_s


def steps(clock: Clock, report: Report | None = None) -> Steps:
    return Steps(StepCost(**COST), report or Report(), clock, clock.sleep)


def test_a_step_costs_what_the_simulator_says() -> None:
    """Two chunks of a prompt, then a token with all of it as context."""
    simulator = Simulator(
        load_model("tiny-llama"),
        calibration(COST),
        "vllm-0.32",
        "lmcache-0.5.6-mp",
        gpu_blocks=64,
        block_tokens=32,
        chunk_tokens=64,
        cpu_bytes=2**30,
        max_num_batched_tokens=512,
        max_num_seqs=1,
    )
    simulator.submit(Request(id="one", prompt=(Segment(1, 800),), output_tokens=2), 0.0)
    (done,) = simulator.advance()
    cost = StepCost(**COST)
    prefill_s = cost.of([(512, 0)]) + cost.of([(288, 512)])
    assert done.first_token_s == pytest.approx(prefill_s, abs=1e-6)
    assert done.last_token_s == pytest.approx(prefill_s + cost.of([(1, 800)]), abs=1e-6)


def test_sequences_of_one_step_share_its_fixed_time() -> None:
    cost = StepCost(**COST)
    assert cost.of([(3, 5), (2, 7)]) == pytest.approx(
        0.01 + 1e-4 * 5 + 2e-8 * (9 + 4) / 2 + 3e-8 * (15 + 14) + 1e-6 * 12
    )


def test_a_step_takes_as_long_as_its_launches_at_least() -> None:
    cost = StepCost(**COST, launch_s=0.02)
    assert cost.of([(1, 0)]) == 0.02
    assert cost.of([(500, 0)]) == StepCost(**COST).of([(500, 0)]) > 0.02


def test_the_engine_s_own_work_counts_towards_the_step() -> None:
    clock = Clock()
    pace = steps(clock)
    pace.begin()
    clock.now_s += 0.003
    pace.plan([(1, 0)])
    clock.now_s += 0.004
    pace.finish(more=True)
    asked_s = StepCost(**COST).of([(1, 0)])
    assert clock.now_s == pytest.approx(100 + asked_s) and clock.slept_s == pytest.approx(asked_s - 0.007)
    clock.now_s += 0.002  # between two steps the engine hands its output over: that counts, too
    pace.begin()
    pace.plan([(1, 1)])
    pace.finish(more=False)
    assert clock.now_s == pytest.approx(100 + asked_s + StepCost(**COST).of([(1, 1)]))
    clock.now_s += 5.0  # an idle engine's next step begins when it is scheduled
    pace.begin()
    pace.plan([(1, 0)])
    assert pace.due_s == pytest.approx(clock.now_s + asked_s)


def test_a_step_without_tokens_is_not_paced_and_breaks_the_row() -> None:
    clock, report = Clock(), Report()
    pace = steps(clock, report)
    pace.begin()
    pace.plan([(1, 0)])
    pace.finish(more=True)
    clock.now_s += 0.5
    pace.begin()
    pace.plan([])
    assert pace.due_s is None
    pace.finish(more=True)
    assert report.steps.count == 1
    pace.begin()
    pace.plan([(1, 0)])
    assert pace.due_s == pytest.approx(clock.now_s + StepCost(**COST).of([(1, 0)]))


def test_a_look_for_an_answer_lasts_until_the_next_schedule() -> None:
    clock, report = Clock(), Report()
    pace = steps(clock, report)
    for took_s in (0.0015, 0.0025):
        pace.begin()
        pace.plan([], waiting=True)
        pace.finish(more=True)
        clock.now_s += took_s
    pace.begin()
    pace.plan([(1, 0)], waiting=True)
    pace.finish(more=False)
    assert report.polls.count == 2 and report.polls.asked_s == pytest.approx(0.004)
    pace.begin()
    pace.plan([])  # an engine without requests asks its connector about stores; no request waits
    clock.now_s += 1.0
    pace.begin()
    assert report.polls.count == 2


def test_what_a_step_waits_for_moves_its_end_by_what_is_left_of_it() -> None:
    clock, report = Clock(), Report()
    pace, asked_s = steps(clock, report), StepCost(**COST).of([(8, 0)])
    pace.begin()
    pace.plan([(8, 0)])
    pace.held_up(1.0)  # at once: nothing is lost
    assert pace.due_s == pytest.approx(100 + asked_s)
    clock.now_s += 0.5
    pace.held_up(0.25)
    pace.finish(more=True)
    assert clock.now_s == pytest.approx(100.5 + 0.25 * asked_s)
    assert report.steps.late == 0 and report.steps.asked_s == pytest.approx(asked_s)
    clock.now_s += 3.0
    pace.rest()
    pace.begin()
    pace.plan([(8, 0)])
    assert pace.due_s == pytest.approx(clock.now_s + asked_s)


def test_late_steps_are_counted_and_a_sleeper_s_lateness_does_not_add_up() -> None:
    clock, report = Clock(), Report()
    pace, asked_s = steps(clock, report), StepCost(**COST).of([(1, 0)])
    clock.late_s = CARRIED_S / 2
    for _ in range(10):
        pace.begin()
        pace.plan([(1, 0)])
        pace.finish(more=True)
    assert clock.now_s == pytest.approx(100 + 10 * asked_s + clock.late_s)
    assert report.steps.late == 0 and report.steps.overrun_s == pytest.approx(10 * clock.late_s)
    pace.begin()
    pace.plan([(1, 0)])
    clock.now_s += asked_s + 0.02  # the host takes longer than the step
    pace.finish(more=True)
    ended_s = clock.now_s
    assert report.steps.late == 1 and report.steps.worst_s == pytest.approx(0.02 + CARRIED_S / 2)
    pace.begin()
    pace.plan([(1, 0)])
    assert pace.due_s == pytest.approx(ended_s + asked_s), "what is lost is not made up for"


def test_a_link_moves_one_transfer_after_another_and_overlaps_their_latencies() -> None:
    """As the simulator's device does (core/src/tiers/device.rs, transfers_queue_for_bandwidth_and_overlap_latency)."""
    link = Link(LinkCost(latency_s=1.0, chunk_s=0.5, bytes_per_s=4.0, shared_bytes_per_s=4.0))
    assert [link.reserve(0.0, 2, 4), link.reserve(0.0, 1, 2), link.reserve(10.0, 0, 0)] == [3.0, 4.0, 11.0]
    parts = Link(LinkCost(latency_s=1.0, chunk_s=0.5, bytes_per_s=4.0, shared_bytes_per_s=4.0))
    assert [parts.reserve(0.0, 0.5, 1) for _ in range(4)] == [1.5, 2.0, 2.5, 3.0], "of one transfer of 2 chunks"
    slow = Link(LinkCost(latency_s=0.0, chunk_s=0.5, bytes_per_s=4.0, shared_bytes_per_s=0.5))
    assert slow.reserve(0.0, 2, 4) == 8.0


def test_the_report_is_what_the_harness_reads(tmp_path: Path) -> None:
    path = tmp_path / "pace.json"
    assert read_report(path) == {}
    report = Report(str(path))
    report.add("steps", 0.5, 2 * LATE_S)
    report.add("steps", 0.25, -0.1)
    report.note("arrivals", 100.25)
    report.note("arrivals", 100.75)
    report.add("loads", 0.125, 0.0)
    found = read_report(path, origin_s=100.0)
    assert found["steps_paced"] == 2 and found["steps_late"] == 1 and found["stores_paced"] == 0
    assert (
        found["steps_asked_us"] == 750_000 and found["steps_overrun_us"] == 2000 and found["loads_asked_us"] == 125_000
    )
    counters = Counters.of(found)
    assert counters.paced == {"steps": 2, "polls": 0, "loads": 1, "stores": 0} and counters.named() == found
    assert counters.at_us == {"arrivals": 1_000_000}, "of the run, and of those that there were"
    assert len(path.read_text().splitlines()) == 1


def test_what_the_harness_asks_is_what_the_plugin_reads(tmp_path: Path) -> None:
    model = load_model("llama-3.1-70b")
    for link, paced in (("paced", True), ("copied", False)):
        asked = Accelerator("rtx-a5000-nfs", link, model)  # type: ignore[arg-type]
        read = json.loads(asked.environment(tmp_path / "pace.json")["KV_ACCELERATOR"])
        pacing = Pacing(read["constants"], read["report"])
        assert (pacing.loads is not None) == (pacing.stores is not None) == paced
        preset = load_calibration("rtx-a5000-nfs")
        kept = {*STEP, *(f"cpu.{way}.{of}bytes_per_s" for way in ("read", "write") for of in ("", "shared_") if paced)}
        assert asked.constants == {name: preset.constant(name) for name in kept}
    assert str(asked.facts) == "reference accelerator rtx-a5000-nfs, no GPU, steps of llama-3.2-3b for llama-3.1-70b"
    assert asked.shape.kv_bytes_per_token == model.kv_bytes_per_token == 320 * 1024
    assert asked.shape.vocab_size < model.vocab_size


def test_a_preset_of_another_model_says_so_and_one_of_these_layers_does_not(tmp_path: Path) -> None:
    for name, model in (("h100-llama-3.1-8b", "llama-3.1-8b"), ("h100x2-llama-3.1-70b", "llama-3.1-70b")):
        facts = Accelerator(name, "paced", load_model(model)).facts
        assert (facts.other_model, facts.doubt) == (None, None) and str(facts).endswith("no GPU")
    longer = msgspec.structs.replace(load_model("llama-3.1-8b"), name="mine", max_position=4096, vocab_size=9000)
    assert Accelerator("h100-llama-3.1-8b", "paced", longer).facts.doubt is None
    wide = msgspec.structs.replace(load_model("llama-3.1-8b"), name="mine", intermediate_size=8192)
    doubt = Accelerator("h100-llama-3.1-8b", "paced", wide).facts.doubt
    assert doubt is not None and doubt.startswith(
        "h100-llama-3.1-8b was fitted on llama-3.1-8b, and mine has other layers: bytes of KV are mine's, steps take"
        " llama-3.1-8b's time."
    )
    # A calibration of one's own whose model file is gone is known by the name that it kept.
    content = (CONFIGS / "hardware" / "h100-llama-3.1-8b.yaml").read_text()
    (tmp_path / "own.yaml").write_text(content.replace("  model: llama-3.1-8b\n", "  model: gone.yaml\n"))
    assert Accelerator(str(tmp_path / "own.yaml"), "paced", wide).facts.other_model == "mine"


def test_it_names_the_constants_of_its_pace_that_no_published_time_shows() -> None:
    model = load_model("llama-3.1-70b")
    assert Accelerator("h100x2-llama-3.1-70b", "paced", model).facts.assumed == ("attention_s", "cpu.read.bytes_per_s")
    assert Accelerator("h100x2-llama-3.1-70b", "copied", model).facts.assumed == ("attention_s",)


def test_what_it_cannot_stand_for_is_refused_on_one_line() -> None:
    model = load_model("llama-3.1-8b")
    unknown = r"^engines.vllm.accelerator: h9000: configs/hardware has no file of that name; it has .*rtx-a5000-nfs.*$"
    with pytest.raises(SettingsError, match=unknown):
        Accelerator("h9000", "paced", model)
    latent = msgspec.structs.replace(model, name="latent", mla_latent_dim=512, mla_rope_dim=64)
    with pytest.raises(SettingsError, match=r"^engines.vllm.accelerator: latent has layers of other kinds .*$"):
        Accelerator("rtx-a5000-nfs", "paced", latent)


def test_a_cache_that_does_not_fit_the_memory_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an accelerator the GPU's KV lies in RAM, too: 6 and 3 of 10 GiB fit, 6 and 4 do not."""
    monkeypatch.setattr("harness.collectors.room.available_memory_bytes", lambda: 10 * 2**30)
    path = tmp_path / "experiment.yaml"
    asked: dict[str, Any] = {
        "name": "large",
        "model": "llama-3.1-70b",
        "workload": {"kind": "prefix", "prompt_tokens": 4097, "hit_rate": 1.0},
        "measure": {"tiers": ["recompute", "gpu", "cpu"], "samples": 1},
        "engines": {"vllm": {"python": sys.executable, "accelerator": "rtx-a5000-nfs"}},
    }
    for cpu in ("3GiB", "4GiB"):
        cache = {"block_tokens": 32, "chunk_tokens": 256, "gpu": "6GiB", "cpu": cpu}
        path.write_text(yaml.safe_dump({**asked, "cache": cache}))
        experiment = load_experiment(path).experiment
        if cpu == "3GiB":
            check(experiment, tmp_path)
            continue
        words = r"^cache: gpu, which lies in RAM with an accelerator, and cpu .* take 10GiB of RAM, 10GiB are free; .*$"
        with pytest.raises(PreflightError, match=words):
            check(experiment, tmp_path)


def test_beside_an_accelerator_s_waits_nothing_has_to_share_a_core_or_wait_for_a_copy(tmp_path: Path) -> None:
    def traits(**section: Any) -> tuple[bool, bool]:
        asked = {
            "name": "traits",
            "workload": {"kind": "prefix", "prompt_tokens": 4097, "hit_rate": 1.0},
            "measure": {"tiers": ["gpu"], "samples": 1},
            "cache": {"gpu": "1GiB"},
            "engines": {"vllm": {"cores": {"engine": [0], "client": [1]}, **section}},
        }
        (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(asked))
        found = ENGINES["vllm"].traits(load_experiment(tmp_path / "experiment.yaml").experiment)
        return found.synchronous_loads, found.shared_core

    assert traits() == (True, True)
    assert traits(accelerator="rtx-a5000-nfs") == (False, False)
    assert traits(accelerator="rtx-a5000-nfs", link="copied") == (True, False)


def test_sglang_s_waiting_passes_leave_their_core_to_a_front_end_that_has_no_other(tmp_path: Path) -> None:
    for cores, one_core in (([0], True), ([0, 2], False), (None, False)):
        asked = {
            "name": "traits",
            "workload": {"kind": "prefix", "prompt_tokens": 4097, "hit_rate": 1.0},
            "measure": {"tiers": ["gpu"], "samples": 1},
            "cache": {"gpu": "1GiB"},
            "engines": {"sglang": {"cores": {"engine": cores, "client": [1]}} if cores else {}},
        }
        (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(asked))
        found = ENGINES["sglang"].traits(load_experiment(tmp_path / "experiment.yaml").experiment)
        assert (found.yields_core, found.shared_core) == (one_core, False)


def test_only_the_thread_that_asks_wakes_before_others() -> None:
    """A child of it, and the thread that started it, stay as they were."""
    policies: list[int] = []

    def paced() -> None:
        wake_precisely()
        policies.append(os.sched_getscheduler(0))
        child = threading.Thread(target=lambda: policies.append(os.sched_getscheduler(0)))
        child.start()
        child.join()

    asking = threading.Thread(target=paced)
    asking.start()
    asking.join()
    allowed = os.SCHED_RR | os.SCHED_RESET_ON_FORK if os.geteuid() == 0 else os.SCHED_OTHER
    assert policies == [allowed, os.SCHED_OTHER] and os.sched_getscheduler(0) == os.SCHED_OTHER
