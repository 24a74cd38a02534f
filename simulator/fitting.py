"""Fits a calibration's constants to measured times to first token. Apart, for it needs numpy and scipy."""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls

from simulator.calibration import CONSTANTS, Assumption, Calibration, FittedOn, Point
from simulator.models import load_model

SIGNIFICANT_DIGITS = 6


def fit(fitted_on: FittedOn, assumed: dict[str, Assumption]) -> dict[str, float | None]:
    """Constants by least squares of the relative error, none below 0; null where the points say nothing.

    Relative, because a time to first token of 30 ms has to be as right as one of 3 s. An infinitely fast device (the
    fit finds no time per byte) is null: the points cannot tell its speed.
    """
    wanted = [n for n in CONSTANTS if n not in assumed and any(n in design(p, fitted_on) for p in fitted_on.points)]
    known = {n: a.value for n, a in assumed.items() if a.value is not None}
    measured = np.array([point.ttft_s for point in fitted_on.points])
    rows = [design(point, fitted_on) for point in fitted_on.points]
    given = np.array([sum(_slope(n, known[n]) * row.get(n, 0.0) for n in known) for row in rows])
    matrix = np.array([[row.get(name, 0.0) for name in wanted] for row in rows]) / measured[:, None]
    scale = np.linalg.norm(matrix, axis=0)
    solution, _ = nnls(matrix / scale, (measured - given) / measured)
    found: dict[str, float | None] = dict.fromkeys(CONSTANTS)
    found |= known
    found |= {name: _stated(name, float(value)) for name, value in zip(wanted, solution / scale, strict=True)}
    return found | {n: found[a.same_as] for n, a in assumed.items() if a.same_as is not None}


def design(point: Point, fitted_on: FittedOn) -> dict[str, float]:
    """How often each constant counts in a point's time (for bytes_per_s: bytes, so that its inverse is linear)."""
    computed = point.prompt_tokens - point.hit_tokens
    row = {
        "step_s": float(-(-computed // fitted_on.max_num_batched_tokens)),
        "token_s": float(computed),
        "attention_s": computed * (point.hit_tokens + computed / 2),
        "request_s": 1.0,
        "request_token_s": float(point.prompt_tokens),
    }
    devices = {"cpu": ("cpu.read",), "disk": ("cpu.read", "page_cache.read"), "disk_cold": ("cpu.read", "disk.read")}
    for device in devices.get(point.state, ()):
        row[f"{device}.latency_s"] = 1.0
        row[f"{device}.chunk_s"] = point.hit_tokens / fitted_on.chunk_tokens
        row[f"{device}.bytes_per_s"] = float(point.hit_tokens * load_model(fitted_on.model).kv_bytes_per_token)
    return row


def predicted_s(point: Point, calibration: Calibration) -> float:
    """What the constants say of a point."""
    row = design(point, calibration.fitted_on)
    return sum(_slope(name, calibration.constant(name)) * times for name, times in row.items())


def _slope(name: str, value: float) -> float:
    return 1 / value if name.endswith("bytes_per_s") else value


def _stated(name: str, slope: float) -> float | None:
    """A fitted slope as the constant that a file states."""
    if name.endswith("bytes_per_s"):
        return None if slope == 0 else float(f"{1 / slope:.{SIGNIFICANT_DIGITS}g}")
    return float(f"{slope:.{SIGNIFICANT_DIGITS}g}")
