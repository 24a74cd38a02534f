"""Sweeps over workers: the folder of a single process, whatever the workers are and whatever becomes of them."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from harness.errors import ConfigError, EngineError, PreflightError
from harness.measure.run import RunRequest, run
from harness.report.refresh import seal
from harness.results.manifest import read_manifest
from tests.support.paths import ROOT
from tests.support.same_folders import assert_same_rows, assert_same_run
from tests.unit.measure.test_run_loop import Quiet
from tests.unit.measure.test_run_sim import FREE, SESSIONS, SYNTHETIC, TIERS, request

AXES = {"cache.cpu": ["256MiB", "1GiB"], "engines.sim.tier_policy": ["lmcache-0.5.6-mp", "lru", "arc"]}
LONG = {**SYNTHETIC, "workload": {**SYNTHETIC["workload"], "requests": 1200}, "sweep": {**AXES, "seed": [1, 2]}}
NO_RAY = importlib.util.find_spec("ray") is None
needs_ray = pytest.mark.skipif(NO_RAY, reason="Ray is not installed: the extra `ray`")
WORKER = "harness.measure.local_workers"


def asked(folder: Path, config: dict[str, Any], on: str | None, **more: Any) -> RunRequest:
    return msgspec.structs.replace(request(folder, config, **more), on=on)


def workers_of(process: int, name: str = WORKER) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(process).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if name in " ".join(child.cmdline()):
                found.append(child)
    return found


@contextlib.contextmanager
def meanwhile(work: Callable[[], object], every_s: float = 0.05) -> Iterator[None]:
    """Does `work` again and again, in a thread of its own, until the block ends."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(every_s):
            work()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Killing(Quiet):
    """Kills one worker when the first cells are done."""

    def __init__(self) -> None:
        super().__init__()
        self.killed = 0

    def advance(self, n: int = 1) -> None:
        super().advance(n)
        if not self.killed:
            victim = workers_of(os.getpid())[-1]
            victim.kill()
            self.killed = victim.pid


@pytest.mark.parametrize(
    "config",
    [TIERS, {**FREE, "sweep": AXES}, {**SYNTHETIC, "sweep": AXES}, {**SESSIONS, "sweep": {"seed": [1, 2, 3]}}],
    ids=["tiers", "trace", "synthetic", "sessions"],
)
def test_the_folder_does_not_depend_on_the_workers(tmp_path: Path, config: dict[str, Any]) -> None:
    alone, spread = Quiet(), Quiet()
    one = run(asked(tmp_path, config, None, out="one"), alone)
    other = run(asked(tmp_path, config, "local:3", out="other"), spread)
    for folder in (one, other):
        seal(folder)
    assert_same_run(one, other)
    assert alone.done == spread.done == spread.total
    assert not workers_of(os.getpid())


def test_a_cell_of_a_sweep_has_the_rows_of_that_cell_alone(tmp_path: Path) -> None:
    whole = run(asked(tmp_path, {**SYNTHETIC, "sweep": {"workload.hit_rate": [0.0, 0.5]}}, None, out="whole"), Quiet())
    last = run(asked(tmp_path, {**SYNTHETIC, "sweep": {"workload.hit_rate": [0.5]}}, None, out="last"), Quiet())
    rows = (last / "rows.jsonl").read_bytes()
    assert rows and (whole / "rows.jsonl").read_bytes().endswith(rows)


def test_a_killed_worker_costs_its_batch_again_and_nothing_else(tmp_path: Path) -> None:
    whole = run(asked(tmp_path, LONG, None, out="whole"), Quiet())
    killing = Killing()
    spread = run(asked(tmp_path, LONG, "local:2", out="spread"), killing)
    assert_same_rows(whole, spread)
    [note] = killing.notes
    assert note.startswith("a worker has ended (killed by SIGKILL); ")
    assert killing.done == killing.total


def test_workers_that_end_again_and_again_end_the_run_and_name_the_cell(tmp_path: Path) -> None:
    def kill_all() -> None:
        for worker in workers_of(os.getpid()):
            with contextlib.suppress(psutil.Error):
                worker.kill()

    first = asked(tmp_path, LONG, "local:1")
    with meanwhile(kill_all), pytest.raises(EngineError) as error:
        run(first, Quiet())
    assert str(error.value).startswith(f"cell {first.cells[0].key}: its worker has ended 3 times (killed by SIGKILL)")
    assert read_manifest(first.folder).status == "failed" and len(str(error.value).splitlines()) == 1
    whole = run(asked(tmp_path, LONG, None, out="whole"), Quiet())
    assert_same_rows(whole, run(asked(tmp_path, LONG, "local:2", resume=first.folder), Quiet()))


def test_a_run_killed_with_its_workers_is_resumed(tmp_path: Path) -> None:
    whole = run(asked(tmp_path, LONG, None, out="whole"), Quiet())
    killed = tmp_path / "killed"
    words = ["sweep", str(tmp_path / "experiment.yaml"), "--engine", "sim", "--on", "local:2", "--out", str(killed)]
    process = subprocess.Popen([sys.executable, "-m", "harness", *words], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    kept = killed / "rows.jsonl"
    while time.monotonic() < deadline and not (kept.exists() and kept.stat().st_size):
        time.sleep(0.005)
    workers = workers_of(process.pid)
    process.kill()
    process.wait()
    assert len(workers) == 2 and not psutil.wait_procs(workers, timeout=30)[1], "workers outlived the run"
    rows = kept.read_bytes()
    assert rows and (whole / "rows.jsonl").read_bytes().startswith(rows[: rows.rfind(b"\n") + 1])
    assert_same_rows(whole, run(asked(tmp_path, LONG, "local:2", resume=killed), Quiet()))


def test_an_interrupted_run_leaves_no_worker(tmp_path: Path) -> None:
    request(tmp_path, LONG)
    out = tmp_path / "out"
    words = ["sweep", str(tmp_path / "experiment.yaml"), "--engine", "sim", "--on", "local:2", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "harness", *words],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (out / "rows.jsonl").exists():
        time.sleep(0.005)
    workers = workers_of(process.pid)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and f"harness sweep --resume {out} --on local:2 goes on" in told
    assert not psutil.wait_procs(workers, timeout=30)[1] and read_manifest(out).status == "failed"


def test_a_cell_that_is_refused_ends_the_run_where_a_single_process_ends_it(tmp_path: Path) -> None:
    config = {
        **SYNTHETIC,
        "cache": {**SYNTHETIC["cache"], "gpu": "64MiB"},
        "sweep": {"workload.prompt_tokens": [513, 1_024_001], "workload.requests": [20, 21, 22]},
    }
    folders, told = [], []
    for on in (None, "local:2"):
        one = asked(tmp_path, config, on, out=f"out-{on or 'alone'}")
        with pytest.raises(PreflightError) as error:
            run(one, Quiet())
        folders.append(one.folder)
        told.append(str(error.value))
    assert told[0] == told[1] and "1024001" in told[0]
    assert_same_rows(*folders)
    states = [[cell.status for cell in read_manifest(folder).cells] for folder in folders]
    assert states[0] == states[1] == [*["complete"] * 3, "started", *["waiting"] * 2]


@pytest.mark.parametrize(
    ("on", "changes", "words"),
    [
        ("local", {}, "--on local: names no workers; use local:N with N from 1 to 256, ray, or ray:ADDRESS"),
        ("local:0", {}, "--on local:0: names no workers"),
        ("local:-1", {}, "names no workers"),
        ("local:1000", {}, "names no workers"),
        ("local:two", {}, "names no workers"),
        ("ray:", {}, "names no workers"),
        ("dask", {}, "names no workers"),
        ("local:2", {"engines": {"sim": {"mode": "storage"}}}, "moves bytes on this machine's devices"),
        ("local:2", {"engines": {"sim": {"mode": "tiers"}}}, "moves bytes on this machine's devices"),
    ],
)
def test_what_cannot_be_spread_is_refused(tmp_path: Path, on: str, changes: dict[str, Any], words: str) -> None:
    one = asked(tmp_path, {**SYNTHETIC, **changes}, on)
    with pytest.raises(ConfigError) as error:
        run(one, Quiet())
    assert words in str(error.value) and len(str(error.value).splitlines()) == 1 and not one.folder.exists()


@pytest.mark.parametrize("engine", ["fake", "vllm", "sglang", "openai"])
def test_an_engine_that_is_not_simulated_is_refused(tmp_path: Path, engine: str) -> None:
    one = msgspec.structs.replace(asked(tmp_path, SYNTHETIC, "local:2"), engine=engine)
    with pytest.raises(ConfigError, match=rf"^--on local:2: spreads what is simulated, and {engine} is real; "):
        run(one, Quiet())


def test_a_missing_ray_is_one_line_with_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    one = asked(tmp_path, SYNTHETIC, "ray")
    with pytest.raises(ConfigError) as error:
        run(one, Quiet())
    assert str(error.value) == "--on ray: Ray is not installed; run pip install 'kv-harness[ray]', or use local:N"


@needs_ray
def test_on_ray_the_folder_is_the_same_also_when_a_worker_is_killed(tmp_path: Path) -> None:
    config = {**FREE, "sweep": {**AXES, "workload.time_scale": [1.0, 2.0]}}
    one = run(asked(tmp_path, config, None, out="one"), Quiet())
    spread, killed = Quiet(), list[int]()

    def kill_one_at_work() -> None:
        # Ray names a worker so only while it has a task; between two tasks no worker may be called so.
        for victim in workers_of(os.getpid(), "ray::_work")[: 1 - len(killed)]:
            with contextlib.suppress(psutil.Error):
                victim.kill()
                killed.append(victim.pid)

    with meanwhile(kill_one_at_work, every_s=0.005):
        other = run(asked(tmp_path, config, "ray", out="other"), spread)
    for folder in (one, other):
        seal(folder)
    assert_same_run(one, other)
    assert killed and spread.done == spread.total


@needs_ray
def test_a_cluster_that_does_not_answer_is_one_line(tmp_path: Path) -> None:
    one = asked(tmp_path, SYNTHETIC, "ray:127.0.0.1:1")
    with pytest.raises(EngineError) as error:
        run(one, Quiet())
    assert str(error.value).startswith("--on ray:127.0.0.1:1: no Ray cluster could be reached (")
    assert len(str(error.value).splitlines()) == 1
