"""The simulator's time for a calibration's points: a few prompts sent at once, their prefix in a named tier."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec

from simulator.calibration import Calibration, CalibrationPoint, at_host_time
from simulator.middle import middle_mean
from simulator.models import ModelSpec
from simulator.simulate import Completion, Simulator
from traces.request import Request, Segment
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
    simulator = _simulator(point, calibration, model)
    if not calibration.host_spread:
        return _once_s(point, simulator)
    others = (simulator.anew(seed) for seed in range(1, _SEEDS))
    return float(middle_mean([_once_s(point, each) for each in (simulator, *others)]))


def _once_s(point: CalibrationPoint, simulator: Simulator) -> float:
    if point.hit_tokens and state_named(point.tier).served_by is not None:
        for slot in range(point.concurrency):
            simulator.submit(Request(id=f"warm{slot}", prompt=_prefix(point, slot), output_tokens=1), simulator.now_s)
            _finish(simulator, 1)
        simulator.drain()
        simulator.reset(state_named(point.tier).must_not_have)
    sent_s = simulator.now_s
    for slot in range(point.concurrency):
        simulator.submit(Request(id=f"{slot}", prompt=_prompt(point, slot), output_tokens=point.output_tokens), sent_s)
    done = _finish(simulator, point.concurrency)
    if point.metric == "batch_s":
        return simulator.now_s - sent_s
    return fmean(_metric(one, point, sent_s) for one in done)


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


def _finish(simulator: Simulator, count: int) -> Sequence[Completion]:
    done: list[Completion] = []
    while len(done) < count:
        done += simulator.advance()
    return done


def _metric(done: Completion, point: CalibrationPoint, sent_s: float) -> float:
    assert done.first_token_s is not None and done.last_token_s is not None, done.error
    if point.metric == "ttft_s":
        return done.first_token_s - sent_s
    return (done.last_token_s - done.first_token_s) / (point.output_tokens - 1)
