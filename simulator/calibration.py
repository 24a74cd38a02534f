"""What a machine costs: constants of the cost model and the devices, and where they came from.

A calibration holds the points that it was fitted on, so that anybody can fit it again: fitting.py gives the
constants that the file states. Nothing is tuned by hand; what the points cannot tell is null, or an assumption that
says why.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import msgspec

from simulator import SettingError
from simulator.models import load_config

COST = ("step_s", "token_s", "attention_s", "decode_context_s", "request_s", "request_token_s")
DEVICES = ("cpu.read", "cpu.write", "disk.read", "disk.write", "page_cache.read")
CONSTANTS = (*COST, *(f"{device}.{of}" for device in DEVICES for of in ("latency_s", "chunk_s", "bytes_per_s")))

State = Literal["recompute", "gpu", "cpu", "disk", "disk_cold"]


class CalibrationError(SettingError):
    """A calibration lacks a constant that is needed, or is not whole."""


class Point(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A measured time to first token of a prompt of which hit_tokens lay in the tier that `state` names.

    'disk' was answered by the page cache, 'disk_cold' by the device.
    """

    state: State
    prompt_tokens: int
    hit_tokens: int
    ttft_s: float


class FittedOn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measured points and the settings under which they were taken."""

    model: str
    chunk_tokens: int
    max_num_batched_tokens: int
    points: tuple[Point, ...]


class Assumption(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A constant that was not fitted: a value, or the name of the constant that it is taken to equal."""

    why: str
    value: float | None = None
    same_as: str | None = None

    def __post_init__(self) -> None:
        if (self.value is None) == (self.same_as is None):
            raise ValueError("an assumption needs either value or same_as")


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants by name (CONSTANTS), null where unknown, with their provenance.

    Seconds: step_s per step, token_s per new token, attention_s per pair of tokens attended, decode_context_s per
    token of a decoding sequence's context, request_s per request and request_token_s per prompt token before the
    scheduler sees it. A device's transfer of n chunks takes latency_s + n chunk_s + bytes / bytes_per_s.
    """

    name: str
    source: str
    date: str
    machine: str
    method: str
    fitted_on: FittedOn
    assumed: dict[str, Assumption]
    constants: dict[str, float | None]

    def __post_init__(self) -> None:
        odd = set(self.constants) ^ set(CONSTANTS) | set(self.assumed) - set(CONSTANTS)
        if odd:
            raise ValueError(f"constants: {', '.join(sorted(odd))} missing or unknown; state each one, null if unknown")
        for name, value in self.constants.items():
            if value is not None and not (0 < value < math.inf or (value == 0 and not name.endswith("bytes_per_s"))):
                raise ValueError(f"constants.{name}: {value} is not a possible cost")

    def constant(self, name: str) -> float:
        """A constant that must be known. CalibrationError names it if it is not."""
        value = self.constants[name]
        if value is None:
            raise CalibrationError(
                f"calibration {self.name}: {name} is unknown (null) and needed here; calibrate it or state it"
            )
        return value


def without_compute(calibration: Calibration) -> Calibration:
    """The same machine with a GPU, and a CPU memory, that take no time: what is left is the disk."""
    free = {name: 0.0 for name in CONSTANTS if not name.startswith(("disk", "page_cache"))}
    free |= {name: 1e18 for name in free if name.endswith("bytes_per_s")}
    return msgspec.structs.replace(
        calibration, name=f"{calibration.name}, compute none", constants={**calibration.constants, **free}
    )


def load_calibration(name: str | Path) -> Calibration:
    """A calibration from a YAML file, or by name from configs/hardware. ValueError: one line with file and cure."""
    return load_config("hardware", name, Calibration)
