"""What commands print: whole lines into pipes, JSON alone, a report that can be opened."""

from __future__ import annotations

import json
import shutil
import webbrowser
from pathlib import Path

import pytest

from harness.commands.output import OutputChoice, name_report
from harness.commands.report import report
from harness.commands.run import run
from harness.commands.validate import compare
from tests.unit.commands.test_commands import command

QUICK = ["measure.samples=5", "workload.prompt_tokens=513"]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "quick"
    assert run(Path("quickstart"), engine="sim", overrides=QUICK, out=folder) == 0
    return folder


def test_lines_in_a_pipe_are_whole(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(done) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) > 80
    assert lines[-1] == f"report: {done / 'report.html'}"


def test_json_is_the_whole_output(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(done, answer=OutputChoice(as_json=True)) == 0
    assert json.loads(capsys.readouterr().out) == [json.loads((done / "summary.json").read_text())]
    assert compare(done, done, out=tmp_path / "same", answer=OutputChoice(as_json=True)) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "pass"
    out = tmp_path / "again"
    assert run(Path("quickstart"), engine="sim", overrides=QUICK, out=out, answer=OutputChoice(as_json=True)) == 0
    assert json.loads(capsys.readouterr().out)["run_id"] == "again"


def test_a_report_is_opened_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []

    def no_browser(url: str) -> bool:
        opened.append(url)
        return False

    monkeypatch.setattr(webbrowser, "open", no_browser)
    name_report(tmp_path)
    assert opened == []
    name_report(tmp_path, browse=True)
    assert opened == [(tmp_path / "report.html").resolve().as_uri()]
    assert "no browser could be started; open" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_told_in_one_line(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kept"
    shutil.copytree(done, folder)
    (folder / "summary.json.tmp").mkdir()
    assert report(folder) == 2
    said = capsys.readouterr().err
    assert "its report cannot be written (Is a directory)" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "tokens",
    [
        ("init", "/proc/mine.yaml", "--engine", "sim"),
        ("calibrate", "quickstart", "--engine", "sim", "-o", "/proc/c.yaml"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tokens: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(*tokens) == 2
    said = capsys.readouterr().err
    assert "cannot be written" in said and said.count("\n") == 1 and not list(tmp_path.iterdir())
