"""A new engine is a folder and a dict entry, and so is a new cache server: the toys run by nothing but the seams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.results.folder import read_rows
from simulator.calibration import load_calibration
from tests.support.paths import ROOT
from tests.support.toy.command import told

TIERS: dict[str, Any] = {
    "name": "toy",
    "workload": {"kind": "prefix", "prompt_tokens": 1025, "hit_rate": 0.5},
    "measure": {"tiers": ["recompute", "gpu", "cpu"], "samples": 3},
    "cache": {"gpu": "1GiB", "cpu": "1GiB", "disk": {"capacity": "2GiB"}},
}


def refusal(folder: Path, *more: str, **config: Any) -> str:
    """The line that `harness run --engine toy` ends with; it has made no folder."""
    done = told(folder, "run", "--engine", "toy", "--out", str(folder / "run"), *more, **{**TIERS, **config})
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert not (folder / "run").exists()
    return done.stderr


def test_it_runs_pinned_and_is_resolved_by_its_own_words(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    out, toy = tmp_path / "run", {"cores": {"engine": [core], "client": [core]}}
    done = told(tmp_path, "run", "--engine", "toy", "--out", str(out), **TIERS, engines={"toy": toy})
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
          "requests": 2, "prompt_tokens": 513, "concurrency": 1}, "engines": {"sim": {"mode": "tiers"}}},
          "tiers without an engine are for --engine sim, not toy"),
        ({"deployment": {"instances": 2}}, "engine toy runs one instance"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_before_it_starts(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    assert words in refusal(tmp_path, **config)


SIZES: dict[str, Any] = {
    **TIERS,
    "cache": {"gpu": "1GiB", "cpu": "1GiB"},
    "sizes": {
        "fitted": {},
        "tiers": {"workload.prompt_tokens": 2049, "measure.samples": 6},
        "load": {
            "workload": {"kind": "synthetic", "requests": 12, "prompt_tokens": 513, "concurrency": 1},
            "measure": {},
        },
    },
}
FIT = ("calibrate", "--engine", "toy", "--size", "fitted", "--budget", "10min")


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `harness calibrate` makes of the toy."""
    folder = tmp_path_factory.mktemp("calibrated")
    done = told(folder, *FIT, "-o", str(folder / "toy-cpu.yaml"), "--run", str(folder / "run"), **SIZES)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return folder / "toy-cpu.yaml"


def test_it_is_calibrated_by_its_own_packs(calibration: Path) -> None:
    found = load_calibration(calibration)
    assert (found.fitted_on.engine, found.fitted_on.engine_policy) == ("toy", "toy-1")
    assert found.fitted_on.tier_policy == "toy-cache-2" and found.fitted_on.versions == {"toy": "1", "toy-cache": "2"}
    assert found.good and not found.synchronous_loads
    # The toy computes a token in a millisecond, and never polls.
    assert found.constant("token_s") == pytest.approx(1e-3, rel=0.02) and found.constants["poll_s"] is None


def test_its_traits_are_those_of_the_fit(calibration: Path) -> None:
    """Loads that stop the engine are not what the toy's points show, and the fit says so."""
    script = """
import tests.support.toy.__main__
from pathlib import Path
from harness.calibration.calibrate import calibrated
from harness.experiment.read import load_experiment
experiment = load_experiment(Path("toy.yaml"), ["engines.toy.synchronous_loads=true"]).experiment
found = calibrated(Path("run"), "odd", experiment, "toy")
print(found.synchronous_loads, found.good)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=calibration.parent, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "False"], done.stderr[-2000:]


@pytest.mark.parametrize(("slowness", "code", "verdict"), [(1.0, 0, "pass"), (1.3, 1, "fail")])
def test_it_is_validated_as_a_whole(
    calibration: Path, tmp_path: Path, slowness: float, code: int, verdict: str
) -> None:
    """The toy that was calibrated passes; one that is slower than it was then does not."""
    words = ("--engine", "toy", "--calibration", str(calibration), "--size", "tiers", "--size", "load")
    config = {**SIZES, "engines": {"toy": {"slowness": slowness}}}
    done = told(tmp_path, "validate", *words, "--out", str(tmp_path / "out"), **config)
    assert done.returncode == code, done.stdout + done.stderr
    content = json.loads((tmp_path / "out" / "validation.json").read_text())
    assert (content["reference"]["engine"], content["candidate"]["engine"]) == ("toy", "sim")
    assert [point["tier"] for point in content["points"]] == ["recompute", "gpu", "cpu", "load"]
    assert {point["verdict"] for point in content["points"]} == {content["verdict"]} == {verdict}
    counts = [figure for point in content["points"] for figure in point["counts"]]
    assert len(counts) == 14 and {figure["verdict"] for figure in counts} == {"pass"}
    [*_, cell] = json.loads((tmp_path / "out" / "sim" / "manifest.json").read_text())["cells"]
    packs = {key: cell["config"]["engines"]["sim"][key] for key in ("engine_policy", "tier_policy")}
    assert packs == {"engine_policy": "toy-1", "tier_policy": "toy-cache-2"}


def test_without_packs_it_is_neither_calibrated_nor_validated(tmp_path: Path) -> None:
    config = {**SIZES, "engines": {"toy": {"packs": False}}}
    out = str(tmp_path / "out")
    fit, judge = (*FIT, "-o", f"{out}.yaml", "--run", out), ("validate", "--engine", "toy", "--out", out)
    for words in (fit, (*judge, "--size", "load", "--calibration", "cpu-2core")):
        done = told(tmp_path, *words, **config)
        assert done.returncode == 2 and done.stderr.startswith("harness: engine toy: the simulator has no packs for it")
        assert not Path(out).exists()
