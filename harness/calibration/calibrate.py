"""Minutes of micro-measurements through the real adapters, and the constants that explain them.

The run loop measures the points, each prefix placed and proven in its tier; a normal run folder keeps the rows.
A fit is good only if leave-one-out says so: a fit to all other points predicts each point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from harness.calibration.cores import core_times
from harness.calibration.points import ENGINE_START_S, PASSES, least_measuring_s, micro_cells, points_of
from harness.calibration.timed import timed
from harness.engines import ENGINES
from harness.engines.kind import EngineName, Packs
from harness.engines.sim.settings import SimSettings
from harness.errors import ConfigError, PreflightError
from harness.experiment.model import Experiment
from harness.experiment.read import Cell, Plan
from harness.results.folder import write_atomically
from harness.results.manifest import Manifest, read_manifest
from simulator.calibration import (
    HOST_STEP,
    LAUNCH,
    RESPONSE_STORE,
    TRANSFER,
    Assumption,
    Calibration,
    CalibrationPoint,
    FittedOn,
)
from simulator.errors import CalibrationError
from simulator.models import load_model
from simulator.point_costs import answers_beside_stores
from traces.tiers import PAGE_CACHE, all_states, all_tiers, state_named

# What leave-one-out may miss by: the ±5 % that a validation asks for on average, twice that in any point.
LOO_MEAN, LOO_WORST = 0.05, 0.10
# A cold read of so much of its device's limit is the limit's.
_DECIDES = 0.8
_STORES = "stores were not timed by themselves: in a step without a GPU they are part of token_s; taken to be as reads"
_COPIES = "loads from CPU RAM are copied one after another: a copy has all the bandwidth there is"
_NO_STORES = "no point's first token passes the front end while its request is stored"
_IN_STEPS = "the points cannot tell it from the step's and the request's other costs, which hold it"
_COMPUTES = "without a GPU, the engine's own thread computes what it does not wait for"
_GIVEN = "not fitted: the reference accelerator keeps to it"
_ONE_CHUNK = "one chunk size cannot tell a chunk's cost from that of its bytes and its tokens, which have it"
_HIDDEN = "the device's limit hides how fast it would be; without it, reads are taken to be as from the page cache"

# What a chunk costs whatever its size, of a host that copies what it reads.
_OF_CHUNKS = ("request_chunk_s", *(f"{device}.read.chunk_s" for device in ("cpu", "disk", PAGE_CACHE)))


def calibrated(folder: Path, name: str, experiment: Experiment, engine: EngineName, size: str = "") -> Calibration:
    """The constants that a finished run of micro_cells gives, with points, residuals and verdict. size: how their keys
    begin, in a run that measured other cells too. Of the experiment, what the engine is counts."""
    from simulator.fitting import fit

    given = {name: Assumption(value=s, why=_GIVEN) for name, s in ENGINES[engine].given(experiment).items()}
    traits = ENGINES[engine].traits(experiment)
    # Of an engine that computes on its cores, a slower one shows in every constant.
    core_loop_s, host_times = core_times(folder, size) if given or traits.launches_steps else (None, {})
    manifest, points = read_manifest(folder), points_of(folder, size, host_times)
    if not points:
        raise CalibrationError(f"{folder}: no row counts, so there is nothing to fit; its report says why")
    fitted_on = _fitted_on(manifest, points, size, packs_of(experiment, engine))
    fitted_on = msgspec.structs.replace(fitted_on, core_loop_s=core_loop_s and float(f"{core_loop_s:.6g}"))
    assumed = _assumed(points, load_model(experiment.model).kv_bytes_per_token, traits.copied_reads) | given
    assumed |= timed(folder, size, given, fitted_on, host_times)
    if not traits.launches_steps:
        assumed = {LAUNCH: Assumption(value=0.0, why=_COMPUTES), **assumed}
    if not any(answers_beside_stores(point, fitted_on) for point in points):
        assumed[RESPONSE_STORE] = Assumption(value=0.0, why=_NO_STORES)
    ways = traits._asdict()
    # What a GPU computes repeats, as what an accelerator paces does.
    found = fit(fitted_on, assumed, **ways, host_varies=bool(given) or traits.launches_steps)
    known = [
        msgspec.structs.replace(point, fitted_s=float(f"{fitted_s:.6g}"), loo_error=round(error, 5))
        for point, fitted_s, error in zip(points, found.fitted_s, found.loo_error, strict=True)
    ]
    good, verdict = _verdict(known)
    return Calibration(
        name=name,
        source=f"harness calibrate, run {manifest.run_id}: middle means of TTFT and time per output token",
        date=manifest.created_at or "",
        machine=_machine(manifest),
        method="Least squares of the relative error, weighed by noise, no constant below 0 (simulator/fitting.py).",
        fitted_on=msgspec.structs.replace(fitted_on, points=tuple(known)),
        assumed=assumed,
        constants=found.constants,
        **ways,
        host_spread=found.host_spread,
        good=good,
        verdict=verdict,
        intervals=found.intervals,
    )


def _machine(manifest: Manifest) -> str:
    """With the GPU, or what stood for one, first: the constants are then of both."""
    host, resolved = manifest.host, [cell.resolved for cell in manifest.cells if cell.resolved]
    paced = dict.fromkeys(str(each.accelerator) for each in resolved if each.accelerator)
    own = f"{host.cpu}, {host.cores} cores, {(host.memory_bytes or 0) >> 30} GiB RAM, Linux {host.kernel}"
    return "; ".join([*paced, *dict.fromkeys(host.gpus), own])


def packs_of(experiment: Experiment, engine: EngineName) -> Packs:
    """The simulator's packs that stand for the engine. Raises PreflightError where there are none."""
    if (packs := ENGINES[engine].packs(experiment)) is None:
        raise PreflightError(
            f"engine {engine}: the simulator has no packs for it, so it can be neither fitted nor validated; use an"
            " engine that has them, or `harness run`"
        )
    return packs


def _fitted_on(manifest: Manifest, points: tuple[CalibrationPoint, ...], size: str, packs: Packs) -> FittedOn:
    """The settings, as the engine has resolved them."""
    cell = next(cell for cell in manifest.cells if cell.key.startswith(size))
    resolved = cell.resolved
    assert resolved is not None, "points were measured, so that the engine has said its sizes"
    if resolved.block_tokens is None or resolved.gpu_blocks is None:
        raise CalibrationError(
            f"engine {manifest.engine} does not say how many blocks its GPU's KV cache has, which the simulator needs;"
            " use an engine that says it, or `harness run`"
        )
    assumed, limits = cell.experiment.engines.of(SimSettings), resolved.scheduler
    host = {key: getattr(manifest.host, key) for key in ("cpu", "cores", "memory_bytes", "kernel", "python")}
    return FittedOn(
        model=cell.experiment.model,
        max_num_batched_tokens=limits.max_batched_tokens or assumed.max_batched_tokens,
        max_num_seqs=limits.max_sequences or assumed.max_sequences,
        block_tokens=resolved.block_tokens,
        gpu_blocks=resolved.gpu_blocks,
        engine=manifest.engine,
        engine_policy=packs.engine_policy,
        tier_policy=packs.tier_policy,
        versions=resolved.versions,
        host=host,
        run_id=manifest.run_id,
        points=points,
    )


def _assumed(points: Sequence[CalibrationPoint], kv_bytes_per_token: int, copied_reads: bool) -> dict[str, Assumption]:
    """What the points do not show: of tiers in RAM, of tiers whose device hides how fast it is, of stores, and of a
    chunk beside its bytes."""
    seen = {point.tier for point in points}
    measured = {state.served_by for state in all_states() if state.name in seen and state.from_device is False}
    limited = _limit_decides(points, kv_bytes_per_token)
    # A pool, which few engines have, is only told of where one was measured.
    served = {state_named(name).served_by for name in seen}
    behind = [tier for tier in all_tiers() if tier.offload and (tier.name != "pool" or "pool" in served)]
    assumed = {
        f"{tier.name}.read.shared_bytes_per_s": Assumption(same_as=f"{tier.name}.read.bytes_per_s", why=_COPIES)
        for tier in behind
        if tier.kind == "memory"
    }
    hidden = [tier for tier in behind if tier.name in measured and limited]
    assumed |= {
        f"{tier.name}.read.{of}": Assumption(same_as=f"{PAGE_CACHE}.read.{of}", why=_HIDDEN)
        for tier in hidden
        # Of what is copied once more, that is the copy, which no limit hides.
        for of in ("bytes_per_s", "shared_bytes_per_s")[copied_reads:]
    }
    for tier in behind:
        for of in TRANSFER:
            # What is taken to equal another must not be taken from a third.
            like = assumed.get(f"{tier.name}.read.{of}")
            source = like.same_as if like is not None else f"{tier.name}.read.{of}"
            assumed[f"{tier.name}.write.{of}"] = Assumption(same_as=source, why=_STORES)
    if copied_reads and len({point.chunk_tokens for point in points}) == 1:
        assumed |= dict.fromkeys(_OF_CHUNKS, Assumption(value=0.0, why=_ONE_CHUNK))
    return assumed | dict.fromkeys(HOST_STEP, Assumption(value=0.0, why=_IN_STEPS))


def _limit_decides(points: Sequence[CalibrationPoint], kv_bytes_per_token: int) -> bool:
    """Whether a device's limit is what its reads take: some lone read came near it. A slow one says nothing, as a host
    has slow moments. Of a fast device, the host's own path is slower, and shows in all."""
    return any(
        point.hit_tokens * kv_bytes_per_token / point.measured_s >= _DECIDES * point.device_bytes_per_s
        for point in points
        if point.device_bytes_per_s and point.concurrency == 1 and point.metric == "ttft_s"
    )


def _verdict(points: Sequence[CalibrationPoint]) -> tuple[bool, str]:
    worst = max(points, key=lambda point: abs(point.loo_error or 0.0))
    mean = sum(abs(point.loo_error or 0.0) for point in points) / len(points)
    largest = abs(worst.loo_error or 0.0)
    good = mean <= LOO_MEAN and largest <= LOO_WORST
    where = f"{worst.tier}, {worst.prompt_tokens} tokens, {worst.concurrency} at once, {worst.metric}"
    text = f"left out, points are missed by {mean:.1%} on average and {largest:.1%} at most ({where})"
    return good, f"{text}; allowed are {LOO_MEAN:.0%} and {LOO_WORST:.0%}"


def write_calibration(path: Path, calibration: Calibration) -> None:
    """A YAML file that load_calibration reads, one point a line."""
    content = msgspec.to_builtins(calibration)
    points = content["fitted_on"].pop("points")
    rows = [f"  - {yaml.safe_dump(point, default_flow_style=True, width=1000, sort_keys=False)}" for point in points]
    until = list(content).index("fitted_on") + 1
    first, rest = dict(list(content.items())[:until]), dict(list(content.items())[until:])
    text = "".join([_yaml(first), "  points:\n", *rows, _yaml(rest)])
    write_atomically(path, text.encode())


def _yaml(content: dict[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False, width=110, allow_unicode=True)


def planned_micro_cells(plan: Plan, budget_s: float, passes: int = PASSES, option: str = "--budget") -> list[Cell]:
    """micro_cells of all chunk sizes of a plan, starts of the engine included in their time.

    Raises ConfigError, which names the option that gave the budget and the least that every point can be measured in.
    """
    chunk_sizes = plan.axes.get("cache.chunk_tokens", (plan.experiment.cache.chunk_tokens,))
    starts_s = ENGINE_START_S * len(chunk_sizes)  # an engine is started for each
    cells = micro_cells(plan.experiment, chunk_sizes, budget_s - starts_s, passes)
    least_s = starts_s + least_measuring_s(len(cells))
    if budget_s < least_s:
        raise ConfigError(
            f"{option} {budget_s:g}s: too short to measure anything: {len(chunk_sizes)} start(s) of the engine"
            f" and {len(cells)} micro-measurements need at least {math.ceil(least_s / 60)}min"
        )
    return cells
