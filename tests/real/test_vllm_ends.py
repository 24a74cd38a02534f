"""However a run on real vLLM and LMCache ends, it leaves nothing behind, and says why in one line."""

from pathlib import Path

import pytest
import yaml

from harness.results.manifest import read_manifest
from tests.real.test_vllm import EXPERIMENT, PYTHON, written
from tests.support.real_runs import HARNESS, Victim, harness, killed_and_resumed, left_behind

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not PYTHON.exists(), reason="no engine environment; `scripts/engine_env vllm` makes it"),
]

VICTIMS = (
    HARNESS,
    Victim("vLLM", "vllm.entrypoints.openai.api_server"),
    Victim("LMCache server", "lmcache.cli.main", warden=True),
)


def test_however_a_run_ends_it_leaves_nothing_loses_no_row_and_goes_on(tmp_path: Path) -> None:
    path, folder = tmp_path / "experiment.yaml", tmp_path / "out"
    changes = {"engines": {"vllm": {"python": str(PYTHON)}}, "measure": {**EXPERIMENT["measure"], "samples": 6}}
    path.write_text(yaml.safe_dump(EXPERIMENT | changes))
    killed_and_resumed([str(path), "--engine", "vllm", "--out", str(folder)], folder, VICTIMS, rows=30)


def test_the_error_of_a_vllm_that_cannot_start_ends_with_its_last_log_lines(tmp_path: Path) -> None:
    path = written(tmp_path, {"vllm": {"python": str(PYTHON), "args": ["--no-such-flag"]}})
    alone = ("--set", "cache.cpu=null", "--set", "cache.disk=null", "--set", "measure.tiers=[recompute]")
    done = harness("run", str(path), "--engine", "vllm", *alone, "--out", str(tmp_path / "out"))
    _, errors = done.communicate(timeout=280)
    assert done.returncode == 1 and "Traceback" not in errors.split("The end of")[0]
    assert "no-such-flag" in errors and read_manifest(tmp_path / "out").status == "failed"
    assert not left_behind(tmp_path)
