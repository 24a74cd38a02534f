"""Every command line in README and docs: run where it can be, else its verb, options and files are checked.

Commands stand in fenced `sh` blocks, one a line; what is after '  # ' or two blanks and # is a comment.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.commands.app import VERBS, make_app
from harness.experiment.read import load_experiment
from tests.support.paths import ROOT

PAGES = sorted([ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
# Lines that begin so are not run here; each with the reason. Their verb, options and experiment are still checked.
NOT_RUN = {
    "harness init mine.yaml --engine vllm": "a folder and a disk of the reader's; tests/unit/commands runs init",
    "--attach": "servers of the reader's; tests/real attaches",
    "--engine vllm": "a real engine: 6 GB of packages, and minutes",
    "--engine sglang": "a real engine: 6 GB of packages, and minutes",
    "harness serve": "it serves until it is interrupted; tests/unit/serving runs it",
    "harness validate cpu_vllm": "a real engine",
    "harness device create": "root",
    "harness device destroy --all": "root; it would remove devices of other runs",
    "harness traces fetch": "a download",
    "harness run mooncake_trace": "a trace that has to be downloaded first",
    "harness io": "a traced run, which takes root and bpftrace",
    "harness run --resume": "an unfinished run; tests/unit/measure resumes one",
    "harness run my_experiment.yaml": "the reader's own file",
    "--set engines.sim.hardware=mine.yaml": "the reader's own calibration",
    "harness validate published": "tests/unit/validation runs it",
    "harness sweep cluster_routing": "a minute; tests/unit/measure runs clusters",
    "harness capacity": "minutes; tests/unit/measure searches on the simulator",
    "harness suite": "a minute and more; tests/unit/commands runs it",
    "harness export": "runs of the reader's; tests/unit/commands exports some",
    "harness sweep": "half a minute and more; tests/unit/measure runs sweeps",
}
# What other programs' lines begin with, and what holds them: a script here is a file with a --help or a usage line.
OTHERS = ("./scripts/", "scripts/", "uv ")


class Line(NamedTuple):
    page: str
    text: str


def lines() -> Iterator[Line]:
    for page in PAGES:
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for text in block.splitlines():
                if command := re.split(r"\s+# ", text)[0].strip():
                    yield Line(page.relative_to(ROOT).as_posix(), command)


LINES = list(dict.fromkeys(lines()))
HARNESS = [line for line in LINES if line.text.startswith("harness ")]


def reason(text: str) -> str | None:
    return next((why for part, why in NOT_RUN.items() if part in text), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with two finished runs, named as the docs name them."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("before", "after"):
        run(folder, f"harness run quickstart --engine sim --out results/{name}")
    # Every page writes mine.yaml first; pages are tested in any order.
    run(folder, "harness init mine.yaml --engine sim --hardware cpu-2core")
    return folder


def run(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HARNESS_")}
    command = [sys.executable, "-m", *shlex.split(text)]
    return subprocess.run(
        command, cwd=folder, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300
    )


def test_there_are_commands_on_every_page_that_is_about_them() -> None:
    assert len(HARNESS) > 30
    pages = {line.page for line in LINES}
    named = ("getting-started", "experiments", "engines", "storage", "simulator", "validation", "run-folder")
    assert pages >= {"README.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in named)}


@pytest.mark.parametrize("line", [line for line in HARNESS if reason(line.text) is None], ids=lambda line: line.text)
def test_a_command_that_can_run_here_does(line: Line, folder: Path) -> None:
    again = line.text.startswith("harness init")
    done = run(folder, f"{line.text} --force" if again else line.text)
    # doctor's code says whether this machine lacks something, not whether the command works.
    codes = (0, 1) if line.text == "harness doctor" else (0,)
    assert done.returncode in codes, f"{line.page}: {line.text}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.strip() or line.text == "harness device list", "only that list may be empty"


@pytest.mark.parametrize("line", [line for line in HARNESS if reason(line.text)], ids=lambda line: line.text)
def test_a_command_that_cannot_run_here_is_one(line: Line) -> None:
    tokens = shlex.split(line.text)[1:]
    verb = next((name for name in (" ".join(tokens[:2]), tokens[0]) if name in VERBS), None)
    assert verb is not None, f"{line.page}: {line.text}: no such verb"
    _, bound, _ = make_app(tokens).parse_args(tokens, exit_on_error=False, print_error=False)
    if verb in ("run", "sweep", "calibrate", "serve") and bound.args and bound.args[0] != Path("my_experiment.yaml"):
        overrides = [text for text in bound.kwargs.get("overrides") or [] if "mine.yaml" not in text]
        load_experiment(bound.args[0], overrides, bound.kwargs.get("size"))


@pytest.mark.parametrize("line", [line for line in LINES if line not in HARNESS], ids=lambda line: line.text)
def test_another_program_is_there(line: Line) -> None:
    first = shlex.split(line.text)[0]
    assert line.text.startswith(OTHERS), f"{line.page}: {line.text}: begins with none of {OTHERS}"
    if first == "uv":
        (path,) = [part for part in shlex.split(line.text) if part.startswith("tests/")] or ["tests"]
        assert (ROOT / path).exists()
        return
    script = ROOT / first
    assert script.is_file() and os.access(script, os.X_OK)
    assert shutil.which("bash") is not None
    done = subprocess.run([script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and Path(first).name in done.stdout


def test_scripts_named_in_a_sentence_are_there() -> None:
    for page in PAGES:
        for name in re.findall(r"`(?:\./)?scripts/(\w+)", page.read_text()):
            assert (ROOT / "scripts" / name).is_file(), f"{page.name}: scripts/{name}"


def test_links_lead_to_files() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not broken, "\n".join(broken)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_picture_is_small() -> None:
    assert (ROOT / "docs/images/report.png").stat().st_size < 200_000


def test_a_reason_is_for_some_line() -> None:
    unused = [part for part in NOT_RUN if not any(part in line.text for line in HARNESS)]
    assert not unused, f"NOT_RUN names what no page has: {unused}"
