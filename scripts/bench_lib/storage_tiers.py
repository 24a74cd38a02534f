"""`scripts/bench storage --tiers`: all three tiers of mode tiers on a device, by client cores, against fio's CPU.

The aim is about the device's bytes: the client's CPU, copies in memory included, against fio's for what the device
read and wrote. Two sides say what of it the copies are: `no copies` makes the same decisions on memory tiers that move
nothing, `disk alone` has no such tiers. Beside the aim stands fio's CPU for the bytes of all tiers, those of memory in
a file on tmpfs.
"""

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

import msgspec
import yaml
from loop_devices import MIB, Device

CHUNK_MIB, DISK_MIB = 8, 448
# Conversations that fill GPU memory and CPU RAM (both are RAM here) many times: nearly all KV moves down to the disk.
# Decode reads an entry three times soon after it was written, on a slow device mostly before it has moved down.
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
    """What runs: on which client cores; without: 'copies' in memory tiers, those 'tiers' themselves, or nothing."""

    name: str
    cores: Sequence[int]
    without: str = ""


class Costs(NamedTuple):
    """fio's CPU-s a byte."""

    read: float
    write: float


class TiersRun(NamedTuple):
    """bytes: of the device, read and written; memory: copied out of and into memory tiers. cpu_s: of the client, from
    the load's first request to its last."""

    read_bytes: int
    write_bytes: int
    memory_read_bytes: int
    memory_write_bytes: int
    counted_bytes: int
    wall_s: float
    cpu_s: float
    failed: int

    @property
    def device_bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def memory_bytes(self) -> int:
        return self.memory_read_bytes + self.memory_write_bytes

    def against(self, disk: Costs, memory: Costs | None = None) -> float:
        """CPU-s for one of fio's, which moves the device's bytes, and those in memory too if their costs are given."""
        theirs_s = self.read_bytes * disk.read + self.write_bytes * disk.write
        if memory is not None:
            theirs_s += self.memory_read_bytes * memory.read + self.memory_write_bytes * memory.write
        return self.cpu_s / theirs_s


def run_tiers(device: Device, side: Side) -> TiersRun:
    """One run in a process of its own."""
    words = [str(device.folder), device.name, str(device.group or ""), ",".join(map(str, side.cores))]
    words.append(side.without)
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the tiers' run failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    return TiersRun(*json.loads(done.stdout))


def work(folder: str, name: str, group: str, cores: str, without: str) -> None:
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
        if without == "tiers":
            cache |= {"gpu": "0B", "cpu": None}
        path.write_text(yaml.safe_dump(EXPERIMENT | {"cache": cache}))
        experiment = load_experiment(path).experiment
        load, model = free_load(experiment), load_model(experiment.model)
        engine: Any = ENGINES["sim"].make(experiment, model, Path(scratch), time.perf_counter)
        if without == "copies":
            for level in engine.tiers.levels[:-1]:
                level.device.settings = msgspec.structs.replace(level.device.settings, device="null")
        print(json.dumps(asyncio.run(_measured(engine, load, device))))


async def _measured(engine: Any, load: Any, device: Device) -> TiersRun:
    rows: list[Any] = []
    await engine.start()
    try:
        await engine.ready()
        device.join()
        # Fills the memory of tiers and transfers once: what the kernel does for fresh pages differs by the machine's
        # state, from 0.1 to 0.7 CPU-s here, and comes once, as with a pool that is made at the start.
        await engine.replay(load.schedule([each for each in load.requests if each.turn == 0]), lambda _: None)
        await engine.reset(engine.capabilities.tiers)
        before, began_s, cpu_s = sum(device.moved_bytes()), time.perf_counter(), time.process_time()
        await engine.replay(load.schedule(load.requests), rows.append)
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        counted, found = sum(device.moved_bytes()) - before, engine.record().storage
    finally:
        await engine.stop()
    failed = sum(row.error is not None for row in rows) + found.failed_operations
    memory = [tier for tier in found.kv.by_tier.values() if tier.device == "ram"]
    return TiersRun(
        read_bytes=found.read.moved_bytes,
        write_bytes=found.write.moved_bytes,
        memory_read_bytes=sum(tier.read.moved_bytes for tier in memory),
        memory_write_bytes=sum(tier.write.moved_bytes for tier in memory),
        counted_bytes=counted,
        wall_s=wall_s,
        cpu_s=cpu_s,
        failed=failed,
    )


# Of a file on the device, or of one on tmpfs, and whether it writes: bytes/s and CPU-s a byte.
Fio = Callable[[bool, bool], tuple[float, float]]


def tiers_lines(device: Device, rounds: int, fio: Fio, most_cpu: float) -> Iterator[tuple[str, bool | None]]:
    """Lines of the table, and whether each misses a target; None: it has none."""
    cores = sorted(os.sched_getaffinity(0))
    sides = [Side("1 core", cores[-1:])]
    sides += [Side(f"{len(cores)} cores", cores)] if len(cores) > 1 else []
    sides += [Side("no copies", cores[-1:], "copies"), Side("disk alone", cores[-1:], "tiers")]
    runs: dict[str, list[TiersRun]] = {side.name: [] for side in sides}
    theirs: dict[tuple[bool, bool], list[tuple[float, float]]] = {}
    for turn in range(rounds):
        for side in sides[:: -1 if turn % 2 else 1]:
            runs[side.name].append(run_tiers(device, side))
        for where in ((memory, write) for memory in (False, True) for write in (False, True)):
            theirs.setdefault(where, []).append(fio(*where))
    disk, memory = (
        Costs(*(statistics.median(cpu_s for _, cpu_s in theirs[kind, write]) for write in (False, True)))
        for kind in (False, True)
    )
    first = statistics.median(each.device_bytes / each.wall_s for each in runs[sides[0].name])
    for side in sides:
        yield _line(side, runs[side.name], first, disk, memory, most_cpu)
    speed = statistics.median(speed for (kind, _), found in theirs.items() for speed, _ in found if not kind)
    gib = [f"{costs.read * 2**30:.3f} and {costs.write * 2**30:.3f}" for costs in (disk, memory)]
    yield f"  fio         {speed / MIB:7,.0f} MiB/s, {CHUNK_MIB} MiB x16; CPU-s/GiB read and written: {gib[0]}", None
    yield f"  fio, tmpfs  {CHUNK_MIB} MiB x1, psync; CPU-s/GiB read and written: {gib[1]}", None


def _line(
    side: Side, found: Sequence[TiersRun], first: float, disk: Costs, memory: Costs, most_cpu: float
) -> tuple[str, bool | None]:
    def middle(figure: Callable[[TiersRun], float]) -> float:
        return statistics.median(map(figure, found))

    speed, same = middle(lambda one: one.device_bytes / one.wall_s), middle(lambda one: one.against(disk))
    counted = middle(lambda one: one.counted_bytes / one.device_bytes)
    failed = sum(each.failed for each in found)
    miss = same > most_cpu or failed > 0
    share = f"{speed / first:5.3f} of one core's" if not side.without else 21 * " "
    verdict = "" if side.without == "copies" else "MISS" if miss else "ok"
    text = (
        f"  {side.name:<10}  {speed / MIB:7,.0f} MiB/s  {share}   {same:5.2f} CPU-s a CPU-s of fio's"
        f"   {counted:6.4f} counted/reported   {failed} failed   {verdict}\n"
        f"{14 * ' '}{middle(lambda one: one.cpu_s):5.2f} CPU-s"
    )
    copied = middle(lambda one: one.memory_bytes / one.device_bytes)
    if copied:
        each_gib = middle(lambda one: one.cpu_s / (one.device_bytes + one.memory_bytes) * 2**30)
        text += (
            f", {copied:4.2f} bytes copied in memory for each of the device; for all tiers {each_gib:5.3f} a GiB,"
            f" {middle(lambda one: one.against(disk, memory)):4.2f} of fio's"
        )
    return text, miss if verdict else None


if __name__ == "__main__":
    work(*sys.argv[1:])
