"""What a report may not say: 'no difference' of too few samples, 'measured' of a simulation, 'failed' of what the
budget cut off, ± of requests that waited for each other, a curve along an axis that the model lacks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.experiment.read import load_experiment
from harness.records import CUT_OFF, AcceleratorFacts, CellRecord, Counters, PresetFacts, Resolved, Sample
from harness.report.io.storage_words import storage_lines
from harness.report.run import figures
from harness.report.run.answer import Badge, badge
from harness.report.run.html import write_report
from harness.report.run.maps import heat_maps
from harness.report.run.pays import speedup_lines
from harness.report.run.tables import figure_rows, flow_rows
from harness.report.simulated import FLAT, flat_axes, how_made
from harness.report.words import TIMES, UNKNOWN, evidence, findings, mean_with_interval
from harness.results.manifest import CellEntry
from harness.results.summary import Summary, summarize
from harness.storage_records import LatencyParts, OperationFigures, StorageFigures, Throughput
from tests.support.report_runs import cell, folder_of, manifest, row
from tests.unit.report.test_report_terminal import shown

PRESET = PresetFacts(
    name="rtx-a5000-nfs",
    machine="RTX A5000 24 GiB, NFS",
    date="2026-11",
    standing="3 of its 10 fitted rows and 0 of 2 others pass ±5%",
)


def summary_of(rows: list[Any], cells: list[CellEntry] | None = None, engine: str = "fake") -> Summary:
    return summarize(manifest(cells or [cell()], engine=engine), rows)


def simulated(key: str = "base", overrides: dict[str, Any] | None = None) -> CellEntry:
    return cell(key, overrides or {}, resolved=Resolved(preset=PRESET))


# ---- ratios


def test_two_samples_of_a_54_fold_difference_are_too_few_to_compare() -> None:
    rows = [row("recompute", t) for t in (2.8, 4.556)] + [row("gpu", t) for t in (0.066, 0.068, 0.069)]
    found = summary_of(rows)
    (line,) = findings(found)
    assert line.startswith("gpu against recompute: too few samples to compare (2 and 3; at least 3 each)")
    assert "difference" not in line
    recompute = found.cells[0].tiers["recompute"].metrics["ttft_s"]
    assert recompute is not None and recompute.mean_low is recompute.mean_high is recompute.half_width is None
    assert mean_with_interval(recompute) == f"3.68 (2.80{UNKNOWN}4.56) s"


def test_an_interval_that_would_reach_below_zero_is_shown_as_a_range() -> None:
    found = summary_of([row("gpu", t) for t in (0.1, 0.2, 0.9)]).cells[0].tiers["gpu"].metrics["ttft_s"]
    assert found is not None and found.mean_low is not None and found.mean_low < 0 and found.half_width is None
    assert mean_with_interval(found) == f"400 (100{UNKNOWN}900) ms"


def test_what_samples_can_and_cannot_separate() -> None:
    rows = [row("recompute", t) for t in (1.0, 1.3, 1.1)] + [row("cpu", t) for t in (1.1, 1.0, 1.2)]
    (line,) = findings(summary_of(rows))
    assert line.startswith(f"cpu against recompute: these samples cannot separate them, 1.03{TIMES} (")
    rows = [row("recompute", t) for t in (1.0, 1.3, 1.1)] + [row("gpu", t) for t in (0.1, 0.11, 0.12)]
    (line,) = findings(summary_of(rows))
    assert line.startswith(f"gpu: 10{TIMES} (") and "faster than recompute at 4,097 prompt tokens (typical TTFT" in line


def test_a_sweep_says_where_there_is_no_gain_and_up_to_what_there_is_one() -> None:
    cells = [cell(f"h{hit}", {"workload.hit_rate": hit}) for hit in (0.0, 0.5, 1.0)]
    rows = [row("recompute", 6.1, cell=each.key) for each in cells for _ in range(3)]
    for key, ttft_s in (("h0.0", 6.12), ("h0.5", 3.05), ("h1.0", 1.0)):
        rows += [row("cpu", ttft_s, cell=key) for _ in range(3)]
    assert findings(summary_of(rows, cells)) == [
        f"cpu against recompute: no gain at hit_rate=0.0; 2.0{TIMES} faster at hit_rate=0.5, up to 6.1{TIMES} faster at"
        " hit_rate=1.0 (typical TTFT, 3 points)."
    ]


# ---- samples


def test_requests_sent_together_are_one_sample() -> None:
    """Two at a time, 0.854 and 1.6 s, three times over: every sample says the same."""
    rows = [row("gpu", t, sample=number) for number in range(3) for t in (0.854, 1.6)]
    found = summary_of(rows).cells[0].tiers["gpu"].metrics["ttft_s"]
    assert found is not None and (found.n, len(found.sample_means)) == (6, 3)
    assert found.half_width == pytest.approx(0) and mean_with_interval(found) == f"1.23 (0.854{UNKNOWN}1.60) s"


def test_a_free_load_is_one_sample_and_shows_its_range() -> None:
    rows = [row(None, t, sample=0) for t in (0.1, 0.4, 2.0, 9.0)]
    (line,) = figure_rows(summary_of(rows))
    assert line.mean == f"2.88 (0.1{UNKNOWN}9.00) s" and line.samples == UNKNOWN


# ---- cut off


def test_requests_cut_off_by_the_budget_are_counted_apart_without_a_cure_for_failures() -> None:
    rows = [row(None, 0.1 * n, at_s=n) for n in range(1, 11)]
    rows += [row(None, None, at_s=20 + n, error=CUT_OFF) for n in range(29)]
    found = summary_of(rows)
    judged = evidence(found)
    assert (found.rows.errors, found.rows.cut_off, found.rows.counted) == (0, 29, 10)
    assert judged.level == "good" and judged.headline.startswith("10 rows measured, all answered")
    assert judged.cures == () == judged.reasons and ("cut off by the time", 29) in judged.counts
    assert ("errors", 0) in judged.counts
    (line,) = figure_rows(found)
    assert (line.verdicts, line.left_out, line.reasons) == ("29 cut off", 0, ())
    text = shown(rows)
    assert "29 requests cut off when the time was over" in text
    assert "error" not in text and "request_timeout" not in text
    failed = evidence(summary_of([*rows, row(None, None, at_s=60)]))
    assert failed.level == "warn" and len(failed.cures) == 1


def test_a_run_of_which_nothing_was_finished_says_what_to_raise() -> None:
    judged = evidence(summary_of([row(None, None, error=CUT_OFF)]))
    assert (judged.level, judged.headline) == ("bad", "No request was finished")
    assert judged.cures == ("Raise measure.budget or workload.duration, or ask for less.",)


# ---- one figure, one number


def test_output_tokens_a_second_are_one_number_wherever_they_stand() -> None:
    """By the rows' own span it would be 5.05/s; the device's findings have the time to the budget's end."""
    rows = [row(None, 0.9, at_s=float(n), output_tokens=5) for n in range(10)]
    nothing = LatencyParts(total={}, device={}, host={})
    moved = OperationFigures(operations=0, asked_bytes=0, moved_bytes=0, device_bytes=None, latency_s=nothing)
    storage = StorageFigures(
        io="threads",
        page_cache=None,
        operations_sha256="",
        failed_operations=0,
        errors={},
        moved_over_s=None,
        cumulative_io_s=1.0,
        read=moved,
        write=moved,
        throughput={"wall_clock": Throughput(tokens_per_s=5.0, formula="output tokens / elapsed time")},
    )
    found = summary_of(rows, [cell(record=CellRecord(storage=storage))], "sim")
    assert flow_rows(found)[0].output_tokens == "5.00/s"
    (line,) = storage_lines(found, {"base": "base"})
    assert line.startswith("base: Output: 5.00 tokens/s")
    assert how_made(found) == "device measured, engine simulated" and evidence(found).level == "simulated"


# ---- simulated


def test_a_simulated_row_says_so_in_table_headline_sentence_axis_and_terminal() -> None:
    rows = [row(tier, t) for tier, t in (("recompute", 7.6), ("gpu", 0.2)) for _ in range(3)]
    found = summary_of(rows, [simulated()], "sim")
    judged = evidence(found)
    assert judged.level == "simulated"
    assert judged.headline == "6 rows simulated, not measured, each served by the tier it claims"
    assert ("as claimed", 6) in judged.counts and not any(word == "proven" for word, _ in judged.counts)
    assert [line.verdicts for line in figure_rows(found)] == ["3 simulated", "3 simulated"]
    whose, line = findings(found)
    assert whose == (
        "Simulated with rtx-a5000-nfs, which stands for RTX A5000 24 GiB, NFS (2026-11): a prediction, not a"
        " measurement. 3 of its 10 fitted rows and 0 of 2 others pass ±5%."
    )
    assert f"gpu: 38{TIMES} faster than recompute" in line and "simulated typical TTFT" in line
    assert figures.ttft_by_axis(found).layout.yaxis.title.text == "simulated mean TTFT (s)"
    text = shown(rows, cells=[simulated()], engine="sim")
    assert "complete, simulated" in text and "preset's validation: 3 of its 10 fitted rows" in text
    assert "proven" not in text and "rows measured" not in text
    load = evidence(summary_of([row(None, 0.1)], [simulated()], "sim"))
    assert load.level == "simulated" and load.headline.startswith("1 row simulated, not measured, all answered")


def test_rows_that_a_simulator_leaves_out_still_warn() -> None:
    rows = [row("gpu", 0.2), row("gpu", 0.2, verdict="contradicted", verdict_reason="cpu served it")]
    assert evidence(summary_of(rows, [simulated()], "sim")).level == "warn"


def modelled(**sections: Any) -> CellEntry:
    """A cell of a simulation whose manifest says all of its settings."""
    config = load_experiment(Path("quickstart")).experiment.model_dump(mode="json")
    config["engines"]["sim"] |= sections
    return cell("base", {}, config=config, resolved=Resolved(preset=PRESET))


def test_one_simulated_sample_is_enough_since_it_repeats_exactly() -> None:
    rows = [row("recompute", 7.6), row("gpu", 0.2)]
    _, line = findings(summary_of(rows, [modelled()], "sim"))
    assert line == (
        f"gpu: 38{TIMES} faster than recompute at 4,097 prompt tokens (simulated, repeats exactly: typical TTFT"
        " 200 ms against 7.60 s)."
    )
    assert "measured" not in line and "proven" not in line
    differing = [*rows, row("gpu", 0.3)]
    _, line = findings(summary_of(differing, [modelled()], "sim"))
    assert "too few samples to compare" in line, "samples that differ do not repeat"


@pytest.mark.parametrize(
    ("entry", "engine"),
    [(modelled(), "fake"), (modelled(mode="storage"), "sim"), (simulated(), "sim")],
    ids=["an engine", "a device that moves bytes", "settings that the manifest does not keep"],
)
def test_what_is_not_known_to_repeat_needs_samples(entry: CellEntry, engine: str) -> None:
    found = findings(summary_of([row("recompute", 7.6), row("gpu", 0.2)], [entry], engine))
    assert "too few samples to compare" in found[-1] and "repeats exactly" not in " ".join(found)


# ---- loads, request by request


def loads(slower: float, requests: int = 200, **workload: Any) -> Summary:
    """One load at two sizes of CPU RAM; with a workload, the second is another load."""
    kept = {"workload": {"kind": "trace", "trace": "x", "concurrency": 2}, "seed": 3}
    other = kept | {"workload": {**kept["workload"], **workload}}  # type: ignore[dict-item]
    cells = [cell(f"cpu={size}", {"cache.cpu": size}, config=config) for size, config in (("4", kept), ("null", other))]
    rows = [
        row(None, factor * (0.1 + 0.001 * (n % 17)), cell=key, at_s=float(n), id=f"r{n}", sample=0)
        for key, factor in (("cpu=4", 1.0), ("cpu=null", slower))
        for n in range(requests)
    ]
    return summary_of(rows, cells)


def test_loads_of_the_same_requests_have_a_ratio_paired_by_request() -> None:
    found = loads(1.4)
    quick, slow = found.cells
    assert quick.paired is None and slow.paired is not None and slow.paired.cell == "cpu=4"
    assert slow.paired.requests == 200 and slow.paired.ratio.ratio == pytest.approx(1 / 1.4)
    assert findings(found)[-1] == (
        f"Of these two loads, 200 requests paired by request: at cpu=null, TTFT is 1.4{TIMES} slower."
    )
    few = findings(loads(1.4, requests=20))[-1]
    assert few.endswith(f"typically 1.4{TIMES} slower; too few requests to compare.")
    assert loads(1.4, concurrency=8).cells[1].paired is not None, "a load's pace does not change its requests"


def test_loads_of_other_requests_have_none() -> None:
    for found in (loads(1.4, trace="y"), loads(1.4, block_tokens=32)):
        assert all(each.paired is None for each in found.cells) and "paired" not in " ".join(findings(found))


# ---- axes without a term


def swept(times_s: dict[int, float], engine: str) -> Summary:
    cells = [simulated(f"c{chunk}", {"cache.chunk_tokens": chunk}) for chunk in times_s]
    rows = [row("recompute", 6.4, cell=f"c{chunk}") for chunk in times_s for _ in range(3)]
    rows += [row("cpu", t, cell=f"c{chunk}") for chunk, t in times_s.items() for _ in range(3)]
    return summary_of(rows, cells, engine)


def test_an_axis_that_changes_no_simulated_time_is_marked_in_finding_and_chart() -> None:
    flat = swept({16: 1.36, 64: 1.36, 256: 1.36}, "sim")
    assert [axis.name for axis in flat_axes(flat)] == ["chunk_tokens"]
    _, line, mark = findings(flat)
    assert f"cpu against recompute: 4.7{TIMES} faster at all 3 points" in line
    assert mark.startswith("chunk_tokens changes no simulated time: the preset has no term for it")
    assert figures.ttft_by_axis(flat).layout.xaxis.title.text == f"chunk_tokens ({FLAT})"
    lines = speedup_lines(flat)
    assert lines is not None and lines.layout.xaxis.title.text == f"chunk_tokens ({FLAT})"
    assert {row.cell: row.repeats for row in figure_rows(flat)} == {
        "chunk_tokens=16": "",
        "chunk_tokens=64": "chunk_tokens=16",
        "chunk_tokens=256": "chunk_tokens=16",
    }


def test_an_axis_that_has_a_term_or_was_measured_is_not_marked() -> None:
    for found in (swept({16: 1.36, 64: 1.2}, "sim"), swept({16: 1.36, 64: 1.36}, "fake")):
        assert flat_axes(found) == [] and not any("flat by construction" in line for line in findings(found))
        assert FLAT not in figures.ttft_by_axis(found).layout.xaxis.title.text


def test_of_two_axes_only_the_flat_one_is_marked() -> None:
    cells = [
        simulated(f"{tokens} {chunk}", {"workload.prompt_tokens": tokens, "cache.chunk_tokens": chunk})
        for tokens in (513, 1025)
        for chunk in (16, 64)
    ]
    rows = [row("gpu", 0.1 if each.key.startswith("513") else 0.2, cell=each.key) for each in cells]
    summary = summary_of(rows, cells, "sim")
    assert [axis.name for axis in flat_axes(summary)] == ["chunk_tokens"]
    repeats = [row.repeats.partition(",")[0] for row in figure_rows(summary)]
    assert repeats == ["", "prompt_tokens=513", "", "prompt_tokens=1025"]
    heat = heat_maps(summary)
    assert heat is not None and heat.layout.xaxis.title.text == "prompt_tokens"
    assert heat.layout.yaxis.title.text == f"chunk_tokens ({FLAT})"


def test_a_row_that_repeats_another_by_construction_says_so_on_the_page(tmp_path: Path) -> None:
    cells = [simulated(f"c{chunk}", {"cache.chunk_tokens": chunk}) for chunk in (16, 64)]
    rows = [row("cpu", 1.36, cell=each.key) for each in cells for _ in range(3)]
    page = write_report(folder_of(tmp_path / "run", rows, cells=cells, engine="sim")).read_text()
    [labels] = set(
        re.findall(r'<th scope="row" data-value="(.*?)">.*?<small>not modelled: repeats (.*?)</small>', page)
    )
    assert labels == ("chunk_tokens=64", "chunk_tokens=16")


# ---- paced


ACCELERATOR = AcceleratorFacts(
    name="rtx-a5000-nfs",
    machine="RTX A5000 24 GiB, NFS",
    date="2026-11",
    standing="3 of its 10 fitted rows pass",
    link="paced",
    fitted_on="llama-3.2-3b",
)


def paced_run(overrun_us: int) -> tuple[list[Any], list[CellEntry], list[Sample]]:
    moved = Counters(paced={"steps": 2}, asked_us={"steps": 100_000}, overrun_us={"steps": overrun_us})
    same: dict[str, Any] = {"cell": "base", "tier": "gpu", "started_s": 0, "ended_s": 1, "verdict": "proven"}
    samples = [Sample(index=number, observed=moved, expected=Counters(), **same) for number in range(3)]
    return [row("gpu", 0.1 + i / 100) for i in range(3)], [cell(resolved=Resolved(accelerator=ACCELERATOR))], samples


def test_a_paced_run_says_everywhere_that_no_gpu_was_there() -> None:
    rows, cells, samples = paced_run(500)
    found = summarize(manifest(cells, engine="vllm"), rows, samples)
    assert how_made(found) == "paced"
    assert evidence(found).headline == "3 rows paced, all proven"
    first, *rest = findings(found)
    assert first.startswith(
        "Paced by reference accelerator rtx-a5000-nfs, no GPU: engine, cache server and storage are"
    )
    assert "the time of RTX A5000 24 GiB, NFS, by constants that were fitted on llama-3.2-3b" in first
    assert len(rest) == 1 and "paced mean TTFT" in rest[0]
    assert badge(manifest(cells, engine="vllm"), found) == Badge("PACED", "simulated")
    text = shown(rows, cells=cells, engine="vllm")
    assert "complete, paced" in text and "accelerator: reference accelerator rtx-a5000-nfs, no GPU" in text
    assert "3 proven" in text


def test_a_paced_run_says_what_of_its_pace_is_another_models_or_not_fitted() -> None:
    rows, cells, samples = paced_run(500)
    facts = msgspec.structs.replace(ACCELERATOR, other_model="llama-3.1-8b", assumed=("step_s", "cpu.read.bytes_per_s"))
    cells[0].resolved = Resolved(accelerator=facts)
    first, *_ = findings(summarize(manifest(cells, engine="vllm"), rows, samples))
    assert "(2026-11); scaled or assumed, not fitted: step_s, cpu.read.bytes_per_s. rtx-a5000-nfs was fitted" in first
    assert "rtx-a5000-nfs was fitted on llama-3.2-3b, and llama-3.1-8b has other layers" in first
    assert "no GPU, steps of llama-3.2-3b for llama-3.1-8b" in shown(rows, cells=cells, engine="vllm")


def test_a_host_that_ran_late_is_named_before_the_findings() -> None:
    rows, cells, samples = paced_run(2001)
    found = summarize(manifest(cells, engine="vllm"), rows, samples)
    assert findings(found)[1].startswith("Steps ended 2.0% of their time late, more than 2%: this machine was too slow")
    rows, cells, samples = paced_run(2000)
    assert not any("late" in line for line in findings(summarize(manifest(cells, engine="vllm"), rows, samples)))
