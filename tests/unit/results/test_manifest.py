"""The manifest: what is written is read back equal; kept evidence of schema 1 stays readable; errors name the place."""

from pathlib import Path

import msgspec
import pytest
import yaml

from harness.errors import ResultsError
from harness.experiment.read import load_experiment
from harness.experiment.workloads import PrefixWorkload, TraceWorkload
from harness.records import (
    CellRecord,
    ClusterShape,
    EvictionRules,
    Origin,
    Resolved,
    SchedulerLimits,
    StoreFacts,
    TraceOrigin,
)
from harness.results.folder import RunFolder
from harness.results.manifest import (
    SCHEMA,
    Attempt,
    CellEntry,
    DeviceEntry,
    Manifest,
    encode_manifest,
    manifest_of,
    read_kept_manifests,
    read_manifest,
)
from harness.results.provenance import Git, Host
from harness.storage_records import LatencyParts, OperationFigures, StorageFigures, Throughput
from tests.support.paths import ROOT

KEPT = ROOT / "results" / "validation"
QUICKSTART = ROOT / "configs" / "experiments" / "quickstart.yaml"


def whole_manifest() -> Manifest:
    """Every field set."""
    resolved = Resolved(
        gpu_bytes=2**30,
        io_pids=(7, 8),
        versions={"vllm": "0.32.0"},
        scheduler=SchedulerLimits(max_batched_tokens=2048, max_sequences=128),
        eviction=EvictionRules(policy="lru", watermark=0.8, ratio=0.2),
        cluster=ClusterShape(instances=2, routing="round-robin", shared=("disk",)),
        store=StoreFacts(io="uring", page_cache=None, slot_bytes=4096),
        disk_file_system="ext4",
        url="http://127.0.0.1:1",
        connector="mp",
        cache_config={"num_gpu_blocks": "1024"},
        calibration_source="measured",
    )
    latency_s = LatencyParts(total={"p50": 0.2}, device={"p50": None}, host={"p50": 0.1})
    moved = OperationFigures(operations=2, asked_bytes=8, moved_bytes=4, device_bytes=None, latency_s=latency_s)
    storage = StorageFigures(
        io="uring",
        page_cache=None,
        operations_sha256="ef",
        failed_operations=1,
        errors={"EIO": 1},
        moved_over_s=0.5,
        cumulative_io_s=0.7,
        read=moved,
        write=moved,
        complete=False,
        throughput={"storage": Throughput(tokens_per_s=3.5, formula="a / b")},
    )
    device = DeviceEntry(limits={"bandwidth": 1e8}, file_system="ext4", size_bytes=2**32, name="run-1", mount="m")
    trace = TraceOrigin(name="t", sha256="ab", format="mooncake", requests=3, total_requests=5, left_out=2)
    cell = CellEntry(
        key="base",
        overrides={"seed": 2},
        status="complete",
        config=load_experiment(QUICKSTART).experiment.model_dump(mode="json"),
        resolved=resolved,
        trace=trace,
        device=device,
        record=CellRecord(storage=storage),
    )
    return Manifest(
        run_id="r",
        name="n",
        status="failed",
        error="why",
        engine="sim",
        experiment=Origin(path="a.yaml", sha256="cd"),
        command="harness run a.yaml",
        created_at="2026-11-22T10:00:00Z",
        finished_at="2026-11-22T10:01:00Z",
        seed=3,
        git=Git(commit="f00d", dirty=False),
        host=Host(cpu="c", cores=2, memory_bytes=4, kernel="k", hostname="h"),
        versions={"python": "3.11"},
        attempts=[Attempt(started_at="2026-11-22T10:00:00Z", pid=1)],
        cells=[cell, CellEntry(key="waits")],
    )


def test_what_is_written_is_read_back_equal(tmp_path: Path) -> None:
    manifest = whole_manifest()
    RunFolder.create(tmp_path / "run", manifest).close()
    again = read_manifest(tmp_path / "run")
    assert again == manifest and again.schema == SCHEMA
    assert encode_manifest(again) == (tmp_path / "run" / "manifest.json").read_bytes()


def test_a_cell_reads_its_config_as_the_experiment_that_it_was() -> None:
    cell = whole_manifest().cells[0]
    experiment = load_experiment(QUICKSTART).experiment
    assert cell.experiment == experiment and cell.model == experiment.model
    assert cell.workload == experiment.workload and cell.cache == experiment.cache and cell.storage is None
    assert cell.workload_kind == experiment.workload.kind


def test_schema_1_is_read_as_this_one() -> None:
    """A manifest as the last version before schema 2 wrote it."""
    manifest = whole_manifest()
    new = msgspec.to_builtins(manifest)
    old = new | {"schema": 1, "error": None, "cells": [dict(cell) for cell in new["cells"]]}
    resolved = dict(old["cells"][0]["resolved"])
    moved = ("scheduler", "eviction", "cluster", "disk_file_system", "url", "connector", "cache_config")
    details = {name: resolved.pop(name) for name in (*moved, "calibration_source")}
    store = resolved.pop("store")
    details |= {f"storage_{name}": store[name] for name in ("io", "page_cache", "slot_bytes")}
    old["cells"][0]["resolved"] = resolved | {"details": details}
    manifest.error = None
    assert manifest_of(msgspec.json.decode(msgspec.json.encode(old)), "m", "r") == manifest


def test_kept_evidence_of_schema_1_is_readable() -> None:
    runs = read_kept_manifests(KEPT / "cpu_vllm" / "manifest.json")
    assert {"real", "sim"} <= runs.keys()
    real = runs["real"]
    assert real.engine == "vllm" and real.host.cores == 2 and real.host.hostname is None and real.git.commit
    assert len(real.cells) > 10
    for cell in real.cells:
        assert cell.resolved is not None and cell.resolved.gpu_blocks in (128, 1024)
        assert cell.resolved.scheduler == SchedulerLimits(max_batched_tokens=2048, max_sequences=128)
        assert cell.status == "complete" and cell.workload is not None and cell.cache is not None
        assert (cell.disk_file_system is None) == (cell.cache.disk is None)
    first = real.cells[0]
    assert isinstance(first.workload, PrefixWorkload) and first.workload.prompt_tokens == 513
    assert first.device_bytes_per_s == 100 * 2**20 and first.resolved and first.resolved.connector == "mp"
    assert any(isinstance(cell.workload, TraceWorkload) and cell.trace for cell in real.cells)


def test_kept_evidence_of_this_schema_is_readable() -> None:
    published = read_kept_manifests(KEPT / "published" / "manifest.json")
    assert published.keys() == {"sim", "rounds", "curves"}
    assert all(run.engine == "sim" and run.cells[0].storage is None for run in published.values())


def test_kept_evidence_has_no_whole_experiment_and_says_so() -> None:
    cell = read_kept_manifests(KEPT / "cpu_vllm" / "manifest.json")["real"].cells[0]
    with pytest.raises(ResultsError, match=r"cell calibration:.*: its config cannot be read \(name: Field required\)"):
        _ = cell.experiment


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"schema": 3}', "has schema 3, this version reads 1 to 2"),
        ("{}", "has schema None"),
        ("[]", "cannot be read"),
        ('{"schema": 2, "run_id": "r"}', "is no manifest of schema 2"),
        ('{"schema": 1, "status": "odd"}', "is no manifest of schema 1"),
    ],
)
def test_what_is_no_manifest_is_refused_on_one_line(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ResultsError) as refused:
        read_manifest(tmp_path)
    assert words in str(refused.value) and str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)


def test_a_section_that_this_version_cannot_read_is_refused() -> None:
    cell = CellEntry(key="k", config=yaml.safe_load("cache: {gpu: 1, novelty: 2}"))
    with pytest.raises(ResultsError, match=r"cell k: its config cannot be read \(novelty: .*manifest names"):
        _ = cell.cache
    assert cell.workload is None and cell.model is None
