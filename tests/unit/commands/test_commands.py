"""The command line as declared: every verb is found, its help is its function's, names and mistakes are told."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness import __version__
from harness.commands.app import VERBS, make_app
from harness.engines import ENGINES
from harness.experiment.read import load_experiment
from tests.support.paths import ROOT


def command(*tokens: str) -> int:
    try:
        return int(make_app(tokens)(tokens, exit_on_error=False, print_error=False))
    except SystemExit as done:
        return int(done.code or 0)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_has_the_first_line_of_its_function(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, function, text = VERBS[verb]
    found = inspect.getdoc(getattr(importlib.import_module(f"harness.commands.{module}"), function))
    assert found is not None and found.splitlines()[0] == text
    command(*verb.split(), "--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert f"harness {verb}" in shown and text in shown


def test_a_reader_that_has_enough_ends_a_command_quietly() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "harness", "list", "models", "--json"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_every_engine_can_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    command("run", "--help")
    shown = capsys.readouterr().out
    assert all(name in shown for name in ENGINES)


def test_the_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    command("--version")
    assert capsys.readouterr().out.strip() == __version__
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_a_shipped_experiment_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = load_experiment(Path("quickstart"))
    assert plan.path == ROOT / "configs/experiments/quickstart.yaml"
    assert load_experiment(Path("cpu_vllm")).path == ROOT / "configs/validation/cpu_vllm.yaml"
    Path("quickstart").write_text(plan.path.read_text().replace("name: quickstart", "name: mine"))
    assert load_experiment(Path("quickstart")).experiment.name == "mine", "a file of that name comes first"


def test_list_shows_what_ships_and_the_runs_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HARNESS_RESULTS", raising=False)
    assert command("list") == 0
    shown = capsys.readouterr().out
    for folder in ("experiments", "models", "hardware"):
        assert all(f"  {path.stem} " in shown for path in (ROOT / "configs" / folder).glob("*.yaml"))
    assert "runs: none" in shown
    quick = ("--set", "measure.samples=1", "--set", "measure.until=null", "--set", "measure.tiers=[gpu]")
    assert command("run", "quickstart", "--engine", "sim", "--out", "results/first", *quick) == 0
    capsys.readouterr()
    assert command("list", "runs") == 0
    shown = capsys.readouterr().out
    assert "results/first" in shown and "complete" in shown and "experiments" not in shown
    assert command("list", "runs", "--json") == 0
    [[kind, [run]]] = json.loads(capsys.readouterr().out).items()
    assert kind == "runs" and run["name"] == "results/first" and run["engine"] == "sim" and run["points"] == 1


def test_lists_answer_programs_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("list", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["experiments", "models", "presets", "runs"]
    for kind, folder in (("experiments", "experiments"), ("models", "models"), ("presets", "hardware")):
        assert [each["name"] for each in found[kind]] == sorted(
            p.stem for p in (ROOT / "configs" / folder).glob("*.yaml")
        )
    assert all(each["kv_bytes_per_token"] > 0 for each in found["models"])
    assert command("traces", "list", "--json") == 0
    traces = json.loads(capsys.readouterr().out)
    assert traces["mooncake_conversation"]["format"] and traces["tiny_conversation"]["url"] is None
    assert command("device", "list", "--json") == 0
    assert isinstance(json.loads(capsys.readouterr().out), list)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (("run",), "no experiment given"),
        (("run", "quickstart"), "no engine given; add --engine with one of sim"),
        (("run", "nosuch", "--engine", "sim"), "`harness list experiments`"),
        (("report",), "no folder given"),
        (("device", "destroy"), "name one device, or say --all"),
        (("device", "create", "x", "--bandwidth", "fast"), "--bandwidth: 'fast' is not a bandwidth"),
        (("io", "replay", "nosuch", "."), "nosuch"),
        (("calibrate", "quickstart", "--engine", "sim", "-o", "a.yaml", "--budget", "soon"), "--budget: 'soon'"),
    ],
)
def test_a_mistake_is_one_line(
    tokens: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert command(*tokens) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())
