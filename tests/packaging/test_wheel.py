"""The wheel, built from this tree and installed into an empty environment, away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.paths import ROOT

UV = shutil.which("uv") or shutil.which("uv", path=str(ROOT / ".uv" / "bin"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(UV is None, reason="no uv on the path or in .uv/bin; scripts/demo installs it"),
    pytest.mark.skipif(shutil.which("cargo") is None, reason="no cargo on the path; scripts/demo installs it"),
]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment that holds the wheel and what it depends on, nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    maturin = Path(sys.executable).with_name("maturin")
    run(str(maturin), "build", "--release", "--out", str(folder), cwd=ROOT)
    assert UV is not None
    run(UV, "venv", "--python", sys.executable, str(folder / "venv"), cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run(UV, "pip", "install", "--python", str(folder / "venv/bin/python"), str(wheel), cwd=folder)
    return folder / "venv/bin/harness"


def run(*command: str, cwd: Path) -> str:
    # Nothing of the checkout may help: neither its packages nor its settings.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HARNESS_", "PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_it_reports_lists_and_keeps_to_the_folder_that_it_runs_in(harness: Path, tmp_path: Path) -> None:
    help_s, report_s = [], []
    for _ in range(3):
        began = time.perf_counter()
        assert "harness run quickstart --engine sim" in run(str(harness), "--help", cwd=tmp_path)
        help_s.append(time.perf_counter() - began)
    for _ in range(2):
        began = time.perf_counter()
        said = run(str(harness), "run", "quickstart", "--engine", "sim", cwd=tmp_path)
        report_s.append(time.perf_counter() - began)
    print(f"\nharness --help: {min(help_s):.2f} s; harness run quickstart --engine sim: {min(report_s):.1f} s")
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
    reports = list(tmp_path.glob("results/*/report.html"))
    assert len(reports) == 2 and any(str(report.relative_to(tmp_path)) in said for report in reports)
    assert "quickstart" in reports[0].read_text()

    listed = run(str(harness), "list", cwd=tmp_path)
    for folder in ("experiments", "models", "hardware"):
        assert all(f"  {file.stem} " in listed for file in (ROOT / "configs" / folder).glob("*.yaml"))
    assert listed.count("results/quickstart-sim-") == 2
    assert "tiny_conversation" in run(str(harness), "traces", "list", cwd=tmp_path)


def test_files_that_no_code_imports_travel_too(harness: Path) -> None:
    (packages,) = (harness.parent.parent / "lib").glob("python*/site-packages")
    for pattern in ("harness/**/*.bt", "harness/**/*.j2", "harness/**/*.css", "harness/**/*.js", "traces/data/tiny*"):
        here = {path.relative_to(ROOT) for path in ROOT.glob(pattern)}
        there = {path.relative_to(packages) for path in packages.glob(pattern)}
        assert here and here == there
    assert not (packages / "tests").exists() and not (packages / "configs").exists()
