"""The micro-measurements of a calibration: which cells are measured, and the points that their rows give.

Lengths are 2, 6, 12 and 24 units of (at least) 256 tokens and one token, so that every chunk size and the hit rates
below divide them. Each constant shows in several points: prefill over tokens and context (partial hits), fixed costs
(gpu hits), each tier over lengths and chunk sizes, what waits for what (2 and 4 requests at once), decoding over batch
and context.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
import numpy as np

from harness.config import TIER_STATES, Experiment, PrefixWorkload, hit_tokens
from harness.experiments import Cell, ConfigError
from harness.results import read_manifest, read_rows
from harness.summary import counted, metric_values
from simulator.calibration import Metric, Point
from traces.request import RequestRecord

LENGTHS = (2, 6, 12, 24)
# (chunks of the prompt, of them hit)
PARTIAL = ((6, 3), (12, 4), (24, 12), (24, 18))
CONCURRENT = ((2, 2), (2, 4), (6, 2), (6, 4))
# With the larger chunks, where bandwidth counts for more than operations.
CONCURRENT_AGAIN = ((6, 4), (12, 4))
DECODE = ((2, 1), (12, 1), (2, 4), (6, 2))
DECODE_TOKENS = 33
HALF_WIDTH = 0.01
_RESAMPLED = 1000
_UNIT_TOKENS = 256


def micro_cells(experiment: Experiment, chunk_sizes: Sequence[int], budget_s: float) -> list[Cell]:
    """Cells for `budget_s` seconds of measuring, all of one chunk size together. Raises ConfigError."""
    if not isinstance(experiment.workload, PrefixWorkload):
        raise ConfigError("harness calibrate needs workload.kind prefix; its model, cache and engines count")
    # Prompts long enough to tell a tier's time from all others, whatever the chunks are.
    unit = math.lcm(_UNIT_TOKENS, *chunk_sizes)
    made = [spec for number, chunk in enumerate(chunk_sizes) for spec in _specs(experiment, chunk, unit, number == 0)]
    each_s = budget_s / len(made)
    return [_cell(experiment, chunk, workload, tiers, each_s) for chunk, workload, tiers in made]


Spec = tuple[int, dict[str, Any], tuple[str, ...]]


def _specs(experiment: Experiment, chunk: int, unit: int, whole: bool) -> Iterator[Spec]:
    """(chunk size, workload, tiers) of each cell. whole False: only what depends on the chunk size."""
    cache = experiment.cache
    tiers = tuple(
        tier
        for tier in TIER_STATES
        if not (tier == "cpu" and cache.cpu is None)
        and not (tier.startswith("disk") and cache.disk is None)
        and not (tier == "disk" and cache.disk is not None and cache.disk.odirect)
    )
    warm = tuple(tier for tier in tiers if tier != "recompute")
    for length in LENGTHS:
        yield chunk, {"prompt_tokens": length * unit + 1}, tiers if whole or length == LENGTHS[1] else warm
    for length, at_once in CONCURRENT if whole else CONCURRENT_AGAIN:
        yield chunk, {"prompt_tokens": length * unit + 1, "concurrency": at_once}, tiers if length == 2 else warm
    if not whole:
        return
    for length, hit in PARTIAL:
        yield chunk, {"prompt_tokens": length * unit + 1, "hit_rate": hit / length}, tiers[1:3]
    for length, at_once in DECODE:
        workload = {"prompt_tokens": length * unit + 1, "concurrency": at_once, "output_tokens": DECODE_TOKENS}
        yield chunk, workload, ("gpu",)


def _cell(experiment: Experiment, chunk: int, workload: dict[str, Any], tiers: Sequence[str], budget_s: float) -> Cell:
    config = experiment.model_dump(mode="json")
    config["workload"] = {"kind": "prefix", **workload}
    config["cache"]["chunk_tokens"] = chunk
    until = {"metric": "ttft_s", "half_width": HALF_WIDTH, "min_samples": 5, "max_samples": 60}
    timeout = config["measure"]["request_timeout"]
    config["measure"] = {"tiers": tiers, "until": until, "budget": budget_s, "request_timeout": timeout}
    overrides = {f"workload.{key}": value for key, value in workload.items()} | {"cache.chunk_tokens": chunk}
    key = ",".join(f"{name}={value:.6g}" for name, value in overrides.items())
    checked = Experiment.model_validate_json(msgspec.json.encode(config), context={"resolved": True})
    return Cell(key, overrides, checked)


def points_of(folder: Path, seed: int = 0) -> tuple[Point, ...]:
    """A run's points, from the rows that count. A cell that decodes gives its time per output token."""
    manifest, rows = read_manifest(folder), list(read_rows(folder))
    points = []
    for cell in manifest["cells"]:
        config, resolved = cell["config"], cell["resolved"] or {}
        for tier in config["measure"]["tiers"]:
            samples: dict[tuple[int, int], list[RequestRecord]] = {}
            for row in rows:
                if row.cell == cell["key"] and row.phase == "measure" and row.expected_tier == tier and counted(row):
                    samples.setdefault((row.attempt, row.sample), []).append(row)
            if samples:
                points.append(_point(tier, config, resolved, list(samples.values()), seed))
    return tuple(points)


def _point(
    tier: Any, config: dict[str, Any], resolved: dict[str, Any], samples: Sequence[Sequence[RequestRecord]], seed: int
) -> Point:
    workload, cache = config["workload"], config["cache"]
    device = (config.get("storage") or {}).get("device") or {}
    metric: Metric = "tpot_s" if workload["output_tokens"] > 1 else "ttft_s"
    hit = hit_tokens(workload["prompt_tokens"], workload["hit_rate"], cache["chunk_tokens"])
    values = [fmean(metric_values(rows, metric)) for rows in samples]
    chosen = np.random.default_rng(seed).choice(values, size=(_RESAMPLED, len(values)))
    low, high = (float(np.quantile(np.median(chosen, axis=1), share)) for share in (0.025, 0.975))
    on_disk = tier in ("disk", "disk_cold")
    return Point(
        tier=tier,
        prompt_tokens=workload["prompt_tokens"],
        hit_tokens=0 if tier == "recompute" else hit,
        chunk_tokens=cache["chunk_tokens"],
        concurrency=workload["concurrency"],
        output_tokens=workload["output_tokens"],
        metric=metric,
        device_bytes_per_s=(device.get("read_bandwidth") or device.get("bandwidth")) if tier == "disk_cold" else None,
        file_system=(
            device.get("file_system") or (resolved.get("details") or {}).get("disk_file_system") if on_disk else None
        ),
        samples=len(values),
        measured_s=float(f"{median(values):.6g}"),
        low_s=float(f"{low:.6g}"),
        high_s=float(f"{high:.6g}"),
    )
