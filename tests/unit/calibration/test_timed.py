"""What an accelerator inside the engine notes tells what the host takes before a step and after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.calibration import timed as module
from harness.calibration.timed import timed
from harness.records import Counters, Sample
from simulator.calibration import LAUNCH, STEP, Assumption, Calibration, CalibrationPoint, load_calibration
from simulator.models import load_model
from simulator.probing import simulated_s
from traces.request import RequestRecord

REQUEST_S, TOKEN_S, WAIT_S, POLL_S = 1.8e-3, 4e-7, 6e-4, 1.6e-3
RESPONSE_S, RESPONSE_TOKEN_S, STORE_S = 1.5e-3, 3e-7, 2e-3
SENT_S = 40.0


class Samples:
    """Rows and samples as a run folder keeps them."""

    def __init__(self) -> None:
        self.rows: list[RequestRecord] = []
        self.samples: list[Sample] = []

    def add(self, tier: str, count: int, tokens: int, cell: str = "c#1", steps: int = 1, **moved: Any) -> None:
        index = len(self.samples)
        hit, ended_s = tier != "recompute", SENT_S + 0.02
        late_s = RESPONSE_S + RESPONSE_TOKEN_S * tokens + (0.0 if hit else STORE_S)
        for each in range(count):
            self.rows.append(
                RequestRecord(
                    id=f"{index}-{each}", cell=cell, phase="measure", sample=index, expected_tier=tier,
                    verdict="proven", scheduled_s=SENT_S, sent_s=SENT_S, first_token_s=ended_s + late_s,
                    prompt_tokens=tokens, output_tokens=1, cached_tokens=tokens - 1 if hit else 0,
                )
            )  # fmt: skip
        noted = {"arrivals": sum(arrivals_s(count, tokens)), "ends": ended_s * steps}
        moved = {
            "paced": {"polls": 3, "steps": steps},
            "asked_us": {"polls": round(3e6 * POLL_S)},
            "at_us": {name: round(s * 1e6) for name, s in noted.items()},
        } | moved
        self.samples.append(
            Sample(
                cell=cell, tier=tier, index=index, started_s=SENT_S, ended_s=SENT_S + 1, verdict="proven",
                observed=Counters(**moved), expected=Counters(),
            )
        )  # fmt: skip


def arrivals_s(count: int, tokens: int) -> list[float]:
    """All are read, then parsed one after another: once the first has arrived, the engine has the core for all but 1 ms
    of each poll, of which the first takes longer."""
    parsing_s = REQUEST_S + TOKEN_S * tokens
    at_s, found = SENT_S + count * parsing_s / 3, []
    for number in range(count):
        at_s += parsing_s * 2 / 3 * (POLL_S * 5 / 6 / 1e-3 if number else 1.0)
        at_s += POLL_S / 2 if number == 1 else 0.0
        found.append(at_s + WAIT_S)
    return found


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Samples:
    made = Samples()
    monkeypatch.setattr(module, "read_rows", lambda _folder: iter(made.rows))
    monkeypatch.setattr(module, "read_samples", lambda _folder: iter(made.samples))
    sizes = {"small": 64, "other": 256, "c": 256}
    monkeypatch.setattr(module, "_chunk_tokens", lambda _folder: {f"{cell}#1": size for cell, size in sizes.items()})
    return made


def values(size: str = "") -> dict[str, float | None]:
    fitted_on = load_calibration("cpu-2core").fitted_on
    return {name: found.value for name, found in timed(Path("run"), size, {}, fitted_on).items()}


def test_what_a_front_end_takes_is_found_from_when_requests_arrive(kept: Samples) -> None:
    for tokens in (513, 3073):
        for tier, count in (("gpu", 1), ("cpu", 2), ("cpu", 4)):
            kept.add(tier, count, tokens)
    # Of several hits in the engine's own tier, a step of the first delays the others.
    kept.add("gpu", 4, 513, at_us={"arrivals": 9_000_000_000})
    kept.add("cpu", 1, 513, cell="other#1", at_us={"arrivals": 9_000_000_000})
    found = values("c#")
    told = {"request_s": REQUEST_S, "request_token_s": TOKEN_S, "request_wait_s": WAIT_S}
    assert {name: found[name] for name in told} == {name: pytest.approx(s, rel=0.02) for name, s in told.items()}


def test_requests_sent_one_at_a_time_do_not_tell_parsing_from_waiting(kept: Samples) -> None:
    kept.add("gpu", 1, 513)
    kept.add("gpu", 1, 3073)
    assert "request_s" not in values() and values()["response_s"] == pytest.approx(RESPONSE_S, abs=1e-6)


def test_each_start_of_the_engine_tells_what_its_front_end_takes_and_the_mean_over_samples_counts(
    kept: Samples,
) -> None:
    for cell, slower in (("c#1", 1.0), ("small#1", 1.3)):
        for tokens in (513, 3073):
            for tier, count in (("gpu", 1), ("cpu", 2)):
                late_s = [(at_s - SENT_S) * slower + SENT_S for at_s in arrivals_s(count, tokens)]
                kept.add(tier, count, tokens, cell, at_us={"arrivals": round(sum(late_s) * 1e6)})
    assert values()["request_token_s"] == pytest.approx(1.15 * TOKEN_S, rel=0.02)


def test_what_a_chunk_takes_is_what_more_of_them_add_to_the_look_for_an_answer(kept: Samples) -> None:
    """Of the first ones, what the server takes while it wakes up adds little."""
    for cell, tokens, chunks in (("c#1", 513, 2), ("c#1", 3073, 12), ("small#1", 3073, 48)):
        took_s = 3 * POLL_S + max(1e-4 * chunks / 4, 1e-4 * chunks - POLL_S / 4)
        kept.add("gpu", 1, tokens, cell, asked_us={"polls": round(1e6 * took_s)})
        kept.add("cpu", 1, tokens, cell, asked_us={"polls": 90_000})
    assert values()["request_chunk_s"] == pytest.approx(1e-4, rel=0.03)
    assert "request_chunk_s" not in values("small")


def test_what_an_answer_takes_is_found_from_the_end_of_its_step(kept: Samples) -> None:
    kept.add("gpu", 1, 513)
    kept.add("gpu", 1, 3073)
    kept.add("recompute", 1, 513)
    # The ends of several steps are one sum, and of several requests nothing says whose step that was.
    kept.add("recompute", 1, 3073, steps=3)
    kept.add("cpu", 2, 513, at_us={"ends": 1})
    found = values()
    assert found["response_s"] == pytest.approx(RESPONSE_S, abs=1e-6)
    assert found["response_token_s"] == pytest.approx(RESPONSE_TOKEN_S, abs=1e-9)
    assert found["response_store_s"] == pytest.approx(STORE_S, abs=1e-6)


def test_what_a_look_for_an_answer_takes_is_what_the_engine_has_timed(kept: Samples) -> None:
    """Of the calibration's own samples, all together. Looks for the end of a load are quicker, and do not count."""
    for tier, polls, took_us in (("gpu", 2, 3000), ("recompute", 1, 1500), ("cpu", 8, 9000)):
        kept.add(tier, 1, 513, paced={"polls": polls}, asked_us={"polls": took_us}, at_us={})
    kept.add("gpu", 1, 513, cell="other#1")
    assert values("c#") == {"poll_s": pytest.approx(1.5e-3), "response_next_s": 0.0}


def test_what_the_wait_for_storage_takes_is_what_prompts_that_ask_it_take_more(kept: Samples) -> None:
    known = load_calibration("cpu-2core-sglang-mooncake").fitted_on
    below = CalibrationPoint(tier="disk", prompt_tokens=513, hit_tokens=512, chunk_tokens=64, measured_s=1.0)
    fitted_on = msgspec.structs.replace(known, points=(below,))
    paced: dict[str, Any] = {"paced": {"steps": 1}, "at_us": {}}
    for tokens in (513, 1537):
        kept.add("gpu", 1, tokens, asked_us={"steps": 5_000}, **paced)
        kept.add("recompute", 1, tokens, asked_us={"steps": 5_000 + 100}, **paced)
    # Loads, several steps, several requests, and lengths of which one kind is missing tell nothing.
    kept.add("cpu", 1, 513, asked_us={"steps": 0}, **paced)
    kept.add("recompute", 1, 513, asked_us={"steps": 0}, paced={"steps": 2}, at_us={})
    kept.add("recompute", 2, 513, asked_us={"steps": 0}, **paced)
    kept.add("recompute", 1, 3073, asked_us={"steps": 0}, **paced)
    assert timed(Path("run"), "", {}, fitted_on)["poll_s"].value == pytest.approx(STORE_S - 1e-4, abs=1e-6)
    # Nothing is below its tiers: it does not ask.
    above = (msgspec.structs.replace(below, tier="cpu"),)
    assert "poll_s" not in timed(Path("run"), "", {}, msgspec.structs.replace(fitted_on, points=above))


def test_of_an_engine_that_reads_ahead_two_at_once_tell_what_its_front_end_takes(kept: Samples) -> None:
    """It parses each as a whole, and has the core for itself. Hits that are not read ahead wait for a step, and the
    reading delays the third and fourth one."""
    known = load_calibration("cpu-2core-sglang-mooncake").fitted_on
    below = CalibrationPoint(tier="disk", prompt_tokens=513, hit_tokens=512, chunk_tokens=64, measured_s=1.0)
    fitted_on = msgspec.structs.replace(known, points=(below,))
    for tokens in (513, 3073):
        parsing_s = REQUEST_S + TOKEN_S * tokens
        for tier, each in (("gpu", (1,)), ("disk", (1, 2))):
            at_us = {"arrivals": round(sum(SENT_S + count * parsing_s for count in each) * 1e6), "ends": 40_020_000}
            kept.add(tier, len(each), tokens, paced={"steps": 1}, at_us=at_us)
        kept.add("disk", 4, tokens, paced={"steps": 1}, at_us={"arrivals": 9_000_000_000})
        kept.add("cpu", 2, tokens, paced={"steps": 1}, at_us={"arrivals": 9_000_000_000})
    found = {name: one.value for name, one in timed(Path("run"), "", {}, fitted_on).items()}
    told = {"request_s": REQUEST_S, "request_token_s": TOKEN_S, "response_s": RESPONSE_S}
    assert {name: found[name] for name in told} == {name: pytest.approx(s, rel=0.01) for name, s in told.items()}
    # What else passes between arrival and step, the fit finds.
    assert "request_wait_s" not in found


def test_an_engine_without_an_accelerator_times_nothing(kept: Samples) -> None:
    kept.add("gpu", 1, 513, paced={}, asked_us={}, at_us={})
    assert values() == {"response_next_s": 0.0}


def test_what_was_timed_on_slow_cores_counts_as_if_they_were_not(kept: Samples) -> None:
    """All that is the host's took 1.5 times as long beside one of two kinds of samples."""
    fitted_on = load_calibration("cpu-2core").fitted_on
    for tokens in (513, 3073):
        for tier, count in (("gpu", 1), ("cpu", 2), ("cpu", 4)):
            kept.add(tier, count, tokens)
    usual = timed(Path("run"), "", {}, fitted_on)
    usual_s = {name: found.value or 0.0 for name, found in usual.items()}
    slow = timed(Path("run"), "", {}, fitted_on, dict.fromkeys((("c#1", "gpu"), ("c#1", "cpu")), 1.5))
    named = ("poll_s", "response_s", "response_token_s")
    assert {name: slow[name].value for name in named} == {name: pytest.approx(usual_s[name] / 1.5) for name in named}


def test_what_a_first_token_waits_for_the_next_step_is_read_off_decoding() -> None:
    truth = load_calibration("cpu-2core")
    waits = {"response_next_s": 2e-3, "response_token_s": RESPONSE_TOKEN_S, "poll_s": 1e-3}
    known = msgspec.structs.replace(truth, constants=truth.constants | waits, shared_core=False)
    decoding = CalibrationPoint(
        tier="gpu",
        prompt_tokens=513,
        hit_tokens=512,
        chunk_tokens=64,
        output_tokens=33,
        metric="tpot_s",
        measured_s=1.0,
    )
    points = [decoding, msgspec.structs.replace(decoding, prompt_tokens=1025, hit_tokens=1024)]
    # Of several, first tokens come apart for other reasons.
    points.append(msgspec.structs.replace(decoding, concurrency=4))
    given = {name: Assumption(value=truth.constant(name), why="given") for name in STEP}
    assert waited_s(known, points, given) == pytest.approx([2e-3, 2e-3], rel=0.05)
    late = msgspec.structs.replace(truth.fitted_on, points=(msgspec.structs.replace(decoding, measured_s=0.9),))
    assert module._waits_for_next_step_s(late, given, 0.0) == [0.0]
    assert waited_s(known, points, {}) == []
    # A roof, too, is what a step takes.
    roof = {LAUNCH: 0.1}
    roofed = msgspec.structs.replace(known, constants=known.constants | roof)
    below = given | {LAUNCH: Assumption(value=0.1, why="given")}
    assert waited_s(roofed, points[:2], below) == pytest.approx([2e-3, 2e-3], rel=0.05)


def waited_s(known: Calibration, points: list[CalibrationPoint], given: dict[str, Assumption]) -> list[float]:
    model = load_model("tiny-llama")
    told = tuple(msgspec.structs.replace(one, measured_s=simulated_s(one, known, model)) for one in points)
    fitted_on = msgspec.structs.replace(known.fitted_on, points=told)
    return module._waits_for_next_step_s(fitted_on, given, RESPONSE_TOKEN_S)
