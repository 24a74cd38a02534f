"""Calibrations and models as shipped: what they state follows from what they list."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import yaml

from simulator.calibration import (
    CONSTANTS,
    HOST,
    HOST_STEP,
    TRANSFER,
    Assumption,
    CalibrationPoint,
    FittedOn,
    at_host_time,
    load_calibration,
)
from simulator.errors import CalibrationError
from simulator.fitting import fit
from simulator.models import CONFIGS, ModelSpec, load_model
from simulator.point_costs import predicted_s
from simulator.probing import simulated_s
from simulator.simulate import Simulator
from tests.support.paths import ROOT
from traces.request import Request, Segment

ABSENT = (*HOST_STEP, "request_wait_s", "request_chunk_s", "response_s", "poll_s")
SHIPPED = sorted(path.stem for path in (CONFIGS / "hardware").glob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_the_constants_of_a_file_are_the_fit_to_its_points(name: str) -> None:
    calibration = load_calibration(name)
    assumed = calibration.assumed
    paced = "step_s" in assumed and "reference accelerator" in assumed["step_s"].why
    loads = calibration.synchronous_loads
    again = fit(calibration.fitted_on, assumed, synchronous_loads=loads, host_varies=paced).constants
    assert calibration.constants.keys() == again.keys()
    for constant, stated in calibration.constants.items():
        assert stated == (None if again[constant] is None else pytest.approx(again[constant], rel=1e-5)), constant


@pytest.mark.parametrize("name", SHIPPED)
def test_a_file_says_where_it_comes_from_and_why_it_assumes(name: str) -> None:
    calibration = load_calibration(name)
    assert calibration.name == name
    assert all((calibration.source, calibration.date, calibration.machine, calibration.method))
    assert all(len(assumption.why) > 20 for assumption in calibration.assumed.values())


def point(
    tier: str, prompt_tokens: int, hit_tokens: int, measured_s: float, chunk_tokens: int = 256
) -> CalibrationPoint:
    return CalibrationPoint(
        tier=tier, prompt_tokens=prompt_tokens, hit_tokens=hit_tokens, chunk_tokens=chunk_tokens, measured_s=measured_s
    )


def test_the_fit_finds_known_constants_again() -> None:
    truth = {
        "token_s": 2e-4,
        "attention_s": 3e-9,
        "request_s": 0.05,
        "cpu.read.latency_s": 0.01,
        "cpu.read.bytes_per_s": 8e9,
    }

    def ttft_s(prompt: int, hit: int) -> float:
        computed = prompt - hit
        compute_s = truth["token_s"] * computed + truth["attention_s"] * computed * (hit + computed / 2)
        load_s = truth["cpu.read.latency_s"] + hit * 32768 / truth["cpu.read.bytes_per_s"] if hit else 0.0
        return truth["request_s"] + compute_s + load_s

    lengths = (1000, 4000, 16000, 64000)
    points = [point("recompute", n, 0, ttft_s(n, 0)) for n in lengths]
    points += [point("cpu", n, n - 1, ttft_s(n, n - 1)) for n in lengths]
    nothing = Assumption(value=0.0, why="the truth has none of it")
    assumed = dict.fromkeys((*ABSENT, "step_s", "context_s", "request_token_s", "cpu.read.chunk_s"), nothing)
    assumed["attention_context_s"] = Assumption(same_as="attention_s", why="the truth knows one attention")
    fitted_on = FittedOn(model="tiny-llama", max_num_batched_tokens=65536, points=tuple(points))
    found = fit(fitted_on, assumed).constants
    assert {name: found[name] for name in truth} == pytest.approx(truth, rel=1e-4)
    assert found["disk.read.latency_s"] is None


def test_the_fit_finds_what_steps_take_for_requests_and_stores() -> None:
    truth = load_calibration("h100-llama-3.1-8b")
    truth = msgspec.structs.replace(truth, constants=truth.constants | {"store_token_s": 3e-6})
    batch = CalibrationPoint(
        tier="recompute",
        prompt_tokens=512,
        hit_tokens=0,
        chunk_tokens=16,
        concurrency=2000,
        metric="batch_s",
        measured_s=1,
    )
    points = (
        *(point for point in truth.fitted_on.points if point.concurrency == 1),
        point("cpu", 20000, 0, 1, 16),
        batch,
        msgspec.structs.replace(batch, tier="cpu", hit_tokens=448),
    )
    exact = tuple(msgspec.structs.replace(each, measured_s=predicted_s(each, truth)) for each in points)
    assumed = {name: why for name, why in truth.assumed.items() if name != "store_token_s"}
    found = fit(msgspec.structs.replace(truth.fitted_on, points=exact), assumed).constants
    names = ("step_request_s", "store_token_s", "request_wait_s", "token_s", "cpu.read.bytes_per_s")
    assert {name: found[name] for name in names} == pytest.approx({name: truth.constants[name] for name in names})


def test_the_fit_finds_what_a_store_adds_to_a_first_token_and_the_simulator_has_it_too() -> None:
    truth = load_calibration("rtx-a5000-nfs")
    host = {"request_s": 2e-3, "response_s": 1e-3, "response_store_s": 3e-3}
    # Nothing else that stores take, and no disk: its page cache was not measured.
    rest = {"store_token_s": 0.0} | {name: None for name in truth.constants if name.startswith("disk.")}
    # An engine's own run: what it computes it stores; of published points it is unknown.
    fitted_on = msgspec.structs.replace(truth.fitted_on, engine="vllm", max_num_batched_tokens=2048)
    truth = msgspec.structs.replace(truth, fitted_on=fitted_on, constants=truth.constants | host | rest)
    kinds = [("recompute", 0), ("gpu", 1), ("gpu", 0.5), ("cpu", 1), ("cpu", 0.5)]
    points = tuple(
        point(tier, length + 1, int(length * share), 1.0) for length in (512, 1024, 1536) for tier, share in kinds
    )
    truth = msgspec.structs.replace(truth, fitted_on=msgspec.structs.replace(fitted_on, points=points))
    exact = tuple(msgspec.structs.replace(each, measured_s=predicted_s(each, truth)) for each in points)
    model = load_model(fitted_on.model)
    assert [simulated_s(each, truth, model) for each in points] == pytest.approx([each.measured_s for each in exact])
    given = ("step_s", "token_s", "attention_s", "cpu.read.bytes_per_s", "response_s", "request_wait_s", "poll_s")
    assumed = truth.assumed | {name: Assumption(value=truth.constants[name], why="given") for name in given}
    found = fit(msgspec.structs.replace(fitted_on, points=exact), assumed).constants
    assert {name: found[name] for name in host} == pytest.approx(host, rel=1e-3)
    unknown = msgspec.structs.replace(fitted_on, engine=None, points=exact)
    assert fit(unknown, assumed).constants["response_store_s"] == 0.0


def test_a_slower_host_takes_longer_for_its_own_work_and_for_nothing_else() -> None:
    known = load_calibration("rtx-a5000-nfs")
    slow = at_host_time(known, 1.5)
    for name in CONSTANTS:
        times = 1.0 if name not in HOST else 1 / 1.5 if name.endswith("bytes_per_s") else 1.5
        value = known.constants[name]
        assert slow.constants[name] == (None if value is None else pytest.approx(times * value))
    assert {"request_s", "poll_s", "cpu.read.chunk_s", "page_cache.read.latency_s", "disk.read.chunk_s"} <= HOST
    assert {f"page_cache.read.{of}" for of in TRANSFER} <= HOST
    assert not {"step_s", "launch_s", "cpu.read.bytes_per_s", "disk.read.latency_s", "disk.read.bytes_per_s"} & HOST
    assert at_host_time(known, 1.0) is known


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_fit_finds_the_constants_though_points_were_measured_on_slow_cores(concurrency: int) -> None:
    truth = load_calibration("rtx-a5000-nfs")
    kinds = [("recompute", 0), ("gpu", 1), ("cpu", 1)]
    points = tuple(
        msgspec.structs.replace(point(tier, length + 1, length * hit, 1.0), host_time=slow, concurrency=count)
        for slow, length in ((1.0, 512), (1.4, 1024), (1.2, 1536))
        for tier, hit in kinds
        for count in dict.fromkeys((1, concurrency))
    )
    fitted_on = msgspec.structs.replace(truth.fitted_on, points=points)
    constants = truth.constants | {name: None for name in truth.constants if name.startswith("disk.")}
    constants |= {"store_token_s": 0.0}
    truth = msgspec.structs.replace(truth, fitted_on=fitted_on, constants=constants)
    model = load_model(fitted_on.model)
    exact = tuple(msgspec.structs.replace(each, measured_s=simulated_s(each, truth, model)) for each in points)
    for each in exact:
        if each.concurrency == 1:
            assert predicted_s(each, truth) == pytest.approx(each.measured_s, rel=1e-3)
    told = ("request_s", "request_token_s")
    known = {name: s for name, s in truth.constants.items() if s is not None and name not in told}
    assumed = {name: Assumption(value=s, why="given") for name, s in known.items()}
    found = fit(msgspec.structs.replace(fitted_on, points=exact), assumed).constants
    assert {name: found[name] for name in told} == {n: pytest.approx(truth.constants[n], rel=0.01) for n in told}
    # Taken for points of a host as usual, they tell other constants.
    same = tuple(msgspec.structs.replace(each, host_time=1.0) for each in exact)
    other = fit(msgspec.structs.replace(fitted_on, points=same), assumed).constants
    assert other["request_s"] != pytest.approx(truth.constants["request_s"], rel=0.05)


@pytest.mark.parametrize(("hit_tokens", "off"), [(0, 0.005), (256, 0.02)])
def test_a_batch_in_the_simulator_takes_what_the_fit_says_of_its_steps(hit_tokens: int, off: float) -> None:
    """Loads pass beside the steps, but for those that the first step waits for."""
    known = load_calibration("h100-llama-3.1-8b")
    tier = "cpu" if hit_tokens else "recompute"
    batch = CalibrationPoint(
        tier=tier,
        prompt_tokens=512,
        hit_tokens=hit_tokens,
        chunk_tokens=16,
        concurrency=2000,
        metric="batch_s",
        measured_s=1,
    )
    settings = msgspec.structs.replace(known.fitted_on, block_tokens=16, gpu_blocks=20_000)
    taken_s = simulated_s(batch, msgspec.structs.replace(known, fitted_on=settings), load_model("llama-3.1-8b"))
    assert taken_s == pytest.approx(predicted_s(batch, known), rel=off)


def test_what_a_preset_takes_from_another_is_what_that_one_says() -> None:
    ada, small, large = (load_calibration(n) for n in ("rtx-4000ada-ssd", "h100-llama-3.1-8b", "h100x2-llama-3.1-70b"))
    assert ada.constant("store_token_s") == load_calibration("rtx-a5000-nfs").constant("store_token_s") > 0
    # 80 layers of 64 heads for 32 of 32, on two GPUs with a link each.
    for name, times in (("attention_s", 5 / 2), ("cpu.read.bytes_per_s", 2)):
        assert large.constant(name) == pytest.approx(times * small.constant(name), rel=1e-5)


def test_a_file_that_lacks_what_steps_take_beside_the_model_means_none() -> None:
    kept = load_calibration(ROOT / "results/validation/cpu_vllm/calibration.yaml")
    assert {name: kept.constants[name] for name in HOST_STEP} == dict.fromkeys(HOST_STEP, 0.0)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_simulator_says_what_the_fit_says(name: str) -> None:
    """A lone prompt in the simulator takes what the constants say of it: the two are one model."""
    calibration = load_calibration(name)
    # The formula is that of an engine which computes once all is loaded.
    settings = msgspec.structs.replace(calibration.fitted_on, engine_policy="vllm-0.32")
    calibration = msgspec.structs.replace(calibration, fitted_on=settings)
    chunk_tokens = settings.points[0].chunk_tokens
    has_disk = calibration.constants["disk.read.bytes_per_s"] is not None
    state = "disk_cold" if has_disk else "cpu"
    for hit_tokens, prompt_tokens in ((0, 2000), (8 * chunk_tokens, 8 * chunk_tokens + 1)):
        simulator = Simulator(
            load_model(settings.model),
            calibration,
            "vllm-0.32",
            "lmcache-0.5.6-mp",
            gpu_blocks=9000,
            block_tokens=16,
            chunk_tokens=chunk_tokens,
            cpu_bytes=8 << 30,
            disk_bytes=8 << 30 if has_disk else None,
            odirect=has_disk,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=8,
        )
        prompt = (Segment(1, prompt_tokens),)
        simulator.submit(Request(id="warm", prompt=prompt, output_tokens=1), 0.0)
        (done,) = simulator.advance()
        sent_s = 0.0
        if hit_tokens:
            simulator.drain()
            simulator.reset({"gpu", "cpu"} if has_disk else {"gpu"})
            sent_s = simulator.now_s
            simulator.submit(Request(id="hit", prompt=prompt, output_tokens=1), sent_s)
            (done,) = simulator.advance()
            assert (done.disk if has_disk else done.cpu) == hit_tokens
        lone = point(state, prompt_tokens, hit_tokens, math.nan, chunk_tokens)
        assert done.first_token_s is not None
        assert done.first_token_s - sent_s == pytest.approx(predicted_s(lone, calibration), rel=1e-9)


def test_an_unknown_constant_is_an_error_that_names_it() -> None:
    with pytest.raises(CalibrationError, match=r"rtx-a5000-nfs: page_cache\.read\.latency_s is unknown"):
        load_calibration("rtx-a5000-nfs").constant("page_cache.read.latency_s")


def test_a_calibration_must_be_whole(tmp_path: Path) -> None:
    good = yaml.safe_load((CONFIGS / "hardware" / "cpu-2core.yaml").read_text())
    bad = tmp_path / "bad.yaml"
    for change, text in (
        ({"constants": good["constants"] | {"step_ms": 1.0}}, "step_ms missing or unknown"),
        ({"constants": good["constants"] | {"step_s": -1.0}}, r"constants\.step_s: -1\.0 is not a possible cost"),
        ({"assumed": {"step_s": {"why": "because"}}}, "needs either value or same_as"),
        ({"tuned_by": "hand"}, "tuned_by"),
    ):
        bad.write_text(yaml.safe_dump(good | change))
        with pytest.raises(ValueError, match=text) as caught:
            load_calibration(bad)
        assert str(caught.value).startswith(str(bad)) and "\n" not in str(caught.value)


def test_kv_bytes_of_the_shipped_models() -> None:
    assert load_model("tiny-llama").kv_bytes_per_token == 32768
    assert load_model("llama-3.2-3b").kv_bytes_per_token == 114688


def test_latent_attention_keeps_one_vector_a_token() -> None:
    plain = load_model("llama-3.2-3b")
    latent = msgspec.structs.replace(plain, layers=61, mla_latent_dim=512, mla_rope_dim=64)
    assert latent.kv_bytes_per_token == 61 * 576 * 2


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": "int3"}, "dtype 'int3' is unknown"),
        ({"layers": 0}, "layers must be at least 1"),
        ({"mla_latent_dim": 512}, "go together"),
        ({"heads": 3}, "heads"),
        ({"head_dim": "x"}, r"head_dim"),
    ],
)
def test_a_model_file_is_checked(tmp_path: Path, change: dict[str, object], text: str) -> None:
    good = yaml.safe_load((CONFIGS / "models" / "tiny-llama.yaml").read_text())
    bad = tmp_path / "bad.yaml"
    bad.write_text(yaml.safe_dump(good | change))
    with pytest.raises(ValueError, match=text):
        load_model(bad)


def test_a_missing_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"gpt: configs/models has no file .* it has .*llama-3\.2-3b, .*tiny-llama"):
        load_model("gpt")
    with pytest.raises(ValueError, match=r"\./gpt\.yaml: no such file; correct the path, or name one of .*tiny-llama"):
        load_model("./gpt.yaml")
    assert isinstance(load_model(CONFIGS / "models" / "tiny-llama.yaml"), ModelSpec)
