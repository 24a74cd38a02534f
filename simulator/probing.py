"""The simulator's time for a calibration's points: a few prompts sent at once, their prefix in a named tier."""

from __future__ import annotations

import functools
from statistics import fmean

import msgspec

from simulator import _core
from simulator.calibration import Calibration, CalibrationPoint, at_host_time
from simulator.middle import middle_mean
from simulator.models import ModelSpec
from simulator.simulate import Simulator
from traces.request import Segment, reply_stream
from traces.tiers import state_named

# So large that nothing is evicted: a point's time does not depend on evictions.
_ROOM_BYTES = 1 << 42
_SEEDS = 15


def simulated_s(point: CalibrationPoint, calibration: Calibration, model: ModelSpec) -> float:
    """The point's metric, mean over its requests, by a fresh simulator with the calibration's constants.

    Where the host's times vary, so does the order of requests sent together: the middle mean over some seeds. A batch
    gets the GPU blocks that fitted_on has; other points get all that they need. The host is as slow as the point says.
    """
    calibration = at_host_time(calibration, point.host_time)
    if point.concurrency == 1 and calibration.host_spread:
        calibration = msgspec.structs.replace(calibration, host_spread=0.0)
    each_s = _each_s(point, _simulator(point, calibration, model), varies=calibration.host_spread > 0)
    return each_s[0] if len(each_s) == 1 else float(middle_mean(each_s))


def _each_s(point: CalibrationPoint, simulator: Simulator, *, varies: bool) -> list[float]:
    """The metric by a fresh engine for each of some seeds; for one where nothing varies."""
    hit = point.hit_tokens and state_named(point.tier).served_by is not None
    slots = range(point.concurrency)
    probed = _core.probed(
        simulator.config,
        [_asked(f"warm{slot}", _prefix(point, slot), 1) for slot in slots] if hit else [],
        sorted(state_named(point.tier).must_not_have) if hit else [],
        [_asked(f"{slot}", _prompt(point, slot), point.output_tokens) for slot in slots],
        range(_SEEDS if varies else 1),
    )
    if point.metric == "batch_s":
        return [ended_s - sent_s for sent_s, ended_s, _ in probed]
    if point.metric == "ttft_s":
        return [fmean(first_s - sent_s for first_s, _ in tokens) for sent_s, _, tokens in probed]
    gaps = point.output_tokens - 1
    return [fmean((last_s - first_s) / gaps for first_s, last_s in tokens) for _, _, tokens in probed]


def _asked(name: str, prompt: tuple[Segment, ...], output_tokens: int) -> tuple[str, tuple[Segment, ...], int, int]:
    return name, prompt, output_tokens, _reply(name)


_reply = functools.cache(reply_stream)


def _simulator(point: CalibrationPoint, calibration: Calibration, model: ModelSpec) -> Simulator:
    settings = calibration.fitted_on
    need = point.concurrency * (point.prompt_tokens + point.output_tokens)
    blocks = settings.gpu_blocks if point.metric == "batch_s" else None
    has_disk = calibration.constants["disk.read.bytes_per_s"] is not None
    return Simulator(
        model,
        calibration,
        settings.engine_policy,
        settings.tier_policy,
        gpu_blocks=blocks or 4 * (need // settings.block_tokens + 2),
        block_tokens=settings.block_tokens,
        chunk_tokens=point.chunk_tokens,
        cpu_bytes=_ROOM_BYTES,
        disk_bytes=_ROOM_BYTES if has_disk else None,
        disk_bytes_per_s=point.device_bytes_per_s,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
    )


def _prefix(point: CalibrationPoint, slot: int) -> tuple[Segment, ...]:
    return (Segment(1 + slot, point.hit_tokens),) if point.hit_tokens else ()


def _prompt(point: CalibrationPoint, slot: int) -> tuple[Segment, ...]:
    rest = Segment(1 + point.concurrency + slot, point.prompt_tokens - point.hit_tokens)
    return (*_prefix(point, slot), rest) if rest.tokens else _prefix(point, slot)
