"""Mode storage: the simulator's rules with a real disk, and storage alone; failures are rows, never lost ones."""

import copy
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from harness.commands.run import run as run_command
from harness.measure.run import run
from harness.report.refresh import seal
from harness.results.folder import read_samples
from harness.results.manifest import read_manifest
from tests.support.paths import ROOT
from tests.unit.measure.test_run_loop import Quiet, measured
from tests.unit.measure.test_run_sim import request

STORAGE: dict[str, Any] = {"reserve": "0B", "compute": "none", "verify": True, "depth": 4}
TIERS: dict[str, Any] = {
    "name": "storage",
    "workload": {"kind": "prefix", "prompt_tokens": 1025, "hit_rate": 0.5, "concurrency": 2},
    "measure": {"tiers": ["recompute", "gpu", "cpu", "disk_cold"], "samples": 2},
    "cache": {"gpu": "1GiB", "cpu": "1GiB", "disk": {"capacity": "256MiB"}},
    "engines": {"sim": {"mode": "storage", "storage": STORAGE}},
}
ALONE: dict[str, Any] = {
    "name": "alone",
    "workload": {
        "kind": "personas",
        "users": 4,
        "turns": 3,
        "personas": [
            {"name": "short", "context_tokens": [64, 256], "output_tokens": [8, 40]},
            {"name": "long", "context_tokens": [256, 600], "output_tokens": [40, 80], "think": ["0s", "20ms"]},
        ],
    },
    "cache": {"chunk_tokens": 64, "gpu": "0B", "disk": {"capacity": "256MiB"}},
    "engines": {"sim": {"mode": "tiers", "storage": STORAGE}},
}
CHUNK_BYTES = 64 * 32768


def figures(folder: Path) -> dict[str, Any]:
    [cell] = read_manifest(folder).cells
    assert cell.record is not None and cell.record.storage is not None
    found: dict[str, Any] = msgspec.to_builtins(cell.record.storage)
    return found


@pytest.fixture
def past_the_cache(tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of the temporary folder has no O_DIRECT")


@pytest.mark.parametrize("config", [TIERS, ALONE], ids=["tiers", "alone"])
def test_the_same_seed_asks_for_the_same_operations(tmp_path: Path, config: dict[str, Any]) -> None:
    """Whatever the device's speed: one run has many operations in flight, the other one, and threads."""
    mode = config["engines"]["sim"]["mode"]
    slow = {"sim": {"mode": mode, "storage": {**STORAGE, "depth": 1, "io": "threads", "fsync": True}}}
    digests = []
    variants: tuple[dict[str, Any], ...] = ({}, {}, {"engines": slow}, {"seed": 5})
    for number, changes in enumerate(variants):
        folder = run(request(tmp_path, {**config, **changes}, out=f"run{number}"), Quiet())
        digests.append(figures(folder)["operations_sha256"])
        assert (
            sorted(path.name for path in folder.iterdir() if "slab" in path.name or path.name.startswith(".kv")) == []
        )
    assert digests[0] == digests[1] == digests[2] != digests[3]


@pytest.mark.usefixtures("past_the_cache")
def test_every_tier_is_proven_with_a_real_disk(tmp_path: Path) -> None:
    folder = run(request(tmp_path, TIERS), Quiet())
    rows = measured(folder)
    assert len(rows) == 4 * 2 * 2 and {(row.verdict, row.verdict_reason) for row in rows} == {("proven", None)}
    cold = [sample for sample in read_samples(folder) if sample.tier == "disk_cold"]
    assert [sample.observed.device_read_bytes for sample in cold] == [{"disk": 2 * 512 * 32768}] * 2
    found = figures(folder)
    assert found["read"]["moved_bytes"] == sum(sample.observed.device_read_bytes["disk"] for sample in cold)
    assert found["failed_operations"] == 0 and found["write"]["operations"] > 0


def files(config: dict[str, Any], folder: Path, **disk: Any) -> dict[str, Any]:
    """The same with a file a chunk, below `folder`."""
    storage = {key: value for key, value in STORAGE.items() if key != "depth"} | {"layout": "files"}
    cache = {**config["cache"], "disk": {**config["cache"]["disk"], "path": str(folder), **disk}}
    mode = config["engines"]["sim"]["mode"]
    return {**config, "cache": cache, "engines": {"sim": {"mode": mode, "storage": storage}}}


@pytest.mark.usefixtures("past_the_cache")
@pytest.mark.parametrize("disk", [{}, {"adapter": "fs_native"}, {"odirect": True}], ids=str)
def test_a_file_a_chunk_is_proven_and_counted_like_a_cache_servers(tmp_path: Path, disk: dict[str, Any]) -> None:
    chunks = tmp_path / "chunks"
    chunks.mkdir()
    tiers = ["recompute", "disk_cold"] if disk.get("odirect") else ["recompute", "disk", "disk_cold"]
    config = {**files(TIERS, chunks, **disk), "measure": {"tiers": tiers, "samples": 2}}
    folder = run(request(tmp_path, config), Quiet())
    assert {(row.verdict, row.verdict_reason) for row in measured(folder)} == {("proven", None)}
    found = figures(folder)
    assert found["failed_operations"] == 0 and found["write"]["operations"] > 0
    assert found["read"]["moved_bytes"] == 2 * (len(tiers) - 1) * 2 * 512 * 32768
    assert list(chunks.iterdir()) == []


def test_chunks_that_are_evicted_lose_their_files(tmp_path: Path) -> None:
    """Room for 8 chunks on disk, and 12 prompts of 4 chunks of their own each."""
    chunks = tmp_path / "chunks"
    chunks.mkdir()
    config = files({**TIERS, "cache": {**TIERS["cache"], "disk": {"capacity": "64MiB"}}}, chunks)
    config["engines"]["sim"] |= {"tier_policy": "lru"}
    config["engines"]["sim"]["storage"] |= {"keep_files": True}
    workload = {
        "kind": "synthetic",
        "requests": 12,
        "prompt_tokens": 1025,
        "hit_rate": 0.0,
        "output_tokens": 1,
        "arrivals": "constant",
        # A prompt's chunks find room once those of an earlier one are written.
        "rate_per_s": 3.0,
    }
    folder = run(request(tmp_path, {**config, "workload": workload, "measure": {}}), Quiet())
    assert all(row.error is None for row in measured(folder))
    [kept] = chunks.iterdir()
    assert figures(folder)["write"]["operations"] > 8 and figures(folder)["failed_operations"] == 0
    assert len(list(kept.glob("*.data"))) == 8 and len(list(kept.iterdir())) == 8


def test_storage_alone_with_a_file_a_chunk_moves_the_same(tmp_path: Path) -> None:
    folder = run(request(tmp_path, files(ALONE, tmp_path)), Quiet())
    slab = run(request(tmp_path, ALONE, out="slab"), Quiet())
    one, other = figures(folder), figures(slab)
    for way in ("read", "write"):
        assert one[way]["moved_bytes"] == other[way]["moved_bytes"] and one[way]["operations"] > 0
    assert one["operations_sha256"] == other["operations_sha256"] and one["failed_operations"] == 0
    assert not list(tmp_path.glob("kv-harness-*"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_chunk_file_outlives_a_run(tmp_path: Path, number: signal.Signals) -> None:
    chunks = tmp_path / "chunks"
    chunks.mkdir()
    request(tmp_path, {**files(TIERS, chunks), "measure": {"tiers": ["disk"], "samples": 5000}})
    words = ["run", str(tmp_path / "experiment.yaml"), "--engine", "sim", "--out", str(tmp_path / "out")]
    program = [sys.executable, "-m", "harness", *words]
    with subprocess.Popen(program, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: any(chunks.glob("*/*.data")))
            process.send_signal(number)
            assert process.wait(30) != 0
        finally:
            process.kill()
    wait_until(lambda: not any(chunks.iterdir()))


def wait_until(holds: Callable[[], bool], patience_s: float = 120) -> None:
    deadline = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_storage_alone_moves_what_the_load_says(tmp_path: Path) -> None:
    folder = run(request(tmp_path, ALONE), Quiet())
    rows, found = measured(folder), figures(folder)
    assert len(rows) == 12 and all(row.error is None for row in rows)
    chunks = {row.id: row.prompt_tokens // 64 for row in rows}
    sessions = {row.session for row in rows}
    written = sum(max(chunks[row.id] for row in rows if row.session == session) for session in sessions)
    hits = sum((row.cached_tokens or 0) // 64 for row in rows)
    again = sum(chunks[row.id] * -(-(row.output_tokens or 0) // 32) for row in rows)
    assert found["write"]["operations"] == written and found["read"]["operations"] == hits + again
    for way in ("read", "write"):
        assert found[way]["moved_bytes"] == found[way]["asked_bytes"] == found[way]["operations"] * CHUNK_BYTES
    assert found["complete"] and found["requests_cut_off"] == 0 and found["failed_operations"] == 0
    output, rates = sum(row.output_tokens or 0 for row in rows), found["throughput"]
    assert rates["wall_clock"]["tokens_per_s"] == pytest.approx(output / found["elapsed_s"])
    assert rates["per_io_time"]["tokens_per_s"] == pytest.approx(output / found["cumulative_io_s"])
    assert rates["storage"]["tokens_per_s"] == pytest.approx((written + hits + again) * 64 / found["elapsed_s"])
    assert msgspec.to_builtins(seal(folder).cells[0].storage) == found
    assert "Output per I/O time" in (folder / "report.html").read_text()


def test_what_ends_after_the_deadline_counts_for_nothing(tmp_path: Path) -> None:
    workload = {**ALONE["workload"], "users": 2, "turns": 200}
    cache = {**ALONE["cache"], "disk": {"capacity": "8GiB"}}
    storage = {**STORAGE, "verify": False, "depth": 1, "device": "null"}
    config = {**ALONE, "workload": workload, "cache": cache, "measure": {"budget": "300ms"}}
    config["engines"] = {"sim": {"mode": "tiers", "storage": storage}}
    kind = {"name": "slow", "context_tokens": [64, 64], "output_tokens": [8, 8], "think": ["50ms", "60ms"]}
    workload["personas"] = [kind]
    began_s = time.monotonic()
    folder = run(request(tmp_path, config), Quiet())
    assert time.monotonic() - began_s < 10
    rows, found = measured(folder), figures(folder)
    finished = [row for row in rows if row.error is None]
    assert 0 < len(finished) < 400 and found["elapsed_s"] == pytest.approx(0.3) and not found["complete"]
    assert found["requests_finished"] == len(finished) and found["requests_cut_off"] == len(rows) - len(finished)
    assert found["moved_over_s"] <= 0.31


def test_transfers_under_way_at_the_deadline_are_not_counted(tmp_path: Path) -> None:
    """More users than a disk serves in that time, each with megabytes in flight, on a real file."""
    workload = {**ALONE["workload"], "users": 40, "turns": 10, "personas": [ALONE["workload"]["personas"][1]]}
    cache = {**ALONE["cache"], "disk": {"capacity": "8GiB"}}
    folder = run(
        request(tmp_path, {**ALONE, "workload": workload, "cache": cache, "measure": {"budget": "2s"}}), Quiet()
    )
    rows, found = measured(folder), figures(folder)
    cut = [row for row in rows if row.error is not None]
    assert cut and found["requests_cut_off"] == len(cut) and len(rows) - len(cut) == found["requests_finished"]
    assert {row.error for row in cut} == {"not finished when the time (measure.budget) was over"}
    assert found["elapsed_s"] == pytest.approx(2.0) and found["moved_over_s"] <= 2.0 and not found["complete"]
    moved = found["read"]["operations"] + found["write"]["operations"]
    assert found["kv_tokens"] == 64 * moved
    assert found["output_tokens"] == sum(row.output_tokens or 0 for row in rows if row.error is None)


def command(folder: Path, config: dict[str, Any], *prefix: str) -> subprocess.CompletedProcess[str]:
    """`harness run` in a process of its own."""
    request(folder, config)
    program = [sys.executable, "-m", "harness", "run", str(folder / "experiment.yaml"), "--engine", "sim"]
    words = [*prefix, *program, "--out"]
    return subprocess.run([*words, str(folder / "out")], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(os.geteuid() != 0, reason="a loop device needs root")
@pytest.mark.parametrize("config", [ALONE, TIERS], ids=["alone", "tiers"])
def test_a_device_that_fails_midway_gives_failed_operations_and_keeps_every_row(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    config = {**config, "cache": {**config["cache"], "disk": {"capacity": "256MiB", "path": str(disk)}}}
    failing = [sys.executable, str(ROOT / "tests/support/failing_disk.py"), str(disk), "40"]
    done = command(tmp_path, config, "unshare", "--mount", "--propagation", "private", *failing)
    assert "Traceback" not in done.stderr, done.stderr
    rows, found = measured(tmp_path / "out"), figures(tmp_path / "out")
    assert len(rows) == len({(row.id, row.sample) for row in rows}) == (12 if config["name"] == "alone" else 16)
    assert found["failed_operations"] > 0 and any("failed" in text for text in found["errors"])
    # All KV on storage: what cannot be written or read is an error. With tiers: what was not written is not looked for.
    assert any(row.error is not None for row in rows) is (config["name"] == "alone")
    assert list(disk.iterdir()) == []


def test_all_kv_on_storage_is_for_the_simulator_alone(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(ALONE))
    for words, reason in ((["run", "--engine", "fake"], "cache.gpu is 0"), (["serve", "--port", "0"], "mode tiers")):
        program = [sys.executable, "-m", "harness", words[0], "experiment.yaml", *words[1:]]
        done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and reason in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cache.disk.path": "/nowhere/at/all"}, "no folder"),
        ({"cache.disk.path": "/proc"}, "/proc"),
        ({"cache.disk.capacity": "4PiB"}, "cache.disk.capacity"),
        ({"cache.disk.capacity": "900TiB"}, "reserve"),
        ({"cache.disk.capacity": "8MiB"}, "is the last tier, and the KV of request"),
        ({"cache.disk": None}, "needs a tier"),
        ({"cache.disk": None, "cache.gpu": "1GiB", "engines.sim.mode": "storage"}, "needs cache.disk"),
        ({"engines.sim.mode": "model"}, "mode tiers"),
        ({"engines.sim.mode": "storage"}, "mode tiers"),
        ({"cache.pool": "1GiB"}, "has no pool"),
        ({"engines.sim.tiers": {"token_time": 3}}, "token_time"),
        ({"engines.sim.tiers": {"tier_share": 1.5}}, "tier_share"),
        ({"workload.warm_up": "5s"}, "longer workload.duration"),
        ({"engines.sim.storage.depth": -1}, "depth"),
        ({"engines.sim.storage.dpeth": 4}, "did you mean 'depth'"),
        ({"engines.sim.storage.layout": "files"}, "depth is for layout slab"),
        ({"engines.sim.storage": {"layout": "files", "device": "ram"}}, "device file"),
        ({"workload.personas": []}, "personas"),
        ({"workload.users": 0}, "users"),
    ],
)
def test_what_cannot_work_is_refused_on_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    words: str,
) -> None:
    config = copy.deepcopy(ALONE)
    for key, value in changes.items():
        *path, last = key.split(".")
        place = config
        for part in path:
            place = place[part]
        place[last] = value
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    assert run_command(Path("experiment.yaml"), engine="sim") == 2
    said = capsys.readouterr().err
    assert words in said and len(said.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["experiment.yaml"]
