"""Runs on the simulator: the same bytes every time, also when a run was killed and resumed."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.errors import ResultsError
from harness.experiment.read import load_experiment
from harness.measure.run import RunRequest, run
from harness.report.refresh import seal
from harness.results.folder import read_samples, write_atomically
from harness.results.manifest import encode_manifest, read_manifest
from tests.support.paths import ROOT
from tests.unit.measure.test_run_loop import Quiet, measured

TIERS: dict[str, Any] = {
    "name": "sim",
    "workload": {"kind": "prefix", "prompt_tokens": 1025, "hit_rate": 0.5, "output_tokens": 3},
    "measure": {"tiers": ["recompute", "gpu", "cpu", "disk", "disk_cold"], "samples": 2},
    "cache": {"gpu": "1GiB", "cpu": "1GiB", "disk": {"capacity": "4GiB"}},
    "sweep": {"workload.hit_rate": [0.0, 0.5, 1.0], "cache.chunk_tokens": [128, 256]},
}
FREE: dict[str, Any] = {
    "name": "sim",
    "workload": {"kind": "trace", "trace": "tiny_conversation", "block_tokens": 64},
    "cache": {"gpu": "1GiB", "cpu": "1GiB", "disk": {"capacity": "4GiB"}},
}
SYNTHETIC: dict[str, Any] = {
    **FREE,
    "workload": {"kind": "synthetic", "requests": 50, "prompt_tokens": 1025, "hit_rate": 0.5, "prefixes": 5,
                 "zipf": 1.0, "arrivals": "poisson", "rate_per_s": 2.0, "output_tokens": 4},
}  # fmt: skip
SESSIONS: dict[str, Any] = {
    **FREE,
    "workload": {"kind": "sessions", "sessions": 6, "turns": 4, "system_tokens": 512, "think": "2s", "concurrency": 3},
}


def request(folder: Path, config: dict[str, Any], *, out: str = "out", resume: Path | None = None) -> RunRequest:
    folder.mkdir(exist_ok=True)
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(config))
    plan = load_experiment(path)
    target = resume or folder / out
    return RunRequest(
        name="sim", cells=plan.cells(), engine="sim", experiment=plan.origin(), folder=target, resume=resume is not None
    )


@pytest.mark.parametrize("config", [TIERS, FREE, SYNTHETIC, SESSIONS], ids=["tiers", "trace", "synthetic", "sessions"])
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path, config: dict[str, Any]) -> None:
    first, second = (run(request(tmp_path, config, out=name), Quiet()) for name in ("one", "two"))
    for name in ("rows.jsonl", "samples.jsonl"):
        assert (first / name).read_bytes() == (second / name).read_bytes() != b""
    if config is SYNTHETIC:
        other = run(request(tmp_path, {**config, "seed": 9}, out="other"), Quiet())
        assert (other / "rows.jsonl").read_bytes() != (first / "rows.jsonl").read_bytes()


def test_every_tier_of_every_cell_is_proven_and_hits_are_exact(tmp_path: Path) -> None:
    rows = measured(run(request(tmp_path, TIERS), Quiet()))
    assert len(rows) == 6 * 5 * 2 and {(row.verdict, row.verdict_reason) for row in rows} == {("proven", None)}
    for row in rows:
        rate = float(row.cell.split("hit_rate=")[1].split(",")[0])
        assert row.cached_tokens == (0 if row.expected_tier == "recompute" else round(1024 * rate))


def test_a_free_load_accounts_for_every_prompt_token(tmp_path: Path) -> None:
    folder = run(request(tmp_path, FREE), Quiet())
    rows = measured(folder)
    assert len(rows) == 200 and all(row.error is None for row in rows)
    [sample] = read_samples(folder)
    for tier, counter in (("computed", "computed_tokens"), ("gpu", "gpu_hit_tokens")):
        assert sum(row.tokens_by_tier[tier] or 0 for row in rows) == sample.observed.named()[counter]
    load = seal(folder).cells[0].tiers["load"]
    assert load.throughput is not None and load.throughput.requests_per_s > 0
    assert load.tokens.hit_rate is not None and load.tokens.hit_rate > 0


def cut(folder: Path, share: float) -> None:
    """Leaves a folder as SIGKILL does: a part of the rows, the last line torn, the status 'started'."""
    for name in ("rows.jsonl", "samples.jsonl"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * share)])
    manifest = read_manifest(folder)
    manifest.status = "started"
    for cell in manifest.cells:
        cell.status = "started"
    write_atomically(folder / "manifest.json", encode_manifest(manifest))


@pytest.mark.parametrize("config", [TIERS, FREE], ids=["tiers", "trace"])
@pytest.mark.parametrize("share", [0.0, 0.4, 0.99])
def test_a_resumed_run_has_the_bytes_of_an_uninterrupted_one(
    tmp_path: Path, config: dict[str, Any], share: float
) -> None:
    whole = run(request(tmp_path / "a", config), Quiet())
    broken = run(request(tmp_path / "b", config), Quiet())
    cut(broken, share)
    resumed = run(request(tmp_path / "b", config, resume=broken), Quiet())
    for name in ("rows.jsonl", "samples.jsonl"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes()


def test_resuming_under_another_seed_is_noticed(tmp_path: Path) -> None:
    folder = run(request(tmp_path, SYNTHETIC), Quiet())
    cut(folder, 0.5)
    with pytest.raises(ResultsError, match="gives other rows"):
        run(request(tmp_path, {**SYNTHETIC, "seed": 2}, resume=folder), Quiet())


def trace_folder() -> Path | None:
    folder = Path(os.environ.get("HARNESS_TRACES") or ROOT.parent / "shared" / "traces")
    return folder if (folder / "mooncake_conversation.jsonl").exists() else None


@pytest.mark.skipif(trace_folder() is None, reason="no mooncake_conversation.jsonl in $HARNESS_TRACES")
def test_the_whole_public_trace_survives_sigkill(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "harness",
        "run",
        "configs/experiments/mooncake_trace.yaml",
        "--engine",
        "sim",
    ]
    environment = {**os.environ, "HARNESS_TRACES": str(trace_folder())}
    killed = tmp_path / "killed"
    process = subprocess.Popen([*command, "--out", str(killed)], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (killed / "rows.jsonl").exists():
        time.sleep(0.005)
    time.sleep(0.15)
    process.kill()
    process.wait()
    partial = (killed / "rows.jsonl").read_bytes().count(b"\n")
    assert 0 < partial < 12_031, "the run was not killed in its middle"
    resume = [sys.executable, "-m", "harness", "run", "--resume", str(killed)]
    for arguments in ([*command, "--out", str(tmp_path / "whole")], resume):
        done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert (killed / "rows.jsonl").read_bytes() == (tmp_path / "whole" / "rows.jsonl").read_bytes()
    rows = measured(killed)
    assert len(rows) == len({row.id for row in rows}) == 12_031


def test_a_budget_that_a_free_load_would_not_keep_is_refused(tmp_path: Path) -> None:
    asked = request(tmp_path, {**FREE, "measure": {"budget": "1s"}})
    with pytest.raises(ValueError, match=r"^measure\.budget: a free load has .*; set workload\.duration instead$"):
        run(asked, Quiet())
    assert not asked.folder.exists()
