"""What points say of an engine that launches a step's kernels one by one, before a fit: where it sets out from.

A lone sequence decodes at the pace of the launches, and prompts that nothing holds take what the GPU computes. A
descent alone does not get from steps that all add up to steps that some launches bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np
from scipy.optimize import nnls

from simulator.calibration import STEP, CalibrationPoint

_OF_PROMPTS = ("step_s", "token_s", "attention_s")


def lone_decoding_s(points: Sequence[CalibrationPoint]) -> float | None:
    """The time per output token of lone sequences; None where none was measured."""
    alone = [point.measured_s for point in points if point.metric == "tpot_s" and point.concurrency == 1]
    return median(alone) if alone else None


def computed_steps(
    points: Sequence[CalibrationPoint], rows: Sequence[Mapping[str, float]], known: Mapping[str, float]
) -> dict[str, float]:
    """A step's slopes by the lone prompts that nothing holds, given what else they take. rows: of `design`."""
    prompts = [
        (point.measured_s, row)
        for point, row in zip(points, rows, strict=True)
        if point.concurrency == 1 and point.metric == "ttft_s" and not point.hit_tokens
    ]
    if not prompts:
        return {}
    beside = [sum(known[name] * times for name, times in row.items() if name not in STEP) for _, row in prompts]
    matrix = np.array([[row[name] / s for name in _OF_PROMPTS] for s, row in prompts])
    target = np.array([1 - rest_s / s for (s, _), rest_s in zip(prompts, beside, strict=True)])
    scale = np.linalg.norm(matrix, axis=0)
    found = dict(zip(_OF_PROMPTS, map(float, nnls(matrix / scale, target)[0] / scale), strict=True))
    return found | {"attention_context_s": found["attention_s"], "context_s": 0.0}
