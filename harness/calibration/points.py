"""The micro-measurements of a calibration: which cells are measured, and the points that their rows give.

Lengths are 2, 6 and 12 units of (at least) 256 tokens and one token, so that every chunk size and the hit rates below
divide them, and 24 where the experiment's own prompt is longer than 12: long prompts take most of the time, and each
second of them tells less. Each constant shows in several points: prefill over tokens and context (partial hits), fixed
costs (gpu hits), each tier over lengths and chunk sizes, what waits for what (2 and 4 requests at once), decoding over
batch and context.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np

from harness.calibration.cores import slow_samples
from harness.errors import ConfigError
from harness.experiment.model import Experiment
from harness.experiment.read import Cell
from harness.experiment.workloads import PrefixWorkload, hit_tokens
from harness.results.folder import read_rows
from harness.results.manifest import CellEntry, read_manifest
from harness.results.rows import metric_values
from harness.results.summary import counted
from simulator.calibration import CalibrationPoint, Metric
from simulator.middle import middle_mean
from traces.request import RequestRecord
from traces.tiers import all_states, state_named

LENGTHS = (2, 6, 12, 24)
# What is measured of any engine; beyond, only prompts that the experiment itself has.
_ALWAYS = 12
# (chunks of the prompt, of them hit)
PARTIAL = ((6, 3), (12, 4), (12, 8), (24, 12), (24, 18))
CONCURRENT = ((2, 2), (2, 4), (6, 2), (6, 4), (12, 2))
# With the larger chunks, where bandwidth counts for more than operations.
CONCURRENT_AGAIN = ((6, 4), (12, 2))
DECODE = ((2, 1), (12, 1), (2, 4), (6, 2))
DECODE_TOKENS = 33
HALF_WIDTH = 0.01
# In the first pass: long prompts get few samples, and a first one that counted would be a large part of them.
WARM_UP = 1
# Many short ones: machines drift over tens of seconds, so that samples taken together are off together.
PASSES = 6
_RESAMPLED = 1000
# With fewer samples than these, a point stands with those of slow cores, too.
_FEWEST = 3
_UNIT_TOKENS = 256
# What a real engine and its cache server take to start, where no run has shown it yet: on a quick core half as long.
ENGINE_START_S = 60.0
# Emptying the tiers and computing the prefixes again, before a cell's own time begins.
_PLACING_S = 3.0
# Enough for a round of samples to begin, which then ends whatever it takes.
_LEAST_S = 0.5


def micro_cells(
    experiment: Experiment, chunk_sizes: Sequence[int], budget_s: float, passes: int = PASSES
) -> list[Cell]:
    """Cells for `budget_s` seconds of measuring, all of one chunk size together. Raises ConfigError.

    Each point is measured in passes that lie apart, so that a machine that gets slower or busier shows in all points
    alike, and not as a term of the model.
    """
    if passes < 1:
        raise ConfigError(f"--passes {passes}: a point is measured in one pass at least; give 1 or more")
    if not isinstance(experiment.workload, PrefixWorkload):
        raise ConfigError("harness calibrate needs workload.kind prefix; its model, cache and engines count")
    # Prompts long enough to tell a tier's time from all others, whatever the chunks are.
    unit = math.lcm(_UNIT_TOKENS, *chunk_sizes)
    made = [
        (again, spec)
        for number, chunk in enumerate(chunk_sizes)
        for again in range(1, passes + 1)
        for spec in _specs(experiment, chunk, unit, number == 0)
    ]
    each_s = max(0.0, budget_s / len(made) - _PLACING_S)
    return [_cell(experiment, spec, again, each_s) for again, spec in made]


def least_measuring_s(cells: int) -> float:
    """The shortest budget in which so many cells of micro_cells get a round each."""
    return cells * (_PLACING_S + _LEAST_S)


# Cell, tier, attempt and number.
_Sample = tuple[str, str, int, int]


class Spec(NamedTuple):
    chunk_tokens: int
    workload: dict[str, Any]
    tiers: tuple[str, ...]


def _specs(experiment: Experiment, chunk: int, unit: int, whole: bool) -> Iterator[Spec]:
    """(chunk size, workload, tiers) of each cell. whole False: only what depends on the chunk size."""
    cache = experiment.cache
    tiers = tuple(
        state.name
        for state in all_states()
        if state.needs <= cache.tiers
        and not state.restarted
        and not (state.from_device is False and cache.disk is not None and cache.disk.odirect)
    )
    warm = tuple(name for name in tiers if state_named(name).served_by is not None)
    assert isinstance(experiment.workload, PrefixWorkload)
    longest = LENGTHS[-1] if experiment.workload.prompt_tokens > _ALWAYS * unit + 1 else _ALWAYS
    for length in (each for each in LENGTHS if each <= longest):
        yield Spec(chunk, {"prompt_tokens": length * unit + 1}, tiers if whole or length == LENGTHS[1] else warm)
    for length, at_once in CONCURRENT if whole else CONCURRENT_AGAIN:
        workload = {"prompt_tokens": length * unit + 1, "concurrency": at_once}
        yield Spec(chunk, workload, tiers if length == 2 else warm)
    if not whole:
        return
    for length, hit in (each for each in PARTIAL if each[0] <= longest):
        yield Spec(chunk, {"prompt_tokens": length * unit + 1, "hit_rate": hit / length}, warm[:2])
    for length, at_once in DECODE:
        workload = {"prompt_tokens": length * unit + 1, "concurrency": at_once, "output_tokens": DECODE_TOKENS}
        yield Spec(chunk, workload, warm[:1])


def _cell(experiment: Experiment, spec: Spec, again: int, budget_s: float) -> Cell:
    config = experiment.model_dump(mode="json")
    config["workload"] = {"kind": "prefix", **spec.workload}
    config["cache"] |= {"chunk_tokens": spec.chunk_tokens}
    until = {"metric": "ttft_s", "half_width": HALF_WIDTH, "min_samples": 5, "max_samples": 60}
    asked = experiment.measure
    # A slow moment is a small part of a long decoding: no sample of it is worth a wait for quick cores.
    steady = None if "output_tokens" in spec.workload else asked.steady
    kept = {"request_timeout": asked.request_timeout, "steady": steady, "warm_up": WARM_UP if again == 1 else 0}
    config["measure"] = {"tiers": spec.tiers, "until": until, "budget": budget_s, **kept}
    overrides = {f"workload.{key}": value for key, value in spec.workload.items()}
    overrides |= {"cache.chunk_tokens": spec.chunk_tokens}
    key = ",".join(f"{name}={value:.6g}" for name, value in overrides.items()) + f"#{again}"
    checked = Experiment.model_validate_json(msgspec.json.encode(config), context={"resolved": True})
    return Cell(key, overrides, checked)


def points_of(
    folder: Path, size: str = "", host_times: Mapping[tuple[str, str], float] | None = None, seed: int = 0
) -> tuple[CalibrationPoint, ...]:
    """The points of a run, from the rows that count; of one that measured other cells too, those of the calibration's
    size, as `planned` names them. A cell that decodes gives its time per output token. host_times: by cell and tier,
    how much longer the host's own work took there; None: it does not count, and neither does how quick the cores were.
    """
    cells = {cell.key: cell for cell in read_manifest(folder).cells}
    samples: dict[tuple[str, str], dict[_Sample, list[RequestRecord]]] = {}
    for row in read_rows(folder):
        if row.cell.startswith(size) and row.phase == "measure" and row.expected_tier is not None and counted(row):
            point = samples.setdefault((row.cell.rpartition("#")[0], row.expected_tier), {})
            point.setdefault((row.cell, row.expected_tier, row.attempt, row.sample), []).append(row)
    known, slow = host_times or {}, slow_samples(folder, size) if host_times else set()
    for point in samples.values():
        if len(point.keys() - slow) >= _FEWEST:
            for key in point.keys() & slow:
                del point[key]
    return tuple(
        _point(
            tier,
            cells[f"{cell}#1"],
            list(measured.values()),
            fmean(known.get((key, tier), 1.0) for key, *_ in measured),
            seed,
        )
        for (cell, tier), measured in samples.items()
    )


def _point(
    tier: str, cell: CellEntry, samples: Sequence[Sequence[RequestRecord]], host_time: float, seed: int
) -> CalibrationPoint:
    workload, cache = cell.workload, cell.cache
    assert isinstance(workload, PrefixWorkload) and cache is not None, "micro_cells made this cell"
    metric: Metric = "tpot_s" if workload.output_tokens > 1 else "ttft_s"
    hit = hit_tokens(workload.prompt_tokens, workload.hit_rate, cache.chunk_tokens)
    values = [fmean(metric_values(rows, metric)) for rows in samples]
    chosen = np.random.default_rng(seed).choice(values, size=(_RESAMPLED, len(values)))
    low, high = (float(np.quantile(middle_mean(chosen, axis=1), share)) for share in (0.025, 0.975))
    state = state_named(tier)
    on_disk = state.from_device is not None
    return CalibrationPoint(
        tier=tier,
        prompt_tokens=workload.prompt_tokens,
        hit_tokens=0 if state.served_by is None else hit,
        chunk_tokens=cache.chunk_tokens,
        concurrency=workload.concurrency,
        output_tokens=workload.output_tokens,
        metric=metric,
        device_bytes_per_s=cell.device_bytes_per_s if state.from_device else None,
        file_system=cell.disk_file_system if on_disk else None,
        samples=len(values),
        host_time=round(host_time, 4),
        measured_s=float(f"{float(middle_mean(values)):.6g}"),
        low_s=float(f"{low:.6g}"),
        high_s=float(f"{high:.6g}"),
    )
