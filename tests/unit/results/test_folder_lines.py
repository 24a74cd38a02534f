"""What a run folder does where a line is there already, a file refuses, or a row becomes a table's."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from harness.errors import EngineError, ResultsError
from harness.records import Counters, Sample
from harness.results import folder as results
from harness.results.folder import RunFolder, UnwrittenFolder, flat_row, read_rows, read_samples, row_fields
from harness.results.manifest import read_manifest
from tests.unit.results.test_folder import made, names, row
from traces.request import RequestRecord
from traces.tiers import sources


def sample(index: int) -> Sample:
    return Sample(
        cell="a",
        tier="gpu",
        index=index,
        started_s=0.0,
        ended_s=1.0,
        verdict=None,
        observed=Counters(),
        expected=Counters(),
    )


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses what would make a file longer, after it has taken what fits."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_long_manifest_is_saved_once_a_second_where_the_engine_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunFolder.create(tmp_path / "run", made()).close()
    now = [1.5]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    folder = RunFolder.resume(tmp_path / "run")
    folder.expect_again()

    def saved(at_s: float) -> float:
        now[0] = at_s
        folder.manifest.cell("a").overrides = {"at_s": at_s}
        folder.save_cells()
        found: float = read_manifest(tmp_path / "run").cell("a").overrides["at_s"]
        return found

    assert [saved(at_s) for at_s in (1.5, 2.25, 2.5, 3.25, 5.0)] == [1.5, 1.5, 2.5, 2.5, 5.0]
    folder.close()


def test_where_no_engine_begins_again_a_cell_is_saved_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    folder = RunFolder.create(tmp_path / "run", made())
    folder.manifest.cell("b").status = "complete"
    folder.save_cells()
    assert read_manifest(tmp_path / "run").cell("b").status == "complete"
    folder.close()


def test_what_a_worker_kept_is_appended_once_also_by_a_run_that_begins_again(tmp_path: Path) -> None:
    kept = UnwrittenFolder(tmp_path / "run", made())
    kept.append_rows([row("1"), row("2")])
    kept.append_sample(sample(0))
    kept.append_sample(sample(1))
    first = RunFolder.create(tmp_path / "run", made())
    first.append_encoded(*kept.encoded())
    first.close()
    kept.append_rows([row("3")])
    kept.append_sample(sample(2))
    again = RunFolder.resume(tmp_path / "run")
    again.expect_again()
    again.append_encoded(*kept.encoded())
    again.close()
    assert names(tmp_path / "run") == ["1", "2", "3"]
    assert [one.index for one in read_samples(tmp_path / "run")] == [0, 1, 2]


def test_rows_that_a_file_does_not_take_whole_are_not_there_at_all(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", made())
    folder.append_rows([row("1")])
    before = (tmp_path / "run" / "rows.jsonl").read_bytes()
    with files_of_at_most(len(before) + 20), pytest.raises(EngineError, match=r"cannot be written \(File too large\)"):
        folder.append_rows([row("2")])
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == before
    folder.append_rows([row("2")])
    folder.close()
    assert names(tmp_path / "run") == ["1", "2"]


@pytest.mark.parametrize("name", ["rows.jsonl", "manifest.json.tmp"])
def test_a_file_that_cannot_be_written_ends_the_run_in_one_line(tmp_path: Path, name: str) -> None:
    folder = RunFolder.create(tmp_path / "run", made())
    (tmp_path / "run" / name).mkdir()
    with pytest.raises(EngineError, match=r"run: cannot be written \(Is a directory\); make room there") as error:
        folder.append_rows([row("1")])
        folder.save_manifest()
    folder.close()
    assert len(str(error.value).splitlines()) == 1


def test_a_folder_whose_lock_cannot_be_made_is_refused(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", made()).close()
    (tmp_path / "run" / ".lock").unlink()
    (tmp_path / "run" / ".lock").mkdir()
    with pytest.raises(ResultsError, match=r"run: cannot be written \(Is a directory\); make it writable, or copy it"):
        RunFolder.resume(tmp_path / "run")


def test_a_folder_of_no_run_is_new_and_its_parents_are_made(tmp_path: Path) -> None:
    results.make_folder(tmp_path / "deep" / "verdict")
    assert (tmp_path / "deep" / "verdict").is_dir()
    with pytest.raises(ResultsError, match=r"verdict: exists already; choose another --out$"):
        results.make_folder(tmp_path / "deep" / "verdict")
    (tmp_path / "file").touch()
    with pytest.raises(ResultsError, match=r"cannot be made \(Not a directory\); choose a writable --out$"):
        results.make_folder(tmp_path / "file" / "verdict")


WHOLE = RequestRecord(
    id="w",
    scheduled_s=0.0,
    sent_s=1.0,
    prompt_tokens=3,
    output_tokens=3,
    first_token_s=1.5,
    last_token_s=2.5,
    token_s=(1.5, 2.0, 2.5),
    tokens_by_tier={"gpu": 2, "computed": 1},
)


def test_a_row_of_a_table_has_its_fields_a_column_a_source_and_its_times() -> None:
    fields = row_fields(WHOLE)
    assert "client" not in fields and "tokens_by_tier" not in fields
    assert {source: fields[f"{source}_tokens"] for source in sources()} == {
        source: {"gpu": 2, "computed": 1}.get(source) for source in sources()
    }
    assert row_fields(msgspec.structs.replace(WHOLE, client=1))["client"] == 1
    line = flat_row(WHOLE)
    times = {"token_s": [1.5, 2.0, 2.5], "ttft_s": 0.5, "e2e_s": 1.5, "tpot_s": 0.5}
    assert line == fields | times


def test_a_table_names_the_client_only_where_several_sent(tmp_path: Path) -> None:
    results.write_parquet(tmp_path, [WHOLE])
    table = pq.read_table(tmp_path / "requests.parquet").to_pylist()
    assert table == [flat_row(WHOLE)]
    of_two = [msgspec.structs.replace(WHOLE, client=1), WHOLE]
    results.write_parquet(tmp_path, of_two)
    assert [line["client"] for line in pq.read_table(tmp_path / "requests.parquet").to_pylist()] == [1, None]


def test_rows_read_back_are_what_was_written(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", made())
    folder.append_rows([WHOLE])
    folder.close()
    assert list(read_rows(tmp_path / "run")) == [WHOLE]
