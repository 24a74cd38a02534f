"""A calibration against the simulator gives the simulator's constants; a fit that predicts badly is not good."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from harness.calibration.calibrate import _limit_decides, calibrated, planned_micro_cells, write_calibration
from harness.calibration.points import micro_cells, points_of
from harness.commands.calibrate import calibrate
from harness.engines import ENGINES
from harness.experiment.read import Plan, load_experiment
from harness.measure.run import RunRequest, run
from harness.records import AcceleratorFacts
from harness.results.folder import read_rows
from harness.results.manifest import encode_manifest, read_manifest
from simulator.calibration import TRANSFER, Assumption, Calibration, CalibrationPoint, load_calibration
from simulator.errors import CalibrationError
from simulator.fitting import Fit, fit
from simulator.models import load_model
from simulator.probing import simulated_s
from tests.unit.measure.test_run_loop import Quiet

TRUTH = {
    "step_s": 0.0165,
    "token_s": 1.4e-4,
    "attention_s": 2.05e-7,
    "attention_context_s": 2.6e-7,
    "context_s": 3e-7,
    "request_s": 2e-3,
    "request_token_s": 3e-6,
    "request_wait_s": 4e-3,
    "request_chunk_s": 2e-5,
    "cpu.read.latency_s": 3e-3,
    "cpu.read.chunk_s": 1e-4,
    "cpu.read.bytes_per_s": 6e9,
    "page_cache.read.latency_s": 4e-3,
    "page_cache.read.chunk_s": 6e-4,
    "page_cache.read.bytes_per_s": 3e9,
    "page_cache.read.shared_bytes_per_s": 5e9,
    "disk.read.latency_s": 6e-3,
    "disk.read.chunk_s": 1e-3,
    "disk.read.bytes_per_s": 1e9,
    "disk.read.shared_bytes_per_s": 1.5e9,
}
# Constants that the points identify. The others trade against each other; a test below checks their sum.
PLAIN = ("step_s", "token_s", "attention_s", "cpu.read.bytes_per_s", "disk.read.bytes_per_s",
         "disk.read.chunk_s", "disk.read.shared_bytes_per_s", "page_cache.read.bytes_per_s")  # fmt: skip
# Lengths, hit rates and concurrencies that are in no fit.
UNSEEN_SHAPES: list[tuple[str, int, int, int, int]] = [
    ("recompute", 1025, 0, 64, 1),
    ("gpu", 2049, 2048, 64, 1),
    ("cpu", 4097, 2048, 64, 1),
    ("disk", 2049, 1024, 256, 1),
    ("disk_cold", 4097, 4096, 256, 2),
    ("recompute", 2049, 0, 256, 4),
    ("disk_cold", 8193, 8192, 64, 1),
]
UNSEEN = [
    CalibrationPoint(
        tier=tier, prompt_tokens=prompt, hit_tokens=hit, chunk_tokens=chunk, concurrency=count, measured_s=1.0
    )
    for tier, prompt, hit, chunk, count in UNSEEN_SHAPES
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calibrate")


@pytest.fixture(scope="module")
def truth(folder: Path) -> Calibration:
    known = load_calibration("cpu-2core")
    constants: dict[str, float | None] = dict(known.constants) | dict(TRUTH)
    for device in ("cpu", "disk"):
        constants |= {f"{device}.write.{of}": constants[f"{device}.read.{of}"] for of in TRANSFER}
    constants |= {f"cpu.{way}.shared_bytes_per_s": constants["cpu.read.bytes_per_s"] for way in ("read", "write")}
    made = msgspec.structs.replace(known, name="truth", constants=constants, assumed={}, synchronous_loads=True)
    write_calibration(folder / "truth.yaml", made)
    return load_calibration(folder / "truth.yaml")


def experiment(folder: Path, **changes: Any) -> Path:
    config: dict[str, Any] = {
        "name": "calibration",
        "workload": {"kind": "prefix", "prompt_tokens": 4097},
        "measure": {"tiers": ["recompute"], "samples": 1},
        "cache": {"gpu": "2GiB", "cpu": "2GiB", "disk": {"capacity": "4GiB"}},
        "engines": {"sim": {"hardware": str(folder / "truth.yaml")}},
        "sweep": {"cache.chunk_tokens": [64, 256]},
    }
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(config | changes))
    return path


@pytest.fixture(scope="module")
def measured(folder: Path, truth: Calibration) -> Path:
    assert truth.synchronous_loads
    plan = load_experiment(experiment(folder))
    cells = micro_cells(plan.experiment, (64, 256), 600.0)
    made = RunRequest(name="c", cells=cells, engine="sim", experiment=plan.origin(), folder=folder / "run")
    return run(made, Quiet())


@pytest.fixture(scope="module")
def found(measured: Path, folder: Path) -> Calibration:
    return calibrated(measured, "found", load_experiment(experiment(folder)).experiment, "sim")


def lone(point: CalibrationPoint) -> bool:
    """The fit needs no simulation of such a point, so that it is quick."""
    return point.concurrency == 1 and point.device_bytes_per_s is None and point.metric == "ttft_s"


def test_the_simulators_own_constants_are_found_again(found: Calibration) -> None:
    assert {name: found.constants[name] for name in PLAIN} == {
        name: pytest.approx(TRUTH[name], rel=0.05) for name in PLAIN
    }
    # What a prompt's length costs a front end: the part of its chunks is told by two sizes only.
    chunk_tokens = 128
    assert found.constant("request_token_s") + found.constant("request_chunk_s") / chunk_tokens == pytest.approx(
        TRUTH["request_token_s"] + TRUTH["request_chunk_s"] / chunk_tokens, rel=0.05
    )
    assert found.good, found.verdict


def test_a_calibration_of_a_paced_engine_names_the_accelerator(
    folder: Path, tmp_path: Path, measured: Path, found: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = found.fitted_on.points
    same = Fit(found.constants, [p.fitted_s or 0.0 for p in points], [p.loo_error or 0.0 for p in points], {})
    monkeypatch.setattr("simulator.fitting.fit", lambda *_args, **_more: same)
    shutil.copytree(measured, tmp_path / "paced")
    manifest = read_manifest(measured)
    facts = AcceleratorFacts(name="h9", machine="m", date="d", standing="s", link="paced", fitted_on="f")
    for cell in manifest.cells:
        assert cell.resolved is not None
        cell.resolved = msgspec.structs.replace(cell.resolved, accelerator=facts)
    (tmp_path / "paced" / "manifest.json").write_bytes(encode_manifest(manifest))
    made = calibrated(tmp_path / "paced", "paced", load_experiment(experiment(folder)).experiment, "sim")
    assert made.machine.startswith("reference accelerator h9, no GPU; ") and str(manifest.host.cpu) in made.machine


def test_an_engine_that_does_not_say_its_blocks_is_told_in_one_line(
    tmp_path: Path, folder: Path, measured: Path
) -> None:
    shutil.copytree(measured, tmp_path / "silent")
    manifest = read_manifest(measured)
    for cell in manifest.cells:
        assert cell.resolved is not None
        cell.resolved = msgspec.structs.replace(cell.resolved, gpu_blocks=None)
    (tmp_path / "silent" / "manifest.json").write_bytes(encode_manifest(manifest))
    with pytest.raises(CalibrationError, match=r"does not say how many blocks .*; use an engine that says it"):
        calibrated(tmp_path / "silent", "silent", load_experiment(experiment(folder)).experiment, "sim")


def fitted_to(
    chosen: Callable[[CalibrationPoint], bool], run_folder: Path, plan: Plan, engine: str, patch: pytest.MonkeyPatch
) -> Calibration:
    """One pass of the plan's micro-measurements on the simulator, and a calibration on those chosen of its points."""
    cells = micro_cells(plan.experiment, (64, 256), 600.0, passes=1)
    run(RunRequest(name="c", cells=cells, engine="sim", experiment=plan.origin(), folder=run_folder), Quiet())
    points = tuple(filter(chosen, points_of(run_folder)))
    patch.setattr("harness.calibration.calibrate.points_of", lambda *_: points)
    return calibrated(run_folder, "chosen", plan.experiment, engine)


def test_what_an_accelerator_keeps_to_is_not_fitted(
    folder: Path, tmp_path: Path, truth: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fit would find what was measured; the accelerator's file says otherwise, and both sides read it."""
    told = {"step_s": 0.02, "token_s": 1e-4, "cpu.read.bytes_per_s": 7e9}
    path = tmp_path / "told.yaml"
    write_calibration(path, msgspec.structs.replace(truth, name="told", constants=truth.constants | told))
    asked = {"vllm": {"accelerator": str(path), "link": "paced"}, "sim": {"hardware": str(folder / "truth.yaml")}}
    plan = load_experiment(experiment(tmp_path, engines=asked))
    found = fitted_to(lone, tmp_path / "run", plan, "vllm", monkeypatch)
    kept = ENGINES["vllm"].given(plan.experiment)
    assert {name: found.constants[name] for name in kept} == kept and kept.items() >= told.items()
    assert {name: found.assumed[name].value for name in kept} == kept and not kept.keys() & found.intervals.keys()
    assert "cpu.read.latency_s" not in found.assumed, "what the host's messages take around a transfer is the host's"


@pytest.mark.usefixtures("truth")
def test_what_the_accelerator_has_timed_is_not_fitted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = load_experiment(experiment(folder))
    told = {"poll_s": Assumption(value=3.4e-3, why="timed")}
    monkeypatch.setattr("harness.calibration.calibrate.timed", lambda *_: told)
    found = fitted_to(lambda p: lone(p) and p.tier != "disk", tmp_path / "run", plan, "sim", monkeypatch)
    assert found.assumed["poll_s"] == told["poll_s"] and found.constants["poll_s"] == 3.4e-3


@pytest.mark.parametrize("limit", ["2GiB/s", "100MiB/s"])
def test_a_device_s_limit_hides_how_fast_the_host_reads_it_only_where_it_decides(
    folder: Path, tmp_path: Path, truth: Calibration, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = {"device": {"bandwidth": limit, "size": "4GiB"}}
    engines = {"sim": {"hardware": str(folder / "truth.yaml")}}
    plan = load_experiment(experiment(tmp_path, engines=engines, storage=storage))
    found = fitted_to(lambda p: lone(p) or p.tier == "disk_cold", tmp_path / "run", plan, "sim", monkeypatch)
    assert ("disk.read.bytes_per_s" in found.assumed) == (limit == "100MiB/s")
    if limit == "2GiB/s":
        true = truth.constant("disk.read.bytes_per_s")
        assert found.constants["disk.read.bytes_per_s"] == pytest.approx(true, rel=0.1)
    assert found.good, found.verdict


def test_a_slow_moment_of_the_longest_cold_read_does_not_hide_its_device_s_limit() -> None:
    """100 bytes a token: the long read got 0.6 of the limit, a shorter one nearly all of it."""
    cold = CalibrationPoint(
        tier="disk_cold", prompt_tokens=3073, hit_tokens=3072, chunk_tokens=256, measured_s=0.5, device_bytes_per_s=1e6
    )
    short = msgspec.structs.replace(cold, prompt_tokens=1537, hit_tokens=1536, measured_s=0.16)
    together = msgspec.structs.replace(cold, concurrency=2, measured_s=0.2)
    assert _limit_decides([cold, short], 100)
    assert not _limit_decides([cold, together], 100), "of several at once, the mean says nothing of their rate"


@pytest.mark.parametrize("point", UNSEEN, ids=lambda p: f"{p.tier}-{p.prompt_tokens}-{p.concurrency}")
def test_the_fit_predicts_what_was_not_measured(
    point: CalibrationPoint, found: Calibration, truth: Calibration
) -> None:
    model = load_model("tiny-llama")
    assert simulated_s(point, found, model) == pytest.approx(simulated_s(point, truth, model), rel=0.05)


def test_a_file_s_points_give_its_constants_again(
    tmp_path: Path, folder: Path, measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = tuple(filter(lone, points_of(measured)))
    monkeypatch.setattr("harness.calibration.calibrate.points_of", lambda *_: points)
    made = calibrated(measured, "lone", load_experiment(experiment(folder)).experiment, "sim")
    write_calibration(tmp_path / "lone.yaml", made)
    again = load_calibration(tmp_path / "lone.yaml")
    assert fit(again.fitted_on, again.assumed, synchronous_loads=True).constants == again.constants


def test_a_file_holds_its_points(tmp_path: Path, found: Calibration) -> None:
    write_calibration(tmp_path / "found.yaml", found)
    again = load_calibration(tmp_path / "found.yaml")
    assert again == found
    settings = again.fitted_on
    assert (settings.engine, settings.block_tokens, settings.max_num_batched_tokens) == ("sim", 32, 2048)
    assert settings.gpu_blocks == 2**31 // (32 * 32768)
    assert {(p.tier, p.chunk_tokens, p.concurrency) for p in settings.points} >= {
        ("recompute", 64, 4), ("gpu", 64, 2), ("cpu", 256, 4), ("disk_cold", 256, 1),
    }  # fmt: skip
    assert all(p.fitted_s is not None and p.loo_error is not None and p.samples for p in settings.points)


def test_points_are_medians_that_a_straggler_does_not_move(measured: Path) -> None:
    points = points_of(measured)
    assert all(p.low_s == p.high_s == p.measured_s for p in points), "the simulator repeats to the bit"
    assert {p.metric for p in points if p.output_tokens > 1} == {"tpot_s"}


def test_samples_of_slow_cores_count_only_where_fewer_than_three_others_do(
    measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = defaultdict[tuple[str, str], set[tuple[str, str, int, int]]](set)
    for row in read_rows(measured):
        if row.phase == "measure" and row.expected_tier is not None:
            point = row.cell.rpartition("#")[0], row.expected_tier
            keys[point].add((row.cell, row.expected_tier, row.attempt, row.sample))
    all_slow, *others = keys.values()
    slow = all_slow | {min(each) for each in others}
    monkeypatch.setattr("harness.calibration.points.slow_samples", lambda _folder, _size: slow)
    untold = [point.samples for point in points_of(measured)]
    told = [point.samples for point in points_of(measured, host_times={("none", "gpu"): 1.0})]
    assert untold == [len(each) for each in keys.values()]
    assert told == [len(all_slow), *(len(each) - 1 if len(each) > 3 else len(each) for each in others)]
    assert told != untold


def test_a_mechanism_that_the_model_lacks_makes_the_fit_not_good(
    measured: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_a_cliff(folder: Path, size: str, host_times: dict[tuple[str, str], float]) -> tuple[CalibrationPoint, ...]:
        def changed(point: CalibrationPoint) -> CalibrationPoint:
            slower = 1.6 if point.tier == "cpu" and point.prompt_tokens > 3000 else 1.0
            return msgspec.structs.replace(point, measured_s=slower * point.measured_s)

        return tuple(map(changed, filter(lone, points_of(folder, size, host_times))))

    monkeypatch.setattr("harness.calibration.calibrate.points_of", with_a_cliff)
    made = calibrated(measured, "cliff", load_experiment(experiment(folder)).experiment, "sim")
    assert made.good is False
    assert made.verdict is not None and "missed by" in made.verdict


@pytest.mark.parametrize(
    ("changes", "output", "budget", "text"),
    [
        ({}, "c.txt", "15min", "a calibration is a YAML file"),
        ({}, "none/c.yaml", "15min", "there is no folder"),
        ({}, "c.yaml", "15", "is not a time"),
        ({}, "c.yaml", "30s", "--budget 30s: too short to measure anything"),
        (
            {"workload": {"kind": "sessions", "sessions": 1, "turns": 1, "concurrency": 1}, "measure": {}},
            "c.yaml", "15min", "needs workload.kind prefix",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], output: str, budget: str, text: str
) -> None:
    path = experiment(tmp_path, engines={}, **changes)
    assert calibrate(path, engine="sim", output=tmp_path / output, budget=budget) == 2
    said = capsys.readouterr().err
    assert text in said and said.count("\n") == 1


def test_the_least_budget_that_is_named_measures_every_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = experiment(tmp_path, engines={}, sweep={"cache.chunk_tokens": [256]})
    arguments: dict[str, Any] = {"engine": "sim", "output": tmp_path / "c.yaml", "run_folder": tmp_path / "run"}
    assert calibrate(path, budget="5min", **arguments) == 2
    refusal = capsys.readouterr().err
    named = re.search(r"108 micro-measurements need at least (\d+)min$", refusal.strip())
    assert named and named[1] == "8" and not (tmp_path / "run").exists()
    plan = load_experiment(path)
    cells = planned_micro_cells(plan, 60.0 * int(named[1]))
    points = points_of(
        run(RunRequest(name="c", cells=cells, engine="sim", experiment=plan.origin(), folder=tmp_path / "run"), Quiet())
    )
    assert len(points) > 30 and all((point.samples or 0) >= 6 for point in points), "a sample in each of six passes"


def test_another_limit_of_the_device_is_foretold(truth: Calibration) -> None:
    """A limit below what the software does decides alone; twice the limit is half of the device's time."""
    model = load_model("tiny-llama")
    point = UNSEEN[-1]
    slow, fast = (
        simulated_s(msgspec.structs.replace(point, device_bytes_per_s=rate), truth, model) for rate in (1e8, 2e8)
    )
    moved = point.hit_tokens * model.kv_bytes_per_token
    assert slow - fast == pytest.approx(moved / 1e8 - moved / 2e8)
    unlimited, far = (
        simulated_s(msgspec.structs.replace(point, device_bytes_per_s=rate), truth, model) for rate in (None, 1e12)
    )
    assert unlimited == far


def test_loads_by_the_engines_own_thread_hold_up_its_steps(truth: Calibration) -> None:
    """Four loads end before the step that computes for all of them; a thread of their own lets the first go ahead."""
    model = load_model("tiny-llama")
    point = msgspec.structs.replace(UNSEEN[2], prompt_tokens=2049, hit_tokens=2048, concurrency=4)
    apart = msgspec.structs.replace(truth, synchronous_loads=False)
    assert simulated_s(point, truth, model) > simulated_s(point, apart, model)


def test_a_front_end_on_the_engines_core_slows_what_is_sent_together(truth: Calibration) -> None:
    model = load_model("tiny-llama")
    busy = {"request_s": 5e-3, "request_token_s": 0.0}
    apart = msgspec.structs.replace(truth, constants=truth.constants | busy)
    shared = msgspec.structs.replace(apart, shared_core=True)
    alone = msgspec.structs.replace(UNSEEN[0], tier="gpu", prompt_tokens=1537, hit_tokens=1536, concurrency=1)
    together = msgspec.structs.replace(alone, concurrency=4)
    assert simulated_s(alone, shared, model) == pytest.approx(simulated_s(alone, apart, model))
    assert simulated_s(together, shared, model) > 1.1 * simulated_s(together, apart, model)


def test_a_point_of_one_noisy_sample_weighs_less(found: Calibration) -> None:
    def error(outlier_samples: int) -> float:
        noisy = [
            msgspec.structs.replace(p, samples=20, low_s=0.95 * p.measured_s, high_s=1.05 * p.measured_s)
            for p in filter(lone, found.fitted_on.points)
        ]
        worst = max((p for p in noisy if p.tier == "recompute"), key=lambda p: p.prompt_tokens)
        off = msgspec.structs.replace(worst, measured_s=1.5 * worst.measured_s, samples=outlier_samples)
        settings = msgspec.structs.replace(found.fitted_on, points=(*(p for p in noisy if p is not worst), off))
        constants = fit(settings, found.assumed, synchronous_loads=True).constants
        return abs((constants["attention_s"] or 0.0) / (found.constants["attention_s"] or 1.0) - 1)

    assert error(1) < 0.7 * error(20)


def test_prompts_longer_than_the_experiments_own_are_not_measured(folder: Path) -> None:
    short, long = (
        micro_cells(load_experiment(experiment(folder, workload=workload)).experiment, (256,), 600.0)
        for workload in ({"kind": "prefix", "prompt_tokens": length} for length in (3073, 3074))
    )
    lengths = [{int(cell.overrides["workload.prompt_tokens"]) for cell in cells} for cells in (short, long)]
    assert lengths == [{513, 1537, 3073}, {513, 1537, 3073, 6145}]


def test_points_warm_up_in_the_first_pass_alone(folder: Path) -> None:
    cells = micro_cells(load_experiment(experiment(folder)).experiment, (64, 256), 600.0, passes=3)
    assert {(cell.key[-2:], cell.experiment.measure.warm_up) for cell in cells} == {("#1", 1), ("#2", 0), ("#3", 0)}


def test_only_points_that_a_slow_moment_is_much_of_wait_for_quick_cores(folder: Path) -> None:
    asked = experiment(folder, measure={"tiers": ["recompute"], "samples": 1, "steady": "5s"})
    cells = micro_cells(load_experiment(asked).experiment, (64, 256), 600.0, passes=1)
    waits = {("workload.output_tokens" in cell.overrides, cell.experiment.measure.steady) for cell in cells}
    assert waits == {(False, 5.0), (True, None)}
