"""Whether two sides asked the same question. What is not comparable is refused with the reason, not averaged away."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from harness.errors import NotComparable
from harness.experiment.workloads import PrefixWorkload, hit_tokens
from harness.records import Resolved
from harness.results.provenance import Host, is_simulated
from harness.validation.points import Point, PointKey, Side, axes, left_out_reasons
from simulator.calibration import Calibration
from traces.tiers import state_named, tier_named

_HOST = ("cpu", "cores", "kernel")
_SIZES = ("gpu_blocks", "block_tokens", "chunk_tokens", "kv_bytes_per_token", "cpu_bytes", "pool_bytes")


def check_sides(reference: Side, candidate: Side) -> None:
    """Raises NotComparable with the first reason that is found, and how many more there are."""
    reasons = [*_hosts(reference, candidate), *_common(reference, candidate)]
    for key, ours in reference.points.items():
        if theirs := candidate.points.get(key):
            reasons += [f"{name(key)}: {reason}" for check in _CHECKS for reason in check(ours, theirs)]
    _refuse(reasons)


def defects(ours: Point, theirs: Point) -> list[str]:
    """Why a point proves nothing on one of two sides, whatever set-ups they are: no evidence, a load cut short, or a
    host too slow for its accelerator."""
    late = [reason for side in (ours, theirs) if (reason := side.lateness())]
    return [*_evidence(ours, theirs), *_degraded(ours, theirs), *late]


def check_modelled(points: Sequence[Point]) -> None:
    """Raises NotComparable where a point's state is one that the simulator does not model."""
    _refuse(
        [
            f"{point.cell.key} {point.tier}: the simulator restarts in no time, and its engine is then as fast as"
            f" before; remove {point.tier} from measure.tiers"
            for point in points
            if not point.free and state_named(point.tier).restarted
        ]
    )


def check_held_out(points: Sequence[Point], calibration: Calibration) -> None:
    """Raises NotComparable where a point is one that the calibration was fitted on: it would be scored on itself."""
    fitted = [msgspec.structs.asdict(p) for p in calibration.fitted_on.points if p.metric == "ttft_s"]
    _check_apart(points, fitted, f"calibration {calibration.name} was fitted")


def check_apart(points: Sequence[Point], micro: Sequence[Point]) -> None:
    """Raises NotComparable where a point is one that a calibration is going to be fitted on."""
    timed = [p for p in micro if isinstance(w := p.cell.workload, PrefixWorkload) and w.output_tokens == 1]
    fitted = [here | {"hit_tokens": _hit_tokens(here)} for here in map(axes, timed)]
    _check_apart(points, fitted, "the calibration is to be fitted")


def _check_apart(points: Sequence[Point], fitted: Sequence[dict[str, Any]], what: str) -> None:
    _refuse(
        [
            f"{point.cell.key} {point.tier}: {what} on it (prompt_tokens {here['prompt_tokens']}); validate on"
            " points that it has not seen"
            for point in points
            if not point.free and any(_same_place(here := axes(point), there) for there in fitted)
        ]
    )


def check_host(host: Host, calibration: Calibration, run_id: str) -> None:
    """Raises NotComparable where a real engine ran, or will run, on another machine than the one that was calibrated.

    Where the calibration timed its core, the harness has to run on the same Python, too: the loop is Python's.
    """
    calibrated, timed = calibration.fitted_on.host, calibration.fitted_on.core_loop_s is not None
    for field in (*_HOST, "python") if timed else _HOST:
        here, there = getattr(host, field), calibrated.get(field)
        if None not in (here, there) and here != there:
            raise NotComparable(
                f"not comparable: unlike hosts: {field} is {here} in {run_id}, {there} in calibration"
                f" {calibration.name}; calibrate on the machine that is validated"
            )


def name(key: PointKey) -> str:
    return f"{key[0]} {key[1]}"


def _refuse(reasons: Sequence[str]) -> None:
    if reasons:
        more = f" (and {len(reasons) - 1} more such points)" if len(reasons) > 1 else ""
        raise NotComparable(f"not comparable: {reasons[0]}{more}")


# ---- the calibration's points


def _same_place(here: dict[str, Any], there: dict[str, Any]) -> bool:
    """Whether a planned point is a fitted one, by what matters to its tier; what a fitted one does not say is alike."""
    if any(here[axis] != there[axis] for axis in ("tier", "prompt_tokens", "concurrency")):
        return False
    state = state_named(here["tier"])
    if state.served_by is None:
        return True
    if there["hit_tokens"] != _hit_tokens(here):
        return False
    decisive: tuple[str, ...] = ("chunk_tokens",) if tier_named(state.served_by).offload else ()
    decisive += ("device_bytes_per_s", "file_system") if state.from_device is not None else ()
    return all(there[axis] in (None, here[axis]) for axis in decisive)


def _hit_tokens(here: dict[str, Any]) -> int:
    return hit_tokens(here["prompt_tokens"], here["hit_rate"] or 0.0, here["chunk_tokens"])


# ---- both sides


def _hosts(reference: Side, candidate: Side) -> Iterator[str]:
    """Real engines have to run on like machines; a simulator's own machine is in none of its figures. An accelerator is
    held against a GPU, which its machine need not have."""
    if any(is_paced(side) for side in (reference, candidate)) and (_has_gpu(reference) or _has_gpu(candidate)):
        return
    manifests = [m for side in (reference, candidate) if not is_simulated(side.engine) for m in side.manifests]
    for manifest in manifests[1:]:
        for field in _HOST:
            first, other = (getattr(m.host, field) for m in (manifests[0], manifest))
            if first != other:
                yield f"unlike hosts: {field} is {first} in {manifests[0].run_id}, {other} in {manifest.run_id}"


def is_paced(side: Side) -> bool:
    """Whether a reference accelerator stood for a GPU."""
    return any(point.paced for point in side.points.values())


def _has_gpu(side: Side) -> bool:
    return not is_paced(side) and any(manifest.host.gpus for manifest in side.manifests)


def _common(reference: Side, candidate: Side) -> Iterator[str]:
    if not set(reference.points) & set(candidate.points):
        yield (
            f"no point is in both ({', '.join(map(name, list(reference.points)[:3])) or 'none'} against"
            f" {', '.join(map(name, list(candidate.points)[:3])) or 'none'}); run the same experiment on both"
        )


def _evidence(ours: Point, theirs: Point) -> Iterator[str]:
    for point in (ours, theirs):
        if point.rows:
            continue
        reasons = "; ".join(left_out_reasons(point.left_out)[:2]) or "no request was answered"
        yield (
            f"no row of {len(point.left_out)} proves its tier ({reasons}); is the cache server silently recomputing?"
            " see the engine's log, and harness doctor"
        )


def _degraded(ours: Point, theirs: Point) -> Iterator[str]:
    """A free load claims no tier a request; what gives a silent degradation away are the sums."""
    if not ours.free:
        return
    for this, other in ((ours, theirs), (theirs, ours)):
        stored = [one.external_tokens for one in this.observed()]
        if not stored:
            yield "its load was not finished, so that there are no counters; go on with harness run --resume"
            continue
        elsewhere = [one.external_tokens or 0 for one in other.observed()]
        prompt = sum(row.prompt_tokens for row in other.rows)
        cache = this.cell.cache
        if cache and cache.cpu and not any(stored) and sum(elsewhere) > 0.01 * prompt:
            yield (
                f"the cache server behind one side served no token, on the other {sum(elsewhere):,}: it silently"
                " recomputed; see the engine's log for a connector that gave up"
            )


def _errors(ours: Point, theirs: Point) -> Iterator[str]:
    failed = [row for point in (ours, theirs) for row in point.left_out if row.error is not None]
    if ours.free and failed:
        yield f"{len(failed)} requests failed ({failed[0].error}); both sides have to answer the whole load"


def _tokens(ours: Point, theirs: Point) -> Iterator[str]:
    """The same prompts, and the same part of them from the tier."""
    if not ours.rows or not theirs.rows:
        return
    if ours.free:
        asked = [{row.id: (row.prompt_tokens, row.output_tokens) for row in point.rows} for point in (ours, theirs)]
        odd = [key for key in asked[0].keys() | asked[1].keys() if asked[0].get(key) != asked[1].get(key)]
        alone = [key for key in odd if None in (asked[0].get(key), asked[1].get(key))]
        if alone and len(alone) == len(odd) and getattr(ours.cell.workload, "duration", None) is not None:
            yield (
                f"{len(alone)} requests were answered on one side only, e.g. {min(alone)}: in workload.duration the"
                " slower side was asked less; lower the rate, or send a whole load"
            )
        elif odd:
            first = sorted(odd)[0]
            yield (
                f"different token counts: request {first} has (prompt, output) {asked[0].get(first)} on one side,"
                f" {asked[1].get(first)} on the other"
            )
        return
    for field in ("prompt_tokens", "output_tokens", "expected_hit_tokens"):
        seen = [sorted({getattr(row, field) for row in point.rows}) for point in (ours, theirs)]
        if seen[0] != seen[1]:
            yield f"different token counts: {field} is {seen[0]} on one side, {seen[1]} on the other"


def _sizes(ours: Point, theirs: Point) -> Iterator[str]:
    left, right = (point.cell.resolved or Resolved() for point in (ours, theirs))
    for field in _SIZES:
        known = getattr(left, field), getattr(right, field)
        if None not in known and known[0] != known[1]:
            yield f"different cache sizes: {field} is {known[0]} on one side, {known[1]} on the other"


def _rules(ours: Point, theirs: Point) -> Iterator[str]:
    """How the cache server evicts, where both sides say so."""
    left, right = (point.cell.resolved and point.cell.resolved.eviction for point in (ours, theirs))
    if left and right and left != right:
        yield f"different eviction: {left} on one side, {right} on the other; set cache.eviction as the server has it"


def _definitions(ours: Point, theirs: Point) -> Iterator[str]:
    if ours.cell.model != theirs.cell.model:
        yield f"different definitions: model is {ours.cell.model} on one side, {theirs.cell.model} on the other"
    left, right = (point.cell.workload for point in (ours, theirs))
    if left != right:
        yield f"different definitions: workload is {left!r} on one side, {right!r} on the other"


_CHECKS: tuple[Callable[[Point, Point], Iterator[str]], ...] = (
    _evidence, _errors, _degraded, _tokens, _sizes, _rules, _definitions,
)  # fmt: skip
