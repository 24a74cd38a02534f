"""What traces say, from lines as bpftrace writes them; and replays that do the same again."""

import json
from pathlib import Path

import pytest

from harness.blockio.characterize import (
    block_figures,
    byte_checks,
    bytes_timeline,
    covered_s,
    file_figures,
    page_cache_share,
    split,
)
from harness.blockio.fio import FIXED, as_the_run, fill_command, read_command
from harness.blockio.replay import iolog, lengths, operations, replay, run_operations
from harness.collectors import bpf
from harness.collectors.bpf import BlockRequest, FileCall, lost_events, read_block, read_files
from harness.errors import FioError, ReplayError, ResultsError, TracingError
from harness.records import Counters, HostSample, IoTrace, Resolved, Sample
from harness.results.manifest import CellEntry
from harness.results.traced import BothDirections, IoFigures, TracedFile, TraceFigures, read_io, write_io
from tests.support.paths import ROOT
from traces.request import RequestRecord

ZERO_NS = 5_000_000_000


def lines(path: Path, *texts: str) -> Path:
    items = [{"type": "attached_probes", "data": {"probes": 2}}, {"type": "printf", "data": "ready 5000000001\n"}]
    items += [{"type": "printf", "data": f"{text}\n"} for text in texts]
    items += [{"type": "lost_events", "data": {"events": 3}}, {"type": "map", "data": {"@flushes": 2}}]
    path.write_text("".join(json.dumps(item) + "\n" for item in items) + '{"type": "printf", "da')
    return path


def request(sector: int, size: int, issued_s: float, completed_s: float, *, write: bool = False) -> BlockRequest:
    return BlockRequest(issued_s - 0.001, issued_s, completed_s, sector, size, write)


def test_block_lines_are_read_on_the_run_s_clock(tmp_path: Path) -> None:
    path = lines(tmp_path / "b", "B 5100000000 5200000000 5300000000 8 4096 0 7340032",
                 "B 0 5150000000 5500000000 16 8192 1 7340032", "B 5600000000 5700000000 0 32 512 0 7340032",
                 "B 0 0 0 0 0 0 0")  # fmt: skip
    left = {"@issued": {"7340032,64": [5800000000, 5900000000, 1024, 1]}, "@line": {"1,7": [0] * 7}}
    path.write_text(json.dumps({"type": "map", "data": left}) + "\n" + path.read_text())
    assert read_block(path, ZERO_NS) == [
        BlockRequest(None, 0.15, 0.5, 16, 8192, True), BlockRequest(0.1, 0.2, 0.3, 8, 4096, False),
        BlockRequest(0.6, 0.7, None, 32, 512, False), BlockRequest(0.8, 0.9, None, 64, 1024, True),
    ]  # fmt: skip
    assert lost_events(path) == 3 + 2, "one found no room, and one was not printed"
    assert read_block(tmp_path / "absent", ZERO_NS) == [] and lost_events(tmp_path / "absent") == 0


def test_file_lines_follow_opens_and_renames(tmp_path: Path) -> None:
    # The core that wrote told later than the one that opened, and an open file is open from the call's end on.
    path = lines(
        tmp_path / "f", "R 5000000000 10 7 3 -1 99", "W 5200000000 2000 7 3 -1 64",
        "O 5100000000 1000 7 3 8 577", "T /d/a b.tmp", "T ../lib", "T R 1 2 3", "F 5250000000 500 7 3 -1 0",
        "M 5300000000 0 7 0 8 0", "T /d/a b.tmp", "T x", "N 5300000001 0 7 0 8 0", "T /d/a b", "T ",
        "O 5400000000 100 7 4 8 0", "T /d/a b", "R 5500000000 300 7 4 32 -5",
    )  # fmt: skip
    calls = read_files(path, ZERO_NS)
    assert [(call.kind, call.path, call.offset, call.bytes) for call in calls] == [
        ("open", "/d/a b.tmp", -1, 0), ("write", "/d/a b.tmp", -1, 64), ("sync", "/d/a b.tmp", -1, 0),
        ("rename", "/d/a b", -1, 0), ("open", "/d/a b", -1, 0), ("read", "/d/a b", 32, 0),
    ]  # fmt: skip
    assert lost_events(path) == 3
    assert calls[0].flags == 577 and calls[1].took_s == pytest.approx(2e-6) and calls[3].old_path == "/d/a b.tmp"


def test_a_long_path_comes_in_parts(tmp_path: Path) -> None:
    first, second = "/d/" + "x" * 60, "/d/" + "y" * 60
    path = lines(tmp_path / "f", "O 5100000000 10 7 3 8 0", f"T {first}", "T " + "z" * 63, "T -1.data", "T  junk",
                 "O 5100000001 10 7 4 9 0", f"T {second}", "T ", "T junk", "R 5500000000 300 7 3 0 5")  # fmt: skip
    long = first + "z" * 63 + "-1.data"
    assert [call.path for call in read_files(path, ZERO_NS)] == [long, second, long]


def test_a_path_goes_on_behind_another_cores_lines(tmp_path: Path) -> None:
    first, second = "/d/" + "x" * 60, "/d/" + "y" * 60
    path = lines(tmp_path / "f", "C 0", "O 5100000000 10 7 3 8 0", f"T {first}", "C 1", "O 5100000001 10 7 4 9 0",
                 f"T {second}", "C 0", "T -1.data", "R 5500000000 300 7 3 0 5", "C 1", "T -2.data")  # fmt: skip
    calls = [(call.kind, call.path) for call in read_files(path, ZERO_NS)]
    assert calls == [("open", first + "-1.data"), ("open", second + "-2.data"), ("read", first + "-1.data")]
    assert lost_events(path) == 3, "none but those of the head"


def test_file_lines_for_which_there_was_no_room_are_lost(tmp_path: Path) -> None:
    whole = ["O 5100000000 10 7 3 8 0", "T /d/a", *["T "] * 5]
    assert lost_events(lines(tmp_path / "f", *whole, "R 5500000000 300 7 3 0 5")) == 3
    assert lost_events(lines(tmp_path / "f", *whole, "T ", "R 5500000000 300 7 3 0 5", "T ")) == 3 + 2, "two calls"
    assert lost_events(lines(tmp_path / "f", whole[0], "T ", "T ")) == 3 + 1, "a path"


def test_a_damaged_trace_is_told_on_one_line(tmp_path: Path) -> None:
    with pytest.raises(TracingError, match="measure again"):
        read_files(lines(tmp_path / "f", "O 5100000000 10 7"), ZERO_NS)
    with pytest.raises(TracingError, match="measure again"):
        read_block(lines(tmp_path / "b", "B 1 2 three 4 5 6 7"), ZERO_NS)


def test_sequential_requests_depth_and_times() -> None:
    reads = [request(0, 4096, 0.0, 0.010), request(8, 4096, 0.005, 0.015), request(100, 512, 0.1, 0.11)]
    figures = block_figures(reads)
    assert (figures.requests, figures.bytes, figures.sequential, figures.random) == (3, 8704, 1, 1)
    assert figures.sizes == {512: 1, 4096: 2}
    assert figures.busy_s == pytest.approx(0.025) and figures.depth == pytest.approx(0.03 / 0.025)
    assert figures.d2c_s.p50 == pytest.approx(0.01) and figures.q2d_s.mean == pytest.approx(0.001)
    empty = block_figures([])
    assert empty.requests == 0 and empty.depth is None and empty.d2c_s.p50 is None


def test_a_request_that_was_not_seen_to_complete_is_in_no_time() -> None:
    seen, unseen = request(0, 4096, 1.0, 1.010), BlockRequest(1.0, 1.005, None, 8, 8192, False)
    figures, alone = block_figures([seen, unseen]), block_figures([seen])
    assert (figures.requests, figures.bytes, figures.unseen, figures.sequential) == (2, 12288, 1, 1)
    for key in ("d2c_s", "busy_s", "depth", "bytes_per_s"):
        assert getattr(figures, key) == getattr(alone, key)
    parts = [BlockRequest(1.0, 1.0, 1.1, 0, 512, False), BlockRequest(1.0, 1.0, None, 1, 512, False)]
    assert block_figures(parts).split == 0


def test_covered_time_counts_overlaps_once() -> None:
    assert covered_s([(0, 2), (1, 3), (5, 6), (5.5, 5.6)]) == 4
    assert covered_s([]) == 0


def test_what_no_block_request_brought_was_in_the_page_cache() -> None:
    calls = [FileCall("read", 0, 1, 1, "f", -1, 8000), FileCall("write", 0, 1, 1, "f", -1, 500)]
    assert page_cache_share([request(0, 2000, 0, 1)], calls) == 0.75
    assert page_cache_share([request(0, 8192, 0, 1)], calls) == 0.0 and page_cache_share([], []) is None


def test_parts_of_a_split_read_are_told_as_a_whole_too() -> None:
    parts = [BlockRequest(1.0, 1.001, 1.013, 0, 4096, False), BlockRequest(1.0, 1.002, 1.026, 8, 4096, False)]
    figures = block_figures([*parts, BlockRequest(2.0, 2.0, 2.5, 99, 512, False)])
    assert figures.split == 1 and figures.split_d2c_s.p50 == pytest.approx(0.025)


def test_files_are_counted_under_their_last_name() -> None:
    calls = [FileCall("open", 0, 0, 1, "/d/x.tmp"), FileCall("write", 1, 0, 1, "/d/x.tmp", -1, 8),
             FileCall("rename", 2, 0, 1, "/d/x", old_path="/d/x.tmp")]  # fmt: skip
    for turn in (3.0, 5.0):
        calls += [FileCall("open", turn, 0, 1, "/d/x"), FileCall("read", turn + 1, 0, 1, "/d/x", -1, 8)]
    calls.append(FileCall("read", 9, 0, 1, "/d/x", 2, 2))
    figures = file_figures(calls)
    assert figures.files == 1 and figures.opens == 3 and figures.sequential == 3 and figures.random == 1
    assert figures.each == [TracedFile(name="x", opens=3, reads=3, writes=1, read_bytes=18, write_bytes=8)]


def row(sent_s: float, first_s: float) -> RequestRecord:
    return RequestRecord(id="r", scheduled_s=sent_s, sent_s=sent_s, first_token_s=first_s, prompt_tokens=9,
                         expected_tier="disk_cold")  # fmt: skip


def test_a_first_token_s_time_is_split_without_rest() -> None:
    reads = [request(0, 1, 1.2, 1.3), request(8, 1, 1.25, 1.4), request(99, 1, 7.0, 8.0)]
    calls = [FileCall("open", 1.1, 0.01, 1, "f"), FileCall("read", 1.15, 0.3, 1, "f", -1, 8)]
    parts = split(row(1.0, 2.0), reads, calls, "first")
    assert parts.device_s == pytest.approx(0.2) and parts.host_s == pytest.approx(0.01 + 0.3 - 0.2)
    assert parts.lookup_s == pytest.approx(0.04) and parts.engine_s == pytest.approx(1.0 - 0.35)
    assert split(row(3.0, 4.0), reads, calls, "first").engine_s == 1.0


def test_accounts_are_held_against_each_other_in_the_cold_samples_only() -> None:
    sample = Sample(
        cell="base", tier="disk_cold", index=0, started_s=1, ended_s=2, verdict="proven", expected=Counters(),
        observed=Counters(device_read_bytes={"disk": 1000}, loaded_chunks={"disk": 2}),
        host=HostSample(device_read_bytes=990),
    )  # fmt: skip
    reads = [request(0, 1000, 1.2, 1.3), request(8, 5000, 3.0, 3.1)]
    calls = [FileCall("read", 1.2, 0.1, 1, "f", -1, 1010)]
    cells = [CellEntry(key="base", resolved=Resolved(chunk_tokens=5, kv_bytes_per_token=100))]
    found = {entry.account: entry.deviation for entry in byte_checks(reads, calls, [sample], cells)}
    assert found == {
        "block requests traced": 0.0, "file reads traced": pytest.approx(0.01),
        "block layer's statistics": pytest.approx(-0.01), "cache server's process": 0.0, "cache server's chunks": 0.0,
    }  # fmt: skip


CALLS = [
    FileCall("open", 0, 0, 1, "/d/a.tmp"), FileCall("write", 0.1, 0, 1, "/d/a.tmp", -1, 100),
    FileCall("write", 0.2, 0, 1, "/d/a.tmp", -1, 50), FileCall("sync", 0.3, 0, 1, "/d/a.tmp"),
    FileCall("rename", 0.4, 0, 1, "/d/a", old_path="/d/a.tmp"), FileCall("open", 0.5, 0, 1, "/elsewhere"),
    FileCall("open", 0.6, 0, 1, "/d/b"), FileCall("read", 0.7, 0, 1, "/d/b", 40, 10),
    FileCall("open", 0.8, 0, 1, "/d/a"), FileCall("read", 0.9, 0, 1, "/d/a", -1, 150),
]  # fmt: skip


def test_a_replay_moves_the_same_bytes_at_the_same_places(tmp_path: Path) -> None:
    steps = operations(CALLS, "/d/")
    assert [(step.kind, step.file, step.offset, step.bytes) for step in steps] == [
        ("open", 0, 0, 0), ("write", 0, 0, 100), ("write", 0, 100, 50), ("sync", 0, 0, 0), ("open", 1, 0, 0),
        ("read", 1, 40, 10), ("open", 0, 0, 0), ("read", 0, 0, 150),
    ]  # fmt: skip
    assert lengths(steps) == {0: 150, 1: 50}
    _, read, written = replay(steps, tmp_path)
    assert (read, written) == (160, 150) and not list(tmp_path.iterdir())
    log = iolog(steps, Path("/d")).splitlines()
    assert log[0] == "fio version 2 iolog" and "/d/chunk-0 write 100 50" in log and log[-1] == "/d/chunk-1 close"


def test_the_fixed_jobs_are_those_of_the_paper_s_appendices() -> None:
    psync, uring = (read_command(Path("/d"), job, 256 << 20, seconds=120) for job in FIXED)
    both = {"--rw=randread", "--bs=131072", "--direct=1", "--time_based", "--runtime=120", "--ramp_time=10000ms"}
    assert both | {"--ioengine=psync", "--numjobs=32", "--iodepth=1"} <= set(psync)
    assert both | {"--ioengine=io_uring", "--numjobs=4", "--iodepth=64"} <= set(uring)
    assert {"--registerfiles=1", "--fixedbufs=1"} <= set(uring) - set(psync)
    fill = fill_command(Path("/d"), FIXED[0], 256 << 20)
    assert "--rw=write" in fill and "--size=8388608" in fill and not any("time" in option for option in fill)
    assert all(len(set(command)) == len(command) for command in (psync, uring, fill))


def traced(reads: list[BlockRequest]) -> IoFigures:
    """One trace with these reads, and nothing else."""
    about = IoTrace(
        cells=("a",), attempt=0, path="p", device_number=1, pids=(), zero_ns=0, started_s=0.0, ended_s=1.0,
        lost_events=0,
    )  # fmt: skip
    trace = TraceFigures(
        cells=about.cells,
        device=None,
        file_system=None,
        started_s=0.0,
        seconds=1.0,
        lost_events=0,
        block=BothDirections(read=block_figures(reads), write=block_figures([])),
        page_cache_share=None,
        syncs=0,
        files=file_figures([]),
        timeline=bytes_timeline(reads, about),
        requests_from_disk=0,
        requests=[],
        checks=[],
    )
    return IoFigures(run="r", engine="vllm", traces=[trace])


def test_a_job_is_as_deep_and_ordered_as_the_run_and_has_the_size_that_carried_most() -> None:
    reads = [request(8 * number, 4096, 1.0, 1.1) for number in range(3)] + [request(99, 65536, 1.0, 1.1)]
    job = as_the_run(traced(reads))
    assert (job.block_bytes, job.depth, job.reads) == (65536, 4, "read")
    scattered = [request(1000 * number, 4096, 1.0, 1.1) for number in range(3)]
    assert as_the_run(traced(scattered)).reads == "randread"


def test_traced_io_is_read_back_equal(tmp_path: Path) -> None:
    assert read_io(tmp_path) is None
    io = traced([request(0, 4096, 1.0, 1.1), BlockRequest(1.0, 1.005, None, 8, 8192, False)])
    write_io(tmp_path, io)
    assert read_io(tmp_path) == io and not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("content", ["{", "[]", '{"run": "a", "engine": "b", "traces": []}', '{"traces": [{}]}'])
def test_io_of_another_shape_is_told_on_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "io.json").write_text(content)
    with pytest.raises(
        ResultsError, match=r"^[^\n]*io\.json: cannot be read [^\n]*; remove it, [^\n]*characterize[^\n]*$"
    ):
        read_io(tmp_path)


def test_kept_io_is_read_and_written_with_the_same_keys_and_figures(tmp_path: Path) -> None:
    kept = json.loads((ROOT / "results" / "io" / "io.json").read_text())["io"]
    (tmp_path / "io.json").write_text(json.dumps(kept))
    io = read_io(tmp_path)
    assert io is not None and len(io.traces) == len(kept["traces"]) > 0
    write_io(tmp_path, io)
    again = json.loads((tmp_path / "io.json").read_text())
    for trace in again["traces"]:
        # What names the machine was not kept.
        trace["device"] = {key: value for key, value in trace["device"].items() if value is not None}
    assert again == kept


def test_what_was_not_traced_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ReplayError, match=r"run it with storage\.trace"):
        run_operations(tmp_path)
    with pytest.raises(FioError, match="measure disk_cold"):
        as_the_run(traced([]))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(TracingError, match=r"needs root.*proc/PID/io.*diskstats"):
        bpf.check_traceable()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(TracingError, match="apt-get install -y bpftrace"):
        bpf.check_traceable()
