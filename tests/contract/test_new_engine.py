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

from harness.results.folder import read_manifest, read_rows
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
    manifest = read_manifest(out)
    assert {row.verdict for row in read_rows(out) if row.phase == "measure"} == {"proven"}
    assert "toy-cache" in json.dumps(_plain(manifest)) and '"engine": [%d]' % core in json.dumps(_plain(manifest))
    assert "prediction, not a measurement" not in (out / "report.html").read_text()


def _plain(manifest: Any) -> Any:
    return json.loads(manifest if isinstance(manifest, str) else json.dumps(manifest, default=str))


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


def test_it_is_validated_by_the_packs_that_stand_for_it(tmp_path: Path) -> None:
    words = ("validate", str(tmp_path / "toy.yaml"), "--engine", "toy", "--calibration", "cpu-2core")
    out = tmp_path / "validation"
    done = harness(tmp_path, *words, "--out", str(out))
    # The made-up times of the toy are not those of the calibrated machine; or the machine is not the calibrated one.
    assert done.returncode in (1, 2, 3), done.stderr
    [cell] = read_manifest(out / "sim")["cells"]
    text = json.dumps(cell, default=str)
    assert '"tier_policy": "lru"' in text
    refused = harness(tmp_path, *words, "--out", str(tmp_path / "none"), engines={"toy": {"packs": False}})
    assert refused.returncode == 2 and "engine toy: the simulator has no packs for it" in refused.stderr


def test_it_is_calibrated_by_its_own_traits(tmp_path: Path) -> None:
    script = (
        "import tests.support.toy.__main__\n"
        "from pathlib import Path\n"
        "from harness.calibration.calibrate import calibrated, planned_micro_cells\n"
        "from harness.experiment.read import load_experiment\n"
        "from harness.measure.run import RunRequest, run\n"
        "from tests.unit.measure.test_run_loop import Quiet\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "plan = load_experiment(folder / 'toy.yaml')\n"
        "cells = planned_micro_cells(plan, 61.0, 1)\n"
        "made = RunRequest(name='toy', cells=cells, engine='toy', experiment=plan.origin(), folder=folder / 'micro')\n"
        "found = calibrated(run(made, Quiet()), 'toy', plan.experiment, 'toy')\n"
        "print(found.synchronous_loads, found.shared_core, found.fitted_on.tier_policy, found.fitted_on.engine)\n"
    )
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump({**TIERS, "cache": {"gpu": "1GiB", "cpu": "1GiB"}}))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "True False lru toy"
