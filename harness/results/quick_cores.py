"""Which samples stand for a point's times, where cells wait for quick cores (`measure.steady`): those that met them.

A sample waits for a limited time, and a neighbour may come while it runs. What a fixed loop took the cores around it
says so, and knows nothing of the sample's outcome.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from harness.records import QUICK_WITHIN, Sample, quick_loop_s
from harness.results.folder import read_samples
from harness.results.manifest import read_manifest
from harness.results.rows import point_name

# A point stands with at least so many samples: where fewer met quick cores, with those that met the quickest.
FEWEST_QUICK = 6
# Cell, tier, sample and attempt.
SampleKey = tuple[str, str, int, int]


def on_slow_cores(folders: Sequence[Path]) -> list[set[SampleKey]]:
    """Of each run, the proven samples of warm states that met slow cores and are not needed: their point has enough
    others, in all runs together. Cells that do not wait for quick cores have none."""
    found = [set[SampleKey]() for _ in folders]
    met: dict[tuple[str, str], list[tuple[float, int, SampleKey]]] = defaultdict(list)
    for number, folder in enumerate(folders):
        waiting = {cell.key for cell in read_manifest(folder).cells if cell.waits_for_cores}
        samples = list(read_samples(folder)) if waiting else []
        for sample, slower in zip(samples, _slower(samples), strict=True):
            if sample.cell in waiting and sample.verdict == "proven":
                key = (sample.cell, sample.tier, sample.index, sample.attempt)
                met[point_name(sample.cell), sample.tier].append((slower, number, key))
    for samples_of in met.values():
        for slower, number, key in sorted(samples_of)[FEWEST_QUICK:]:
            found[number] |= {key} if slower > QUICK_WITHIN else set()
    return found


def _slower(samples: Sequence[Sample]) -> list[float]:
    """By which share the loop took longer around each sample than when that core is quick: the engine's or the
    client's, whichever is more."""
    engine = _beyond_quick([sample.host.core_loop_s for sample in samples])
    client = _beyond_quick([sample.host.client_loop_s for sample in samples])
    return [max(both) for both in zip(engine, client, strict=True)]


def _beyond_quick(loops_s: Sequence[float | None]) -> list[float]:
    known = [loop_s for loop_s in loops_s if loop_s is not None]
    quick_s = quick_loop_s(known) if known else 1.0
    return [0.0 if loop_s is None else loop_s / quick_s - 1 for loop_s in loops_s]
