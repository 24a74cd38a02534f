"""The summary's file: its keys and their order, files that older versions wrote, and files that are no summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ResultsError
from harness.records import Counters
from harness.report.run.tables import client_lines, flow_rows
from harness.report.words import NOT_REPORTED
from harness.results.folder import write_summary
from harness.results.summary import read_summary, summarize
from tests.support.report_runs import cell, manifest, row, sample
from traces.tiers import sources

KEPT = Path(__file__).parents[3] / "results" / "io" / "io.json"
OLD_FIGURES = ["n", "mean", "mean_low", "mean_high", "p50", "p90", "p99", "min", "max", "cv", "samples_for_5_percent"]
FIGURES = [*OLD_FIGURES[:6], "p95", *OLD_FIGURES[6:], "sample_means"]
OLD_VERDICTS = ["measured", "errors", "proven", "contradicted", "unproven", "counted"]
VERDICTS = [*OLD_VERDICTS, "cut_off"]


def test_the_file_has_its_keys_in_their_order_and_nulls_stay(tmp_path: Path) -> None:
    rows = [row("gpu", t, by_tier={"gpu": 4096}) for t in (0.1, 0.2)] + [row("gpu", 0.3, verdict="contradicted")]
    moved = [sample("gpu", n, observed=Counters(hit_tokens={"gpu": 4096})) for n in range(3)]
    written = summarize(manifest([cell("base", {"a.b": 1})]), rows, moved)
    write_summary(tmp_path, written)
    content: dict[str, Any] = json.loads((tmp_path / "summary.json").read_text())
    assert list(content) == ["run_id", "engine", "status", "rows", "cells", "break_evens"]
    assert list(content["rows"]) == ["total", "warm", *VERDICTS]
    [found] = content["cells"]
    assert list(found) == ["key", "overrides", "storage", "tiers"] and found["storage"] is None
    tier = found["tiers"]["gpu"]
    assert list(tier) == ["rows", "left_out_reasons", "metrics", "tokens", "throughput", "counters", "preemptions"]
    assert list(tier["rows"]) == VERDICTS and tier["rows"]["counted"] == 2 and tier["throughput"] is None
    assert list(tier["metrics"]) == ["ttft_s", "e2e_s", "tpot_s", "send_lag_s"]
    assert list(tier["metrics"]["ttft_s"]) == FIGURES and tier["metrics"]["ttft_s"]["max"] == pytest.approx(0.2)
    assert list(tier["tokens"]) == ["prompt", *sources(), "output", "cached", "expected_hit", "hit_rate"]
    assert (tier["tokens"]["gpu"], tier["tokens"]["cpu"]) == (2 * 4096, None)
    assert tier["counters"] == {"gpu_hit_tokens": 3 * 4096}
    assert tier["preemptions"] is None, "no row reports them"
    assert read_summary(tmp_path) == written


def test_a_summary_of_an_older_version_is_read(tmp_path: Path) -> None:
    """The kept evidence has the cells of old summaries, with a source and counters that this version lacks."""
    name, cells = next(iter(json.loads(KEPT.read_text())["summaries"].items()))
    rows = dict.fromkeys(("total", "warm", *OLD_VERDICTS), 0)
    old = {"run_id": name, "engine": "vllm", "status": "complete", "rows": rows, "cells": cells}
    (tmp_path / "summary.json").write_text(json.dumps(old))
    found = read_summary(tmp_path)
    tokens = found.cells[0].tiers["disk_cold"].tokens
    assert (tokens.prompt, tokens.by_source["disk"], tokens.by_source["shared"]) == (40_970, 40_960, None)
    assert found.cells[0].tiers["disk_cold"].counters["l2_loaded_chunks"] == 160
    write_summary(tmp_path, found)
    for each in old["cells"]:
        for tier in each["tiers"].values():
            tier["preemptions"] = None
    assert json.loads((tmp_path / "summary.json").read_text()) == old | {"break_evens": []}


def test_each_clients_send_lag_is_told_where_there_are_several(tmp_path: Path) -> None:
    late = [row("gpu", 0.1, lag_s=0.001 * n, client=n % 2) for n in range(1, 5)]
    unproven = row("gpu", 0.1, lag_s=9.0, client=0, verdict="contradicted")
    written = summarize(manifest(), [*late, unproven, row("cpu", 0.1)])
    assert [(lag.tier, lag.client, lag.n) for lag in written.cells[0].clients] == [("gpu", 0, 2), ("gpu", 1, 2)]
    assert [lag.p50 for lag in written.cells[0].clients] == pytest.approx([0.003, 0.002])
    assert [lag.p99 for lag in written.cells[0].clients] == pytest.approx([0.00398, 0.00298])
    write_summary(tmp_path, written)
    assert read_summary(tmp_path) == written
    assert [line.partition(": ")[2] for line in client_lines(written)] == [
        "send lag, median and p99: client 0 3.00 ms, 3.98 ms*; client 1 2.00 ms, 2.98 ms*"
    ]


@pytest.mark.parametrize(
    ("counts", "total", "text"), [((2, 1), 3, "3"), ((0, 0), 0, "0"), ((2, None), None, NOT_REPORTED)]
)
def test_preemptions_are_summed_where_each_row_tells_them(
    counts: tuple[int | None, ...], total: int | None, text: str
) -> None:
    rows = [row(None, 0.1, preemptions=count) for count in counts]
    found = summarize(manifest(), rows)
    assert found.cells[0].tiers["load"].preemptions == total
    assert [flow.preemptions for flow in flow_rows(found)] == [text]


@pytest.mark.parametrize("content", ["", "[]", '{"cells": 3}', '{"cells": [{"tiers": {"gpu": {}}}]}', '{"cells": []}'])
def test_what_is_no_summary_is_told_on_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(ResultsError, match=r"^[^\n]*summary\.json: is no summary \([^\n]*; make it again with[^\n]*$"):
        read_summary(tmp_path)


def test_a_folder_without_a_summary_is_told(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"holds no summary\.json; make it with harness report"):
        read_summary(tmp_path)
