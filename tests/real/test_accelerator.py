"""The reference accelerator in a real vLLM with a real LMCache: whose KV, which bytes, what pace, and what it leaves.

Counts and bytes are exact. Of times only that nothing takes less than was asked: other work on this machine can make a
step longer, and never shorter.
"""

import contextlib
import os
import shutil
import signal
import time
import zlib
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from harness.engines.accelerator.plugin.kv_accelerator.pace import StepCost
from harness.measure.run import run
from harness.records import Counters, Resolved
from harness.report.refresh import seal
from harness.results.folder import read_samples
from harness.results.manifest import read_manifest
from harness.results.traced import read_io
from simulator.calibration import STEP, load_calibration
from simulator.models import CONFIGS
from tests.real.test_vllm import EXPERIMENT, PYTHON, request
from tests.support.real_runs import harness, left_behind
from tests.unit.measure.test_run_loop import Quiet, measured

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not PYTHON.exists(), reason="no engine environment; `scripts/engine_env vllm` makes it"),
]

PROMPT, CHUNK, TOKEN_BYTES = 1025, 256, 131072
SAID = "reference accelerator rtx-a5000-nfs, no GPU"
# Most that a file system may read of its own, of hundreds of MiB: inodes, directories, maps of blocks.
METADATA_BYTES = 2**20
STATES = ["recompute", "gpu", "cpu", "disk", "disk_cold"]
PACED: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "workload": {"kind": "prefix", "prompt_tokens": PROMPT, "hit_rate": 1.0},
    "measure": {"tiers": STATES, "samples": 2},
    "cache": {"block_tokens": 32, "chunk_tokens": CHUNK, "gpu": "512MiB", "cpu": "1GiB", "disk": {"capacity": "2GiB"}},
}


def engines(**more: Any) -> dict[str, Any]:
    return {"vllm": {"python": str(PYTHON), "accelerator": "rtx-a5000-nfs", "max_batched_tokens": 1024, **more}}


def step_us(*sequences: tuple[int, int]) -> float:
    preset = load_calibration("rtx-a5000-nfs")
    return 1e6 * StepCost(**{name: preset.constant(name) for name in STEP}).of(sequences)


def observed(folder: Path) -> dict[str, list[Counters]]:
    found: dict[str, list[Counters]] = {}
    for sample in read_samples(folder):
        found.setdefault(sample.tier, []).append(sample.observed)
    return found


def test_every_tier_is_proven_with_the_named_model_s_bytes_at_the_pace_that_was_asked(tmp_path: Path) -> None:
    folder = run(request(tmp_path, **PACED, engines=engines()), Quiet())
    rows = measured(folder)
    assert len(rows) == 2 * len(STATES) and {(row.verdict, row.verdict_reason) for row in rows} == {("proven", None)}
    resolved = read_manifest(folder).cells[0].resolved
    assert resolved is not None and resolved.kv_bytes_per_token == TOKEN_BYTES
    assert resolved.gpu_blocks == 2**29 // (32 * TOKEN_BYTES) and resolved.cpu_bytes == 2**30
    assert str(resolved.accelerator) == f"{SAID}, steps of llama-3.2-3b for llama-3.1-8b"
    whole = step_us((1024, 0)) + step_us((1, 1024))
    for state, samples in observed(folder).items():
        for moved in samples:
            computes = state == "recompute"
            polls = moved.paced["polls"]
            # LMCache's connector answers at the third look, at the earliest; vLLM's core sleeps a millisecond between.
            assert polls >= 2 and moved.asked_us["polls"] > 1000 * polls
            assert moved.paced == {
                "steps": 2 if computes else 1,
                "polls": polls,
                "loads": 0 if computes or state == "gpu" else 1,
                "stores": 1 if computes else 0,
            }
            assert moved.asked_us["steps"] == pytest.approx(whole if computes else step_us((1, 1024)), abs=2)
            if state == "disk_cold":
                assert moved.device_read_bytes["disk"] >= 1024 * TOKEN_BYTES
    for row in rows:
        asked_us = whole if row.expected_tier == "recompute" else step_us((1, 1024))
        assert row.ttft_s is not None and row.ttft_s * 1e6 > asked_us
    assert not left_behind(tmp_path)
    seal(folder)
    assert f"{SAID}, steps of llama-3.2-3b for llama-3.1-8b" in (folder / "report.html").read_text()


@pytest.mark.usefixtures("tracefs")
@pytest.mark.skipif(os.geteuid() != 0, reason="tracing and reference devices need root")
@pytest.mark.skipif(not shutil.which("bpftrace"), reason="no bpftrace; scripts/test installs it")
def test_a_70b_shape_and_copied_kv_are_proven_too_and_the_block_layer_sees_these_bytes(tmp_path: Path) -> None:
    """320 KiB of KV a token; LMCache's own copies are neither paced nor counted. Of a cold hit the device moves the
    tokens' bytes and the file system's own, by the process's account and by the block layer's."""
    changes = PACED | {
        "model": "llama-3.1-70b",
        "measure": {"tiers": STATES, "samples": 1},
        "cache": PACED["cache"] | {"disk": {"capacity": "1GiB"}},
        "storage": {"trace": True, "device": {"read_bandwidth": "1GiB/s", "size": "1536MiB"}},
    }
    folder = run(request(tmp_path, **changes, engines=engines(link="copied")), Quiet())
    assert {row.verdict for row in measured(folder)} == {"proven"}
    resolved = read_manifest(folder).cells[0].resolved or Resolved()
    assert resolved.kv_bytes_per_token == 320 * 1024 and resolved.gpu_blocks == 2**29 // (32 * 320 * 1024)
    assert resolved.accelerator is not None and resolved.accelerator.link == "copied"
    by_state = observed(folder)
    moved = [each for samples in by_state.values() for each in samples]
    assert all(each.paced["loads"] == each.paced["stores"] == 0 < each.paced["steps"] for each in moved)
    seal(folder)
    io = read_io(folder)
    assert io is not None
    [trace] = io.traces
    [cold], kv_bytes = by_state["disk_cold"], 1024 * 320 * 1024
    assert trace.lost_events == 0 and cold.device_read_bytes["disk"] is not None
    assert 0 <= cold.device_read_bytes["disk"] - kv_bytes < METADATA_BYTES
    assert 0 <= trace.block.of("read").bytes - kv_bytes < METADATA_BYTES
    assert trace.block.of("write").bytes >= kv_bytes
    assert not left_behind(tmp_path)


def slow_preset(tmp_path: Path) -> Path:
    """A GPU whose every step takes 1.5 s and more."""
    path = tmp_path / "slow.yaml"
    known = (CONFIGS / "hardware" / "rtx-a5000-nfs.yaml").read_text()
    assert "\n  step_s: 0.00836\n" in known
    path.write_text(known.replace("\n  step_s: 0.00836\n", "\n  step_s: 1.5\n"))
    return path


def test_it_sleeps_in_a_step_stores_noise_and_leaves_nothing_after_sigterm(tmp_path: Path) -> None:
    experiment = tmp_path / "experiment.yaml"
    asked = {**EXPERIMENT, **PACED, "engines": engines(accelerator=str(slow_preset(tmp_path)))}
    experiment.write_text(yaml.safe_dump(asked | {"measure": {"tiers": ["recompute"], "samples": 20}}))
    process = harness("run", str(experiment), "--engine", "vllm", "--out", str(tmp_path / "out"))
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline and not (tmp_path / "out" / "rows.jsonl").exists():
        time.sleep(0.05)
    assert process.poll() is None
    below = psutil.Process(process.pid).children(recursive=True)
    [engine] = [child for child in below if "EngineCore" in " ".join(child.cmdline())]
    began_s, before = time.monotonic(), engine.cpu_times()
    chunks: dict[str, bytes] = {}
    while time.monotonic() - began_s < 8:
        for path in (tmp_path / "out").glob("**/*.data"):
            with contextlib.suppress(FileNotFoundError):
                chunks.setdefault(path.name, path.read_bytes())
        time.sleep(0.2)
    after, took_s = engine.cpu_times(), time.monotonic() - began_s
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert read_manifest(tmp_path / "out").error == "interrupted by SIGTERM"
    assert (after.user + after.system - before.user - before.system) / took_s < 0.25, "the engine's core is not idle"
    whole = [content for content in chunks.values() if len(content) == CHUNK * TOKEN_BYTES]
    assert len(whole) >= 4
    pages = [content[at : at + 4096] for content in whole for at in range(0, len(content), 4096)]
    assert len(set(pages)) == len(pages)
    few = b"".join(pages[::64])
    assert len(zlib.compress(few, 1)) > 0.99 * len(few)
    deadline = time.monotonic() + 60
    while (left := left_behind(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left
