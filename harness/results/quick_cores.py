"""Which samples stand for a point's times, where cells wait for quick cores (`measure.steady`): those that met them.

A sample waits for a limited time, and a neighbour may come while it runs. What a fixed loop took the cores around it
says so, and knows nothing of the sample's outcome.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from harness.records import QUICK_WITHIN, Sample
from harness.results.folder import read_samples
from harness.results.manifest import read_manifest
from harness.results.rows import point_name
from harness.results.summary import slower_than_best

# So many samples with quick cores stand for a point without the others.
FEWEST_QUICK = 6
# Cell, tier, sample and attempt.
SampleKey = tuple[str, str, int, int]


def on_slow_cores(folders: Sequence[Path]) -> list[set[SampleKey]]:
    """Of each run, the proven samples of warm states that met slow cores and are not needed: their point has enough
    others, in all runs together. Cells that do not wait for quick cores have none."""
    found = [set[SampleKey]() for _ in folders]
    met: dict[tuple[str, str], list[tuple[int, SampleKey, bool]]] = defaultdict(list)
    for number, folder in enumerate(folders):
        waiting = {cell.key for cell in read_manifest(folder).cells if cell.waits_for_cores}
        samples = list(read_samples(folder)) if waiting else []
        for sample, slow in zip(samples, _slow(samples), strict=True):
            if sample.cell in waiting and sample.verdict == "proven":
                key = (sample.cell, sample.tier, sample.index, sample.attempt)
                met[point_name(sample.cell), sample.tier].append((number, key, slow))
    for samples_of in met.values():
        if sum(not slow for _, _, slow in samples_of) >= FEWEST_QUICK:
            for number, key, slow in samples_of:
                found[number] |= {key} if slow else set()
    return found


def _slow(samples: Sequence[Sample]) -> list[bool]:
    """Whether the engine's core or the client's was slow around each."""
    engine = slower_than_best([sample.host.core_loop_s for sample in samples])
    client = slower_than_best([sample.host.client_loop_s for sample in samples])
    return [
        any(share is not None and share > QUICK_WITHIN for share in both) for both in zip(engine, client, strict=True)
    ]
