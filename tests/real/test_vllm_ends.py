"""However a run on real vLLM and LMCache ends, it leaves nothing behind, and says why in one line."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import yaml

from harness.results.folder import read_rows
from harness.results.manifest import read_manifest
from tests.real.test_vllm import EXPERIMENT, PYTHON, harness, left_behind, written
from tests.unit.measure.test_run_loop import measured

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not PYTHON.exists(), reason="no engine environment; `scripts/engine_env vllm` makes it"),
]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_harness_ends_in_the_middle(tmp_path: Path, how: signal.Signals) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump({**EXPERIMENT, "measure": {**EXPERIMENT["measure"], "samples": 12}}))
    process = harness("run", str(path), "--engine", "vllm", "--out", str(tmp_path / "out"))
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline and not (tmp_path / "out" / "rows.jsonl").exists():
        time.sleep(0.05)
    assert process.poll() is None and left_behind(tmp_path)
    os.kill(process.pid, how)
    process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while (left := left_behind(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left
    before = (tmp_path / "out" / "rows.jsonl").read_bytes()
    assert 0 < len(list(read_rows(tmp_path / "out"))) < 60
    if how == signal.SIGTERM:
        assert process.returncode == 128 + signal.SIGTERM
        assert read_manifest(tmp_path / "out").error == "interrupted by SIGTERM"
        return
    resumed = harness("run", "--resume", str(tmp_path / "out"))
    _, errors = resumed.communicate(timeout=280)
    assert resumed.returncode == 0, errors
    assert (tmp_path / "out" / "rows.jsonl").read_bytes().startswith(before)
    rows = measured(tmp_path / "out")
    assert len(rows) == 60 == len({(row.expected_tier, row.sample) for row in rows})
    assert {row.attempt for row in rows} == {0, 1} and {row.verdict for row in rows} == {"proven"}


@pytest.mark.parametrize(
    ("server", "killed", "told"), [("vLLM", "it", "vLLM ended"), ("LMCache", "its warden", "LMCache server ended")]
)
def test_a_killed_process_ends_the_run_in_one_line_and_leaves_nothing(
    tmp_path: Path, server: str, killed: str, told: str
) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump({**EXPERIMENT, "measure": {**EXPERIMENT["measure"], "samples": 50}}))
    process = harness("run", str(path), "--engine", "vllm", "--out", str(tmp_path / "out"))
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline and not (tmp_path / "out" / "rows.jsonl").exists():
        time.sleep(0.05)
    assert process.poll() is None and (tmp_path / "out" / "rows.jsonl").exists()
    below = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "warden.py" not in " ".join(child.cmdline())
    ]
    module = {"LMCache": "lmcache.cli.main", "vLLM": "vllm.entrypoints.openai.api_server"}[server]
    [process_of_it] = [child for child in below if module in child.cmdline()]
    os.kill(process_of_it.ppid() if killed == "its warden" else process_of_it.pid, signal.SIGKILL)
    gone, left = psutil.wait_procs(below, timeout=20)
    assert gone and not left
    _, errors = process.communicate(timeout=60)
    last = errors.splitlines()[-1]
    assert process.returncode == 1 and "Traceback" not in errors
    assert (
        last.startswith(f"harness: {told} during the run (")
        and f"{tmp_path / 'out' / 'logs'}" in last
        and ".log " in last
    )
    assert read_manifest(tmp_path / "out").status == "failed" and list(read_rows(tmp_path / "out"))
    assert not left_behind(tmp_path)


def test_the_error_of_a_vllm_that_cannot_start_ends_with_its_last_log_lines(tmp_path: Path) -> None:
    engines = {"vllm": {"python": str(PYTHON), "args": ["--no-such-flag"]}}
    done = harness("run", str(written(tmp_path, engines)), "--engine", "vllm", "--out", str(tmp_path / "out"))
    _, errors = done.communicate(timeout=280)
    assert done.returncode == 1 and "Traceback" not in errors.split("The end of")[0]
    assert "no-such-flag" in errors and read_manifest(tmp_path / "out").status == "failed"
    assert not left_behind(tmp_path)
