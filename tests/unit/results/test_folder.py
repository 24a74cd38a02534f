"""What is written to a run folder is read back, is never torn, and has one writer at a time."""

from pathlib import Path

import msgspec
import pytest

from harness.errors import ResultsError
from harness.records import IoTrace
from harness.results import folder as results
from harness.results.folder import RunFolder, read_rows
from harness.results.manifest import CellEntry, Manifest, read_manifest
from harness.results.summary import read_summary, summarize
from tests.support.paths import ROOT
from traces.request import RequestRecord


def made() -> Manifest:
    cells = [CellEntry(key="a"), CellEntry(key="b")]
    return Manifest(run_id="run", name="run", status="started", engine="fake", cells=cells)


def row(name: str) -> RequestRecord:
    return RequestRecord(id=name, scheduled_s=0.0, sent_s=0.0, prompt_tokens=1)


def names(path: Path) -> list[str]:
    return [one.id for one in read_rows(path)]


def test_a_new_folder_has_its_manifest_and_logs_and_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    folder = RunFolder.create(path, made())
    assert read_manifest(path) == made() and (path / "logs").is_dir()
    assert (path / "manifest.json").read_bytes().endswith(b"}\n") and not list(path.glob("*.tmp"))
    with pytest.raises(ResultsError, match="exists already; choose another --out, or go on with --resume"):
        RunFolder.create(path, made())
    folder.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match=r"cannot be made .*; choose a writable --out"):
        RunFolder.create(tmp_path / "file" / "run", made())


def test_one_process_writes_at_a_time_and_a_closed_folder_is_free(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", made())
    with pytest.raises(ResultsError, match="another process is writing to it"):
        RunFolder.resume(tmp_path / "run")
    folder.append_rows([row("1")])
    folder.close()
    folder.close()
    again = RunFolder.resume(tmp_path / "run")
    again.append_rows([row("2"), row("3")])
    again.append_rows([row("4")])
    again.close()
    assert names(tmp_path / "run") == ["1", "2", "3", "4"]
    assert (tmp_path / "run" / "rows.jsonl").stat().st_mode & 0o777 == 0o644


def test_a_closed_folder_holds_no_file_open(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    folder = RunFolder.create(tmp_path / "run", made())
    folder.append_rows([row("1")])
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 2, "the lock and the rows"
    folder.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_cell_is_found_by_its_key_and_changes_are_saved(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", made())
    folder.manifest.cell("b").status = "complete"
    folder.save_manifest()
    assert folder.manifest.cell("a").status == "waiting" and folder.manifest.cell("b").status == "complete"
    assert [cell.status for cell in read_manifest(tmp_path / "run").cells] == ["waiting", "complete"]
    folder.close()


def test_a_torn_last_line_is_left_out_and_cut_off_by_a_resumed_run(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", made()).close()
    good = msgspec.json.encode(row("1")) + b"\n"
    rows = tmp_path / "run" / "rows.jsonl"
    rows.write_bytes(good + good[:20])
    assert names(tmp_path / "run") == ["1"]
    RunFolder.resume(tmp_path / "run").close()
    assert rows.read_bytes() == good
    rows.write_bytes(good[:20])
    RunFolder.resume(tmp_path / "run").close()
    assert rows.read_bytes() == b""


def test_a_damaged_line_is_told_with_its_number(tmp_path: Path) -> None:
    good = msgspec.json.encode(row("1")) + b"\n"
    (tmp_path / "rows.jsonl").write_bytes(good + b"{}\n" + good)
    with pytest.raises(ResultsError, match=r"rows.jsonl:2: not a RequestRecord .*; restore the file"):
        names(tmp_path)
    assert names(tmp_path / "nowhere") == []


def test_rows_that_cannot_be_opened_are_told_and_the_folder_stays_free(tmp_path: Path) -> None:
    path = tmp_path / "run"
    RunFolder.create(path, made()).close()
    (path / "rows.jsonl").mkdir()
    for opening in (RunFolder.resume, names):
        with pytest.raises(
            ResultsError, match=r"rows.jsonl: cannot be opened \(Is a directory\); make it a readable file"
        ):
            opening(path)
    (path / "rows.jsonl").rmdir()
    RunFolder.resume(path).close()


def test_a_deterministic_engine_that_begins_again_writes_only_what_is_new(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", made())
    folder.append_rows([row("1"), row("2")])
    folder.expect_again()
    folder.append_rows([row("1")])
    folder.expect_again()  # of the next group of cells: it goes on, and does not begin again
    folder.append_rows([row("2"), row("3")])
    assert names(tmp_path / "run") == ["1", "2", "3"]
    folder.close()
    other = RunFolder.resume(tmp_path / "run")
    other.expect_again()
    with pytest.raises(ResultsError, match="gives other rows than the first one"):
        other.append_rows([row("1"), row("x")])
    other.close()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "holds no manifest.json; name a run's folder"),
        ("[]", "manifest.json: cannot be read"),
        ("{", "manifest.json: cannot be read"),
        ('{"schema": 3}', "has schema 3, this version reads 1 to 2"),
        ('{"schema": 0}', "has schema 0, this version reads 1"),
        ("{}", "has schema None"),
    ],
)
def test_a_folder_that_is_not_a_runs_is_refused(tmp_path: Path, content: str | None, told: str) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ResultsError, match=told):
        read_manifest(tmp_path)


def test_a_path_that_is_no_folder_is_refused_with_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="nosuch: no such folder; `harness list runs` shows"):
        read_manifest(tmp_path / "nosuch")
    (tmp_path / "rows.jsonl").touch()
    with pytest.raises(ResultsError, match=f"rows.jsonl: is a file; name the run's folder, e.g. {tmp_path}"):
        read_manifest(tmp_path / "rows.jsonl")


def test_traces_are_counted_and_read_in_their_order(tmp_path: Path) -> None:
    for number in range(11):
        target = results.new_trace_folder(tmp_path)
        assert target == tmp_path / "io" / str(number)
        target.mkdir(parents=True)
        about = IoTrace(
            cells=("a",), attempt=number, path="p", device_number=1, pids=(), zero_ns=0, started_s=0.0, ended_s=1.0,
            lost_events=0,
        )  # fmt: skip
        results.write_io_trace(target, about)
    (tmp_path / "io" / "11").mkdir()  # one that was never ended
    assert [(target.name, trace.attempt) for target, trace in results.read_traces(tmp_path)] == [
        (str(number), number) for number in range(11)
    ]


def test_a_summary_is_written_whole(tmp_path: Path) -> None:
    summary = summarize(made(), [])
    results.write_summary(tmp_path, summary)
    assert read_summary(tmp_path) == summary and not list(tmp_path.glob("*.tmp"))


def test_kept_evidence_is_no_run_and_the_error_says_what_to_read() -> None:
    with pytest.raises(ResultsError, match=r"results/io: holds no manifest.json; it is kept evidence: read .*/io\.md$"):
        read_manifest(ROOT / "results" / "io")
