"""An engine that asks storage ahead: which prompts wait for the answer, and what a fit makes of it."""

from __future__ import annotations

import msgspec
import pytest

from simulator.calibration import Assumption, Calibration, CalibrationPoint, FittedOn, load_calibration
from simulator.fitting import fit
from simulator.models import load_model
from simulator.point_costs import design
from simulator.probing import simulated_s

WAIT_S, STEP_S, TOKEN_S, PASS_S = 3e-3, 8e-3, 1.7e-4, 2e-4


def point(tier: str, prompt: int, hit: int) -> CalibrationPoint:
    return CalibrationPoint(tier=tier, prompt_tokens=prompt, hit_tokens=hit, chunk_tokens=64, measured_s=1.0)


ASKING = (point("recompute", 513, 0), point("recompute", 3073, 0), point("gpu", 1537, 768), point("disk", 1537, 1536))
SILENT = (point("gpu", 513, 512), point("gpu", 3073, 3072), point("cpu", 1537, 1536), point("cpu", 1025, 800))


def fitted_on(points: tuple[CalibrationPoint, ...], policy: str = "sglang-0.5.23") -> FittedOn:
    return FittedOn(
        model="tiny-llama",
        max_num_batched_tokens=2048,
        block_tokens=64,
        engine_policy=policy,
        tier_policy="sglang-0.5.23-hicache-wait",
        points=points,
    )


def test_a_prompt_waits_for_storage_if_storage_is_asked_for_enough_of_it() -> None:
    settings = fitted_on((*ASKING, *SILENT))
    assert [design(one, settings).get("poll_s") for one in settings.points] == [1.0] * 4 + [None] * 4
    for other in (fitted_on(SILENT), fitted_on((*ASKING, *SILENT), "vllm-0.32")):
        assert all("poll_s" not in design(one, other) for one in other.points)


def known(settings: FittedOn, wait_s: float = WAIT_S, *, yields_core: bool = False) -> Calibration:
    calibration = load_calibration("cpu-2core")
    host = {"request_s": 4e-3, "request_wait_s": 0.0, "response_s": 1e-3, "poll_s": wait_s}
    free = {name: 0.0 for name in calibration.constants if name.startswith("request_") and name not in host}
    rest = {"step_s": STEP_S, "token_s": TOKEN_S, "cpu.read.latency_s": 1e-3, "page_cache.read.latency_s": 2e-3}
    constants = calibration.constants | free | host | rest
    shared = {"shared_core": False, "yields_core": yields_core}
    return msgspec.structs.replace(
        calibration, fitted_on=settings, constants=constants, synchronous_loads=False, **shared
    )


def test_prompts_that_wait_together_are_computed_together() -> None:
    """Whole hits are not: the first one's step has begun when the second one comes. Nor are prompts whose wait ends
    before that, unless the scheduler leaves its core to the front end meanwhile."""
    settings, model = fitted_on((*ASKING, *SILENT)), load_model("tiny-llama")
    prompt, hit = ASKING[0], SILENT[0]

    def longer_s(one: CalibrationPoint, wait_s: float, *, yields_core: bool = False) -> float:
        """By how much two at once take longer than one, on average."""
        two, calibration = msgspec.structs.replace(one, concurrency=2), known(settings, wait_s, yields_core=yields_core)
        return simulated_s(two, calibration, model) - simulated_s(one, calibration, model)

    assert longer_s(prompt, 2 * WAIT_S) > 513 * TOKEN_S > longer_s(prompt, WAIT_S)
    assert longer_s(prompt, WAIT_S, yields_core=True) > 513 * TOKEN_S
    assert longer_s(hit, WAIT_S) == longer_s(hit, 0.0) == longer_s(hit, WAIT_S, yields_core=True) > STEP_S / 2


def test_a_fit_finds_the_wait_again() -> None:
    truth, model = known(fitted_on((*ASKING, *SILENT))), load_model("tiny-llama")
    points = [msgspec.structs.replace(one, measured_s=simulated_s(one, truth, model)) for one in (*ASKING, *SILENT)]
    settings = fitted_on(tuple(points))
    assumed = {
        name: Assumption(value=value, why="given")
        for name, value in truth.constants.items()
        if value is not None and name not in ("poll_s", "request_s", "cpu.read.latency_s", "page_cache.read.latency_s")
    }
    found = fit(settings, assumed)
    assert found.constants["poll_s"] == pytest.approx(WAIT_S, rel=0.02)
    assert found.fitted_s == [pytest.approx(one.measured_s, rel=2e-3) for one in points]


def test_a_fit_finds_what_passes_take_of_reads_again() -> None:
    together = [msgspec.structs.replace(one, concurrency=n) for one in ASKING[-1:] for n in (2, 4)]
    asked = (*ASKING, point("disk", 513, 512), *SILENT, *together)
    truth, model = known(fitted_on(asked)), load_model("tiny-llama")
    truth = msgspec.structs.replace(truth, constants=truth.constants | {"read_pass_s": PASS_S})
    points = [msgspec.structs.replace(one, measured_s=simulated_s(one, truth, model)) for one in asked]
    settings = fitted_on(tuple(points))
    assumed = {
        name: Assumption(value=value, why="given")
        for name, value in truth.constants.items()
        if value is not None and name not in ("read_pass_s", "page_cache.read.latency_s")
    }
    found = fit(settings, assumed)
    assert found.constants["read_pass_s"] == pytest.approx(PASS_S, rel=0.02)
    assert found.fitted_s == [pytest.approx(one.measured_s, rel=2e-3) for one in points]


def test_only_a_hit_that_is_read_ahead_is_held_up() -> None:
    settings = fitted_on((*ASKING, *SILENT))
    rows = [design(one, settings).get("read_pass_s") for one in settings.points]
    assert rows == [None, None, None, 1536 / 64, *[None] * 4]
