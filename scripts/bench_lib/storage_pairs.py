"""`scripts/bench storage --against CHECKOUT`: our storage beside that of another commit, in turns on one device.

CHECKOUT: another working tree, whose .venv has its core. Each round lets both sides make a file of their own for each
cell, fill it and move the bytes; the side that begins takes turns. Where a file happens to lie is worth up to a third
of a cell's bandwidth, so that one round says little.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loop_devices import MIB

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


def paired(
    start: Callable[[int, int, Path], Any], trees: tuple[Path, Path], sizes: Sequence[int], depths: Sequence[int],
    rounds: int,
) -> Iterator[str]:  # fmt: skip
    """Lines of the table. start: storage.py's Worker for a size, a depth and a tree. trees: ours, the other side's."""
    found: dict[Cell, list[Pair]] = {}
    for number in range(rounds):
        for size, depth in itertools.product(sizes, depths):
            if number % 2:
                ours, theirs = (_moved(start(size, depth, tree)) for tree in trees)
            else:
                theirs, ours = (_moved(start(size, depth, tree)) for tree in reversed(trees))
            for write in (False, True):
                (rate, cpu_s), (their_rate, their_cpu_s) = ours[write], theirs[write]
                found.setdefault(Cell(size, depth, write), []).append(Pair(rate / their_rate, cpu_s / their_cpu_s))
        yield f"round {number + 1} of {rounds}"
    for cell, pairs in sorted(found.items()):
        label = f"{'write' if cell.write else 'read':5} {cell.size // KIB:>5} KiB x{cell.depth:<2}"
        rates, costs = [one.bandwidth for one in pairs], [one.cpu for one in pairs]
        yield f"  {label}  bandwidth {_spread(rates)}  CPU {_spread(costs)}"
    every = [pair for pairs in found.values() for pair in pairs]
    bandwidth, cpu = statistics.median(one.bandwidth for one in every), statistics.median(one.cpu for one in every)
    yield f"all {len(every)} pairs: bandwidth {bandwidth:.3f}, CPU {cpu:.3f} of the other side's"


def _moved(worker: Any) -> dict[bool, tuple[float, float]]:
    """Bytes a second and CPU-s a GiB, of reads (False) and writes (True)."""
    found: dict[bool, tuple[float, float]] = {}
    for write in (False, True):
        runs = [worker.run(write, MOVED_MIB * MIB) for _ in range(RUNS)]
        found[write] = (
            statistics.fmean(run.bytes_per_s for run in runs),
            statistics.fmean(run.cpu_s_per_gib for run in runs),
        )
    worker.close()
    os.sync()
    return found


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
