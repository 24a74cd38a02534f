"""What tracing costs: TTFT of the disk tier on one running vLLM with LMCache, with and without bpftrace, in turn.

    scripts/bench tracing [--minutes M] [--bandwidth RATE]      (root; takes the engine environment)

16 chunks of 2 MiB are read cold from a reference device, six times in each state; the states follow each other as
A B B A, so that what drifts in time is the same on both sides. Each traced sample is paired with the untraced one in
the same place of its round. Prints both medians, and the median of the paired differences with the interval that a
bootstrap over rounds gives it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

import yaml

from harness.blockio.attach import device_number, run_device
from harness.collectors.bpf import BpfTrace
from harness.engines import ENGINES
from harness.engines.base import Engine
from harness.experiment.read import Cell, load_experiment
from harness.experiment.workloads import PrefixWorkload
from harness.measure.placing import Probe, after_sample, place
from harness.results.folder import RunFolder
from harness.results.manifest import Attempt, CellEntry, Manifest
from harness.results.provenance import now
from simulator.models import load_model
from traces.load import Load
from traces.request import RequestRecord

SAMPLES = 6
EXPERIMENT: dict[str, Any] = {
    "name": "tracing",
    "workload": {"kind": "prefix", "prompt_tokens": 1025},
    "measure": {"tiers": ["disk_cold"], "samples": 1},
    "cache": {"block_tokens": 32, "chunk_tokens": 64, "gpu": "512MiB", "cpu": "1GiB", "disk": {"capacity": "1GiB"}},
    "engines": {"vllm": {"cores": {"engine": [0], "client": [1]}}},
}
Round = dict[bool, list[float]]  # traced or not: TTFT in seconds


async def main(minutes: float, bandwidth: str) -> None:
    print(f"load before the start (1 min): {os.getloadavg()[0]:.2f}")
    with tempfile.TemporaryDirectory(prefix="kv-bench-") as own:
        storage = {"device": {"bandwidth": bandwidth, "size": "1500MiB"}}
        (Path(own) / "e.yaml").write_text(yaml.safe_dump(EXPERIMENT | {"storage": storage}))
        cells = load_experiment(Path(own) / "e.yaml").cells()
        manifest = Manifest(
            run_id="run",
            name="tracing",
            status="started",
            engine="vllm",
            attempts=[Attempt(started_at=now(), pid=os.getpid())],
            cells=[CellEntry(key=cells[0].key)],
        )
        folder = RunFolder.create(Path(own) / "run", manifest)
        async with run_device(cells, "vllm", folder) as [cell]:
            engine = ENGINES["vllm"].make(cell.experiment, load_model("tiny-llama"), folder.path, time.perf_counter)
            try:
                await engine.start()
                rounds = await measure(engine, cell, Path(own), time.monotonic() + minutes * 60)
            finally:
                await engine.stop()
    tell(rounds, bandwidth)
    print(f"load after the end (1 min): {os.getloadavg()[0]:.2f}")


async def measure(engine: Engine, cell: Cell, own: Path, until_s: float) -> list[Round]:
    """Rounds of both states until that moment of the monotonic clock; at least two."""
    resolved = await engine.ready()
    assert isinstance(cell.experiment.workload, PrefixWorkload)
    probe = Probe("base", cell.experiment, cell.experiment.workload, resolved, engine.capabilities)
    assert cell.experiment.cache.disk is not None and cell.experiment.cache.disk.path is not None
    device = device_number(Path(cell.experiment.cache.disk.path))
    numbers = count()

    async def ttft_s() -> float:
        rows: list[RequestRecord] = []
        index = next(numbers)
        await place(engine, probe, "disk_cold", index, lambda _: None)
        await engine.replay(Load(probe.requests("disk_cold", index)), rows.append)
        after_sample(probe, "disk_cold", "proven", fresh_prefix=False)
        assert rows[0].ttft_s is not None, rows[0].error
        return rows[0].ttft_s

    rounds: list[Round] = []
    trace: BpfTrace | None = None
    try:
        while len(rounds) < 2 or time.monotonic() < until_s:
            found: Round = {}
            for traced in (False, True) if len(rounds) % 2 else (True, False):
                if trace is not None and not traced:
                    await trace.stop()
                    trace = None
                elif trace is None and traced:
                    trace = BpfTrace(own / f"trace-{len(rounds)}", device_number=device, pids=resolved.io_pids)
                    await trace.start()
                await ttft_s()  # what a change of state stirred up; left out where there was none too, to be alike
                found[traced] = [await ttft_s() for _ in range(SAMPLES)]
            rounds.append(found)
            left_s = max(0.0, until_s - time.monotonic())
            print(f"\r{len(rounds)} rounds, {left_s:.0f} s left ", end="", file=sys.stderr, flush=True)
    finally:
        print(file=sys.stderr)
        if trace is not None:
            await trace.stop()
    return rounds


def tell(rounds: Sequence[Round], bandwidth: str) -> None:
    print(f"{len(rounds)} rounds of {SAMPLES} traced and {SAMPLES} untraced samples, 32 MiB cold at {bandwidth}")
    for traced in (False, True):
        values = [value for found in rounds for value in found[traced]]
        name, spread = "traced" if traced else "not traced", statistics.stdev(values) / statistics.mean(values)
        print(f"{name:12} n {len(values)}  median {statistics.median(values):.4f} s  CV {spread:.1%}")
    changes = [[a / b - 1 for a, b in zip(found[True], found[False], strict=True)] for found in rounds]
    rng = random.Random(0)
    medians = sorted(statistics.median(chain(*rng.choices(changes, k=len(changes)))) for _ in range(4000))
    pairs = list(chain(*changes))
    print(f"trace adds {statistics.median(pairs):+.2%} to TTFT (median of {len(pairs)} paired differences)")
    print(f"95 % interval {medians[99]:+.2%} to {medians[-100]:+.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="scripts/bench tracing")
    parser.add_argument("--minutes", type=float, default=4.0, help="how long samples are taken; 1 more to start")
    parser.add_argument("--bandwidth", default="100MiB/s", help="of the reference device")
    given = parser.parse_args()
    asyncio.run(main(given.minutes, given.bandwidth))
