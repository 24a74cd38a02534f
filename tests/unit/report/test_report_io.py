"""What a report says of traced I/O: file systems side by side, and whose time each request's first token took."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.commands.errors import DONE, USER_ERROR
from harness.commands.report import report
from harness.records import IoTrace, Resolved
from harness.report.io.storage_words import moved_line
from harness.report.io.tables import render_traces
from harness.report.refresh import seal
from harness.report.words import UNKNOWN
from harness.results.traced import read_io
from harness.storage_records import LatencyParts, OperationFigures
from tests.support.report_runs import cell, folder_of, row
from tests.unit.report.test_report_html import Page

MIB = 2**20


def traced_run(path: Path, requests: int) -> Path:
    """Two cells of one request a second; each reads two blocks of 1 MiB for 100 ms each, the kth one k ms later."""
    resolved = Resolved(chunk_tokens=256, kv_bytes_per_token=4096)
    cells = [cell(name, {"fs": name}, resolved=msgspec.structs.replace(resolved, disk_file_system=name))
             for name in ("ext4", "xfs")]  # fmt: skip
    rows = [
        row("disk_cold", 0.5 + number / 1000, cell=name, at_s=float(number), id=f"r{number}")
        for name in ("ext4", "xfs")
        for number in range(requests)
    ]
    folder = folder_of(path, rows, [], cells=cells)
    for place, name in enumerate(("ext4", "xfs")):
        own = folder / "io" / str(place)
        own.mkdir(parents=True)
        block, files = [], ["O 1 1 7 3 8 0", "T /d/chunk"]
        for number in range(requests):
            at_ns = number * 10**9 + 10**8
            # xfs's two come one after the other, ext4's leave a gap.
            second = 2048 if name == "xfs" else 4096
            block += [f"B {at_ns} {at_ns + 10**6} {at_ns + 10**8} 0 {MIB} 0 1",
                      f"B {at_ns} {at_ns + 10**8} {at_ns + 2 * 10**8} {second} {MIB} 0 1"]  # fmt: skip
            files.append(f"R {at_ns} {3 * 10**8} 7 3 0 {2 * MIB}")
        for kind, lines in (("block", block), ("files", files)):
            text = "".join(json.dumps({"type": "printf", "data": f"{line}\n"}) + "\n" for line in lines)
            (own / f"{kind}.jsonl").write_text(text)
        about = IoTrace(cells=(name,), attempt=0, path="/d", device_number=1, pids=(7,), zero_ns=0, started_s=0.0,
                        ended_s=float(requests), lost_events=0)  # fmt: skip
        (own / "trace.json").write_bytes(msgspec.json.encode(about))
    seal(folder)
    return folder


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traced_run(tmp_path_factory.mktemp("io") / "run", 250)


def test_file_systems_stand_beside_each_other(long_run: Path) -> None:
    page = Page(long_run / "report.html")
    names = ["io-timeline", "io-order", "io-sizes", "io-latency", "io-split"]
    assert [name for name in page.figures() if name.startswith("io-")] == names
    table = {cells[0]: cells[1:] for cells in page.rows["io"]}
    assert table["what"] == ["ext4", "xfs"]
    assert table["read: requests"] == ["500", "500"] and table["read: bytes"] == ["500MiB", "500MiB"]
    # Of 499 steps, each request's second block follows its first on xfs.
    assert table["read: sequential"] == ["0.0%", "50.1%"]
    assert table["read: sizes from"] == ["1MiB 100%"] * 2
    assert table["read: split by the kernel; D2C as a whole, p50"] == ["250, 199 ms"] * 2
    assert table["each file: opened"] == ["1", "1"] and table["each file: bytes read"] == ["500MiB", "500MiB"]
    assert table["write: requests"] == [UNKNOWN] * 2
    assert table["requests not seen to complete"] == ["0"] * 2
    order = page.figure("io-order")["data"]
    assert sum(sum(bar["y"]) for bar in order if bar["name"] == "sequential") == 250


def test_each_request_s_first_token_is_split_and_the_table_is_bounded(long_run: Path) -> None:
    page = Page(long_run / "report.html")
    head, *body = page.rows["io-requests"]
    assert head[5:] == ["TTFT", "engine", "look-up", "file system, host", "device"]
    assert "400 of 500 requests" in page.text["io-requests"] and "the first 100 of each" in page.text["io-requests"]
    assert len(body) == 400
    for cells in body:
        ttft, *parts = map(float, cells[5:])
        assert sum(parts) == pytest.approx(ttft, abs=0.03)
        assert parts[3] == pytest.approx(199, abs=0.01) and parts[2] == pytest.approx(101, abs=0.01)
    ext4 = [cells for cells in body if cells[1] == body[0][1]]
    assert [cells[0] for cells in ext4[:100]] == [f"r{number}" for number in range(100)]
    # The slowest are the last ones: each is 1 ms slower than the one before.
    assert [cells[0] for cells in ext4[100:]] == [f"r{number}" for number in range(150, 250)]
    assert {cells[3] for cells in ext4[:100]} == {"first"} and {cells[3] for cells in ext4[100:]} == {"slow"}
    assert ("table", {"data-name": "requests-from-disk"}) in page.tags


def test_means_are_of_the_first_requests_and_not_of_the_slowest(long_run: Path) -> None:
    io = read_io(long_run)
    assert io is not None
    assert "TTFT  549.5 ms" in render_traces([io]) and "(means of 100 requests)" in render_traces([io])


def test_a_short_run_shows_every_request(tmp_path: Path) -> None:
    page = Page(traced_run(tmp_path / "run", 3) / "report.html")
    assert "All 6 requests" in page.text["io-requests"] and len(page.rows["io-requests"]) == 7
    # In each second, two requests are at the device for 99 and 100 ms, one after the other.
    bars = [bar for bar in page.figure("io-timeline")["data"] if bar["type"] == "bar"]
    depths = [bar["y"] for bar in bars if bar["yaxis"] in ("y3", "y4")]
    assert [round(sum(depth), 2) for depth in depths if any(depth)] == [5.97, 5.97]


def test_a_traces_percentiles_of_few_requests_are_marked_in_table_terminal_and_chart(
    long_run: Path, tmp_path: Path
) -> None:
    """Six block requests support a median and no more; 500 support a 99th percentile."""
    short = Page(traced_run(tmp_path / "run", 3) / "report.html")
    [few] = {cells[1] for cells in short.rows["io"] if cells[0] == "read: D2C p50 / p90 / p99"}
    assert [text.endswith("*") for text in few.split(" / ")] == [False, True, True]
    [many] = {
        cells[1] for cells in Page(long_run / "report.html").rows["io"] if cells[0] == "read: D2C p50 / p90 / p99"
    }
    assert "*" not in many
    bars = {bar["name"]: bar["marker"]["pattern"]["shape"] for bar in short.figure("io-latency")["data"]}
    assert bars == {"p50": ["", ""], "p90": ["/", "/"], "p99": ["/", "/"]}
    io = read_io(tmp_path / "run")
    assert io is not None and f"D2C p50 / p90 / p99 {few}" in render_traces([io])


def test_percentiles_of_a_storage_devices_few_operations_are_marked() -> None:
    """39 writes say nothing of their slowest in 100 or in 1,000."""
    spread: dict[str, float | None] = {"p50": 0.1, "p99": 0.6, "p99.9": 0.618}
    latency = LatencyParts(total=spread, device=spread, host=spread)
    sizes: dict[str, Any] = {"asked_bytes": MIB, "moved_bytes": MIB, "device_bytes": MIB, "latency_s": latency}
    few = moved_line("write", OperationFigures(operations=39, **sizes), None)
    assert "p50 100 ms (100 ms), p99 600 ms* (600 ms*), p99.9 618 ms* (618 ms*)" in few
    assert "fewer values than this percentile needs" in few
    many = moved_line("write", OperationFigures(operations=1000, **sizes), None)
    assert "p99.9 618 ms (618 ms)." in many and "*" not in many


def test_io_of_another_shape_is_one_line_and_its_cure_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path / "run", [row("gpu", 0.1)])
    (folder / "io.json").write_text('{"run": "a", "traces": [{}]}')
    assert report(folder) == USER_ERROR
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{folder}/io.json: cannot be read" in said and "remove it" in said
    (folder / "io.json").unlink()
    assert report(folder) == DONE
