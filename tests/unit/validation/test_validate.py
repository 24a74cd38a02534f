"""`harness validate` end to end: the simulator stands in for the real engine, with true and with wrong constants."""

import itertools
import statistics
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from harness.commands.calibrate import calibrate as calibrate_command
from harness.commands.validate import planned_cells
from harness.commands.validate import validate as validate_command
from harness.engines.sim.make import simulator_maker
from harness.engines.sim.settings import SimSettings
from harness.errors import NotComparable, ResultsError, SettingsError
from harness.experiment.read import Cell, changed, load_experiment
from harness.measure.run import RunRequest, run
from harness.records import SchedulerLimits
from harness.report.validation.html import comparison_findings, write_comparison
from harness.results.folder import read_rows
from harness.results.manifest import CellEntry, encode_manifest, read_manifest
from harness.stats import Equivalence
from harness.validation.document import read_document
from harness.validation.equivalence import Figure, PointResult, compare
from harness.validation.points import axes, read_side, repeated
from harness.validation.sample_again import more_cells, more_samples
from harness.validation.validate import Validation, sim_cell, validate
from simulator.calibration import HOST, STEP, load_calibration
from simulator.models import CONFIGS, load_model
from tests.support.noisy_runs import noisy_copy, sim_run, wrong_calibration
from tests.unit.measure.test_run_loop import Quiet

CONFIG: dict[str, Any] = {
    "name": "validated",
    "workload": {"kind": "prefix", "prompt_tokens": 3073, "hit_rate": 1.0},
    "measure": {"tiers": ["recompute", "gpu", "cpu", "disk_cold"], "samples": 10},
    "cache": {"gpu": "1GiB", "cpu": "1GiB", "disk": {"capacity": "4GiB"}, "chunk_tokens": 128},
    "sizes": {
        "pairs": {"workload.concurrency": 2},
        "load": {
            "workload": {"kind": "trace", "trace": "tiny_conversation", "block_tokens": 32, "concurrency": 2},
            "measure": {},
        },
    },
}
SIZES = (None, "pairs", "load")
QUICK_LOOP_S = 60e-6


def request(tmp_path: Path, calibration: Path | str, sizes: tuple[str | None, ...] = SIZES, **more: Any) -> Validation:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    plans = {size: load_experiment(path, size=size) for size in sizes}
    fields: dict[str, Any] = {"engine": "sim", "folder": tmp_path / "out", "experiment": plans[sizes[0]].origin()}
    return Validation(name="v", cells=planned_cells(plans), calibration=str(calibration), **(fields | more))


def test_the_true_constants_pass_every_point_and_every_count(tmp_path: Path) -> None:
    judgement = validate(request(tmp_path, "cpu-2core"), Quiet())
    document, whole = judgement.document, judgement.document.overall
    write_comparison(tmp_path / "out", *judgement)
    assert document.verdict == "pass" and whole.points == 9
    assert whole.counts_equal == whole.counts > 40
    assert whole.mape == pytest.approx(0, abs=1e-9) and all(whole.targets.values())
    load = document.points[-1]
    assert load.tier == "load" and load.noise and load.cell == "load:base"
    assert read_document(tmp_path / "out") == document
    assert {row.cell for row in read_rows(tmp_path / "out" / "real") if row.cell.startswith("load")} == {
        "load:base#1", "load:base#2", "load:base#3",
    }  # fmt: skip
    for name in ("validation.json", "validation.md", "report.html"):
        assert str(tmp_path) not in (tmp_path / "out" / name).read_text()


def test_a_bandwidth_that_is_a_tenth_too_high_fails_where_it_matters(tmp_path: Path) -> None:
    """Of a slow device, as a reference device is: there the transfer is most of the time."""
    slow = wrong_calibration(tmp_path / "slow.yaml", 0.1)
    wrong = wrong_calibration(tmp_path / "wrong.yaml", 0.11)
    run = sim_run(tmp_path / "truth", {key: CONFIG[key] for key in CONFIG if key != "sizes"}, slow)
    real = noisy_copy(run, tmp_path / "real", seed=1, spread=0.01)
    document = validate(request(tmp_path, wrong, (None,), real=(real,), engine="fake"), Quiet()).document
    verdicts = {point.tier: point.verdict for point in document.points}
    assert verdicts == {"recompute": "pass", "gpu": "pass", "cpu": "pass", "disk_cold": "fail"}
    assert not any("calls its fit not good" in line for line in comparison_findings(document))
    assert document.calibration is not None
    poor = msgspec.structs.replace(document.calibration, good=False, verdict="missed by 20 %")
    told = comparison_findings(msgspec.structs.replace(document, calibration=poor))
    assert "The calibration itself calls its fit not good: missed by 20 %." in told
    right = request(tmp_path, slow, (None,), real=(real,), engine="fake", folder=tmp_path / "right")
    assert validate(right, Quiet()).document.verdict == "pass"


def timed_calibration(path: Path) -> Path:
    """One that tells how long a fixed loop took."""
    known = yaml.safe_load((CONFIGS / "hardware" / "cpu-2core.yaml").read_text())
    known["fitted_on"]["core_loop_s"] = QUICK_LOOP_S
    path.write_text(yaml.safe_dump(known))
    return path


def test_a_host_that_was_slow_is_simulated_as_slow(tmp_path: Path) -> None:
    """Its own work took four times as long, and so did a fixed loop. A calibration without the loop's time knows of
    none."""
    config = {key: CONFIG[key] for key in CONFIG if key != "sizes"}
    of_host = [name for name, value in load_calibration("cpu-2core").constants.items() if value and name in HOST]
    run = sim_run(tmp_path / "truth", config, wrong_calibration(tmp_path / "slow.yaml", 4.0, *of_host))
    real = noisy_copy(run, tmp_path / "real", seed=1, spread=0.005, core_loop_s=4 * QUICK_LOOP_S)
    timed_calibration(tmp_path / "timed.yaml")
    asked = request(tmp_path, tmp_path / "timed.yaml", (None,), real=(real,), engine="fake")
    document = validate(asked, Quiet()).document
    assert document.verdict == "pass" and document.notes
    assert document.notes[0].endswith("4.00 to 4.00 times what it took while calibrating.")
    same = request(tmp_path, "cpu-2core", (None,), real=(real,), engine="fake", folder=tmp_path / "same")
    untold = validate(same, Quiet()).document
    assert untold.verdict == "fail"
    assert not any("as slow as" in note for note in untold.notes or ())


def test_a_host_that_was_slow_while_points_were_sampled_again_is_simulated_as_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sim_run(tmp_path / "truth", {key: CONFIG[key] for key in CONFIG if key != "sizes"})

    def measured(request: Validation, cells: list[Cell], name: str, _: object) -> Path:
        loops = 1 if name == "real" else 4
        made = noisy_copy(run, request.folder / name, seed=loops, spread=0.2, core_loop_s=loops * QUICK_LOOP_S)
        for kept in ("rows.jsonl", "manifest.json", "samples.jsonl"):
            (made / kept).write_text((made / kept).read_text().replace('"base"', f'"{cells[0].key}"'))
        return made

    monkeypatch.setattr("harness.validation.validate._run_real", measured)
    monkeypatch.setattr("harness.validation.validate.MOST_PASSES", 2)
    timed = timed_calibration(tmp_path / "timed.yaml")
    notes = validate(request(tmp_path, timed, (None,), engine="fake", budget_s=1e6), Quiet()).document.notes or ()
    assert (tmp_path / "out" / "real-2").exists()
    assert notes[0].endswith("2.50 to 2.50 times what it took while calibrating."), "as many samples of each pass"


@pytest.mark.parametrize("side", ["real", "simulated"])
def test_a_pace_that_is_a_tenth_too_slow_on_one_side_fails_what_it_computes(tmp_path: Path, side: str) -> None:
    slow = wrong_calibration(tmp_path / "slow.yaml", 1.1, *STEP)
    config = {key: CONFIG[key] for key in CONFIG if key != "sizes"}
    run = sim_run(tmp_path / "truth", config, slow if side == "real" else None)
    real = noisy_copy(run, tmp_path / "real", seed=1, spread=0.01)
    judged = "cpu-2core" if side == "real" else slow
    document = validate(request(tmp_path, judged, (None,), real=(real,), engine="fake"), Quiet()).document
    assert document.verdict == "fail"
    verdicts = {point.tier: point.verdict for point in document.points}
    assert verdicts["recompute"] == "fail" and verdicts["disk_cold"] == "pass", "the disk has a pace of its own"
    recompute = next(f for point in document.points for f in point.figures if point.tier == "recompute" and f.gates)
    assert recompute.error == pytest.approx(1 / 1.1 - 1 if side == "real" else 0.1, abs=0.02)


def test_a_validation_goes_on_with_what_it_lacks(tmp_path: Path) -> None:
    """Stopped in its second cell, and then asked for one more size: no finished row is measured again."""
    whole = validate(request(tmp_path, "cpu-2core", folder=tmp_path / "whole"), Quiet()).document
    validate(request(tmp_path, "cpu-2core", (None, "pairs")), Quiet())
    real = tmp_path / "out" / "real"
    rows, manifest = (real / "rows.jsonl").read_bytes(), read_manifest(real)
    manifest.status, manifest.cells[1].status = "failed", "started"
    (real / "manifest.json").write_bytes(encode_manifest(manifest))
    (real / "rows.jsonl").write_bytes(rows[: len(rows) * 2 // 3])
    again = validate(request(tmp_path, "cpu-2core", resume=True), Quiet()).document
    assert read_manifest(real).status == "complete" and (real / "rows.jsonl").read_bytes() == rows
    more = {cell.key for cell in read_manifest(tmp_path / "out" / "real-2").cells}
    assert more == {"load:base#1", "load:base#2", "load:base#3"} and not (tmp_path / "out" / "real-3").exists()
    judged = [[(p.cell, p.tier, p.verdict, p.counts) for p in document.points] for document in (whole, again)]
    assert judged[0] == judged[1] and again.overall.mape == pytest.approx(0, abs=1e-9)


def test_a_validation_that_sampled_some_points_again_goes_on_with_all_of_them(tmp_path: Path) -> None:
    asked = request(tmp_path, "cpu-2core", (None,))
    whole = validate(asked, Quiet()).document
    again = changed(asked.cells[0].experiment, measure={"tiers": ["cpu"], "samples": 3})
    cells = [Cell(f"{asked.cells[0].key}#1001", asked.cells[0].overrides, again)]
    folder = tmp_path / "out" / "real-2"
    run(RunRequest(name="more", cells=cells, engine=asked.engine, experiment=asked.experiment, folder=folder), Quiet())
    resumed = validate(msgspec.structs.replace(asked, resume=True), Quiet()).document
    assert [(point.tier, point.verdict) for point in resumed.points] == [(p.tier, p.verdict) for p in whole.points]
    assert max(figure.samples for point in resumed.points for figure in point.figures if point.tier == "cpu") == 13


def test_a_validation_with_other_settings_does_not_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = request(tmp_path, "cpu-2core", (None,))
    validate(asked, Quiet())
    other = [
        msgspec.structs.replace(cell, experiment=changed(cell.experiment, measure={"samples": 11}))
        for cell in asked.cells
    ]
    with pytest.raises(ResultsError, match=r"real: measured base with other settings; choose another --out$"):
        validate(msgspec.structs.replace(asked, cells=other, resume=True), Quiet())
    arguments: dict[str, Any] = {"calibration": "cpu-2core", "engine": "sim", "resume": tmp_path / "none"}
    assert validate_command(tmp_path / "experiment.yaml", **arguments) == 2
    assert "none: holds no real run; begin with --out" in capsys.readouterr().err


def test_points_that_the_calibration_was_fitted_on_are_refused_before_anything_runs(tmp_path: Path) -> None:
    seen = request(tmp_path, "cpu-2core", (None,))
    cells = [
        msgspec.structs.replace(cell, experiment=changed(cell.experiment, workload={"prompt_tokens": 2049}))
        for cell in seen.cells
    ]
    with pytest.raises(NotComparable, match=r"was fitted on it \(prompt_tokens 2049\)"):
        validate(msgspec.structs.replace(seen, cells=cells), Quiet())
    assert not (tmp_path / "out").exists()


def test_points_that_a_calibration_is_to_be_fitted_on_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(**workload: Any) -> str:
        path = tmp_path / "experiment.yaml"
        path.write_text(yaml.safe_dump(CONFIG | {"workload": CONFIG["workload"] | workload, "sizes": {"micro": {}}}))
        turns: dict[str, Any] = {"calibrate": "micro", "calibrating": "5min", "passes": 2}
        assert validate_command(path, engine="sim", out=tmp_path / "out", **turns) == 2
        return capsys.readouterr().err

    assert "base recompute: the calibration is to be fitted on it (prompt_tokens 3073)" in refusal()
    partial = refusal(prompt_tokens=1537, hit_rate=0.5)
    assert "base recompute" in partial and "(and 2 more such points)" in partial, "of half a hit: GPU and CPU RAM"
    assert not (tmp_path / "out").exists()


def test_the_simulators_disk_is_as_fast_as_the_reference_device(tmp_path: Path) -> None:
    cold_s = []
    for limit in (50, 100):
        device = {"device": {"bandwidth": f"{limit}MiB/s", "size": "4GiB"}}
        config = {key: CONFIG[key] for key in CONFIG if key != "sizes"} | {"storage": device}
        side = read_side([sim_run(tmp_path / str(limit), config)])
        point = side.points["base", "disk_cold"]
        assert axes(point)["device_bytes_per_s"] == limit * 2**20 and axes(point)["file_system"] == "ext4"
        cold_s.append(statistics.fmean(row.ttft_s or 0 for row in point.rows))
    assert cold_s[0] - cold_s[1] == pytest.approx(3072 * 32 / 1024 * (1 / 50 - 1 / 100), rel=0.01)


def test_the_simulator_gets_what_the_engine_resolved(tmp_path: Path) -> None:
    """Not what the experiment hoped for: fewer blocks, and the scheduler's own limits."""
    run = sim_run(tmp_path / "real", {key: CONFIG[key] for key in CONFIG if key != "sizes"})
    entry = read_manifest(run).cells[0]
    assert entry.resolved is not None
    limits = SchedulerLimits(max_batched_tokens=1024, max_sequences=8)
    entry.config["measure"] |= {"samples": None, "until": {}, "budget": 60.0}
    sizes = {"gpu_bytes": 500 * 32 * 32768, "cpu_bytes": 2**31}
    entry.resolved = msgspec.structs.replace(entry.resolved, scheduler=limits, **sizes)
    experiment = sim_cell(entry, "cpu-2core", "sim").experiment
    assert experiment.cache.gpu == 500 * 32 * 32768 and experiment.cache.cpu == 2**31
    sim = experiment.engines.of(SimSettings)
    assert sim.max_batched_tokens == 1024 and sim.max_sequences == 8
    assert sim.hardware == "cpu-2core" and experiment.measure.samples == 5


def test_the_simulator_gets_the_packs_of_the_pool_that_ran_and_its_lease(tmp_path: Path) -> None:
    """Mooncake behind SGLang, with the lease that its master was told, and the buffer before the SSD."""
    config: dict[str, Any] = {
        "name": "p",
        "workload": CONFIG["sizes"]["load"]["workload"],
        "cache": {
            "gpu": "64MiB",
            "cpu": "1GiB",
            "pool": "1GiB",
            "disk": {"capacity": "2GiB", "buffer": "128MiB", "odirect": True},
            "block_tokens": 64,
            "chunk_tokens": 64,
        },
        "engines": {
            "sglang": {"hicache": {"storage": "mooncake"}, "mooncake_args": ["--default_kv_lease_ttl=1500"]},
        },
    }
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(config))
    [cell] = load_experiment(path).cells()
    entry = CellEntry(key=cell.key, config=cell.experiment.model_dump(mode="json"))
    experiment = sim_cell(entry, "a100-qwen3-8b-sglang", "sglang").experiment
    settings = experiment.engines.of(SimSettings)
    assert (settings.engine_policy, settings.tier_policy) == ("sglang-0.5.23", "sglang-0.5.23-hicache-wait")
    assert (settings.pool_policy, settings.pool_lease) == ("mooncake-0.3.13-offload-on-evict", 1.5)
    made = simulator_maker(experiment, load_model("tiny-llama"), token_times=False)()
    assert made.pool_policy.lease_s == 1.5 and made.pool_policy.disk_buffer_bytes == 2**27
    lasting = changed(cell.experiment, engines={"sim": {"pool_policy": "lru", "pool_lease": "1s"}})
    with pytest.raises(SettingsError, match="lru has no leases"):
        simulator_maker(lasting, load_model("tiny-llama"), token_times=False)


def test_what_does_not_resolve_is_sampled_again_while_the_time_lasts(tmp_path: Path) -> None:
    run = sim_run(tmp_path / "truth", {key: CONFIG[key] for key in CONFIG if key != "sizes"})
    cells = request(tmp_path, "cpu-2core", (None,)).cells
    real = read_side([noisy_copy(run, tmp_path / "real", seed=1, spread=0.15)])
    comparison = compare(real, read_side([run]))
    asked = {point.tier: more_samples(point) for point in comparison.points}
    unclear = [tier for tier, samples in asked.items() if samples]
    more = more_cells(comparison, real, cells, left_s=1e6)
    rounds = [(cell.experiment.measure.tiers, cell.experiment.measure.samples or 0) for cell in more]
    assert len(unclear) > 1 and list(rounds[0][0]) == unclear, "all tiers are interleaved at first"
    several = [len(tiers) for tiers, _ in rounds]
    assert several == sorted(set(several), reverse=True), "fewer tiers in each"
    assert all(cell.key.startswith("base#") for cell in more)
    passes = {key for number in (1, 8) for key in repeated("base", number)}
    assert not passes & {cell.key for cell in more}, "a resumed validation takes them for samples of a pass"
    for tier, samples in asked.items():
        assert sum(n for tiers, n in rounds if tier in tiers) == samples
    for cell in real.manifest.cells:
        cell.start_s = 50.0
    assert more_cells(comparison, real, cells, left_s=49.0) == [], "no time for the engine's start"
    assert more_cells(comparison, real, cells, left_s=1e6) == more


@pytest.mark.parametrize(
    ("had", "needed", "low", "verdict", "reason", "more"),
    [
        (20, 45, -0.06, "not resolvable", None, 25),
        (20, 21, -0.06, "not resolvable", None, 10),  # at least half as many again
        (20, 20, -0.06, "not resolvable", None, 10),
        (20, 400, -0.06, "not resolvable", None, 40),  # at most twice as many
        (20, 421, -0.06, "not resolvable", None, 0),  # no feasible number
        (20, None, -0.06, "not resolvable", None, 0),
        (7, 1243, -0.30, "not resolvable", None, 14),  # so few samples do not say that none is feasible
        (3, None, None, "not resolvable", None, 3),  # too few for an interval
        (3, None, None, "not resolvable", "its steps ended late", 0),
        (20, None, -0.02, "pass", None, 0),
        (20, None, -0.2, "fail", None, 0),
    ],
)
def test_a_point_is_sampled_again_as_often_as_its_samples_ask(
    had: int, needed: int | None, low: float | None, verdict: Equivalence, reason: str | None, more: int
) -> None:
    counts = Figure(metric="ttft_p50_s", reference=1, candidate=1, error=0, low=low, high=low, verdict=verdict,
                    samples=had, needed=needed, reason=reason)  # fmt: skip
    silent = msgspec.structs.replace(counts, verdict="not resolvable", needed=had + 99, gates=False)
    point = PointResult(cell="base", tier="cpu", axes={}, figures=(counts, silent), counts=(), noise=(),
                        wasserstein_s=None, left_out=0, verdict=verdict)  # fmt: skip
    assert more_samples(point) == more


def test_samples_of_a_second_pass_count_with_those_of_the_first(tmp_path: Path) -> None:
    run = sim_run(tmp_path / "truth", {key: CONFIG[key] for key in CONFIG if key != "sizes"})
    again = noisy_copy(run, tmp_path / "again", seed=2, spread=0.1)
    for name in ("rows.jsonl", "manifest.json", "samples.jsonl"):
        (again / name).write_text((again / name).read_text().replace('"base"', '"base#1"'))
    side = read_side([noisy_copy(run, tmp_path / "real", seed=1, spread=0.1), again])
    assert len(side.points) == 4
    assert {figure.samples for point in compare(side, read_side([run])).points for figure in point.figures} == {20}


def test_the_command_and_its_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(CONFIG))

    def command(calibration: str | None, sizes: list[str], budget: str, out: Path) -> int:
        return validate_command(path, calibration=calibration, engine="sim", sizes=sizes, budget=budget, out=out)

    assert command("cpu-2core", ["pairs"], "0s", tmp_path / "out") == 0
    calibration = read_document(tmp_path / "out").calibration
    assert calibration is not None and calibration.name == "cpu-2core"
    assert "disk_cold" in capsys.readouterr().out
    assert command(None, [], "0s", tmp_path / "no") == 2
    assert command("cpu-2core", ["none"], "0s", tmp_path / "no") == 2
    assert command("cpu-2core", [], "soon", tmp_path / "no") == 2
    assert command("cpu-2core", ["pairs"], "0s", tmp_path / "out") == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4 and all(line.startswith("harness: ") for line in errors)
    assert not (tmp_path / "no").exists()


def test_what_a_calibration_finds_foretells_points_that_it_never_saw(tmp_path: Path) -> None:
    """The simulator calibrated on itself: other lengths, hit rates, concurrency, chunk sizes, and a faster device."""
    config = yaml.safe_load(Path("configs/validation/cpu_vllm.yaml").read_text())
    config["measure"] |= {"samples": 10, "until": None}
    config["sizes"].pop("trace")
    path, found = tmp_path / "experiment.yaml", tmp_path / "found.yaml"
    path.write_text(yaml.safe_dump(config))
    assert (
        calibrate_command(
            path, engine="sim", size="calibration", output=found, run_folder=tmp_path / "run", budget="10min"
        )
        == 0
    )
    sizes = ["lengths", "hits", "concurrency", "chunk64", "ext4_200"]
    assert validate_command(path, calibration=str(found), engine="sim", sizes=sizes, out=tmp_path / "out") == 0
    document = read_document(tmp_path / "out")
    assert document.overall.points == 25 and all(document.overall.targets.values())
    assert len({point.axes["device_bytes_per_s"] for point in document.points}) == 3


def test_a_calibration_is_measured_in_turns_with_what_it_is_held_against(tmp_path: Path) -> None:
    config = yaml.safe_load(Path("configs/validation/cpu_vllm.yaml").read_text())
    config["measure"] |= {"samples": 10, "until": None}
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(config))
    turns: dict[str, Any] = {"calibrate": "calibration", "calibrating": "10min", "passes": 3}
    sizes = ["lengths", "ext4_200"]
    assert validate_command(path, engine="sim", sizes=sizes, out=tmp_path / "out", **turns) == 0
    document = read_document(tmp_path / "out")
    assert document.overall.points == 9 and document.overall.mape is not None and document.overall.mape < 0.01
    assert document.calibration is not None
    assert document.calibration.name == "cpu_vllm-out" and document.calibration.good
    assert {figure.samples for point in document.points for figure in point.figures} == {12, 10}

    cells = read_manifest(tmp_path / "out" / "real").cells
    keys = [cell.key for cell in cells]
    lengths = [[f"lengths:workload.prompt_tokens={n}#{p}" for p in of for n in (1793, 2817)] for of in ((1, 2), (3,))]
    held_out = [key for key in keys if not key.startswith("calibration:")]
    assert held_out == [*lengths[0], "ext4_200:base", *lengths[1]]
    places = [keys.index(key) for key in held_out]
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(places))
    alone = keys.index("ext4_200:base")
    warm_up = {cell.key: cell.experiment.measure.warm_up for cell in cells}
    prompt_tokens = {cell.key: cell.config["workload"]["prompt_tokens"] for cell in cells}
    # What the calibration has no point of, another device, lies between two starts of each of its engines.
    for half, passes, beside in zip((keys[:alone], keys[alone + 1 :]), ([1, 2], [3]), lengths, strict=True):
        small = [key for key in half if "chunk_tokens=64" in key]
        large = half[: len(half) - len(small)]
        assert half[len(large) :] == small and set(beside) < set(large)
        for engine in (large, small):
            numbers = [int(key[-1]) for key in engine]
            assert numbers == sorted(numbers) and sorted(set(numbers)) == passes
            # The first cell of a prompt length; the longest prompts of each have all tiers.
            met = [prompt_tokens[key] for key in engine]
            assert [warm_up[key] for key in engine] == [int(n not in met[:place]) for place, n in enumerate(met)]

    real = [tmp_path / "out" / "real"]
    assert validate_command(path, engine="sim", real=real, sizes=sizes, out=tmp_path / "again", **turns) == 0
    first, again = ((tmp_path / folder / "calibration.yaml").read_text() for folder in ("out", "again"))
    assert again == first.replace("cpu_vllm-out", "cpu_vllm-again")
