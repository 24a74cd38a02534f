"""Where the engine's thread launches a step's kernels one by one, no step is shorter than its launches."""

from __future__ import annotations

import msgspec
import pytest

from simulator.calibration import HOST_STEP, Assumption, Calibration, CalibrationPoint, FittedOn, load_calibration
from simulator.fitting import Fit, fit
from simulator.models import load_model
from simulator.point_costs import predicted_s
from simulator.probing import simulated_s

MODEL = "tiny-llama"
LAUNCH_S = 0.02
# Steps of up to some 700 new tokens take their launches, longer ones what they compute.
COST = {
    "step_s": 0.005, "token_s": 2e-5, "attention_s": 2e-9, "attention_context_s": 2e-9, "context_s": 0.0,
    "step_request_s": 0.0, "request_s": 0.004, "request_token_s": 1e-6, "request_wait_s": 0.0, "request_chunk_s": 0.0,
    "response_s": 0.002, "poll_s": 0.0,
}  # fmt: skip


def of_gpu(launch_s: float, points: tuple[CalibrationPoint, ...] = ()) -> Calibration:
    known = load_calibration("cpu-2core")
    fitted_on = FittedOn(model=MODEL, max_num_batched_tokens=2048, max_num_seqs=64, points=points)
    return msgspec.structs.replace(
        known, name="gpu", constants=known.constants | COST | {"launch_s": launch_s}, assumed={}, shared_core=False,
        synchronous_loads=False, host_spread=0.0, fitted_on=fitted_on,
    )  # fmt: skip


def point(prompt_tokens: int, hit_tokens: int = 0, output_tokens: int = 1, at_once: int = 1) -> CalibrationPoint:
    return CalibrationPoint(
        tier="gpu" if hit_tokens else "recompute", prompt_tokens=prompt_tokens, hit_tokens=hit_tokens,
        chunk_tokens=256, concurrency=at_once, output_tokens=output_tokens, samples=9, measured_s=1.0,
        metric="tpot_s" if output_tokens > 1 else "ttft_s",
    )  # fmt: skip


POINTS = (
    *(point(tokens) for tokens in (513, 1537, 3073, 6145)),
    *(point(tokens, tokens - 1) for tokens in (513, 1537, 3073, 6145)),
    point(1537, 768), point(3073, 1024), point(3073, 2048), point(6145, 3072), point(6145, 4608),
    point(513, at_once=2), point(513, at_once=4), point(1537, 1536, at_once=2), point(1537, 1536, at_once=4),
    point(513, 512, 33), point(3073, 3072, 33), point(513, 512, 33, at_once=4),
)  # fmt: skip


def fitted(launch_s: float) -> tuple[Fit, tuple[CalibrationPoint, ...]]:
    truth, model = of_gpu(launch_s, POINTS), load_model(MODEL)
    measured = tuple(msgspec.structs.replace(each, measured_s=simulated_s(each, truth, model)) for each in POINTS)
    absent = ("context_s", "request_wait_s", "request_chunk_s", "poll_s", *HOST_STEP)
    assumed = dict.fromkeys(absent, Assumption(value=0.0, why="the truth has none of it"))
    return fit(msgspec.structs.replace(truth.fitted_on, points=measured), assumed, launches_steps=True), measured


@pytest.mark.parametrize(
    ("tokens", "hit_tokens", "step_s"), [(3073, 3072, LAUNCH_S), (1025, 0, 0.0265), (600, 0, LAUNCH_S)]
)
def test_a_lone_step_takes_its_launches_or_what_it_computes(tokens: int, hit_tokens: int, step_s: float) -> None:
    asked, gpu, model = point(tokens, hit_tokens), of_gpu(LAUNCH_S, POINTS), load_model(MODEL)
    beside_s = COST["request_s"] + COST["request_token_s"] * tokens + COST["response_s"]
    assert simulated_s(asked, gpu, model) - beside_s == pytest.approx(step_s, rel=0.003)
    assert predicted_s(asked, gpu) == pytest.approx(simulated_s(asked, gpu, model), rel=1e-6)


def test_each_step_of_a_long_prompt_takes_its_launches_at_least() -> None:
    """2,048 new tokens compute for longer, the 102 that are left do not."""
    gpu, model = of_gpu(LAUNCH_S, POINTS), load_model(MODEL)
    more_s = simulated_s(point(2150), gpu, model) - simulated_s(point(2048), gpu, model)
    assert more_s == pytest.approx(LAUNCH_S + 102 * COST["request_token_s"], rel=1e-3)


def test_a_fit_finds_launches_where_they_bound_steps() -> None:
    found, measured = fitted(LAUNCH_S)
    assert found.constants["launch_s"] == pytest.approx(LAUNCH_S, rel=0.01)
    for each, fitted_s in zip(measured, found.fitted_s, strict=True):
        assert fitted_s == pytest.approx(each.measured_s, rel=0.02), each


def test_a_fit_finds_none_where_none_bound_a_step() -> None:
    found, measured = fitted(0.0)
    assert found.constants["launch_s"] == 0.0
    for each, fitted_s in zip(measured, found.fitted_s, strict=True):
        assert fitted_s == pytest.approx(each.measured_s, rel=0.02), each


def test_only_an_engine_that_launches_its_steps_is_asked_for_launches() -> None:
    truth, model = of_gpu(LAUNCH_S, POINTS), load_model(MODEL)
    measured = tuple(msgspec.structs.replace(each, measured_s=simulated_s(each, truth, model)) for each in POINTS[:8])
    settings = msgspec.structs.replace(truth.fitted_on, points=measured)
    assert fit(settings, {}).constants["launch_s"] == 0.0
