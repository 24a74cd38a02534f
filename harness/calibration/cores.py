"""How quick the engine's core was: what a fixed loop took on it, timed before and after each sample.

    usual_s, host_times = core_times(folder, "calibration")

On a machine with neighbours, all that the host does takes half as long again for minutes, and no counter shows it. So
the loops of a point's time say how much longer the host's work took than over the whole calibration. Those of a minute
before and after a sample count: its own two are 5 ms each, and a sample that waits for quick cores has chosen them.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median

from harness.results.folder import read_samples

_AROUND_S = 60.0
_SLOW = 1.2


def loops_s(folder: Path) -> dict[tuple[str, str], list[float]]:
    """By cell and tier, what the loop took around each sample of a run, by the mean; empty where the run did not time
    its core."""
    samples = list(read_samples(folder))
    told = sorted((s.started_s, s.host.core_loop_s) for s in samples if s.host.core_loop_s is not None)
    times_s = [started_s for started_s, _ in told]
    found = defaultdict[tuple[str, str], list[float]](list)
    for sample in samples if told else ():
        first = bisect.bisect_left(times_s, sample.started_s - _AROUND_S)
        last = bisect.bisect_right(times_s, sample.ended_s + _AROUND_S)
        found[sample.cell, sample.tier].append(fmean(loop_s for _, loop_s in told[first:last] or told))
    return found


def slow_samples(folder: Path, size: str = "") -> set[tuple[str, str, int, int]]:
    """Cell, tier, attempt and index of the samples of a size around which the loop itself took a fifth longer than
    around half of them: another guest had the core."""
    loops = {
        (sample.cell, sample.tier, sample.attempt, sample.index): sample.host.core_loop_s
        for sample in read_samples(folder)
        if sample.cell.startswith(size) and sample.host.core_loop_s is not None
    }
    usual_s = median(loops.values()) if loops else 0.0
    return {key for key, loop_s in loops.items() if loop_s > _SLOW * usual_s}


def core_times(folder: Path, size: str = "") -> tuple[float | None, dict[tuple[str, str], float]]:
    """The loop's seconds, by the median over the samples of the cells whose keys begin with the size, and by cell and
    tier how much longer it took there, by the mean. None and nothing where the run did not time its core."""
    took_s = {key: each for key, each in loops_s(folder).items() if key[0].startswith(size)}
    if not took_s:
        return None, {}
    usual_s = median(loop_s for each in took_s.values() for loop_s in each)
    return usual_s, {key: fmean(each) / usual_s for key, each in took_s.items()}
