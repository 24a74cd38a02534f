"""The most that a cache could have served of a load: worked out by hand, and no less than the simulator hits."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from rich.console import Console

from harness.experiment.loads import free_load
from harness.experiment.model import Experiment
from harness.measure.run import run
from harness.records import CellRecord, HitCeiling, Resolved
from harness.report.refresh import seal
from harness.report.run.terminal import render_summary
from harness.report.words import ceiling_words, percent
from harness.results import ceiling
from harness.results.ceiling import find_ceilings, read_ceilings, write_ceilings
from harness.results.folder import read_rows, read_samples
from harness.results.manifest import CellEntry, Manifest, read_manifest
from harness.results.summary import read_summary, summarize
from tests.support.report_runs import cell, manifest, row, sample
from tests.unit.measure.test_run_loop import Quiet
from tests.unit.measure.test_run_sim import FREE, request
from traces.formats import write_trace
from traces.request import Request, RequestRecord, Segment, reply_stream

A, B, C = Segment(1, 100), Segment(2, 100), Segment(3, 100)
REQUESTS = [
    Request(id="a", prompt=(A,), output_tokens=7),
    Request(id="b", prompt=(B,), output_tokens=7),
    Request(id="c", prompt=(C,), output_tokens=7),
    Request(id="a2", prompt=(A, Segment(4, 50)), output_tokens=7),
    Request(id="b2", prompt=(B, Segment(5, 50)), output_tokens=7),
]
SIZES = Resolved(gpu_bytes=100 * 8, cpu_bytes=20 * 8, kv_bytes_per_token=8)


def load_cell(path: Path, requests: list[Request] = REQUESTS, resolved: Resolved = SIZES, **measure: Any) -> CellEntry:
    """A cell that has replayed these requests, over a GPU and a CPU tier."""
    write_trace(path, requests)
    experiment = Experiment.model_validate(
        {
            "name": "t",
            "workload": {"kind": "trace", "trace": str(path)},
            "cache": {"gpu": "1GiB", "cpu": "1GiB"},
            "measure": measure,
        }
    )
    config = experiment.model_dump(mode="json")
    return cell("base", config=config, resolved=resolved, trace=free_load(experiment).trace)


def sent(*names: str, requests: list[Request] = REQUESTS, **fields: Any) -> list[RequestRecord]:
    """Rows of requests that were sent a second after each other in this order; a name with a ! has failed."""
    tokens = {request.id: request.prompt_tokens for request in requests}
    return [
        row(
            None,
            None if name.endswith("!") else 0.5,
            at_s=float(at),
            id=name.rstrip("!"),
            prompt_tokens=tokens[name.rstrip("!")],
            **({"sample": 0} | fields),
        )
        for at, name in enumerate(names)
    ]


def found(entry: CellEntry, rows: list[RequestRecord], *ended: int) -> HitCeiling:
    return find_ceilings(manifest([entry]), rows, [sample("load", number, None) for number in ended])["base"]


def test_the_ceiling_is_that_of_all_tiers_together_in_the_order_of_sends(tmp_path: Path) -> None:
    """600 tokens are asked for. Any cache serves A and B again: 200. One of 120 serves 100 of A, and 20 of B."""
    entry = load_cell(tmp_path / "own.jsonl")
    told = found(entry, sent("a", "b", "c", "a2", "b2"))
    assert told == HitCeiling(of_size=120 / 600, size_tokens=120, of_any_size=200 / 600)
    # Where each comes again at once, a cache of 120 tokens serves both whole.
    assert found(entry, sent("a", "a2", "b", "b2", "c")).of_size == pytest.approx(200 / 600)
    # Rows are read in the order in which requests ended, which is not that of the sends.
    assert found(entry, sent("a", "b", "c", "a2", "b2")[::-1]) == told
    # A failed request may have filled a cache; it is in no hit rate.
    assert found(entry, sent("a!", "b", "c", "a2", "b2")).of_any_size == pytest.approx(200 / 500)


def test_only_complete_trials_count_each_with_caches_of_its_own(tmp_path: Path) -> None:
    entry = load_cell(tmp_path / "own.jsonl", trials=3)
    order = ("a", "b", "c", "a2", "b2")
    rows = [*sent(*order), *sent(*order, sample=1), *sent("a", "a2", "b!", sample=2)]
    assert found(entry, rows, 0, 1, 2) == HitCeiling(of_size=240 / 1200, size_tokens=120, of_any_size=400 / 1200)


def test_a_quoted_answer_was_decoded_behind_its_prompt(tmp_path: Path) -> None:
    """What was decoded is not asked for, but can be hit; the KV of an answer's last token is never computed."""
    quoted = (A, Segment(reply_stream("a"), 7), Segment(9, 20))
    requests = [REQUESTS[0], Request(id="a2", prompt=quoted, output_tokens=1)]
    entry = load_cell(tmp_path / "own.jsonl", requests)
    assert found(entry, sent("a", "a2", requests=requests)).of_any_size == pytest.approx(106 / 227)


def test_what_cannot_be_known_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry, order = load_cell(tmp_path / "own.jsonl"), ("a", "b", "c", "a2", "b2")
    unsized = load_cell(tmp_path / "own.jsonl", resolved=Resolved(gpu_bytes=800, kv_bytes_per_token=8))
    half = found(unsized, sent(*order))
    assert half == HitCeiling(of_any_size=200 / 600, reason="the size of the tier CPU RAM is not reported")
    assert ceiling_words(half) == (
        "at most 33.3 % in any cache (computed); of this size unknown: the size of the tier CPU RAM is not reported"
    )
    other = [msgspec.structs.replace(one, prompt_tokens=3) if one.id == "b" else one for one in sent(*order)]
    assert "request b is not the one that was sent" in str(found(entry, other).reason)
    monkeypatch.setattr(ceiling, "MAX_SEGMENTS", 6)
    assert "the prompts have 7 segments, more than 6" in str(found(entry, sent(*order)).reason)
    monkeypatch.setattr(ceiling, "MAX_REQUESTS", 4)
    assert "more than 4 requests were sent (5)" in str(found(entry, sent(*order)).reason)
    monkeypatch.undo()
    write_trace(tmp_path / "own.jsonl", REQUESTS[:3])
    assert found(entry, sent(*order)).reason == "the load cannot be made again: its trace is another one now"
    (tmp_path / "own.jsonl").unlink()
    gone = found(entry, sent(*order))
    assert gone.of_any_size is None and "there is no such trace file" in ceiling_words(gone)


def test_no_ceiling_of_a_load_that_goes_on_of_warm_states_and_of_storage_alone(tmp_path: Path) -> None:
    rows = sent("a", "b", "c", "a2", "b2")
    entry = load_cell(tmp_path / "own.jsonl")
    claimed = [msgspec.structs.replace(one, expected_tier="gpu") for one in rows]
    assert find_ceilings(manifest([entry]), claimed, []) == {}
    entry.status = "started"
    assert find_ceilings(manifest([entry]), rows, []) == {}
    entry.status = "complete"
    entry.record = CellRecord()
    assert "base" in find_ceilings(manifest([entry]), rows, [])
    entry.record = CellRecord(storage=cast(Any, "figures of a storage device"))
    assert find_ceilings(manifest([entry]), rows, []) == {}


def test_a_ceiling_outlives_its_trace(tmp_path: Path) -> None:
    known, unknown = HitCeiling(of_any_size=0.5, reason="x"), HitCeiling(reason="gone")
    write_ceilings(tmp_path, "run", {})
    assert read_ceilings(tmp_path) == {} and not list(tmp_path.iterdir())
    write_ceilings(tmp_path, "run", {"one": known, "two": unknown})
    write_ceilings(tmp_path, "run", {"one": unknown, "two": unknown})
    assert read_ceilings(tmp_path) == {"one": known, "two": unknown}


@pytest.mark.parametrize("gpu", ["64MiB", "1GiB"])
def test_the_simulator_hits_no_more_than_that(gpu: str, tmp_path: Path) -> None:
    """With evictions on both tiers, and where all fits."""
    config = FREE | {"cache": {"gpu": gpu, "cpu": gpu}, "workload": {**FREE["workload"], "concurrency": 3}}
    folder = run(request(tmp_path, config), Quiet())
    told: Manifest = read_manifest(folder)
    rows, samples = list(read_rows(folder)), list(read_samples(folder))
    ceilings = find_ceilings(told, rows, samples)
    (figures,) = summarize(told, rows, samples, ceilings).cells
    most, rate = figures.ceiling, figures.tiers["load"].tokens.hit_rate
    assert most is not None and most.of_size is not None and most.of_any_size is not None and rate is not None
    assert 0 < rate <= most.of_size <= most.of_any_size < 1
    assert (most.of_size < most.of_any_size) == (gpu != "1GiB")


def test_table_page_and_summary_print_it_beside_the_hit_rate(tmp_path: Path) -> None:
    folder = run(request(tmp_path, FREE), Quiet())
    summary = seal(folder)
    assert read_summary(folder) == summary
    words = ceiling_words(summary.cells[0].ceiling)
    assert words == "at most 75.2 % in any cache of this size, 75.2 % in any at all (computed)"
    rate = summary.cells[0].tiers["load"].tokens.hit_rate
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(render_summary(summary, read_manifest(folder)))
    assert f"hit rate {percent(rate)} ({words})" in console.export_text()
    page = (folder / "report.html").read_text()
    assert f'<td>{percent(rate)}</td><td class="left">{words}</td>' in page
    assert f"of prompt tokens came from a cache, {words}" in page
