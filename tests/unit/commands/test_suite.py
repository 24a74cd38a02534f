"""`harness suite` and `harness export`: what runs, what is skipped and why, and a table that spreadsheets read."""

import contextlib
import io
import json
from pathlib import Path

import pandas as pd
import pytest

from harness.commands.export import export
from harness.commands.output import OutputChoice
from harness.commands.suite import suite
from harness.results.export import COLUMNS
from harness.results.folder import read_rows
from simulator.gpu_memory import why_no_gpu

# So long that there are requests however little of its cores a busy machine leaves to it.
SECONDS = 5
SMALL = [f"workload.duration={SECONDS}s", "workload.warm_up=200ms", "workload.turns=100", "workload.users=2",
         "engines.sim.storage.reserve=0B"]  # fmt: skip


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder, and what the command prints. Its tests only read."""
    folder, asked = tmp_path_factory.mktemp("ran") / "suite", OutputChoice(as_json=True)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert suite("mlperf", only="gpu,cpu,cpu_storage", overrides=SMALL, out=folder, answer=asked) == 0
    return folder, told.getvalue()


@pytest.mark.skipif(why_no_gpu() is None, reason="there is a GPU here, and no test is skipped")
def test_what_this_machine_lacks_is_skipped_with_the_reason(ran: tuple[Path, str]) -> None:
    told = json.loads(ran[1])
    assert [row["test"] for row in told["tests"]] == ["cpu", "cpu_storage"]
    assert list(told["skipped"]) == ["gpu"] and "GPU memory needs" in told["skipped"]["gpu"]
    for row in told["tests"]:
        assert row["requests"] > 0 and row["output_tokens_per_s"] > 0 and row["end_to_end_p95_s"] > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"only": "cpu,tape"}, "--only tape: is no test of the suite"),
        ({"only": "storage", "overrides": ["cache.disk.path=/nowhere/at/all"]}, "cache.disk"),
        ({"only": "storage", "overrides": ["workload.personas=robots"]}, "no set of personas"),
        ({"size": "huge"}, "huge"),
    ],
)
def test_bad_words_are_refused_on_one_line(
    changes: dict[str, object], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert suite("mlperf", **{"out": tmp_path / "out", **changes}) == 2  # type: ignore[arg-type]
    said = capsys.readouterr().err.strip()
    assert words in said and len(said.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_every_format_has_the_benchmarks_columns(ran: tuple[Path, str], tmp_path: Path) -> None:
    folder, out = ran[0], {name: tmp_path / f"all.{name}" for name in ("csv", "xlsx", "parquet")}
    assert export(folder, folder, **out) == 0  # type: ignore[arg-type]
    tables = [pd.read_csv(out["csv"]), pd.read_excel(out["xlsx"]), pd.read_parquet(out["parquet"])]
    told = {row["test"]: row for row in json.loads(ran[1])["tests"]}
    for table in tables:
        assert list(table.columns) == ["Run", "Cell", "State", *COLUMNS] and len(table) == 2 * len(told)
        for _, row in table.iterrows():
            test = told[row["Cell"].removeprefix("test=")]
            assert row["Avg Throughput (tok/s)"] == pytest.approx(test["output_tokens_per_s"])
            assert row["Storage Throughput (tok/s)"] == pytest.approx(test["per_io_time_tokens_per_s"])
            assert (
                row["Num Users"] == 2
                and row["Model"] == "tiny-llama"
                and row["Duration (s)"] == pytest.approx(SECONDS - 0.2)
            )


def test_a_spreadsheet_has_rows_and_settings_too(ran: tuple[Path, str], tmp_path: Path) -> None:
    assert export(ran[0], xlsx=tmp_path / "all.xlsx") == 0
    book, rows = pd.read_excel(tmp_path / "all.xlsx", sheet_name=None), list(read_rows(ran[0]))
    assert list(book) == ["summary", "rows", "settings"]
    assert list(book["rows"]["id"]) == [row.id for row in rows]
    assert list(book["rows"]["sent_s"]) == pytest.approx([row.sent_s for row in rows])
    facts = {(fact.Cell, fact.Fact): fact.Value for fact in book["settings"].fillna("").itertuples()}
    assert facts["", "engine"] == "sim" and facts["", "status"] == "complete" and facts["", "seed"] == 42
    assert facts["test=cpu", "config.model"] == "tiny-llama" and facts["test=cpu", "resolved.cpu_bytes"] == 2**30


def test_what_is_set_for_some_tests_need_not_go_with_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tests that set a number of users cannot have a trace, which has none."""
    path = tmp_path / "sharegpt.json"
    turns = [{"from": who, "value": f"{who} says " * 40} for who in ("human", "gpt") * 2]
    path.write_text(json.dumps([{"id": f"c{number}", "conversations": turns} for number in range(6)]))
    trace = f"workload={{kind: trace, trace: {path}, active_sessions: 3}}"
    asked = {"overrides": [trace], "out": tmp_path / "out", "answer": OutputChoice(as_json=True)}
    assert suite("mlperf", only="cpu", **asked) == 0  # type: ignore[arg-type]
    [row] = json.loads(capsys.readouterr().out)["tests"]
    assert row["requests"] == 12 and 0 < row["hit_rate"] < 1
    assert suite("mlperf", only="cpu,saturation", **{**asked, "out": tmp_path / "other"}) == 2  # type: ignore[arg-type]
    assert "workload.users" in capsys.readouterr().err


def test_the_page_has_one_table_of_the_tests(ran: tuple[Path, str]) -> None:
    page = (ran[0] / "report.html").read_text()
    tests = page[page.index('id="tests"') : page.index('id="evidence"')]
    for row in json.loads(ran[1])["tests"]:
        assert f'<th scope="row">{row["test"]}</th>' in tests and f"<td>{row['requests']:,}</td>" in tests
    findings = page[page.index('id="findings"') : page.index('id="tests"')]
    assert "latency (of it the device)" not in findings and "latency (of it the device)" in tests


def test_a_row_a_request(ran: tuple[Path, str], tmp_path: Path) -> None:
    assert export(ran[0], parquet=tmp_path / "rows.parquet", requests=True) == 0
    table, rows = pd.read_parquet(tmp_path / "rows.parquet"), list(read_rows(ran[0]))
    assert len(table) == len(rows) and list(table["id"]) == [row.id for row in rows]
    assert list(table["prompt_tokens"]) == [row.prompt_tokens for row in rows]
    assert list(table["cpu_tokens"]) == [row.tokens_by_tier.get("cpu") for row in rows]


@pytest.mark.parametrize(
    ("folders", "name", "words"),
    [
        ([], "a.csv", "no folder given"),
        (["none"], None, "no table asked for"),
        (["none"], "a.txt", "has to end in .csv"),
        (["none"], "taken.csv", "exists already"),
        (["none"], "new.csv", "no such folder"),
    ],
)
def test_exports_are_refused_on_one_line(
    folders: list[str], name: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken.csv").write_text("")
    code = export(*(tmp_path / each for each in folders), csv=None if name is None else tmp_path / name)
    said = capsys.readouterr().err.strip()
    assert code == 2 and words in said and len(said.splitlines()) == 1
