"""However a run on real vLLM and LMCache ends, it leaves nothing behind, and says why in one line."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
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


SERVERS = {"LMCache": "lmcache.cli.main", "vLLM": "vllm.entrypoints.openai.api_server"}


def begun(process: "subprocess.Popen[str]", rows: Path, had: int) -> None:
    """Returns once the run has written a row more."""
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        if rows.exists() and rows.stat().st_size > had:
            return
        time.sleep(0.05)
    raise AssertionError(f"no row came: {process.communicate(timeout=60)}")


def killed_harness(process: "subprocess.Popen[str]", folder: Path) -> None:
    assert left_behind(folder.parent)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while (left := left_behind(folder.parent)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def killed_server(process: "subprocess.Popen[str]", folder: Path, server: str, *, warden: bool) -> None:
    """The server, or the warden above it. The run ends in one line that names the server, its log and its error."""
    children = psutil.Process(process.pid).children(recursive=True)
    below = [child for child in children if "warden.py" not in " ".join(child.cmdline())]
    [one] = [child for child in below if SERVERS[server] in child.cmdline()]
    os.kill(one.ppid() if warden else one.pid, signal.SIGKILL)
    gone, left = psutil.wait_procs(below, timeout=20)
    assert gone and not left
    _, errors = process.communicate(timeout=60)
    last = errors.splitlines()[-1]
    assert process.returncode == 1 and "Traceback" not in errors
    told = "LMCache server ended" if server == "LMCache" else "vLLM ended"
    assert last.startswith(f"harness: {told} during the run (")
    assert f"{folder / 'logs'}" in last and ".log " in last
    assert read_manifest(folder).status == "failed" and not left_behind(folder.parent)


def test_however_a_run_ends_it_leaves_nothing_loses_no_row_and_goes_on(tmp_path: Path) -> None:
    """SIGKILL of the harness, of vLLM and of LMCache's warden, each in the run that resumes the one before."""
    path, folder = tmp_path / "experiment.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump({**EXPERIMENT, "measure": {**EXPERIMENT["measure"], "samples": 6}}))
    rows, before = folder / "rows.jsonl", b""
    ends: tuple[Callable[[subprocess.Popen[str]], None], ...] = (
        lambda process: killed_harness(process, folder),
        lambda process: killed_server(process, folder, "vLLM", warden=False),
        lambda process: killed_server(process, folder, "LMCache", warden=True),
    )
    for number, end in enumerate(ends):
        arguments = ["--resume", str(folder)] if number else [str(path), "--engine", "vllm", "--out", str(folder)]
        process = harness("run", *arguments)
        begun(process, rows, len(before))
        end(process)
        assert rows.read_bytes().startswith(before) and len(list(read_rows(folder))) < 30
        before = rows.read_bytes()
    resumed = harness("run", "--resume", str(folder))
    _, errors = resumed.communicate(timeout=280)
    assert resumed.returncode == 0, errors
    assert rows.read_bytes().startswith(before)
    found = measured(folder)
    assert len(found) == 30 == len({(row.expected_tier, row.sample) for row in found})
    assert {row.attempt for row in found} == {0, 1, 2, 3} and {row.verdict for row in found} == {"proven"}
    assert not left_behind(tmp_path)


def test_the_error_of_a_vllm_that_cannot_start_ends_with_its_last_log_lines(tmp_path: Path) -> None:
    path = written(tmp_path, {"vllm": {"python": str(PYTHON), "args": ["--no-such-flag"]}})
    alone = ("--set", "cache.cpu=null", "--set", "cache.disk=null", "--set", "measure.tiers=[recompute]")
    done = harness("run", str(path), "--engine", "vllm", *alone, "--out", str(tmp_path / "out"))
    _, errors = done.communicate(timeout=280)
    assert done.returncode == 1 and "Traceback" not in errors.split("The end of")[0]
    assert "no-such-flag" in errors and read_manifest(tmp_path / "out").status == "failed"
    assert not left_behind(tmp_path)
