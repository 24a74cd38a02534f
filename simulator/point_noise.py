"""How precisely a calibration's points are known, as the spread of their samples tells."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simulator.calibration import CalibrationPoint

# Of so many samples, an interval tells how they spread.
TELLING_SAMPLES = 5
NORMAL_975 = 1.96


def relative_noise(points: Sequence[CalibrationPoint]) -> NDArray[np.float64]:
    """The relative standard error of each point's measured time.

    A point's few samples tell little of their own spread, so that of its tier's points counts, over the root of its
    samples. A point without samples, read off a figure, has the interval that it states.
    """
    spreads: dict[tuple[str, str], list[float]] = {}
    for point in points:
        width = (point.high_s or point.measured_s) - (point.low_s or point.measured_s)
        if (samples := point.samples or 1) >= TELLING_SAMPLES:
            spread = width / (2 * NORMAL_975 * point.measured_s) * math.sqrt(samples)
            spreads.setdefault((point.tier, point.metric), []).append(spread)
    typical = {of: float(np.median(found)) for of, found in spreads.items()}
    largest = max(typical.values(), default=0.0)
    noise = [
        _read_off(point) or typical.get((point.tier, point.metric), largest) / math.sqrt(point.samples or 1)
        for point in points
    ]
    return np.array(noise)


def _read_off(point: CalibrationPoint) -> float | None:
    """The relative error of a point without samples that states an interval."""
    if point.samples is not None or point.low_s is None or point.high_s is None:
        return None
    return (point.high_s - point.low_s) / (2 * NORMAL_975 * point.measured_s)
