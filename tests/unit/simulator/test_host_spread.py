"""Where the host's times vary, requests sent together run in several orders; the mean of a lone one stays."""

from __future__ import annotations

import math
from statistics import fmean, median, pstdev

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import nnls

from simulator.calibration import HOST_STEP, Assumption, Calibration, CalibrationPoint, FittedOn, load_calibration
from simulator.fitting import fit
from simulator.host_spread import host_spread
from simulator.models import load_model
from simulator.point_costs import design, predicted_s, slope_of
from simulator.probing import simulated_s
from simulator.simulate import Completion, Simulator
from traces.request import Request, Segment

# Front end, which reads a request before it parses it, way to the scheduler, answer, and three polls, the first long.
HOST = {"request_s": 2e-3, "request_token_s": 0.0, "request_chunk_s": 0.0, "request_wait_s": 1e-3, "response_s": 3e-3,
        "poll_s": 1.5e-3}  # fmt: skip
TASKS_S = (2e-3 / 3, 4e-3 / 3, 1e-3, 3e-3, 2e-3, 1.25e-3, 1.25e-3)


def varied(spread: float) -> Calibration:
    known = load_calibration("cpu-2core")
    constants = known.constants | HOST | {"step_s": 8e-3, "token_s": 1.7e-4}
    return msgspec.structs.replace(
        known, name="varied", constants=constants, assumed={}, shared_core=False, host_spread=spread
    )


def ttfts_s(calibration: Calibration, seed: int, count: int, tokens: int = 1025) -> tuple[float, ...]:
    simulator = Simulator(
        load_model("tiny-llama"), calibration, "vllm-0.32", "lmcache-0.5.6-mp", gpu_blocks=4096, block_tokens=32,
        chunk_tokens=256, cpu_bytes=1 << 30, max_num_batched_tokens=2048, max_num_seqs=64, seed=seed,
    )  # fmt: skip
    for slot in range(count):
        simulator.submit(Request(id=f"{slot}", prompt=(Segment(1 + slot, tokens),), output_tokens=1), 0.0)
    done: list[Completion] = []
    while len(done) < count:
        done += simulator.advance()
    return tuple(one.first_token_s or math.nan for one in sorted(done, key=lambda one: one.id))


def test_a_lone_request_takes_its_mean_time_on_average_and_varies_as_its_tasks_do() -> None:
    (mean_s,) = ttfts_s(varied(0.0), 1, 1)
    seen = [ttfts_s(varied(0.2), seed, 1)[0] for seed in range(3000)]
    assert fmean(seen) == pytest.approx(mean_s, rel=0.002)
    assert pstdev(seen) == pytest.approx(0.2 * math.hypot(*TASKS_S), rel=0.05)


@pytest.mark.parametrize("tier", ["recompute", "gpu", "cpu", "disk"])
def test_a_lone_request_takes_in_the_simulator_what_the_fit_says(tier: str) -> None:
    """Its questions for the answer and the read of storage add up: the server reads once it has woken up."""
    reads = {"latency_s": 1e-3, "chunk_s": 4e-4, "bytes_per_s": 8e9, "shared_bytes_per_s": math.inf}
    known = varied(0.0)
    devices = {f"{device}.read.{of}": value for device in ("cpu", "page_cache") for of, value in reads.items()}
    calibration = msgspec.structs.replace(known, constants=known.constants | devices)
    hit_tokens = 0 if tier == "recompute" else 1024
    point = CalibrationPoint(tier=tier, prompt_tokens=1025, hit_tokens=hit_tokens, chunk_tokens=256, measured_s=1.0)
    served = (point, msgspec.structs.replace(point, tier="cpu"))
    fitted_on = msgspec.structs.replace(known.fitted_on, tier_policy="lmcache-0.5.6-mp", points=served)
    calibration = msgspec.structs.replace(calibration, fitted_on=fitted_on)
    taken_s = simulated_s(point, calibration, load_model(fitted_on.model))
    assert taken_s == pytest.approx(predicted_s(point, calibration), rel=1e-3)


def test_a_seed_gives_the_same_times_and_seeds_give_several_orders() -> None:
    spread = varied(0.3)
    assert ttfts_s(spread, 7, 4) == ttfts_s(spread, 7, 4)
    assert ttfts_s(varied(0.0), 7, 4) == ttfts_s(varied(0.0), 8, 4)
    orders = {tuple(round(ttft_s, 1) for ttft_s in ttfts_s(spread, seed, 4)) for seed in range(40)}
    assert len(orders) > 1
    together = CalibrationPoint(
        tier="recompute", prompt_tokens=1025, hit_tokens=0, chunk_tokens=256, concurrency=4, measured_s=1.0
    )
    model = load_model("tiny-llama")
    all_orders = [fmean(ttfts_s(spread, seed, 4)) for seed in range(300)]
    assert median(all_orders) == pytest.approx(simulated_s(together, spread, model), rel=0.05)
    alone = msgspec.structs.replace(together, concurrency=1)
    assert simulated_s(alone, spread, model) == simulated_s(alone, varied(0.0), model)


def hits_of(truth: Calibration, *more: tuple[int, int]) -> tuple[FittedOn, dict[str, Assumption]]:
    """What the truth makes of lone hits in the GPU and of several at once, and all that is given but the host's.

    more: prompt tokens and number of requests of further points."""
    model, samples = load_model("tiny-llama"), 25
    # The 95 % interval of the mean of the middle third, of so many samples of tasks that vary so.
    half_s = 1.96 * 0.2 * math.hypot(*TASKS_S) / math.sqrt(0.77 * samples)
    points = []
    for prompt, count in (*more, (513, 1), (1537, 1), (3073, 1), (513, 2), (513, 4)):
        point = CalibrationPoint(
            tier="gpu", prompt_tokens=prompt, hit_tokens=prompt - 1, chunk_tokens=256, concurrency=count,
            samples=samples, measured_s=1.0,
        )  # fmt: skip
        s = simulated_s(point, truth, model)
        points.append(msgspec.structs.replace(point, measured_s=s, low_s=s - half_s, high_s=s + half_s))
    settings = FittedOn(model="tiny-llama", max_num_batched_tokens=2048, max_num_seqs=64, points=tuple(points))
    known = load_calibration("cpu-2core").constants | truth.constants
    given = ("step_s", "token_s", "attention_s", "attention_context_s", "context_s", "poll_s")
    assumed = {name: Assumption(value=known[name] or 0.0, why="given") for name in given}
    return settings, assumed


def test_a_fit_finds_the_spread_in_lone_hits_and_only_where_it_is_the_host_s() -> None:
    # Fewer points at once cannot tell parsing, waiting and answering apart.
    settings, assumed = hits_of(varied(0.2), (1537, 2), (1537, 4))
    found = fit(settings, assumed, host_varies=True)
    assert found.host_spread == pytest.approx(0.2, rel=0.25), "what trades between tasks moves it a little"
    lone = [(point, design(point, settings)) for point in settings.points if point.concurrency == 1]
    slopes = {name: slope_of(name, value) for name, value in found.constants.items() if value is not None}
    assert host_spread(lone, slopes, settings) == pytest.approx(found.host_spread, rel=0.05), "its own tasks give it"
    assert fit(settings, assumed).host_spread == 0.0
    for point, fitted_s in zip(settings.points, found.fitted_s, strict=True):
        assert fitted_s == pytest.approx(point.measured_s, rel=0.03)


def test_points_that_race_bend_what_lone_ones_take_less() -> None:
    """Two of five points were measured in an order that the model lacks: they bend the others about half as much."""
    settings, assumed = hits_of(varied(0.2))
    *lone, two, four = settings.points
    raced = [msgspec.structs.replace(point, measured_s=1.3 * point.measured_s) for point in (two, four)]
    settings = msgspec.structs.replace(settings, points=(*lone, *raced))

    def off(host_varies: bool) -> float:
        fitted_s = fit(settings, assumed, host_varies=host_varies).fitted_s
        return max(abs(s / point.measured_s - 1) for s, point in zip(fitted_s, lone, strict=False))

    assert off(host_varies=True) < 0.6 * off(host_varies=False)


def test_a_fit_of_the_host_s_constants_alone_asks_scipy_for_no_empty_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    """scipy's nnls ends the process for a matrix without columns, now and then."""
    columns: list[int] = []

    def solving(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
        columns.append(matrix.shape[1])
        return nnls(matrix, target) if matrix.shape[1] else (np.zeros(0), 0.0)

    monkeypatch.setattr("simulator.fitting.nnls", solving)
    point = CalibrationPoint(
        tier="gpu", prompt_tokens=513, hit_tokens=512, chunk_tokens=256, samples=9, measured_s=0.02
    )  # fmt: skip
    settings = FittedOn(model="tiny-llama", max_num_batched_tokens=2048, points=(point,))
    host = ("request_s", "request_token_s", "request_chunk_s", "request_wait_s", "response_s", "poll_s")
    known = varied(0.0).constants
    assumed = {name: Assumption(value=s, why="given") for name, s in known.items() if s and name not in host}
    assumed |= {name: Assumption(value=0.0, why="given") for name in (*HOST_STEP, "context_s")}
    assert fit(settings, assumed).fitted_s == [pytest.approx(0.02, rel=1e-3)]
    assert columns and all(columns)


def test_a_spread_below_0_is_no_spread() -> None:
    with pytest.raises(ValueError, match=r"host_spread: -0\.1 is not a possible spread"):
        varied(-0.1)
