"""`scripts/bench storage --tiers`: all three tiers of mode tiers on a device, by client cores, against fio's CPU.

The same load on the disk alone beside them: what the client itself takes, without copies between tiers in memory."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from loop_devices import MIB, Device

CHUNK_MIB, DISK_MIB = 8, 448
# Conversations that fill GPU memory and CPU RAM (both are RAM here) several times, so that most KV comes from the disk.
EXPERIMENT: dict[str, Any] = {
    "name": "tiers",
    "seed": 7,
    "model": "llama-3.1-8b",
    "workload": {
        "kind": "sessions", "sessions": 12, "turns": 4, "user_tokens": 256, "output_tokens": 64, "concurrency": 6,
        "order": "fifo",
    },
    "cache": {"block_tokens": 32, "chunk_tokens": 64, "gpu": "64MiB", "cpu": "128MiB",
              "disk": {"capacity": f"{DISK_MIB}MiB"}},
    "engines": {"sim": {"mode": "tiers", "storage": {"reserve": "0B", "depth": 16},
                        "tiers": {"gpu": "ram", "decode_reads": "turn"}}},
}  # fmt: skip


class Side(NamedTuple):
    """What runs: on which client cores; alone: without tiers in memory."""

    name: str
    cores: Sequence[int]
    alone: bool = False


class TiersRun(NamedTuple):
    """bytes: of the device, read and written. cpu_s: of the client, from the load's first request to its last."""

    read_bytes: int
    write_bytes: int
    counted_bytes: int
    wall_s: float
    cpu_s: float
    failed: int

    @property
    def bytes_per_s(self) -> float:
        return (self.read_bytes + self.write_bytes) / self.wall_s


def run_tiers(device: Device, side: Side) -> TiersRun:
    """One run in a process of its own."""
    words = [str(device.folder), device.name, str(device.group or ""), ",".join(map(str, side.cores))]
    words.append("alone" if side.alone else "")
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the tiers' run failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    return TiersRun(*json.loads(done.stdout))


def work(folder: str, name: str, group: str, cores: str, alone: str) -> None:
    """The run's own process."""
    from harness.engines import ENGINES
    from harness.experiment.loads import free_load
    from harness.experiment.read import load_experiment
    from simulator.models import load_model

    device = Device(Path(folder), name, Path(group) if group else None)
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "tiers.yaml"
        cache = EXPERIMENT["cache"] | {"disk": {"capacity": f"{DISK_MIB}MiB", "path": folder}}
        if alone:
            cache |= {"gpu": "0B", "cpu": None}
        path.write_text(yaml.safe_dump(EXPERIMENT | {"cache": cache}))
        experiment = load_experiment(path).experiment
        load, model = free_load(experiment), load_model(experiment.model)
        engine = ENGINES["sim"].make(experiment, model, Path(scratch), time.perf_counter)
        print(json.dumps(asyncio.run(_measured(engine, load, device))))


async def _measured(engine: Any, load: Any, device: Device) -> TiersRun:
    rows: list[Any] = []
    await engine.start()
    try:
        await engine.ready()
        device.join()
        before, began_s, cpu_s = sum(device.moved_bytes()), time.perf_counter(), time.process_time()
        await engine.replay(load.schedule(load.requests), rows.append)
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        counted, found = sum(device.moved_bytes()) - before, engine.record().storage
    finally:
        await engine.stop()
    failed = sum(row.error is not None for row in rows) + found.failed_operations
    return TiersRun(found.read.moved_bytes, found.write.moved_bytes, counted, wall_s, cpu_s, failed)


Fio = Callable[[bool], tuple[float, float]]


def tiers_lines(device: Device, rounds: int, fio: Fio, most_cpu: float) -> Iterator[tuple[str, bool]]:
    """Lines of the table, and whether each misses a target. fio: whether it writes → bytes and CPU-s a byte."""
    cores = sorted(os.sched_getaffinity(0))
    sides = [Side("1 core", cores[-1:])]
    sides += [Side(f"{len(cores)} cores", cores)] if len(cores) > 1 else []
    sides.append(Side("disk alone", cores[-1:], alone=True))
    runs: dict[str, list[TiersRun]] = {side.name: [] for side in sides}
    theirs: dict[bool, list[float]] = {False: [], True: []}
    speeds: list[float] = []
    for turn in range(rounds):
        for side in sides[:: -1 if turn % 2 else 1]:
            runs[side.name].append(run_tiers(device, side))
        for write in (False, True):
            speed, cpu_s = fio(write)
            theirs[write].append(cpu_s)
            speeds.append(speed)
    per_byte = {write: statistics.median(values) for write, values in theirs.items()}
    first = statistics.median(each.bytes_per_s for each in runs[sides[0].name])
    for side in sides:
        found = runs[side.name]
        speed = statistics.median(each.bytes_per_s for each in found)
        same = statistics.median(
            each.cpu_s / (each.read_bytes * per_byte[False] + each.write_bytes * per_byte[True]) for each in found
        )
        counted = statistics.median(each.counted_bytes / (each.read_bytes + each.write_bytes) for each in found)
        failed = sum(each.failed for each in found)
        miss = same > most_cpu or failed > 0
        share = f"{speed / first:5.3f} of one core's" if not side.alone else 21 * " "
        yield (
            f"  {side.name:<10}  {speed / MIB:7,.0f} MiB/s  {share}   {same:5.2f} CPU-s a CPU-s of fio's"
            f"   {counted:6.4f} counted/reported   {failed} failed   {'MISS' if miss else 'ok'}",
            miss,
        )
    yield f"  fio         {statistics.median(speeds) / MIB:7,.0f} MiB/s, {CHUNK_MIB} MiB x16", False


if __name__ == "__main__":
    work(*sys.argv[1:])
