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

from simulator.errors import CalibrationError
from simulator.models import load_config
from traces.tiers import state_names

STEP = ("step_s", "token_s", "attention_s", "attention_context_s", "context_s")
COST = (*STEP, "request_s", "request_token_s", "request_wait_s", "request_chunk_s", "response_s", "poll_s")
DEVICES = ("cpu.read", "cpu.write", "disk.read", "disk.write", "page_cache.read")
TRANSFER = ("latency_s", "chunk_s", "bytes_per_s", "shared_bytes_per_s")
CONSTANTS = (*COST, *(f"{device}.{of}" for device in DEVICES for of in TRANSFER))

Metric = Literal["ttft_s", "tpot_s"]


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A measured time of prompts of which hit_tokens each lay in the tier that `tier` names.

    'disk' was answered by the page cache, 'disk_cold' by the device, which device_bytes_per_s limited (None: nothing
    did). measured_s: the mean over the `concurrency` requests sent at once of the metric, its median over the samples;
    low_s, high_s: the 95 % interval of that. fitted_s: what the constants say. loo_error: by how much (relative) a fit
    to all other points misses it.
    """

    tier: str
    prompt_tokens: int
    hit_tokens: int
    chunk_tokens: int
    concurrency: int = 1
    output_tokens: int = 1
    metric: Metric = "ttft_s"
    device_bytes_per_s: float | None = None
    file_system: str | None = None
    samples: int | None = None
    measured_s: float
    low_s: float | None = None
    high_s: float | None = None
    fitted_s: float | None = None
    loo_error: float | None = None

    def __post_init__(self) -> None:
        if self.tier not in state_names():
            raise ValueError(f"tier: {self.tier!r} is no state; use one of {', '.join(state_names())}")

    @property
    def error(self) -> float | None:
        """Relative: what the constants say against what was measured."""
        return None if self.fitted_s is None else self.fitted_s / self.measured_s - 1


class FittedOn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The measured points, the settings under which they were taken, and by what. engine_policy, tier_policy: the packs
    (simulator/policies.py) that stand for what was measured; older files hold none, and were measured of the defaults.
    """

    model: str
    max_num_batched_tokens: int
    max_num_seqs: int = 256
    block_tokens: int = 32
    gpu_blocks: int | None = None
    engine: str | None = None
    engine_policy: str = "vllm-0.32"
    tier_policy: str = "lmcache-0.5.6-mp"
    versions: dict[str, str] = {}
    host: dict[str, str | int | None] = {}
    run_id: str | None = None
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

    Seconds: step_s per step, token_s per new token, attention_s per pair of new tokens attended,
    attention_context_s per pair of a new token and one of its context, context_s per token of a sequence's context
    (core/src/cost.rs). Before the scheduler sees a request: request_s and per prompt token
    request_token_s and per prompt chunk request_chunk_s in a front end that takes one thing after another, then
    request_wait_s beside other requests. response_s: a request's first token, and its last, in that front end.
    poll_s: a step of the engine with nothing to do but ask for the answer to a look-up. A device's transfer of n
    chunks takes, alone, latency_s + n chunk_s + bytes / bytes_per_s (.inf: the points show no time per byte); all
    together move at most shared_bytes_per_s (.inf: no bound was seen).

    What passes beside what: synchronous_loads: the engine's own thread copies what is loaded from the CPU tier, and
    computes nothing meanwhile (vLLM's workers without a GPU: LMCache 0.5.6,
    multiprocess/transfer_context/worker_transfer.py, EngineDrivenTransferContext). shared_core: front end and engine
    have one core between them, half of it each while both have work. serial_chunks: what a chunk of the disk tier
    costs where no device is waited for, page_cache.read.chunk_s, is spent by one interpreter for all requests that
    read at once (LMCache's server with its adapter fs).

    good: the verdict of the fit's own leave-one-out (fitting.LooVerdict); None: none was made. intervals: 95 %, of
    the constants that were fitted.
    """

    name: str
    source: str
    date: str
    machine: str
    method: str
    fitted_on: FittedOn
    assumed: dict[str, Assumption]
    constants: dict[str, float | None]
    synchronous_loads: bool = False
    shared_core: bool = False
    serial_chunks: bool = False
    good: bool | None = None
    verdict: str | None = None
    intervals: dict[str, tuple[float, float]] = {}

    def __post_init__(self) -> None:
        odd = set(self.constants) ^ set(CONSTANTS) | set(self.assumed) - set(CONSTANTS)
        if odd:
            raise ValueError(f"constants: {', '.join(sorted(odd))} missing or unknown; state each one, null if unknown")
        for name, value in self.constants.items():
            if value is not None and not _possible(name, value):
                raise ValueError(f"constants.{name}: {value} is not a possible cost")

    def constant(self, name: str) -> float:
        """A constant that must be known. CalibrationError names it if it is not."""
        value = self.constants[name]
        if value is None:
            raise CalibrationError(
                f"calibration {self.name}: {name} is unknown (null) and needed here; calibrate it or state it"
            )
        return value


def _possible(name: str, value: float) -> bool:
    if name.endswith("bytes_per_s"):
        return value > 0
    return 0 <= value < math.inf


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
