"""What a machine costs: constants of the cost model and the devices, and where they came from.

A calibration holds the points of its fit, so that a user can repeat the fit: fitting.py gives the constants that the
file states. No constant is tuned by hand. A constant that the points do not determine is null, or an assumption that
says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from simulator.errors import CalibrationError
from simulator.models import load_config
from traces.tiers import PAGE_CACHE, all_tiers, state_names

# The least that a step takes, by the host that launches its kernels.
LAUNCH = "launch_s"
STEP = ("step_s", "token_s", "attention_s", "attention_context_s", "context_s", LAUNCH)
# What an engine's own thread does in a step beside the model's forward pass.
HOST_STEP = ("step_request_s", "hit_token_s", "store_token_s")
# What a first token takes longer for each token of its prompt, and a first or last one where the engine goes on at
# once, ahead of the front end. How long passes hold a chunk that is read ahead up, for each request that waits.
RESPONSE_TOKEN, RESPONSE_NEXT, RESPONSE_STORE = "response_token_s", "response_next_s", "response_store_s"
READ_PASS = "read_pass_s"
BESIDE = (RESPONSE_TOKEN, RESPONSE_NEXT, RESPONSE_STORE, READ_PASS)
# What a front end takes to parse a request, and what the questions about its chunks take.
PARSING, ASKING = ("request_s", "request_token_s"), "request_chunk_s"
REQUEST = (*PARSING, "request_wait_s", ASKING, "response_s", *BESIDE, "poll_s")
COST = (*STEP, *HOST_STEP, *REQUEST)
# What transfers KV: each tier behind the engine's own, and the page cache of those on a device.
DEVICES = (
    *(f"{tier.name}.{way}" for tier in all_tiers() if tier.offload for way in ("read", "write")),
    f"{PAGE_CACHE}.read",
)
TRANSFER = ("latency_s", "chunk_s", "bytes_per_s", "shared_bytes_per_s")
CONSTANTS = (*COST, *(f"{device}.{of}" for device in DEVICES for of in TRANSFER))
# What a core of the host does, and takes longer for while it is slower: not what a GPU computes, a device reads, or a
# link moves. An operation of a device in RAM is the host's, and what the kernel copies from its page cache.
HOST = frozenset(
    (
        *HOST_STEP,
        *REQUEST,
        *(f"{PAGE_CACHE}.read.{of}" for of in TRANSFER),
        *(f"{device}.chunk_s" for device in DEVICES),
        *(f"{device}.latency_s" for device in DEVICES if device.partition(".")[0] in ("cpu", "pool")),
    )
)

Metric = Literal["ttft_s", "tpot_s", "batch_s"]


class CalibrationPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A measured time of prompts of which hit_tokens each lay in the tier that `tier` names.

    The page cache answered 'disk'; the device answered 'disk_cold', limited to device_bytes_per_s (None: no limit).
    measured_s: the metric's mean over the `concurrency` requests sent at once, and the median of that over the samples;
    of batch_s, the time until the last of them has its last token. host_time: how much longer the host's own work took
    meanwhile than over the whole calibration. hit_share: where measured_s is the mean of many
    requests, the share of them that hit; the others have no hit_tokens. low_s, high_s: its 95 % interval. fitted_s:
    what the constants predict. loo_error: the relative error of a fit to all other points.
    """

    tier: str
    prompt_tokens: int
    hit_tokens: int
    chunk_tokens: int
    concurrency: int = 1
    output_tokens: int = 1
    hit_share: float = 1.0
    metric: Metric = "ttft_s"
    device_bytes_per_s: float | None = None
    file_system: str | None = None
    samples: int | None = None
    host_time: float = 1.0
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
        """The relative difference of the predicted time from the measured one."""
        return None if self.fitted_s is None else self.fitted_s / self.measured_s - 1


class FittedOn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The measured points, the settings under which they were taken, and by what. engine_policy, tier_policy: the packs
    (simulator/policies/) that stand for what was measured; older files hold none, and were measured of the defaults.
    core_loop_s: what a fixed loop took on the engine's core meanwhile, by the median; None where that does not count.
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
    core_loop_s: float | None = None
    points: tuple[CalibrationPoint, ...]


class Assumption(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A constant without a fit: a value, or the name of a constant that it is assumed to equal."""

    why: str
    value: float | None = None
    same_as: str | None = None

    def __post_init__(self) -> None:
        if (self.value is None) == (self.same_as is None):
            raise ValueError("an assumption needs either value or same_as")


class Held(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the constants did against kept evidence. fitted: rows that they were fitted on; others: all other rows.

    evidence: the folder that keeps each row's verdict. margin: relative; a row passes whose whole interval lies within
    it. A preset can hit all rows that it was fitted on and miss every other one, so that both are told.
    """

    evidence: str
    date: str
    margin: float
    fitted: int
    fitted_pass: int
    others: int
    others_pass: int

    def __str__(self) -> str:
        return (
            f"{self.fitted_pass} of its {self.fitted} fitted rows and {self.others_pass} of {self.others} others pass"
            f" \N{PLUS-MINUS SIGN}{self.margin:.0%} ({self.evidence}, {self.date})"
        )


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constants by name (CONSTANTS), null where unknown, with their provenance.

    Seconds: step_s per step, token_s per new token, attention_s per pair of new tokens, attention_context_s per pair of
    a new token and a token of its context, context_s per token of a sequence's context (core/src/engine/cost.rs). All
    these together take launch_s at least.
    The engine's own thread spends step_request_s on each request that a step begins, and hit_token_s on each cached
    token with which that request begins. It spends store_token_s on each token whose KV the step copies to the tier
    behind the GPU (0: beside the steps). A file that lacks launch_s, these three or BESIDE means 0. Of a tier that it
    does not name, all is unknown.
    Before the scheduler sees a request, a front end that does one task after another spends request_s, and
    request_token_s per prompt token. Then request_wait_s passes, for all requests at once. request_chunk_s per prompt
    chunk: the cache server's, which takes one question after another; the front end's where an engine has no such
    server. response_s: the front end's time for a request's first token, and for its last. A first token takes
    response_token_s more per prompt token, of all requests that get theirs in the same step. Such tokens take longer
    where the engine's own work goes ahead of them: response_next_s where a step begins, response_store_s while a store
    of the request is under way. poll_s: a step of the engine that only asks for an answer, on average of those of a
    lone look-up; of an engine that reads ahead, the wait for storage's answer. There a chunk takes
    read_pass_s longer to read for each request that waits for a read, its own one too. Alone, a device's transfer of n
    chunks takes latency_s + n chunk_s + bytes / bytes_per_s (.inf: the points show no time per byte). All transfers
    together move at most shared_bytes_per_s (.inf: the points show no bound).

    What runs at once. synchronous_loads: the engine's own thread copies loads from the CPU tier and computes nothing
    meanwhile (vLLM's workers without a GPU: LMCache 0.5.6, multiprocess/transfer_context/worker_transfer.py,
    EngineDrivenTransferContext). shared_core: front end and engine share one core; each gets half while both have work.
    yields_core: they share one, steps take no time of it, and the front end goes ahead of passes that wait for storage.
    serial_chunks: one interpreter spends page_cache.read.chunk_s, a chunk's cost without the device, for all requests
    that read at once (LMCache's server with its adapter fs). copied_reads: a chunk that is read is copied once more
    (SGLang's file storage). disk.read.bytes_per_s is then that copy, where the device's own bandwidth is known: the
    kernel copies a part while the device still reads. Where it is not, page_cache.read.bytes_per_s counts for each
    byte, too. launches_steps: the engine's thread launches a step's kernels one by one, and a GPU computes beside it.

    host_spread: the standard deviation of each of the host's tasks (front end, wait, poll, answer) over its mean; 0:
    each takes its mean time, so that requests sent at once run in one order.

    held: how it did in a kept validation; None: no kept one is of it.
    good: the verdict of leaving each point out (`harness calibrate`); None: there was none. intervals: 95 %, of the
    fitted constants.
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
    yields_core: bool = False
    serial_chunks: bool = False
    copied_reads: bool = False
    launches_steps: bool = False
    host_spread: float = 0.0
    held: Held | None = None
    good: bool | None = None
    verdict: str | None = None
    intervals: dict[str, tuple[float, float]] = {}

    def __post_init__(self) -> None:
        unnamed = _unnamed(self.constants)
        absent = dict.fromkeys(name for name in CONSTANTS if name.partition(".")[0] in unnamed)
        msgspec.structs.force_setattr(
            self, "constants", dict.fromkeys((LAUNCH, *HOST_STEP, *BESIDE), 0.0) | absent | self.constants
        )
        if not 0 <= self.host_spread < math.inf:
            raise ValueError(f"host_spread: {self.host_spread} is not a possible spread")
        odd = set(self.constants) ^ set(CONSTANTS) | set(self.assumed) - set(CONSTANTS)
        if odd:
            raise ValueError(f"constants: {', '.join(sorted(odd))} missing or unknown; state each one, null if unknown")
        for name, value in self.constants.items():
            if value is not None and not _possible(name, value):
                raise ValueError(f"constants.{name}: {value} is not a possible cost")

    @property
    def standing(self) -> str:
        """How far its predictions may be believed, as a clause: by kept evidence, or else by its own fit."""
        if self.held is not None:
            return str(self.held)
        if self.verdict is not None:
            return f"its own check is {'good' if self.good else 'not good'}: {self.verdict}"
        return "no kept validation holds it against rows that it was not fitted on"

    def constant(self, name: str) -> float:
        """A known constant. CalibrationError names an unknown one."""
        value = self.constants[name]
        if value is None:
            without = (
                "set cache.disk.odirect: true, which passes the page cache by, or " if "page_cache" in name else ""
            )
            raise CalibrationError(
                f"calibration {self.name}: {name} is unknown (null) and needed here; {without}measure it with"
                " `harness calibrate`, or state it in the file"
            )
        return value


def _unnamed(constants: Iterable[str]) -> set[str]:
    """The tiers of which no constant is there."""
    named = {name.partition(".")[0] for name in constants}
    return {tier.name for tier in all_tiers() if tier.offload} - named


def _possible(name: str, value: float) -> bool:
    if name.endswith("bytes_per_s"):
        return value > 0
    return 0 <= value < math.inf


def on_slower_cores(slopes: Mapping[str, float], host_time: float) -> dict[str, float]:
    """The constants' slopes (of a bandwidth: its inverse) where the host's own work takes host_time times as long."""
    if host_time == 1.0:
        return dict(slopes)
    return {name: s * host_time if name in HOST else s for name, s in slopes.items()}


def at_host_time(calibration: Calibration, host_time: float) -> Calibration:
    """The same machine with slower cores, or quicker ones below 1."""
    if host_time == 1.0:
        return calibration
    constants = dict(calibration.constants)
    for name in HOST:
        if (value := constants[name]) is not None:
            constants[name] = value / host_time if name.endswith("bytes_per_s") else value * host_time
    return msgspec.structs.replace(calibration, constants=constants)


def without_compute(calibration: Calibration) -> Calibration:
    """The same machine with a GPU and a CPU memory that take no time: only the disk takes time."""
    free = {name: 0.0 for name in CONSTANTS if not name.startswith(("disk", "page_cache"))}
    free |= {name: 1e18 for name in free if name.endswith("bytes_per_s")}
    return msgspec.structs.replace(
        calibration, name=f"{calibration.name}, compute none", constants={**calibration.constants, **free}
    )


def with_disk_of(calibration: Calibration, other: Calibration) -> Calibration:
    """GPU and CPU RAM of the one machine before the disk and the page cache of the other."""
    disk = {name: value for name, value in other.constants.items() if name.startswith(("disk", "page_cache"))}
    return msgspec.structs.replace(
        calibration,
        name=f"{calibration.name} with the disk of {other.name}",
        machine=f"{calibration.machine}; the disk of {other.machine}",
        source=f"{calibration.source} The disk: {other.source}",
        constants={**calibration.constants, **disk},
        serial_chunks=other.serial_chunks,
        copied_reads=other.copied_reads,
    )


def load_calibration(name: str | Path) -> Calibration:
    """A calibration from a YAML file, or by name from configs/hardware. ValueError: one line with file and cure."""
    return load_config("hardware", name, Calibration)
