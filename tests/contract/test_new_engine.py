"""A new engine is a folder and a dict entry, and so is a new cache server: the toys run by nothing but the seams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.results.folder import read_rows
from tests.support.paths import ROOT

TIERS: dict[str, Any] = {
    "name": "toy",
    "workload": {"kind": "prefix", "prompt_tokens": 1025, "hit_rate": 0.5},
    "measure": {"tiers": ["recompute", "gpu", "cpu"], "samples": 3},
    "cache": {"gpu": "1GiB", "cpu": "1GiB", "disk": {"capacity": "2GiB"}},
}


def harness(folder: Path, *words: str, **config: Any) -> subprocess.CompletedProcess[str]:
    (folder / "toy.yaml").write_text(yaml.safe_dump({**TIERS, **config}))
    command = [sys.executable, "-m", "tests.support.toy", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def refusal(folder: Path, *more: str, **config: Any) -> str:
    """The line that `harness run --engine toy` ends with; it has made no folder."""
    done = harness(
        folder, "run", str(folder / "toy.yaml"), "--engine", "toy", "--out", str(folder / "run"), *more, **config
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert not (folder / "run").exists()
    return done.stderr


def test_it_runs_pinned_and_is_resolved_by_its_own_words(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    out, toy = tmp_path / "run", {"cores": {"engine": [core], "client": [core]}}
    done = harness(
        tmp_path, "run", str(tmp_path / "toy.yaml"), "--engine", "toy", "--out", str(out), engines={"toy": toy}
    )
    assert done.returncode == 0, done.stderr
    assert {row.verdict for row in read_rows(out) if row.phase == "measure"} == {"proven"}
    [cell] = json.loads((out / "manifest.json").read_text())["cells"]
    assert cell["resolved"]["versions"] == {"toy": "1", "toy-cache": "2"}
    assert cell["config"]["engines"]["toy"]["cores"] == {"engine": [core], "client": [core]}
    assert "prediction, not a measurement" not in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"engines": {"toy": {"cores": {"engine": [9999]}}}}, r"engines.toy.cores.engine: core 9999 is not here"),
        ({"storage": {"device": {"size": "2GiB", "bandwidth": "1GiB/s"}}}, "storage.device: --engine toy would not"),
        ({"storage": {"trace": True}}, "storage.trace: --engine toy moves no bytes"),
        ({"engines": {"toy": {"colour": "red"}}}, "engines.toy.colour: unknown key"),
        ({"cache": {"gpu": "0B", "disk": {"capacity": "2GiB"}}, "measure": {}, "workload": {"kind": "synthetic",
          "requests": 2, "prompt_tokens": 513, "concurrency": 1}, "engines": {"sim": {"mode": "storage",
          "storage": {"compute": "none"}}}}, "all KV on storage is for --engine sim, not toy"),
        ({"deployment": {"instances": 2}}, "engine toy runs one instance"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_before_it_starts(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    assert words in refusal(tmp_path, **config)


def scripted(folder: Path, body: str) -> str:
    """The last line that a script prints, with the toys in their tables."""
    script = f"import tests.support.toy.__main__\nfrom pathlib import Path\nfolder = Path({str(folder)!r})\n{body}"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def test_it_is_validated_by_the_packs_that_stand_for_it(tmp_path: Path) -> None:
    body = """
import json
from harness.errors import NotComparable
from harness.experiment.read import load_experiment
from harness.results.manifest import CellEntry
from harness.validation.validate import sim_cell
config = json.loads(load_experiment(folder / "toy.yaml").experiment.model_dump_json())
chosen = sim_cell(CellEntry(key="base", overrides={}, config=config), "cpu-2core", "toy").experiment.engines.sim
config["engines"]["toy"]["packs"] = False
try:
    sim_cell(CellEntry(key="base", overrides={}, config=config), "cpu-2core", "toy")
except NotComparable as error:
    print(chosen.tier_policy, error)
"""
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(TIERS))
    assert scripted(tmp_path, body).startswith("lru engine toy: the simulator has no packs for it")


def test_it_is_calibrated_by_its_own_traits(tmp_path: Path) -> None:
    body = """
from harness.calibration.calibrate import calibrated, planned_micro_cells
from harness.experiment.read import load_experiment
from harness.measure.run import RunRequest, run
from tests.unit.measure.test_run_loop import Quiet
plan = load_experiment(folder / "toy.yaml")
cells = planned_micro_cells(plan, 5000.0, 1)
made = RunRequest(name="toy", cells=cells, engine="toy", experiment=plan.origin(), folder=folder / "micro")
found = calibrated(run(made, Quiet()), "toy", plan.experiment, "toy")
print(found.synchronous_loads, found.shared_core, found.fitted_on.tier_policy, found.fitted_on.engine)
"""
    (tmp_path / "toy.yaml").write_text(
        yaml.safe_dump({**TIERS, "cache": {"gpu": "1GiB", "cpu": "1GiB"}, "measure": {"tiers": ["gpu"], "samples": 1}})
    )
    assert scripted(tmp_path, body) == "True False lru toy"
