"""`scripts/bench sweep`: how long does a sweep take, on one process, on workers, on Ray? Usage: scripts/bench."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from harness.experiment.read import load_experiment
from harness.measure.run import RunRequest, run
from harness.report.refresh import seal

PACKS = ("lmcache-0.5.6-mp", "lru")
CELLS, ROUNDS, REQUESTS = 100, 3, 12_031
TARGET_CELLS, TARGET_S = 1000, 360.0
ROWS = ("rows.jsonl", "samples.jsonl")


class Timed(NamedTuple):
    """One sweep: seconds of measuring and of making summary, table and report; CPU of this process and its workers."""

    wall_s: float
    seal_s: float
    cpu_s: float
    seal_cpu_s: float
    peak_bytes: int
    rows_sha256: str


class Silent:
    def start(self, total: int | None, label: str) -> None: ...
    def advance(self, n: int = 1) -> None: ...
    def state(self, text: str) -> None: ...

    def note(self, text: str) -> None:
        print(text, file=sys.stderr)


def overrides(cells: int, requests: int | None) -> list[str]:
    """The conversation trace in so many configurations: two packs, and sizes of CPU RAM from 16 GiB up."""
    sizes = [f"{16 + number}GiB" for number in range(-(-cells // len(PACKS)))]
    return [
        f"sweep.cache.cpu={json.dumps(sizes)}",
        f"sweep.engines.sim.tier_policy={json.dumps(PACKS)}",
        *([] if requests is None else [f"workload.limit={requests}"]),
    ]


def cpu_s() -> float:
    """Of this process and of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def measured(on: str | None, out: Path, cells: int, requests: int | None, sealed: bool) -> Timed:
    plan = load_experiment(Path("mooncake_trace"), overrides(cells, requests))
    asked = RunRequest(
        name="sweep", cells=plan.cells()[:cells], engine="sim", experiment=plan.origin(), folder=out, on=on
    )
    begin_s, begin_cpu_s = time.perf_counter(), cpu_s()
    run(asked, Silent())
    run_s, run_cpu_s = time.perf_counter(), cpu_s()
    if sealed:
        seal(out)
    end_s, end_cpu_s = time.perf_counter(), cpu_s()
    digest = hashlib.sha256()
    for name in ROWS:
        with (out / name).open("rb") as file:
            while part := file.read(2**20):
                digest.update(part)
    return Timed(
        wall_s=run_s - begin_s,
        seal_s=end_s - run_s,
        cpu_s=run_cpu_s - begin_cpu_s,
        seal_cpu_s=end_cpu_s - run_cpu_s,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        rows_sha256=digest.hexdigest(),
    )


def one(on: str | None, folder: Path, cells: int, requests: int | None, sealed: bool) -> Timed:
    """A sweep in a process of its own, so that memory and CPU count alone. Its folder is removed."""
    out = folder / "out"
    words = ["case", on or "", str(out), str(cells), str(requests or ""), str(int(sealed))]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    try:
        done = subprocess.run([sys.executable, __file__, *words], env=environment, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"the sweep on {on or 'one process'} failed")
        return Timed(**json.loads(done.stdout))
    finally:
        shutil.rmtree(out, ignore_errors=True)


def line(name: str, cells: int, found: list[Timed]) -> str:
    walls, median_s = [each.wall_s for each in found], statistics.median(each.wall_s for each in found)
    cpu = statistics.median(each.cpu_s for each in found) / cells
    peak = max(each.peak_bytes for each in found) / 2**30
    return (
        f"  {name:<12} {median_s:8.1f} s  ({min(walls):.1f} to {max(walls):.1f})  {cpu:6.3f} CPU-s a configuration"
        f"  peak {peak:.2f} GiB  {TARGET_CELLS:,} at this rate: {median_s / cells * TARGET_CELLS / 60:.1f} min"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench sweep", description="How long does a sweep take?")
    parser.add_argument("--cells", type=int, default=CELLS, help="configurations of the trace")
    parser.add_argument("--requests", type=int, help="of the trace; all by default")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seal", action="store_true", help="also times summary, table and report")
    asked = parser.parse_args()
    names = {"one process": None, f"local:{asked.workers}": f"local:{asked.workers}"}
    if importlib.util.find_spec("ray") is None:
        print("ray: left out, it is not installed")
    else:
        names["ray"] = "ray"
    print(f"load before the start (1 min): {os.getloadavg()[0]:.2f}")
    print(
        f"{asked.cells:,} configurations of {asked.requests or REQUESTS:,} requests of the conversation trace, median"
        f" (lowest to highest) of {asked.rounds} interleaved runs"
    )
    found: dict[str, list[Timed]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="kv-sweep-") as scratch:
        for _ in range(asked.rounds):
            for name, on in names.items():
                found[name].append(one(on, Path(scratch), asked.cells, asked.requests, asked.seal))
    for name, timed in found.items():
        print(line(name, asked.cells, timed))
    if asked.seal:
        seals = [each for timed in found.values() for each in timed]
        each_s = statistics.median(one.seal_s for one in seals) / asked.cells
        print(f"  summary, table and report: {each_s:.3f} s a configuration, in one process, after the sweep")
    local, ray = found[f"local:{asked.workers}"], found.get("ray")
    if ray:
        ratio = statistics.median(b.wall_s / a.wall_s for a, b in zip(local, ray, strict=True))
        print(f"  ray takes {ratio:.2f} times as long as local:{asked.workers} (target: 1.15; pairs of the same round)")
    same = len({each.rows_sha256 for timed in found.values() for each in timed}) == 1
    print(f"  rows and samples of all runs: {'the same bytes' if same else 'DIFFERENT BYTES'}")
    print(f"target: {TARGET_CELLS:,} configurations in {TARGET_S / 60:.0f} min on two cores by local:2")
    print(f"load after the end (1 min): {os.getloadavg()[0]:.2f}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        on, out, cells, requests, sealed = sys.argv[2:]
        timed = measured(on or None, Path(out), int(cells), int(requests) if requests else None, sealed == "1")
        print(json.dumps(timed._asdict()))
    else:
        main()
