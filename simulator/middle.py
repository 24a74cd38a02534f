"""The middle of samples, of measured ones and of simulated ones alike."""

from __future__ import annotations

from typing import Any

import numpy as np


def middle_mean(values: Any, axis: int = 0) -> Any:
    """The mean of the middle third, along an axis: a median that does not jump.

    An engine that asks again and again has one of a few times to first token, a poll apart. Their median jumps where
    the share of one passes a half; this moves with the shares. What a busy machine adds to a fifth of them does not
    count either.
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=axis)
    count = ordered.shape[axis]
    return np.take(ordered, range(count // 3, count - count // 3), axis=axis).mean(axis=axis)
