"""`harness report` of evidence that is kept in place of run folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from harness.results.kept import read_kept_io
from tests.support.paths import ROOT
from tests.unit.commands.test_commands import command
from tests.unit.report.test_report_html import Page

RESULTS = ROOT / "results"


def copied(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(RESULTS / name, tmp_path / name, ignore=shutil.ignore_patterns("report.html")))


@pytest.mark.parametrize("named", ["", "io.json"])
def test_kept_traces_have_a_page_with_their_charts_and_figures(
    named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied("io", tmp_path)
    assert command("report", str(folder / named)) == 0
    said = capsys.readouterr().out
    assert "file_system=btrfs" in said and str(folder / "report.html") in said
    page = Page(folder / "report.html")
    assert page.figures() == ["io-timeline", "io-order", "io-sizes", "io-latency", "io-split"]
    read = json.loads((folder / "io.json").read_text())["io"]["traces"][0]["block"]["read"]["requests"]
    assert ["read: requests", f"{read:,}", "1,319", "1,918"] in page.rows["io"]
    # The table of every run that io.md has, with its figures.
    lines = [line for line in (folder / "io.md").read_text().splitlines() if "10 proven" in line]
    shown = [" ".join(row) for row in page.rows["figures"] if row[-1] == "10 proven"]
    assert len(lines) == len(shown) == 13
    assert shown == [" ".join(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    assert "AMD EPYC" in page.text["environment"] and "vllm 0.32.0" in page.text[""]


def test_a_kept_validation_has_its_table_and_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied("validation/published", tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert command("report", str(folder)) == 0
    assert "points: " in capsys.readouterr().out
    assert "errors" in Page(folder / "report.html").figures()
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "report.html"} == before
    # A page that is there may draw rows that the document lacks.
    (folder / "report.html").write_text("its command's own")
    assert command("report", str(folder / "validation.json"), "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "published"
    assert (folder / "report.html").read_text() == "its command's own"


def test_a_damaged_file_is_named_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied("io", tmp_path)
    content = json.loads((folder / "io.json").read_text())
    del next(iter(content["summaries"].values()))[0]["tiers"]["cpu"]["tokens"]["cached"]
    (folder / "io.json").write_text(json.dumps(content))
    assert command("report", str(folder)) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "io.json: cannot be read as kept evidence" in said and "restore the file" in said


def test_the_reader_has_every_run() -> None:
    kept = read_kept_io(RESULTS / "io")
    assert [len(summary.cells) for summary in kept.summaries] == [3, 2, 3]
    assert kept.summaries[0].rows.measured == kept.summaries[0].rows.proven == 60
