"""report.html: complete in one file, honest about its evidence, and safe with any text."""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs_version

from harness.errors import ResultsError
from harness.records import Counters, HostSample, Origin, Resolved, TraceOrigin
from harness.report.glossary import glossary, meaning_of
from harness.report.page import CHART_LIBRARY
from harness.report.run.html import write_report
from harness.report.run.takeaway import requests_csv
from harness.report.words import TIMES, UNKNOWN
from harness.results.provenance import Git, Host
from tests.support.report_runs import cell, folder_of, row, sample

HOSTILE = "</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """What a browser would find: tags with attributes, scripts, table rows, and the text by section."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.rows: dict[str, list[list[str]]] = {}
        self.text: dict[str, str] = {}
        self.classes: dict[str, str] = {}
        self._section, self._script, self._cell = "", False, False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag in ("section", "details") and (found.get("id") or tag == "section"):
            self._section = found.get("id") or ""
            self.classes[self._section] = found.get("class") or ""
        elif tag == "script":
            self._script = True
            self.scripts.append("")
        elif tag == "tr":
            self.rows.setdefault(self._section, []).append([])
        elif tag in ("td", "th"):
            self._cell = True
            self.rows[self._section][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._script = False
        elif tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts[-1] += data
            return
        self.text[self._section] = self.text.get(self._section, "") + data
        if self._cell:
            self.rows[self._section][-1][-1] += data

    def unpacked(self, name: str) -> bytes:
        """What the page's script unpacks from the script element of this id."""
        ids = [attrs.get("id") for tag, attrs in self.tags if tag == "script"]
        return gzip.decompress(base64.b64decode(self.scripts[ids.index(name)]))

    def figure(self, name: str) -> dict[str, Any]:
        places = [
            n
            for n, (_, attrs) in enumerate(t for t in self.tags if t[0] == "script")
            if attrs.get("data-figure") == name
        ]
        figure: dict[str, Any] = json.loads(self.scripts[places[0]])
        return figure

    def figures(self) -> list[str]:
        return [str(attrs["data-figure"]) for _, attrs in self.tags if "data-figure" in attrs]


def report(path: Path, *args: Any, **kwargs: Any) -> Page:
    target = write_report(folder_of(path / "run", *args, **kwargs))
    assert target == path / "run" / "report.html"
    return Page(target)


def proven_rows() -> list[Any]:
    gpu: dict[str, int | None] = {"computed": 1, "gpu": 4096, "cpu": 0}
    none: dict[str, int | None] = {"computed": 4097, "gpu": 0, "cpu": 0}
    rows = [row("gpu", t, at_s=n, by_tier=gpu, cached_tokens=4096) for n, t in enumerate((0.09, 0.10, 0.11))]
    return rows + [row("recompute", t, at_s=n, by_tier=none, cached_tokens=0) for n, t in enumerate((2.9, 3.0, 3.1))]


def test_a_term_in_a_table_s_head_says_what_it_means(tmp_path: Path) -> None:
    page = report(tmp_path, proven_rows(), [sample("gpu", n) for n in range(3)])
    titles = {attrs.get("title") or "" for tag, attrs in page.tags if tag == "th"}
    words = dict(glossary([]))
    for term in ("cell", "tier", "95 % interval", "p50, p90, p95, p99", "CV", "n for ±5 %", "verdict", "left out"):
        assert words[term] in titles, term
    assert meaning_of("simulated mean ± 95 %") == words["95 % interval"] and meaning_of("sha256") == ""


def test_the_file_is_complete_in_itself(tmp_path: Path) -> None:
    page = report(tmp_path, proven_rows(), [sample("gpu", n) for n in range(3)])
    for tag, attrs in page.tags:
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            inside = name == "href" and (attrs.get(name) or "").startswith("#")
            assert inside or not attrs.get(name), f"<{tag}> fetches {attrs[name]}"
    assert not [tag for tag, _ in page.tags if tag in ("link", "iframe", "object", "embed", "base", "img")]
    policy = next(str(attrs["content"]) for _, attrs in page.tags if attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    assert b"plotly.js (cartesian" in page.unpacked("chart-library")
    assert "showSendToCloud: false" in page.scripts[-1]
    assert "@import" not in (tmp_path / "run" / "report.html").read_text().split("<script")[0]


def test_a_proven_run_says_what_it_found(tmp_path: Path) -> None:
    page = report(tmp_path, proven_rows(), [sample("gpu", n) for n in range(3)])
    times = f"30{TIMES} (24\N{EN DASH}38{TIMES}) faster than recompute at 4,097 prompt tokens"
    finding = f"gpu: {times} (typical TTFT 100 ms against 3.00 s)."
    assert page.text["findings"].split("Findings")[1].strip().startswith(f"{finding}\n")
    assert "recompute3.00 ± 0.25 smean TTFT, 3 rows" in page.text["findings"]
    assert "6 rows measured, all proven" in page.text["evidence"]
    assert page.classes["evidence"] == "banner good"
    assert "state" not in page.text
    assert page.figures() == ["ttft", "ladder", "distribution", "timeline", "noise"]
    assert [trace["name"] for trace in page.figure("ttft")["data"]] == ["recompute", "gpu"]
    assert page.rows["figures"][1] == [
        "base", "recompute", "3", "3.00 ± 0.25 s", "3.00 s", "3.08 s*", "3.09 s*", "3.10 s*", "3.10 s", "3.3 %",
        "2", "0",
    ]  # fmt: skip
    assert [line[0] for line in page.rows["figures"]].count("cell") == 2
    assert page.rows["source-table"][1:] == [
        ["base", "recompute", "3 proven", "12,291", "12,291", "0", "not reported"],
        ["base", "gpu", "3 proven", "12,291", "3", "12,288", "not reported"],
    ]


def test_the_proof_tells_what_the_device_gave(tmp_path: Path) -> None:
    moved = Counters(computed_tokens=1, device_read_bytes={"disk": 3 * 2**20})
    rows = [row("disk_cold", 0.2, at_s=n) for n in range(2)]
    page = report(tmp_path, rows, [sample("disk_cold", n, observed=moved) for n in range(2)])
    assert page.rows["source-table"][0][-1] == "read from the device"
    assert page.rows["source-table"][1][-1] == "6MiB"
    assert "steal mean 1.0 %" in page.text["evidence"]


def test_the_proof_tells_what_memory_the_host_had_taken(tmp_path: Path) -> None:
    shares = (0.0, 0.2)
    samples = [sample("gpu", n, host=HostSample(steal_share=0.0, taken_share=share)) for n, share in enumerate(shares)]
    page = report(tmp_path, [row("gpu", 0.2, at_s=n) for n in range(2)], samples)
    assert "memory in use that the host had taken mean 10.0 %, at most 20.0 %" in page.text["evidence"]


def test_contradicted_rows_are_counted_explained_and_left_out(tmp_path: Path) -> None:
    rows = [row("disk", 0.2, at_s=n, lag_s=0.0) for n in range(2)]
    rows.append(row("disk", 9.0, at_s=3, verdict="contradicted", verdict_reason="cpu served 4096 tokens"))
    rows += [row("disk", 9.0, at_s=4, verdict="unproven", verdict_reason="no counters"), row("disk", None, at_s=5)]
    doubt = sample(
        "disk",
        2,
        "contradicted",
        reason="cpu served 4096 tokens",
        observed=Counters(hit_tokens={"cpu": 4096, "disk": 0}),
        expected=Counters(hit_tokens={"disk": 4096}),
    )
    page = report(tmp_path, rows, [sample("disk", 0), doubt])
    assert "5 rows measured, 2 in the figures, 3 left out" in page.text["evidence"]
    for part in ("2 proven", "1 contradicted", "1 unproven", "1 error", "1 left out: cpu served 4096 tokens"):
        assert part in page.text["evidence"]
    for cure in ("make room in that tier", "reports tokens by source", "measure.request_timeout"):
        assert cure in page.text["evidence"]
    assert page.classes["evidence"] == "banner warn"
    line = page.rows["figures"][1]
    assert (line[2], line[3]) == ("2", "200 ms")
    assert line[11].startswith("3") and f"1 {TIMES} cpu served 4096 tokens" in line[11]
    assert page.rows["doubts"][1:] == [
        ["base", "disk", "2", "contradicted", "cpu served 4096 tokens",
         "cpu_hit_tokens 4,096, disk_hit_tokens 0", "disk_hit_tokens 4,096"],
    ]  # fmt: skip


def test_only_errors(tmp_path: Path) -> None:
    page = report(tmp_path, [row("gpu", None, at_s=n) for n in range(2)])
    assert "2 rows measured, 0 in the figures, 2 left out" in page.text["evidence"]
    assert page.classes["evidence"] == "banner bad"
    assert "no finding" in page.text["findings"]
    assert page.figures() == ["timeline"]


def test_an_empty_run(tmp_path: Path) -> None:
    page = report(tmp_path)
    assert "No request was measured" in page.text["evidence"]
    assert page.figures() == []
    assert "figures" not in page.rows


def test_a_failed_run_shows_its_error_and_its_log_at_once(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run", [row("gpu", 0.1)], status="failed", error=f"engine died {HOSTILE}")
    (folder / "logs" / "engine.log").write_text(f"last words {HOSTILE}\x1b[31m\n")
    page = Page(write_report(folder))
    assert page.classes["state"] == "banner bad"
    assert f"engine died {HOSTILE}" in page.text["state"]
    assert "hold the 1 row that it finished" in page.text["state"]
    assert f"last words {HOSTILE} [31m" in page.text["environment"]


def test_an_unfinished_run_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = report(tmp_path, [row("gpu", 0.1)], status="started")
    assert page.classes["state"] == "banner warn"
    assert "--resume run" in page.text["state"]


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    rows = [row("gpu", 0.1, cell=HOSTILE, id=HOSTILE), row("gpu", 0.1, cell="b", verdict="unproven")]
    rows.append(row(HOSTILE, 0.1, cell="b", verdict="contradicted", verdict_reason=HOSTILE))
    cells = [
        cell(HOSTILE, {"k": HOSTILE}, config={"name": HOSTILE, "workload": {"kind": HOSTILE}}),
        cell("b", {"k": 1}),
    ]
    samples = [sample(HOSTILE, 0, "unproven", reason=HOSTILE, cell=HOSTILE), sample("gpu", 1, cell=HOSTILE)]
    page = report(
        tmp_path, rows, samples, cells=cells, name=HOSTILE, engine=HOSTILE, versions={HOSTILE: HOSTILE},
        host=Host(cpu=HOSTILE), experiment=Origin(path=HOSTILE, sha256=HOSTILE),
    )  # fmt: skip
    assert not [tag for tag, _ in page.tags if tag == "img"]
    # The chart library, the requests as CSV, and what draws and sorts.
    assert len(page.scripts) == len(page.figures()) + 3
    assert HOSTILE in page.text["doubts"] and HOSTILE in page.text["environment"]
    dots = page.figure("timeline")["data"]
    assert "&lt;/script&gt;" in dots[0]["text"][0]


def test_a_free_load(tmp_path: Path) -> None:
    rows = [row(None, 0.1, at_s=float(n), sample=0, output_tokens=5, cached_tokens=2048) for n in range(4)]
    load = sample("load", 0, None, observed=Counters(hit_tokens={"cpu": 8192}), host=HostSample())
    page = report(tmp_path, rows, [load])
    rates = ["1.29/s", "5,290/s", "6.45/s", "5,290/s"]
    assert page.rows["throughput"][1] == ["base", *rates, "50.0 %", "not known", "not reported"]
    finding = "TTFT: median 100 ms, p90 100 ms* over 4 requests; 1.29 requests/s; 50.0 % of the prompt tokens came"
    assert finding in page.text["findings"]
    assert "claims no tier" in page.text["evidence"]
    # With five output tokens there is a time per output token to show; a proven run of one token has none.
    assert [line[0] for line in page.rows["figures"]].count("cell") == 3
    assert "base: cpu_hit_tokens 8,192" in page.text["counters"]
    # Requests of one TTFT have no distribution.
    assert page.figures() == ["sources", "timeline"]
    assert "steal not reported" in page.text["evidence"]


def test_a_simulated_run_is_called_a_prediction(tmp_path: Path) -> None:
    page = report(tmp_path, proven_rows(), engine="sim")
    assert "a prediction, not a measurement" in page.text[""]
    assert page.classes["evidence"] == "banner simulated"
    assert "6 rows simulated, not measured" in page.text["evidence"]
    shown = " ".join(page.text.values())
    assert not re.search(r"\bproven\b|rows measured|measured row", shown)
    for title in ("TTFT by tier, simulated", "Simulated figures", "simulated requests", "simulated mean ± 95 %"):
        assert title in shown
    assert page.rows["source-table"][1][2] == "3 simulated"
    for name in page.figures():
        assert "measured" not in str(page.figure(name)["layout"].get("title", ""))


def test_every_chart_of_a_simulated_run_says_so(tmp_path: Path) -> None:
    titles = re.findall(r"<h2[^>]*>(.*?)</h2>", _figures(tmp_path, "sim"))
    assert titles and all(title.endswith(", simulated") for title in titles)
    assert "simulated" not in _figures(tmp_path, "fake")


def _figures(tmp_path: Path, engine: str) -> str:
    """The HTML of a page's figures."""
    folder = folder_of(tmp_path / engine, proven_rows(), engine=engine)
    return "".join(re.findall(r"<figcaption>.*?</figcaption>", write_report(folder).read_text(), re.DOTALL))


def test_a_late_sender_is_pointed_out(tmp_path: Path) -> None:
    rows = [row("gpu", 0.1, at_s=n, lag_s=0.006) for n in range(3)]
    rows += [row("cpu", 0.2, at_s=n, lag_s=0.006) for n in range(3)]
    page = report(tmp_path, rows)
    gpu, cpu = page.rows["lag"][1:]
    assert gpu[:5] == ["base", "gpu", "6.00 ms", "6.00 ms*", "6.0 %"]
    assert "above 5 %" in gpu[5]
    assert cpu[4:] == ["3.0 %", ""]


def test_each_of_several_clients_has_a_line(tmp_path: Path) -> None:
    rows = [row("gpu", 0.1, at_s=n, lag_s=0.0001 if n % 2 else 0.008, client=n % 2) for n in range(6)]
    page = report(tmp_path, rows)
    assert page.rows["lag"][0][:4] == ["cell", "tier", "client", "p50"]
    assert [line[1:4] for line in page.rows["lag"][1:]] == [
        ["gpu", "all", "4.05 ms"], ["gpu", "0", "8.00 ms"], ["gpu", "1", "100 µs"]
    ]  # fmt: skip
    assert ["above 5 %" in line[6] for line in page.rows["lag"][1:]] == [True, True, False]
    named, unnamed = row("gpu", 0.1, client=1), row("gpu", 0.1)
    lines = list(csv.DictReader(requests_csv([unnamed, named]).splitlines()))
    assert [line["client"] for line in lines] == ["", "1"] and "client" not in requests_csv([unnamed])


def test_a_punctual_sender_has_no_table_of_zeros(tmp_path: Path) -> None:
    assert "lag" not in report(tmp_path, [row("gpu", 0.1, at_s=n, lag_s=0.0009) for n in range(3)]).rows
    assert "lag" in report(tmp_path / "late", [row("gpu", 0.1, at_s=n, lag_s=0.0011) for n in range(3)]).rows


def test_the_environment_sets_resolved_sizes_against_configured_ones(tmp_path: Path) -> None:
    config = {"cache": {"gpu": 2**30, "cpu": 2**31, "disk": None, "chunk_tokens": 256}}
    resolved = Resolved(gpu_bytes=2**30 - 2**20, chunk_tokens=256, gpu_blocks=1023)
    trace = TraceOrigin(name="prefix", sha256="ab" * 32, format="mooncake", requests=30, total_requests=30, left_out=0)
    page = report(
        tmp_path, cells=[cell(config=config, resolved=resolved, trace=trace)],
        host=Host(cpu="a cpu", memory_bytes=24 * 2**30), git=Git(commit="f00d", dirty=True),
        experiment=Origin(path="configs/experiments/a b.yaml", sha256="cd" * 32),
    )  # fmt: skip
    rows = page.rows["environment"]
    assert ["gpu", "1GiB", "1023MiB"] in rows
    assert ["cpu", "2GiB", "not reported"] in rows
    assert ["disk", "not set", "not reported"] in rows
    assert ["gpu_blocks", UNKNOWN, "1,023"] in rows
    assert ["memory bytes", "24GiB"] in rows
    assert ["git commit", "f00d with uncommitted changes"] in rows
    assert ["base", "complete", "prefix", "30", "ab" * 32] in rows
    assert "gpu: 1073741824" in page.text["environment"]
    commands = page.text["reproduce"].split("Do it again")[1].split()
    assert " ".join(commands[:8]) == "git checkout f00d harness run 'configs/experiments/a b.yaml' --engine"


def test_a_manifest_of_nothing_but_its_schema(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run", [row("gpu", 0.1, cell="who")])
    (folder / "manifest.json").write_text('{"schema": 1, "cells": null, "git": null, "host": null}')
    page = Page(write_report(folder))
    assert page.rows["figures"][1][:3] == ["who", "gpu", "1"]
    assert "run" in page.text[""]


def test_a_long_table_and_a_long_run_stay_small(tmp_path: Path) -> None:
    rows = [row(None, 0.1, at_s=n / 100, cell=f"c{n % 600}", id=str(n)) for n in range(100_000)]
    page = report(tmp_path, rows, cells=[cell(f"c{n}", {"k": n}) for n in range(600)])
    assert "The first 500 of 600 lines" in page.text["figures"]
    assert len([line for line in page.rows["figures"] if line[0].startswith("k=")]) == 2 * 500
    drawn = sum(len(trace["text"]) for trace in page.figure("timeline")["data"] if "text" in trace)
    assert 6000 < drawn <= 7600
    assert f"{drawn:,} of 100,000 requests are drawn" in "".join(page.text.values())
    assert (tmp_path / "run" / "report.html").stat().st_size < 5e6


def test_the_same_folder_gives_the_same_bytes(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run", proven_rows(), [sample("gpu", 0)])
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first
    assert not list(folder.glob("*.tmp"))


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="no manifest"):
        write_report(tmp_path)


def test_the_requests_leave_the_page_as_csv(tmp_path: Path) -> None:
    page = report(tmp_path, [*proven_rows(), row("gpu", None, at_s=9.0, error='"a", b')])
    lines = list(csv.DictReader(page.unpacked("rows-csv").decode().splitlines()))
    assert len(lines) == 7
    assert (lines[0]["id"], lines[0]["ttft_s"], lines[0]["gpu_tokens"], lines[0]["disk_tokens"]) == (
        "gpu-0", "0.09", "4096", "",
    )  # fmt: skip
    assert (lines[6]["error"], lines[6]["ttft_s"]) == ('"a", b', "")


def test_the_slowest_requests_are_a_table_that_the_dots_lead_to(tmp_path: Path) -> None:
    rows = [row(None, 0.1 + n / 1000, at_s=float(n), id=f"r{n}") for n in range(60)]
    page = report(tmp_path, rows)
    table = page.rows["slowest"][1:]
    assert [line[0] for line in table] == [f"r{n}" for n in range(59, 9, -1)]
    (dots, _) = page.figure("timeline")["data"]
    assert len([place for place in dots["customdata"] if place is not None]) == 50
    assert dots["customdata"][59] == 0 and dots["customdata"][9] is None


def test_a_page_is_small(tmp_path: Path) -> None:
    report(tmp_path, proven_rows(), [sample("gpu", 0)])
    assert (tmp_path / "run" / "report.html").stat().st_size < 1.5e6


def test_the_chart_library_is_the_one_that_the_figures_are_written_for() -> None:
    library = gzip.decompress(CHART_LIBRARY.read_bytes())
    assert f"plotly.js (cartesian - minified) v{get_plotlyjs_version()}".encode() in library[:200]
    told = (CHART_LIBRARY.parent / "README.md").read_text()
    assert hashlib.sha256(library).hexdigest() in told and get_plotlyjs_version() in told
