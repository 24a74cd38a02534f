"""`scripts/bench storage --against CHECKOUT`: our storage beside that of another commit, in turns on one device.

CHECKOUT: another working tree, whose .venv has its core. Each round lets both sides make a file of their own for each
cell, fill it and move the bytes; the side that begins takes turns. Where a file happens to lie is worth up to a third
of a cell's bandwidth, so that one round says little.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loop_devices import MIB, Device

KIB = 1 << 10
MOVED_MIB = 2048
# Each side moves a cell's bytes so often on one file.
RUNS = 2


class Cell(NamedTuple):
    size: int
    depth: int
    write: bool


class Pair(NamedTuple):
    """Ours over the other side's, of one round."""

    bandwidth: float
    cpu: float


def paired(device: Device, checkout: Path, sizes: Sequence[int], depths: Sequence[int], rounds: int) -> None:
    here = Path(__file__).resolve().parents[2]
    found: dict[Cell, list[Pair]] = {}
    for number in range(rounds):
        for size, depth in itertools.product(sizes, depths):
            if number % 2:
                ours, theirs = (_moved(tree, device, size, depth) for tree in (here, checkout))
            else:
                theirs, ours = (_moved(tree, device, size, depth) for tree in (checkout, here))
            for write in (False, True):
                (rate, cpu_s), (their_rate, their_cpu_s) = ours[write], theirs[write]
                found.setdefault(Cell(size, depth, write), []).append(Pair(rate / their_rate, cpu_s / their_cpu_s))
        print(f"round {number + 1} of {rounds}", flush=True)
    print(f"against {checkout}: median (lowest to highest) of {rounds} pairs a cell on {device.name}")
    for cell, pairs in sorted(found.items()):
        label = f"{'write' if cell.write else 'read':5} {cell.size // KIB:>5} KiB x{cell.depth:<2}"
        print(
            f"  {label}  bandwidth {_spread([one.bandwidth for one in pairs])}  CPU {_spread([p.cpu for p in pairs])}"
        )
    every = [pair for pairs in found.values() for pair in pairs]
    bandwidth, cpu = statistics.median(one.bandwidth for one in every), statistics.median(one.cpu for one in every)
    print(f"all {len(every)} pairs: bandwidth {bandwidth:.3f}, CPU {cpu:.3f} of the other side's")


def _moved(tree: Path, device: Device, size: int, depth: int) -> dict[bool, tuple[float, float]]:
    """Bytes a second and CPU-s a GiB, of reads (False) and writes (True)."""
    worker = tree / "scripts" / "bench_lib" / "storage.py"
    words = [str(device.folder), device.name, str(device.group or ""), str(size), str(depth)]
    process = subprocess.Popen(
        [tree / ".venv/bin/python", worker, "worker", *words],
        cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None

    def asked(line: str = "") -> Any:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(line)
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    path = Path(asked())
    found: dict[bool, tuple[float, float]] = {}
    for write in (False, True):
        runs = [asked(json.dumps([write, MOVED_MIB * MIB]) + "\n") for _ in range(RUNS)]
        found[write] = (statistics.fmean(run[0] for run in runs), statistics.fmean(run[1] for run in runs))
    process.stdin.close()
    process.wait()
    path.unlink()
    os.sync()
    return found


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
