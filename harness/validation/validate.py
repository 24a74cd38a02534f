"""`harness validate`: the same requests on a real engine and on the calibrated simulator, and a verdict on the model.

    outcome = validate(Validation(cells=plan.cells(), calibration="mine.yaml", ...), progress)

The real engine runs first, free loads several times, so that it can be held against itself (A/A). Where no calibration
is given, its points are measured in turns with all that is validated, and fitted. The simulator then gets the
engine's own resolved sizes. Points that do not resolve are sampled again while the budget lasts.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from harness.calibration.calibrate import calibrated, packs_of, write_calibration
from harness.calibration.cores import loops_s
from harness.engines import ENGINES
from harness.engines.kind import EngineName
from harness.engines.sim.settings import SimSettings
from harness.errors import NotComparable, ResultsError
from harness.experiment.model import Experiment
from harness.experiment.read import Cell, changed
from harness.experiment.workloads import PrefixWorkload
from harness.measure.cell import Progress
from harness.measure.run import RunRequest, kept_request, run
from harness.records import Origin, Resolved
from harness.results.folder import make_folder
from harness.results.manifest import CellEntry, read_manifest
from harness.results.provenance import host, is_simulated
from harness.results.summary import FREE_LOAD
from harness.validation.comparable import check_apart, check_held_out, check_host, check_modelled, check_sides
from harness.validation.document import CalibrationFacts, Judgement, document, write_document
from harness.validation.equivalence import MARGIN, Comparison, compare
from harness.validation.known_limits import notes
from harness.validation.points import Point, Side, point_name, read_side, repeated
from harness.validation.sample_again import more_cells
from harness.validation.schedule import in_turns
from simulator.calibration import Calibration, load_calibration

# The median of three is no slow pass of a machine that slows down now and then.
LOAD_REPEATS = 3
SIM_SAMPLES = 5
# Where its host's times vary, they stand for all orders in which requests sent together may run. The middle of so many
# is within 0.3 % of a hit in the GPU.
_VARIED_SAMPLES = 400
MOST_PASSES = 4


class Micro(msgspec.Struct, frozen=True, kw_only=True):
    """A calibration that is to be made: cells of so many passes, whose keys begin with the size."""

    size: str
    cells: list[Cell]
    passes: int
    experiment: Experiment


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """What to validate. real: finished runs to use instead of making one. resume: the folder holds an earlier attempt,
    which goes on: no point that it finished is measured again. budget_s: of the whole; what the first pass over
    everything leaves of it is for sampling again, start of the engine included. calibration: a file, a name of
    configs/hardware, or what to measure for one."""

    name: str
    cells: list[Cell]
    engine: EngineName
    calibration: str | Micro
    experiment: Origin
    folder: Path
    real: tuple[Path, ...] = ()
    resume: bool = False
    budget_s: float = 0.0
    margin: float = MARGIN
    command: str = ""


def validate(request: Validation, progress: Progress) -> Judgement:
    """Runs both sides, judges them, writes validation.json.

    Raises PreflightError before anything starts where the simulator has no packs for the engine; NotComparable then
    where it does not model a state, a point is the calibration's own, or that one is another machine's, and afterwards
    where the two sides did not ask the same question; EngineError where the real engine fails.
    """
    deadline = time.monotonic() + request.budget_s
    for cell in request.cells:
        packs_of(cell.experiment, request.engine)
    planned, source = planned_points(request.cells), request.calibration
    check_modelled(planned)
    if isinstance(source, Micro):
        check_apart(planned, planned_points(source.cells))
    else:
        given = load_calibration(source)
        check_held_out(planned, given)
        if not request.real and not is_simulated(request.engine):
            check_host(host(), given, "this one")
    if not request.resume:
        make_folder(request.folder)
    real = list(request.real) or _measured(request, progress)
    if isinstance(source, Micro):
        source = _calibrated(request, source, real[0])
    calibration = load_calibration(source)
    began = time.monotonic()
    reference, candidate = _sides(request, calibration, source, real, progress)
    sides_s = time.monotonic() - began
    comparison, passes = compare(reference, candidate, request.margin), len(real)
    while not request.real and len(real) < MOST_PASSES:
        left_s = deadline - time.monotonic() - sides_s
        more = more_cells(comparison, reference, request.cells, left_s)
        if not more:
            break
        real.append(_run_real(request, more, _real_name(len(real) + 1), progress))
        reference = read_side(real)
        comparison = compare(reference, candidate, request.margin)
    if len(real) > passes:
        # How slow the host was beside the points sampled again, the simulator did not know yet.
        reference, candidate = _sides(request, calibration, source, real, progress)
        comparison = compare(reference, candidate, request.margin)
    return _write(request, calibration, source, comparison, reference, candidate)


def _sides(
    request: Validation, calibration: Calibration, source: str, real: Sequence[Path], progress: Progress
) -> tuple[Side, Side]:
    """The real runs, and the simulated one that is made from them."""
    reference, candidate = read_side(real), read_side([_run_sim(request, source, real, progress)])
    for manifest in reference.manifests if not is_simulated(reference.engine) else ():
        check_host(manifest.host, calibration, manifest.run_id)
    check_sides(reference, candidate)
    return reference, candidate


def planned_points(cells: Sequence[Cell]) -> list[Point]:
    """What the cells will measure, for checks before anything is measured."""
    return [
        Point(tier, entry)
        for cell in cells
        for entry in [CellEntry(key=cell.key, config=cell.experiment.model_dump(mode="json"))]
        for tier in cell.experiment.measure.tiers or (FREE_LOAD,)
    ]


def _write(
    request: Validation,
    calibration: Calibration,
    source: str,
    comparison: Comparison,
    reference: Side,
    candidate: Side,
) -> Judgement:
    written = document(
        comparison,
        reference,
        candidate,
        name=request.name,
        command=request.command,
        experiment=Origin(path=Path(request.experiment.path or "").name, sha256=request.experiment.sha256),
        calibration=_calibration_facts(calibration, source),
        notes=(*_slow_hosts(candidate), *notes(comparison, reference)),
    )
    write_document(request.folder, written)
    return Judgement(written, reference, candidate)


def _slow_hosts(candidate: Side) -> list[str]:
    times = [cell.experiment.engines.of(SimSettings).host_time for cell in candidate.manifest.cells]
    if set(times) == {1.0}:
        return []
    return [
        "The host: the simulated one is as slow as the engine's core was beside each point, by a fixed loop that was"
        f" timed there: {min(times):.2f} to {max(times):.2f} times what it took while calibrating."
    ]


def compare_runs(ours: Side, theirs: Side, folder: Path, margin: float, command: str) -> Judgement:
    """Judges one run by another, writes validation.json.

    Raises NotComparable where they did not ask the same question.
    """
    check_sides(ours, theirs)
    name = ours.manifest.name
    written = document(compare(ours, theirs, margin), ours, theirs, name=name, command=command)
    make_folder(folder)
    write_document(folder, written)
    return Judgement(written, ours, theirs)


def _calibration_facts(calibration: Calibration, source: str) -> CalibrationFacts:
    path = Path(source)
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    return CalibrationFacts(
        name=calibration.name,
        date=calibration.date,
        machine=calibration.machine,
        method=calibration.method,
        good=calibration.good,
        verdict=calibration.verdict,
        sha256=digest,
        fitted_points=len(calibration.fitted_on.points),
    )


# ---- the real side


def _first(request: Validation) -> list[Cell]:
    """The cells of the first pass over everything."""
    if not isinstance(request.calibration, Micro):
        return with_repeats(request.cells)
    micro = request.calibration
    return in_turns(micro.cells, with_repeats(request.cells), micro.passes)


def _measured(request: Validation, progress: Progress) -> list[Path]:
    """The runs of the real side: those that the folder holds, brought to their end, and one of what they lack.

    Raises ResultsError where one of them measured a cell with other settings.
    """
    asked, found = _first(request), _held(request.folder)
    had: set[str] = set()
    for folder in found:
        manifest = read_manifest(folder)
        _check_alike(folder, manifest.cells, asked)
        if manifest.status != "complete":
            run(kept_request(folder), progress)
        had |= {entry.key for entry in manifest.cells}
    lacking = [cell for cell in asked if cell.key not in had]
    return [*found, _run_real(request, lacking, _real_name(len(found) + 1), progress)] if lacking else found


def _real_name(number: int) -> str:
    return "real" if number == 1 else f"real-{number}"


def _held(folder: Path) -> list[Path]:
    """The real runs of an earlier attempt, in their order."""
    names = (folder / _real_name(number) for number in itertools.count(1))
    return list(itertools.takewhile(lambda run_folder: (run_folder / "manifest.json").exists(), names))


def _check_alike(folder: Path, entries: Sequence[CellEntry], asked: Sequence[Cell]) -> None:
    """But for what came before: how an engine is warmed up is up to the order of the cells."""
    wanted = {cell.key: changed(cell.experiment, measure={"warm_up": 0}) for cell in asked}
    for entry in entries:
        measured = changed(entry.experiment, measure={"warm_up": 0})
        if measured != wanted.get(entry.key, measured):
            raise ResultsError(f"{folder}: measured {entry.key} with other settings; choose another --out")


def _calibrated(request: Validation, micro: Micro, real: Path) -> str:
    """Fits a calibration to a run's points, and writes it; returns the file's name."""
    path = request.folder / "calibration.yaml"
    name = f"{request.name}-{request.folder.name}"
    write_calibration(path, calibrated(real, name, micro.experiment, request.engine, micro.size))
    return str(path)


def _run_real(request: Validation, cells: list[Cell], name: str, progress: Progress) -> Path:
    return run(_run_request(request, cells, request.engine, request.folder / name), progress)


def _run_request(request: Validation, cells: list[Cell], engine: EngineName, folder: Path) -> RunRequest:
    return RunRequest(
        name=request.name,
        cells=cells,
        engine=engine,
        experiment=request.experiment,
        command=request.command,
        folder=folder,
    )


def with_repeats(cells: Sequence[Cell]) -> list[Cell]:
    """Free loads are sent LOAD_REPEATS times, on one running engine, which the first warms up: what it is compared with
    itself by."""
    found: list[Cell] = []
    for cell in cells:
        if isinstance(cell.experiment.workload, PrefixWorkload):
            found.append(cell)
            continue
        again = changed(cell.experiment, measure={"warm_up": 0})
        first, *others = repeated(cell.key, LOAD_REPEATS)
        found.append(Cell(first, cell.overrides, cell.experiment))
        found += [Cell(key, cell.overrides, again) for key in others]
    return found


# ---- the simulated side


def _run_sim(request: Validation, calibration: str, real: Sequence[Path], progress: Progress) -> Path:
    side, asked = read_side(real), {cell.key for cell in request.cells}
    entries = [cell for one in side.manifests for cell in one.cells if point_name(cell.key) in asked]
    if not entries:
        raise NotComparable(f"{real[0]}: measured none of the points that the experiment asks for; name its own sizes")
    # Of an attempt that was judged before.
    shutil.rmtree(request.folder / "sim", ignore_errors=True)
    core_loop_s, took_s = load_calibration(calibration).fitted_on.core_loop_s, _core_loops_s(real)
    unique: dict[str, list[Cell]] = {}
    for entry in entries:
        # The first one has all tiers of the point; one that samples again, those that did not resolve.
        cell = sim_cell(entry, calibration, request.engine)
        if cell.key not in unique:
            unique[cell.key] = as_slow(cell, took_s, core_loop_s)
    cells = list(itertools.chain.from_iterable(unique.values()))
    return run(_run_request(request, cells, "sim", request.folder / "sim"), progress)


def _core_loops_s(real: Sequence[Path]) -> dict[tuple[str, str], float]:
    """What a fixed loop took on the engine's core, by the mean: by point and tier, and of free loads by cell."""
    took_s = defaultdict[tuple[str, str], list[float]](list)
    for folder in real:
        for (cell, tier), each in loops_s(folder).items():
            took_s[cell if tier == FREE_LOAD else point_name(cell), tier] += each
    return {key: fmean(each) for key, each in took_s.items()}


def as_slow(cell: Cell, took_s: Mapping[tuple[str, str], float], core_loop_s: float | None) -> list[Cell]:
    """The simulator's cell, with the host as slow as the engine's own was for each tier: a cell for each of them.
    took_s: what the loop took there. core_loop_s: while calibrating; None: it was not timed there."""
    if core_loop_s is None:
        return [cell]
    tiers, found = cell.experiment.measure.tiers or (FREE_LOAD,), list[Cell]()
    for number, tier in enumerate(tiers, 1):
        host_time = round(took_s.get((cell.key, tier), core_loop_s) / core_loop_s, 4)
        slow = {"sim": cell.experiment.engines.of(SimSettings).model_dump(mode="json") | {"host_time": host_time}}
        if tier == FREE_LOAD:
            return [Cell(cell.key, cell.overrides, changed(cell.experiment, engines=slow))]
        alone = changed(cell.experiment, measure={"tiers": [tier]}, engines=slow)
        found.append(Cell(f"{cell.key}#{number}", cell.overrides, alone))
    return found


def sim_cell(entry: CellEntry, calibration: str, engine: EngineName) -> Cell:
    """A real run's cell for the simulator: the same requests, the packs that stand for the engine, and the sizes and
    limits that the engine resolved. Raises PreflightError where the simulator has no packs for it.

    A free load is sent as often as it was there: a cache server may remember what an earlier pass used.
    """
    experiment, resolved = entry.experiment, entry.resolved or Resolved()
    cache: dict[str, Any] = {"gpu": resolved.bytes_for_one("gpu") or experiment.cache.gpu}
    cache |= {
        tier: resolved.bytes_for_one(tier) or size
        for tier in ("cpu", "pool")
        if (size := experiment.cache.bytes_of(tier)) is not None
    }
    measure: dict[str, Any] = {}
    key = entry.key
    if isinstance(experiment.workload, PrefixWorkload):
        samples = _VARIED_SAMPLES if load_calibration(calibration).host_spread else SIM_SAMPLES
        measure = {"samples": samples, "until": None, "budget": None, "warm_up": 0}
        key = point_name(key)
    limits = msgspec.structs.asdict(resolved.scheduler)
    sim = experiment.engines.of(SimSettings).model_dump(mode="json") | {"hardware": calibration}
    sim |= {name: value for name, value in limits.items() if value is not None}
    sim |= packs_of(experiment, engine).settings
    sections: dict[str, dict[str, Any]] = {"engines": {"sim": sim}}
    if experiment.storage is not None and ENGINES["sim"].disk(experiment).moves != "real":
        sections["storage"] = {"trace": False}
    return Cell(key, entry.overrides, changed(experiment, cache=cache, measure=measure, **sections))
