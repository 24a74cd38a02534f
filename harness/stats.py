"""Percentiles and intervals: pure functions of numbers. Seeds are arguments; nothing reads a clock."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def percentile(values: Sequence[float], share: float) -> float | None:
    """Linear-interpolated percentile, share in 0..1; None without values."""
    return float(np.quantile(values, share)) if len(values) else None


def coefficient_of_variation(values: Sequence[float]) -> float | None:
    """Sample standard deviation over the mean; None with fewer than two values or a mean of 0."""
    if len(values) < 2 or not (mean := float(np.mean(values))):
        return None
    return float(np.std(values, ddof=1)) / mean


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Student's t interval of the mean; None with fewer than two values."""
    if len(values) < 2:
        return None
    from scipy.special import stdtrit

    mean = float(np.mean(values))
    quantile = float(stdtrit(len(values) - 1, (1 + confidence) / 2))
    half = quantile * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean - half, mean + half


def relative_half_width(values: Sequence[float], confidence: float = 0.95) -> float | None:
    """Half of the mean's interval over the mean: what 'sample until' narrows. None while it is undefined."""
    interval = mean_interval(values, confidence)
    mean = float(np.mean(values)) if len(values) else 0.0
    if interval is None or mean <= 0:
        return None
    return (interval[1] - interval[0]) / 2 / mean


def samples_needed(values: Sequence[float], half_width: float, confidence: float = 0.95) -> int | None:
    """How many samples of this spread give ± half_width (relative); None where the spread is unknown."""
    spread = coefficient_of_variation(values)
    if spread is None:
        return None
    from scipy.special import ndtri

    quantile = float(ndtri((1 + confidence) / 2))
    return max(2, math.ceil((quantile * spread / half_width) ** 2))
