"""The table of docs/mlperf.md: each of its command lines runs here for a moment, and prints what it says."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.commands.app import main
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "mlperf.md"
# The lines' own loads are seconds of work each. The same lines ask less, so that they end whatever else runs here.
_LESS = ["--set", "workload.warm_up=null", "--set"]
SHORT = {
    "run": [*_LESS, "workload.turns=2", "--set", "measure.trials=1"],
    "sweep": [*_LESS, "workload.turns=2", "--set", "measure.trials=1"],
    "suite": [*_LESS, "workload.turns=2"],
    "capacity": [*_LESS, "workload.turns=4", "--most", "4", "--repeats", "2"],
    "export": [],
}
PRINTS = {
    "run": "entries found:",
    "sweep": "decode read",
    "suite": "tok/s of I/O time",
    "capacity": "workload.users",
    "export": "rows of loads",
}
# Where no such load keeps the targets, or a test could not run, the code says so; neither is a mistake.
CODES = {"capacity": (0, 1)}


class Row(NamedTuple):
    number: str
    original: str
    commands: tuple[str, ...]


def table() -> Iterator[Row]:
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 4 and "`harness " in cells[2]:
            yield Row(cells[0].strip("| "), cells[1], tuple(re.findall(r"`(harness [^`]+)`", cells[2])))


ROWS = list(table())
HERE = list(dict.fromkeys(row.commands for row in ROWS if "--engine vllm" not in row.commands[0]))


def test_every_line_of_the_proposal_has_its_row() -> None:
    assert [int(row.number) for row in ROWS if row.number] == list(range(1, 30))
    assert len(ROWS) == 37 and all(row.commands for row in ROWS)


@pytest.mark.parametrize("commands", HERE, ids=" && ".join)
def test_a_line_runs_and_prints(
    commands: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HARNESS_RESULTS", raising=False)
    turns = [{"from": who, "value": f"{who} says " * 40} for who in ("human", "gpt") * 4]
    Path("sharegpt.json").write_text(
        json.dumps([{"id": f"c{number}", "conversations": turns} for number in range(1000)])
    )
    for command in commands:
        tokens = shlex.split(command)
        less = [word.replace("turns=2", "limit=6") if "kind: trace" in command else word for word in SHORT[tokens[1]]]
        monkeypatch.setattr(sys, "argv", [*tokens, *less])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        assert ended.value.code in CODES.get(tokens[1], (0,)), told.err
        assert PRINTS[tokens[1]] in told.out and "Traceback" not in told.err
