"""The run loop on the fake engine: evidence, errors, sampling, resuming, interruption."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.engines.fake.engine import FakeEngine
from harness.errors import EngineError, PreflightError, ResultsError
from harness.experiment.read import load_experiment
from harness.measure.run import RunRequest, run
from harness.report.refresh import seal
from harness.results.folder import RunFolder, read_rows, read_samples
from harness.results.manifest import Manifest, read_manifest
from tests.support.paths import ROOT
from traces.request import RequestRecord

EXPERIMENT: dict[str, Any] = {
    "name": "loop",
    "seed": 1,
    "workload": {"kind": "prefix", "prompt_tokens": 1025, "hit_rate": 0.5},
    "measure": {"tiers": ["recompute", "gpu", "cpu", "disk", "disk_cold"], "samples": 3},
    "cache": {"gpu": "1GiB", "cpu": "1GiB", "disk": {"capacity": "4GiB"}},
}


class Quiet:
    """A progress that keeps what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.done = 0

    def start(self, total: int | None, label: str) -> None:
        self.total, self.label = total, label

    def advance(self, n: int = 1) -> None:
        self.done += n

    def state(self, text: str) -> None:
        self.last_state = text

    def note(self, text: str) -> None:
        self.notes.append(text)


def request(tmp_path: Path, *, engine: Any = "fake", resume: Path | None = None, **changes: Any) -> RunRequest:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump({**EXPERIMENT, **changes}))
    plan = load_experiment(path)
    return RunRequest(
        name="loop",
        cells=plan.cells(),
        engine=engine,
        experiment=plan.origin(),
        folder=resume or tmp_path / "out",
        resume=resume is not None,
    )


def measured(folder: Path) -> list[RequestRecord]:
    return [row for row in read_rows(folder) if row.phase == "measure"]


def test_every_tier_is_proven_and_interleaved(tmp_path: Path) -> None:
    progress = Quiet()
    folder = run(request(tmp_path), progress)
    rows = measured(folder)
    order = ["recompute", "gpu", "cpu", "disk", "disk_cold"] * 3
    assert [row.expected_tier for row in rows] == order and {row.verdict for row in rows} == {"proven"}
    hits = {row.expected_tier: row.tokens_by_tier for row in rows}
    assert (hits["recompute"]["computed"], hits["recompute"]["gpu"]) == (1025, 0)
    assert (hits["gpu"]["computed"], hits["gpu"]["gpu"]) == (513, 512)
    assert (hits["cpu"]["cpu"], hits["cpu"]["disk"]) == (512, 0)
    assert (hits["disk"]["cpu"], hits["disk"]["disk"]) == (0, 512)
    assert (progress.total, progress.done) == (15, 15)
    manifest = read_manifest(folder)
    resolved = manifest.cells[0].resolved
    assert manifest.status == "complete" and resolved is not None and resolved.gpu_bytes == 2**30


def test_what_placed_a_prefix_is_kept_as_warm_rows_of_its_sample(tmp_path: Path) -> None:
    folder = run(request(tmp_path, measure={"tiers": ["cpu", "disk"], "samples": 3}), Quiet())
    warm = [row for row in read_rows(folder) if row.phase == "warm"]
    # A disk sample leaves no prefix in CPU RAM, so that each round's first sample has it computed anew.
    assert [row.id for row in warm] == [f"warm-cpu-{index:05d}-000" for index in range(3)]
    assert {(row.cell, row.verdict, row.expected_tier) for row in warm} == {("base", None, None)}
    assert [row.sample for row in warm] == [0, 1, 2]
    ids = [row.id for row in read_rows(folder)]
    for row in warm:
        assert ids.index(row.id) < ids.index(row.id.removeprefix("warm-")), "a sample's warm rows stand before its own"
    assert seal(folder).rows.warm == len(warm)


def test_an_engine_s_own_word_for_the_cause_stands_in_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Telling(FakeEngine):
        def cause(self) -> str | None:
            return "it counts 512 as lost; ask it to wait"

    monkeypatch.setattr("harness.engines.fake.engine.FakeEngine", Telling)
    folder = run(request(tmp_path, engines={"fake": {"degrade_after": 0}}), Quiet())
    told = {row.expected_tier: row.verdict_reason for row in measured(folder)}
    assert told["cpu"] == "computed_tokens moved by 1025, cpu needs 513; it counts 512 as lost; ask it to wait"
    assert told["gpu"] is None


def test_a_tier_that_silently_recomputes_is_contradicted_and_left_out(tmp_path: Path) -> None:
    folder = run(request(tmp_path, engines={"fake": {"degrade_after": 0}}), Quiet())
    verdicts = {row.expected_tier: row.verdict for row in measured(folder)}
    assert verdicts["recompute"] == verdicts["gpu"] == "proven"
    assert verdicts["cpu"] == verdicts["disk"] == verdicts["disk_cold"] == "contradicted"
    summary = seal(folder)
    tiers = summary.cells[0].tiers
    assert summary.rows.contradicted == 9 and summary.rows.counted == 6
    gpu = tiers["gpu"].metrics["ttft_s"]
    assert tiers["cpu"].metrics["ttft_s"] is None and gpu is not None and gpu.n == 3
    assert "computed_tokens moved by 1025, cpu needs 513" in next(iter(tiers["cpu"].left_out_reasons))


def test_a_failed_request_is_a_row(tmp_path: Path) -> None:
    folder = run(request(tmp_path, engines={"fake": {"fail_every": 5}}), Quiet())
    rows = measured(folder)
    failed = [row for row in rows if row.error is not None]
    assert len(rows) == 15 and failed and all(row.verdict == "unproven" for row in failed)
    assert seal(folder).rows.errors == len(failed)


def test_the_progress_line_of_a_free_load_tells_time_and_failures(tmp_path: Path) -> None:
    """Every fifth of 40 requests fails; the others take 100 ms to the first token, or as long as the engine says."""
    load = {"kind": "synthetic", "requests": 40, "prompt_tokens": 513, "concurrency": 1, "warm": False}
    seen: list[str] = []

    class Listens(Quiet):
        def state(self, text: str) -> None:
            super().state(text)
            seen.append(text)

    engines = {"fake": {"fail_every": 5}}
    rows = measured(run(request(tmp_path, workload=load, measure={}, engines=engines), Listens()))
    failed = sum(row.error is not None for row in rows)
    good = [row.ttft_s for row in rows if row.ttft_s is not None]
    assert failed and len(rows) == 40
    assert seen[-1].endswith(f", {failed} failed") and "mean TTFT " in seen[-1]
    assert float(seen[-1].split("mean TTFT ")[1].split(" s")[0]) == pytest.approx(sum(good) / len(good), rel=0.1)


def test_sampling_stops_when_the_interval_is_narrow(tmp_path: Path) -> None:
    # Below six values no two of them enclose the median with 95 % confidence.
    measure = {"tiers": ["recompute", "gpu"], "until": {"half_width": 0.05, "min_samples": 4, "max_samples": 50}}
    rows = measured(run(request(tmp_path, measure=measure), Quiet()))
    assert [sum(row.expected_tier == tier for row in rows) for tier in ("recompute", "gpu")] == [6, 6]


def test_samples_that_warm_up_are_kept_and_count_for_nothing(tmp_path: Path) -> None:
    measure = {"tiers": ["recompute", "gpu"], "samples": 3, "warm_up": 2}
    folder = run(request(tmp_path, measure=measure), Quiet())
    assert len(measured(folder)) == 6 and len(list(read_samples(folder))) == 6
    warm = [row.id for row in read_rows(folder) if row.phase == "warm" and row.sample < 0]
    assert {"recompute--0001-000", "gpu--0001-000", "recompute--0002-000", "gpu--0002-000"} <= set(warm)
    assert seal(folder).rows.measured == 6


def test_a_tier_warms_up_right_before_its_first_sample_with_the_prefix_that_serves_that_one(tmp_path: Path) -> None:
    measure = {"tiers": ["recompute", "cpu"], "samples": 2, "warm_up": 1}
    folder = run(request(tmp_path, measure=measure), Quiet())
    sent = sorted(read_rows(folder), key=lambda row: row.sent_s)
    tiers = ["recompute--0001", "recompute-00000", "cpu--0001", "cpu-00000", "recompute-00001"]
    assert [row.id.removesuffix("-000") for row in sent if not row.id.startswith("warm")][:5] == tiers
    assert not any(row.id.startswith("warm-cpu") for row in sent), "recompute has left it in all tiers"


@pytest.mark.parametrize("warm_up", [0, 4])
def test_warming_up_is_not_in_the_budget(tmp_path: Path, warm_up: int) -> None:
    """The fake's clock moves 1.025 s a recompute: the third round begins after 2.05 s."""
    measure = {"tiers": ["recompute"], "samples": 1000, "budget": "2s", "warm_up": warm_up}
    assert len(measured(run(request(tmp_path, measure=measure), Quiet()))) == 2


def test_sampling_gives_up_on_a_tier_that_is_never_proven(tmp_path: Path) -> None:
    measure = {"tiers": ["recompute", "cpu"], "until": {"min_samples": 3, "max_samples": 50}}
    progress = Quiet()
    folder = run(request(tmp_path, measure=measure, engines={"fake": {"degrade_after": 0}}), progress)
    assert sum(row.expected_tier == "cpu" for row in measured(folder)) == 5
    assert progress.notes == ["base: cpu could not be proven; its rows are kept, and left out"]


def test_the_budget_ends_sampling(tmp_path: Path) -> None:
    # The fake's clock moves 1.025 s a recompute: the third round begins after 2.05 s.
    measure = {"tiers": ["recompute"], "samples": 1000, "budget": "2s"}
    assert len(measured(run(request(tmp_path, measure=measure), Quiet()))) == 2


def test_concurrent_prompts_differ_and_are_all_proven(tmp_path: Path) -> None:
    workload = {"kind": "prefix", "prompt_tokens": 513, "hit_rate": 1.0, "concurrency": 4}
    rows = measured(run(request(tmp_path, workload=workload), Quiet()))
    assert len(rows) == 5 * 3 * 4 and {row.verdict for row in rows} == {"proven"}


def test_a_sweep_measures_every_cell_and_restarts_the_engine_only_where_it_must(tmp_path: Path) -> None:
    axes = {"cache.chunk_tokens": [128, 256], "workload.hit_rate": [0.0, 0.5, 1.0]}
    folder = run(request(tmp_path, sweep=axes), Quiet())
    rows = measured(folder)
    assert len({row.cell for row in rows}) == 6 and len(rows) == 6 * 15
    assert {row.verdict for row in rows} == {"proven"}
    hits = {(row.cell, row.cached_tokens) for row in rows if row.expected_tier == "gpu"}
    assert hits == {
        (f"cache.chunk_tokens={chunk},workload.hit_rate={rate}", round(rate * 1024))
        for chunk in (128, 256)
        for rate in (0.0, 0.5, 1.0)
    }


def test_a_failed_start_is_an_error_with_a_folder_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no luck"):
        run(request(tmp_path, engines={"fake": {"start_error": "no luck today; try again"}}), Quiet())
    manifest = read_manifest(tmp_path / "out")
    assert manifest.status == "failed" and "no luck" in (manifest.error or "")


@pytest.mark.parametrize(
    ("change", "cure"),
    [
        ({"cache": {"gpu": "16MiB", "cpu": "1GiB", "disk": {"capacity": "4GiB"}}}, "cache.gpu"),
        ({"cache": {"gpu": "1GiB", "cpu": "33MiB", "disk": {"capacity": "4GiB"}}}, "cache.cpu"),
        ({"cache": {"gpu": "1GiB", "cpu": "1GiB", "disk": {"capacity": "20MiB"}}}, "cache.disk"),
        ({"workload": {"kind": "prefix", "prompt_tokens": 131073}}, "shorten the prompt"),
    ],
)
def test_a_working_set_that_cannot_be_there_is_refused_before_anything_is_made(
    tmp_path: Path, change: dict[str, Any], cure: str
) -> None:
    with pytest.raises(PreflightError, match=cure):
        run(request(tmp_path, **change), Quiet())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("requests", "tier", "cure"), [(4, "disk", "never reach it"), (100_000, "cpu", "of KV exceed the .* of cache.cpu")]
)
def test_a_load_that_cannot_spill_where_it_should_is_refused(
    tmp_path: Path, requests: int, tier: str, cure: str
) -> None:
    workload = {"kind": "synthetic", "requests": requests, "prompt_tokens": 1025, "hit_rate": 0.0, "concurrency": 1}
    with pytest.raises(PreflightError, match=cure):
        run(request(tmp_path, workload=workload, measure={"must_reach": tier}), Quiet())


PROGRAM = """
import sys; from pathlib import Path
sys.path.insert(0, {tests!r})
from tests.unit.measure.test_run_loop import Quiet, request
from harness.measure.run import run
run(request(Path({tmp!r}), engines={{"fake": {{"delay": "20ms"}}}}, {extra}), Quiet())
"""


def start_slow_run(tmp_path: Path, extra: str) -> "subprocess.Popen[bytes]":
    root = str(ROOT)
    program = PROGRAM.format(tests=root, tmp=str(tmp_path), extra=extra)
    return subprocess.Popen([sys.executable, "-c", program], cwd=root, stderr=subprocess.DEVNULL)


def wait_for_rows(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        rows = folder / "rows.jsonl"
        if rows.exists() and rows.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.01)
    raise AssertionError(f"{folder} never had {count} rows")


FREE = """workload={"kind": "synthetic", "requests": 60, "prompt_tokens": 513, "hit_rate": 0.5, "prefixes": 3,
"concurrency": 1}, measure={}"""


@pytest.mark.parametrize(("extra", "total"), [("", 15), (FREE, 60)], ids=["tiers", "free load"])
def test_killed_in_the_middle_and_resumed_loses_and_doubles_nothing(tmp_path: Path, extra: str, total: int) -> None:
    process = start_slow_run(tmp_path, extra)
    wait_for_rows(tmp_path / "out", 8)
    process.kill()
    process.wait()
    before = (tmp_path / "out" / "rows.jsonl").read_bytes()
    changes = eval(f"dict({extra})")
    folder = run(request(tmp_path, resume=tmp_path / "out", **changes), Quiet())
    after = (folder / "rows.jsonl").read_bytes()
    assert after.startswith(before[: before.rfind(b"\n") + 1])
    rows = measured(folder)
    assert len(rows) == total == len({(row.expected_tier, row.sample, row.id) for row in rows})
    assert {row.attempt for row in rows} == {0, 1}
    assert len(read_manifest(folder).attempts) == 2 and read_manifest(folder).status == "complete"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_so_and_can_be_resumed(tmp_path: Path, how: signal.Signals) -> None:
    process = start_slow_run(tmp_path, "")
    wait_for_rows(tmp_path / "out", 4)
    os.kill(process.pid, how)
    assert process.wait(timeout=30) != 0
    manifest = read_manifest(tmp_path / "out")
    assert manifest.status == "failed" and how.name in (manifest.error or "")
    assert len(measured(run(request(tmp_path, resume=tmp_path / "out"), Quiet()))) == 15


def test_two_writers_are_refused(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "one", Manifest(run_id="one", name="one", status="started", engine="fake"))
    with pytest.raises(ResultsError, match="another process"):
        RunFolder.resume(tmp_path / "one")
    folder.close()
    RunFolder.resume(tmp_path / "one").close()


def test_a_torn_line_is_cut_off_and_a_broken_one_is_told(tmp_path: Path) -> None:
    folder = run(request(tmp_path), Quiet())
    rows = folder / "rows.jsonl"
    whole = rows.read_bytes()
    rows.write_bytes(whole + b'{"id": "torn')
    assert len(list(read_rows(folder))) == whole.count(b"\n")
    RunFolder.resume(folder).close()
    assert rows.read_bytes() == whole
    rows.write_bytes(b"garbage\n" + whole)
    with pytest.raises(ResultsError, match=r"rows\.jsonl:1"):
        list(read_rows(folder))


def test_samples_hold_both_sides_of_the_evidence(tmp_path: Path) -> None:
    folder = run(request(tmp_path), Quiet())
    cold = [sample for sample in read_samples(folder) if sample.tier == "disk_cold"]
    assert len(cold) == 3
    for sample in cold:
        assert sample.observed.device_read_bytes == sample.expected.device_read_bytes == {"disk": 512 * 32768}
        assert sample.observed.loaded_chunks == {"disk": 2}


def test_the_summary_can_be_made_again(tmp_path: Path) -> None:
    folder = run(request(tmp_path), Quiet())
    seal(folder)
    first = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").unlink()
    seal(folder)
    assert json.loads((folder / "summary.json").read_text()) == first
