"""Which points of a validation are sampled again, and how often: those that do not resolve, cheapest first."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Sequence

from harness.calibration.points import ENGINE_START_S
from harness.experiment.read import Cell, changed
from harness.results.summary import FREE_LOAD
from harness.validation.equivalence import Comparison, Figure, PointResult
from harness.validation.points import Side
from harness.validation.resampling import FEWEST_CLUSTERS

MOST_SAMPLES = 400
# More than a validation has passes: a resumed one tells the samples of those from these by the key.
_AFTER = 1000


def more_cells(comparison: Comparison, reference: Side, cells: Sequence[Cell], left_s: float) -> list[Cell]:
    """Cells that sample points again that did not resolve, cheapest first, as far as the time goes.

    A point whose interval no feasible number of samples would resolve is left as it is; so are free loads. Tiers of
    one cell are interleaved: all for as many rounds as the least one needs, then the others without it, and so on.
    """
    by_key = {cell.key: cell for cell in cells}
    wanted: list[tuple[float, int, PointResult]] = []
    for point in comparison.points:
        extra = more_samples(point)
        if point.tier != FREE_LOAD and extra and point.cell in by_key:
            wanted.append((extra * _cost_s(reference, point), extra, point))
    chosen: dict[str, dict[str, int]] = {}
    engines: set[str] = set()
    start_s = _start_s(reference)
    for cost_s, extra, point in sorted(wanted, key=lambda each: each[0]):
        experiment = by_key[point.cell].experiment
        engine = repr((experiment.deployment, experiment.cache, experiment.storage))
        cost_s += 0.0 if engine in engines else start_s
        if cost_s <= left_s:
            left_s -= cost_s
            engines.add(engine)
            chosen.setdefault(point.cell, {})[point.tier] = extra
    return [again for key, cell in by_key.items() for again in _sampled_again(cell, chosen.get(key, {}))]


def more_samples(point: PointResult) -> int:
    """So many more samples resolve a point, as far as its samples tell; 0: it is resolved, or no feasible number does.

    What few samples say of how many it takes is a guess: a point gets at least half of what it has again, and at most
    twice that; one with too few for an interval, one more than that takes: such samples are long.
    """
    had = max((figure.samples for figure in point.figures), default=0)
    unclear = [f for f in point.figures if f.gates and f.verdict == "not resolvable"]
    if any(_without_interval(figure) for figure in unclear):
        return FEWEST_CLUSTERS + 1 - had
    lacking = max((f.needed - had for f in unclear if f.needed is not None), default=None)
    if lacking is None or (lacking > MOST_SAMPLES and had >= 2 * FEWEST_CLUSTERS):
        return 0
    return min(max(lacking, math.ceil(had / 2)), 2 * had)


def _without_interval(figure: Figure) -> bool:
    """Of too few samples. A figure that says why it does not resolve would not, however many it had."""
    return figure.low is None and figure.reason is None


def _sampled_again(cell: Cell, extra: dict[str, int]) -> list[Cell]:
    """extra: samples a tier. Repeats of the cell whose tiers shrink as they have enough."""
    steps = sorted(set(extra.values()))
    found = []
    for number, (before, samples) in enumerate(itertools.pairwise([0, *steps]), 1):
        tiers = [tier for tier in cell.experiment.measure.tiers if extra.get(tier, 0) >= samples]
        measure = {"tiers": tiers, "samples": samples - before, "until": None, "budget": None}
        found.append(Cell(f"{cell.key}#{_AFTER + number}", cell.overrides, changed(cell.experiment, measure=measure)))
    return found


def _start_s(reference: Side) -> float:
    """Seconds that an engine takes to start: as in the runs so far, by most of their cells."""
    known = [cell.start_s for manifest in reference.manifests for cell in manifest.cells if cell.start_s is not None]
    return statistics.median(known) if known else ENGINE_START_S


def _cost_s(reference: Side, point: PointResult) -> float:
    """Seconds that one more sample takes, placing the prefix included: from the end of the one before to its end. Their
    mean: what a few take, as where a prefix has to be pushed out, adds to the whole."""
    costs = []
    tiers = [one for (cell, _), one in reference.points.items() if cell == point.cell]
    for name, repeat in reference.points[point.cell, point.tier].repeats.items():
        ends = sorted(sample.ended_s for tier in tiers if name in tier.repeats for sample in tier.repeats[name].samples)
        for sample in repeat.samples:
            before = bisect.bisect(ends, sample.started_s)
            costs += [sample.ended_s - ends[before - 1]] if before else []
    return statistics.fmean(costs) if costs else 1.0
