"""Two sides held against each other: verdicts, refusals, exit codes; the real side is the simulator with noise."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.commands.validate import compare as compare_command
from harness.errors import NotComparable
from harness.results.manifest import encode_manifest, read_manifest
from harness.validation.comparable import check_sides
from harness.validation.contrast import Contrast, contrast
from harness.validation.equivalence import Comparison, compare
from harness.validation.points import read_side
from tests.support.noisy_runs import changed_rows, noisy_copy, sim_run, wrong_calibration

PREFIX: dict[str, Any] = {
    "name": "compared",
    "workload": {"kind": "prefix", "prompt_tokens": 3073, "hit_rate": 1.0, "concurrency": 2},
    "measure": {"tiers": ["recompute", "gpu", "cpu", "disk_cold"], "samples": 40},
    "cache": {"gpu": "1GiB", "cpu": "1GiB", "disk": {"capacity": "4GiB"}, "chunk_tokens": 128},
}
FREE: dict[str, Any] = {
    "name": "compared",
    "workload": {"kind": "trace", "trace": "tiny_conversation", "block_tokens": 32, "concurrency": 2},
    "cache": {"gpu": "64MiB", "cpu": "1GiB", "disk": {"capacity": "4GiB"}, "chunk_tokens": 64},
}


def judged(reference: Path, candidate: Path) -> Comparison:
    sides = read_side([reference]), read_side([candidate])
    check_sides(*sides)
    return compare(*sides)


def verdicts(comparison: Comparison) -> dict[str, str]:
    return {point.tier: point.verdict for point in comparison.points}


@pytest.fixture(scope="module")
def prefix_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sim_run(tmp_path_factory.mktemp("prefix"), PREFIX)


@pytest.fixture(scope="module")
def free_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sim_run(tmp_path_factory.mktemp("free"), FREE)


def test_the_same_machine_with_two_noises_passes(tmp_path: Path, prefix_run: Path) -> None:
    a, b = (noisy_copy(prefix_run, tmp_path / f"{seed}", seed=seed, spread=0.03) for seed in (1, 2))
    comparison = judged(a, b)
    assert verdicts(comparison) == dict.fromkeys(("recompute", "gpu", "cpu", "disk_cold"), "pass")
    for point in comparison.points:
        mean = point.figure("ttft_mean_s")
        assert mean and mean.low is not None and mean.high is not None and mean.error is not None
        assert mean.low < mean.error < mean.high and mean.samples == 40
        assert [f.verdict for f in point.noise if f.metric == "ttft_mean_s"] == ["pass"]
        assert point.wasserstein_s is not None and 0 < point.wasserstein_s < 0.05 * mean.reference


def test_a_slower_one_fails_in_latency_and_in_throughput(tmp_path: Path, prefix_run: Path) -> None:
    a = noisy_copy(prefix_run, tmp_path / "a", seed=1, spread=0.03)
    b = noisy_copy(prefix_run, tmp_path / "b", seed=2, spread=0.03, slower=1.10)
    for point in judged(a, b).points:
        by_metric = {f.metric: f for f in (*point.figures, *point.counts)}
        assert by_metric["ttft_mean_s"].verdict == by_metric["requests_per_s"].verdict == "fail"
        assert by_metric["ttft_mean_s"].error == pytest.approx(0.10, abs=0.02)
        assert by_metric["requests_per_s"].error == pytest.approx(1 / 1.1 - 1, abs=0.02)
        assert by_metric["computed_tokens"].verdict == "pass"


def test_too_much_noise_is_not_resolvable_and_says_how_many_samples_would_do(tmp_path: Path, prefix_run: Path) -> None:
    a, b = (noisy_copy(prefix_run, tmp_path / f"{seed}", seed=seed, spread=0.40) for seed in (3, 4))
    point = judged(a, b).points[0]
    assert point.verdict == "not resolvable"
    mean = point.figure("ttft_mean_s")
    assert mean and mean.needed is not None and mean.needed > mean.samples == 40


def test_the_simulator_passes_against_its_own_noisy_self_and_its_tail_does_not_count(
    tmp_path: Path, prefix_run: Path
) -> None:
    real = noisy_copy(prefix_run, tmp_path / "real", seed=5, spread=0.06)
    comparison = judged(real, prefix_run)
    assert comparison.verdict == "pass"
    tails = [point.figure("ttft_p90_s") for point in comparison.points if point.tier == "gpu"]
    assert [(tail.verdict == "pass", tail.gates) for tail in tails if tail] == [(False, False)]


def test_a_drifting_reference_resolves_nothing(tmp_path: Path, prefix_run: Path) -> None:
    """Odd samples a tenth slower than even ones: no verdict on the candidate, whatever its own interval says."""
    rows = [json.loads(line) for line in (prefix_run / "rows.jsonl").read_text().splitlines()]
    for row in rows:
        if row["phase"] == "measure" and row["sample"] % 2:
            for name in ("first_chunk_s", "first_token_s", "last_token_s"):
                row[name] = row["sent_s"] + 1.2 * (row[name] - row["sent_s"])
    real = changed_rows(prefix_run, tmp_path / "real")
    (real / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for point in judged(real, prefix_run).points:
        mean = point.figure("ttft_mean_s")
        assert mean and mean.verdict == "not resolvable" and "differs from itself" in (mean.reason or "")


def test_a_machine_that_is_slow_for_a_fifth_of_the_samples_moves_no_figure(tmp_path: Path, prefix_run: Path) -> None:
    real = noisy_copy(prefix_run, tmp_path / "real", seed=5, spread=0.03)
    rows = [json.loads(line) for line in (real / "rows.jsonl").read_text().splitlines()]
    for row in rows:
        if row["phase"] == "measure" and row["sample"] % 5 == 0:
            for name in ("first_chunk_s", "first_token_s", "last_token_s"):
                row[name] = row["sent_s"] + 2 * (row[name] - row["sent_s"])
    (real / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    comparison = judged(real, prefix_run)
    assert comparison.verdict == "pass"
    for point in comparison.points:
        tail = point.figure("ttft_p90_s")
        assert tail and tail.error is not None and tail.error < -0.1


def test_of_three_passes_over_a_load_a_slow_one_moves_no_figure(tmp_path: Path, free_run: Path) -> None:
    slower = (1.0, 1.5, 1.0)
    passes = [noisy_copy(free_run, tmp_path / f"{n}", seed=n, spread=0.02, slower=by) for n, by in enumerate(slower)]
    [point] = compare(read_side(passes), read_side([free_run])).points
    assert {f.metric: f.error for f in point.figures} == pytest.approx(
        dict.fromkeys((f.metric for f in point.figures), 0.0), abs=0.03
    )


def test_a_free_load_is_compared_request_by_request(tmp_path: Path, free_run: Path) -> None:
    real = noisy_copy(free_run, tmp_path / "real", seed=7, spread=0.03)
    [point] = judged(real, free_run).points
    assert point.verdict == "pass" and point.tier == "load"
    counted = {f.metric: f for f in point.counts}
    assert counted["cpu_hit_tokens"].reference > 0 and counted["gpu_hit_tokens"].reference > 0
    # Pairs: TTFTs spread over an order of magnitude here, and the interval does not know it.
    mean = point.figure("ttft_mean_s")
    assert mean and mean.low is not None and mean.high is not None and mean.high - mean.low < 0.06


def test_another_eviction_rule_changes_counts_and_fails(tmp_path: Path, free_run: Path) -> None:
    small = {**FREE, "cache": {**FREE["cache"], "gpu": "80MiB"}}
    other = sim_run(tmp_path / "other", small)
    manifest = read_manifest(other)
    manifest.cells[0].resolved = read_manifest(free_run).cells[0].resolved
    (other / "manifest.json").write_bytes(encode_manifest(manifest))
    [point] = judged(free_run, other).points
    hits = point.figure("gpu_hit_tokens")
    assert hits and hits.verdict == "fail" and point.verdict == "fail"


def test_a_few_pages_from_the_device_are_none(tmp_path: Path, free_run: Path) -> None:
    """The cache server's process also reads its own files; bytes that matter are chunks."""
    real = changed_rows(free_run, tmp_path / "real")
    sample = json.loads((real / "samples.jsonl").read_text())
    for read_bytes, verdict in ((40_000, "pass"), (400_000_000, "fail")):
        sample["observed"]["device_read_bytes"]["disk"] = read_bytes
        (real / "samples.jsonl").write_text(json.dumps(sample) + "\n")
        [point] = judged(real, free_run).points
        figure = point.figure("device_read_bytes")
        assert figure and figure.verdict == verdict and (figure.reason is not None) == (verdict == "pass")


# ---- refusals


def refusal(reference: Path, candidate: Path) -> str:
    with pytest.raises(NotComparable) as told:
        judged(reference, candidate)
    return str(told.value)


def test_a_tier_that_was_never_proven_is_refused(tmp_path: Path, prefix_run: Path) -> None:
    reason = "computed_tokens moved by 3073, cpu needs 1"
    degraded = changed_rows(prefix_run, tmp_path / "degraded", verdict="contradicted", verdict_reason=reason)
    told = refusal(degraded, prefix_run)
    assert "proves its tier" in told and reason in told and "silently recomputing" in told and "\n" not in told


def test_a_free_load_whose_cache_server_served_nothing_is_refused(tmp_path: Path, free_run: Path) -> None:
    degraded = changed_rows(free_run, tmp_path / "degraded")
    sample = json.loads((degraded / "samples.jsonl").read_text())
    moved = sample["observed"]
    moved |= {"computed_tokens": moved["computed_tokens"] + moved["external_tokens"], "external_tokens": 0}
    moved["hit_tokens"] |= {"cpu": 0, "disk": 0}
    (degraded / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    assert "silently recomputed" in refusal(degraded, free_run)


def test_a_free_load_that_was_cut_off_is_refused(tmp_path: Path, free_run: Path) -> None:
    cut = changed_rows(free_run, tmp_path / "cut")
    (cut / "samples.jsonl").unlink()
    assert "its load was not finished" in refusal(cut, free_run)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cells.0.resolved.gpu_blocks": 999}, "different cache sizes: gpu_blocks is 999 on one side, 1024"),
        ({"cells.0.config.model": "llama-3.2-3b"}, "different definitions: model"),
        ({"host.cpu": "another", "engine": "vllm"}, "unlike hosts: cpu is another"),
    ],
)
def test_what_is_not_alike_is_refused(tmp_path: Path, prefix_run: Path, change: dict[str, Any], words: str) -> None:
    other = changed_rows(prefix_run, tmp_path / "other")
    manifest = json.loads((other / "manifest.json").read_text())
    for key, value in change.items():
        *parents, last = key.split(".")
        target: Any = manifest
        for part in parents:
            target = target[int(part)] if part.isdigit() else target[part]
        target[last] = value
    (other / "manifest.json").write_text(json.dumps(manifest))
    plain = noisy_copy(prefix_run, tmp_path / "plain", seed=1, spread=0.0)
    assert words in refusal(other, plain if "host.cpu" in change else prefix_run)


@pytest.mark.parametrize("gpus", [["H200"], []])
def test_an_accelerator_is_held_against_a_gpu_on_a_machine_without_one(
    tmp_path: Path, prefix_run: Path, gpus: list[str]
) -> None:
    """Against other arithmetic, its machine has to be the same."""
    ours, theirs = (noisy_copy(prefix_run, tmp_path / name, seed=1, spread=0.0) for name in ("gpu", "paced"))
    of_gpu, of_paced = (json.loads((side / "manifest.json").read_text()) for side in (ours, theirs))
    of_gpu["host"] |= {"gpus": gpus, "cores": 64}
    of_paced["cells"][0]["resolved"]["accelerator"] = {
        "name": "h200", "machine": "m", "date": "2026-11-26", "standing": "s", "link": "paced",
        "fitted_on": "tiny-llama",
    }  # fmt: skip
    for side, manifest in ((ours, of_gpu), (theirs, of_paced)):
        (side / "manifest.json").write_text(json.dumps(manifest))
    if gpus:
        assert set(verdicts(judged(ours, theirs)).values()) == {"pass"}
    else:
        assert "unlike hosts: cores is 64" in refusal(ours, theirs)


def test_other_token_counts_are_refused(tmp_path: Path, prefix_run: Path, free_run: Path) -> None:
    longer = changed_rows(prefix_run, tmp_path / "longer", output_tokens=2)
    assert "different token counts: output_tokens is [2] on one side, [1]" in refusal(longer, prefix_run)
    longer = changed_rows(free_run, tmp_path / "free", output_tokens=2)
    assert "different token counts: request" in refusal(longer, free_run)


def test_a_load_of_which_one_side_was_asked_less_is_refused(tmp_path: Path, free_run: Path) -> None:
    sides = [changed_rows(free_run, tmp_path / name) for name in ("whole", "less")]
    for side in sides:
        manifest = json.loads((side / "manifest.json").read_text())
        manifest["cells"][0]["config"]["workload"]["duration"] = 60.0
        (side / "manifest.json").write_text(json.dumps(manifest))
    rows = (sides[1] / "rows.jsonl").read_text().splitlines(keepends=True)
    (sides[1] / "rows.jsonl").write_text("".join(rows[:-2]))
    assert "2 requests were answered on one side only, e.g. " in refusal(*sides)


def test_runs_without_a_common_point_are_refused(prefix_run: Path, free_run: Path) -> None:
    assert "no point is in both" in refusal(prefix_run, free_run)


# ---- the command


def test_compare_gates_by_exit_code_and_leaves_a_report(
    tmp_path: Path, prefix_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = sim_run(tmp_path, PREFIX, wrong_calibration(tmp_path / "wrong.yaml", 1.2, "step_s"))
    assert compare_command(prefix_run, prefix_run, out=tmp_path / "same") == 0
    assert compare_command(prefix_run, wrong, tolerance=0.01, out=tmp_path / "strict") == 1
    noisy = noisy_copy(prefix_run, tmp_path / "noisy", seed=1, spread=0.2)
    assert compare_command(noisy, prefix_run, out=tmp_path / "noise") == 3
    assert compare_command(noisy, tmp_path / "nowhere", out=tmp_path / "none") == 2
    assert compare_command(noisy, prefix_run, tolerance=1.5, out=tmp_path / "none") == 2
    assert "nowhere: no such folder" in capsys.readouterr().err
    content = json.loads((tmp_path / "strict" / "validation.json").read_text())
    assert content["verdict"] == "fail" and content["overall"]["shares"]["fail"] > 0
    page = (tmp_path / "strict" / "report.html").read_text()
    assert "mean TTFT" not in page and "ttft_mean_s" not in page.replace('"metric":"ttft_mean_s"', "")
    assert "ttft_middle_s" in page and "relative error of TTFT" in page
    assert "Not within ± 1%" in page and page.count('class="plot"') >= 5
    assert "**fail** at ± 1%" in (tmp_path / "strict" / "validation.md").read_text()


def test_a_point_whose_accelerator_s_steps_ended_late_is_left_out_of_verdicts(tmp_path: Path, prefix_run: Path) -> None:
    """2 % of the time measured is still judged; a point beyond it is not, and the others are."""
    fine, late = (noisy_copy(prefix_run, tmp_path / name, seed=1, spread=0.01) for name in ("fine", "late"))
    for folder, share in ((fine, 0.0199), (late, 0.0203)):
        samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        for sample in samples:
            took_us = 1e6 * (sample["ended_s"] - sample["started_s"]) * (share if sample["tier"] == "cpu" else 0.001)
            sample["observed"] |= {"asked_us": {"steps": round(took_us)}, "overrun_us": {"steps": round(took_us)}}
        (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    assert judged(prefix_run, fine).verdict == "pass"
    found = judged(fine, late)
    assert {point.verdict for point in found.points if point.tier != "cpu"} == {"pass"}
    left_out = [point for point in found.points if point.tier == "cpu"]
    assert left_out and {point.verdict for point in left_out} == {"not resolvable"}
    said = "its steps ended late by 2.0% of the time measured, more than 2%"
    assert {figure.reason for point in left_out for figure in point.figures} == {said}
    told = contrasted(fine, late)
    assert {pair.tier for pair in told.pairs} == {point.tier for point in found.points} - {"cpu"}
    assert {each.reason for each in told.left_out} == {said}


def contrasted(a: Path, b: Path) -> Contrast:
    return contrast(read_side([a]), read_side([b]))
