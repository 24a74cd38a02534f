"""THE run loop: preflight → start → ready → measure every cell → stop. (Then `seal` makes summary and report.)

    folder = run(RunRequest(name="quickstart", cells=plan.cells(), engine="sim", experiment=plan.origin()), progress)

A failed request is a row; a failed run is an exception with a cure, and a folder that can be resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from harness.blockio.attach import check_run_storage, run_device, run_trace
from harness.engines import ENGINES
from harness.engines.base import KeepsRecord
from harness.engines.kind import EngineName
from harness.errors import Interrupted
from harness.experiment.loads import FreeLoad, free_load
from harness.experiment.model import Experiment, results_root
from harness.experiment.read import Cell
from harness.experiment.workloads import PrefixWorkload
from harness.measure.cell import Progress, TierMeasurement, measure_load
from harness.measure.placing import empties_all
from harness.measure.preflight import check_cache, check_experiment, check_quotes, check_resumed
from harness.measure.sampling import Sampler
from harness.records import Capabilities, CellRecord, Origin, Resolved
from harness.results import provenance
from harness.results.folder import RunFolder, read_rows, read_samples
from harness.results.manifest import Attempt, CellEntry, Manifest, RunStatus, read_manifest
from harness.results.summary import FREE_LOAD
from harness.results.trials import ended_trials, trials_asked
from simulator.models import load_model


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, and into which folder: one that does not exist yet, or, with resume, an unfinished run's."""

    name: str
    cells: list[Cell]
    engine: EngineName
    experiment: Origin
    command: str = ""
    folder: Path
    resume: bool = False


def kept_request(folder: Path) -> RunRequest:
    """What an unfinished run was asked to measure, by its manifest."""
    manifest = read_manifest(folder)
    return RunRequest(
        name=manifest.name,
        cells=[Cell(entry.key, entry.overrides, entry.experiment) for entry in manifest.cells],
        engine=manifest.engine,
        experiment=manifest.experiment,
        folder=folder,
        resume=True,
    )


def new_folder(name: str, engine: EngineName) -> Path:
    """Where a run goes unless told: a folder of its own under the results root."""
    moment = provenance.now().replace(":", "").replace("-", "")
    return results_root() / f"{name}-{engine}-{moment}-{os.getpid()}"


def run(request: RunRequest, progress: Progress) -> Path:
    """Measures every cell; returns the run's folder.

    Raises PreflightError, ConfigError and other ValueErrors before anything starts, EngineError and Interrupted when
    the run fails on its way: its rows are kept, and --resume goes on.
    """
    loads = preflight(request)
    return _carried_out(request, lambda folder: _run_all(request, folder, loads, progress))


class NextLoad(NamedTuple):
    """What a search measures next. trial: which of the cell's measure.trials it is."""

    cell: Cell
    trial: int


Choose = Callable[[Path], NextLoad | None]


def run_search(request: RunRequest, choose: Choose, progress: Progress) -> Path:
    """Measures free loads that are chosen on the way, each from fresh caches, on one engine; returns the run's folder.

    request.cells: the first of them; the others may differ from it in their workload only. choose: what to measure
    after the rows that the folder has; None ends the search. What an earlier attempt measured is not measured again.
    Raises what `run` raises.
    """
    preflight(request)
    return _carried_out(request, lambda folder: _run_chosen(request, folder, choose, progress))


def _carried_out(request: RunRequest, work: Callable[[RunFolder], Coroutine[Any, Any, None]]) -> Path:
    folder = _open(request)
    try:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(work(folder))
    except BaseException as error:
        _end(folder, "failed", str(error) or type(error).__name__)
        raise
    _end(folder, "complete")
    return folder.path


def preflight(request: RunRequest) -> dict[str, FreeLoad]:
    """Checks every cell before anything starts; returns the free loads, by cell."""
    loads: dict[str, FreeLoad] = {}
    abilities: dict[str, Capabilities] = {}
    results, kind = request.folder.absolute(), ENGINES[request.engine]
    for cell in request.cells:
        experiment, key = cell.experiment, engine_key(cell)
        model = load_model(experiment.model)
        check_cache(experiment, model)
        check_run_storage(cell, request.engine)
        if key not in abilities:
            abilities[key] = kind.make(experiment, model, results, time.perf_counter).capabilities
        check_experiment(experiment, model, abilities[key], request.engine, results)
        if not isinstance(experiment.workload, PrefixWorkload):
            loads[cell.key] = free_load(experiment)
            if request.resume and not abilities[key].deterministic and experiment.measure.trials == 1:
                check_resumed(cell.key, loads[cell.key], _rows_of(request.folder, cell.key))
            check_quotes(cell.key, loads[cell.key], abilities[key], request.engine)
            kind.check_load(experiment, model, loads[cell.key].requests)
    return loads


def _rows_of(folder: Path, key: str) -> int:
    """Measured rows of a cell that was begun and not completed."""
    if read_manifest(folder).cell(key).status == "complete":
        return 0
    return sum(row.cell == key and row.phase == "measure" for row in read_rows(folder))


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


# ---- the folder


def _open(request: RunRequest) -> RunFolder:
    attempt = Attempt(started_at=provenance.now(), pid=os.getpid())
    if request.resume:
        folder = RunFolder.resume(request.folder)
        folder.manifest.status, folder.manifest.error = "started", None
        folder.manifest.attempts.append(attempt)
        folder.save_manifest()
        return folder
    manifest = Manifest(
        run_id=request.folder.name,
        name=request.name,
        status="started",
        engine=request.engine,
        experiment=request.experiment,
        command=request.command,
        created_at=provenance.now(),
        seed=request.cells[0].experiment.seed,
        git=provenance.git(),
        host=provenance.host(),
        versions=provenance.versions(),
        attempts=[attempt],
        cells=[_cell_entry(cell) for cell in request.cells],
    )
    return RunFolder.create(request.folder, manifest)


def _cell_entry(cell: Cell) -> CellEntry:
    return CellEntry(key=cell.key, overrides=cell.overrides, config=cell.experiment.model_dump(mode="json"))


def _end(folder: RunFolder, status: RunStatus, error: str | None = None) -> None:
    manifest = folder.manifest
    manifest.attempts[-1].ended_at = manifest.finished_at = provenance.now()
    manifest.status, manifest.error = status, error
    folder.save_manifest()
    folder.close()


# ---- the loop


async def _run_all(request: RunRequest, folder: RunFolder, loads: dict[str, FreeLoad], progress: Progress) -> None:
    started = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - started

    later_s = _sampled_later_s(request.cells)
    with _signals_cancel():
        progress.start(_total(request, loads), request.name)
        for _, group in itertools.groupby(request.cells, key=engine_key):
            async with run_device(list(group), request.engine, folder) as cells:
                running = _Running(request.engine, cells[0].experiment, folder.path, clock)
                await _run_group(running, cells, folder, loads, later_s, progress)


@contextlib.contextmanager
def _signals_cancel() -> Any:
    """SIGINT and SIGTERM cancel the run's task, so that every `finally` ends what was started."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    received: list[int] = []

    def cancel(number: int) -> None:
        received.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, cancel, number)
    try:
        yield
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(received[0]) from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def engine_key(cell: Cell) -> str:
    """Cells with the same key are measured on the same running engine."""
    experiment = cell.experiment
    timeout_s = experiment.measure.request_timeout
    around = (experiment.deployment, experiment.cache, experiment.storage)
    return repr((experiment.model, experiment.seed, *around, experiment.engines, timeout_s))


def _total(request: RunRequest, loads: dict[str, FreeLoad]) -> int | None:
    """Requests that will be measured; None where sampling decides on the way."""
    total = 0
    for cell in request.cells:
        workload, measure = cell.experiment.workload, cell.experiment.measure
        if not isinstance(workload, PrefixWorkload):
            total += len(loads[cell.key].requests) * trials_measured(cell.experiment, request.engine)
        elif (samples := Sampler(measure).expected()) is None:
            return None
        else:
            total += samples * workload.concurrency
    return total


def _sampled_later_s(cells: Sequence[Cell]) -> dict[str, float]:
    """By cell: most seconds that the cells after it may sample for. What has no budget counts as none."""
    found, rest_s = dict[str, float](), 0.0
    for cell in reversed(cells):
        found[cell.key] = rest_s
        rest_s += cell.experiment.measure.budget or 0.0
    return found


class _Running:
    """A group's engine, and a fresh start in its place where nothing else empties its caches."""

    def __init__(self, name: EngineName, experiment: Experiment, folder: Path, clock: Callable[[], float]) -> None:
        self._arguments = (experiment, load_model(experiment.model), folder, clock)
        self._make = ENGINES[name].make
        self.engine = self._make(*self._arguments)
        self.used = False

    async def start(self) -> Resolved:
        await self.engine.start()
        return await self.engine.ready()

    async def start_again(self) -> Resolved:
        await self.engine.stop()
        self.engine, self.used = self._make(*self._arguments), False
        return await self.start()


async def _run_group(
    running: _Running,
    cells: list[Cell],
    folder: RunFolder,
    loads: dict[str, FreeLoad],
    later_s: dict[str, float],
    progress: Progress,
) -> None:
    name, can = running.engine.name, running.engine.capabilities
    if can.deterministic:
        folder.expect_again()
    else:
        complete = {cell.key for cell in cells if folder.manifest.cell(cell.key).status == "complete"}
        progress.advance(_measured(folder, complete))
        cells = [cell for cell in cells if cell.key not in complete]
    if not cells:
        return
    cores = ENGINES[name].cores(cells[0].experiment).client
    try:
        progress.state("starting the engine")
        resolved = await running.start()
        if resolved.accelerator and resolved.accelerator.doubt:
            progress.note(resolved.accelerator.doubt)
        async with run_trace(cells, running.engine, resolved, folder), _pinned(cores):
            for cell in cells:
                entry = folder.manifest.cell(cell.key)
                entry.status, entry.resolved = "started", resolved
                folder.save_manifest()
                if isinstance(cell.experiment.workload, PrefixWorkload):
                    await TierMeasurement(running.engine, cell, resolved, folder, progress, later_s[cell.key]).run()
                else:
                    resolved = await _send_trials(running, cell, resolved, loads[cell.key], folder, progress)
                if isinstance(running.engine, KeepsRecord):
                    several = trials_measured(cell.experiment, name) > 1
                    entry.record = _last_trial(folder, cell.key) if several else running.engine.record()
                entry.status = "complete"
                folder.save_manifest()
    finally:
        # A second Ctrl-C must not leave an engine behind.
        await asyncio.shield(running.engine.stop())


async def _run_chosen(request: RunRequest, folder: RunFolder, choose: Choose, progress: Progress) -> None:
    started = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - started

    with _signals_cancel():
        progress.start(None, request.name)
        async with run_device(request.cells, request.engine, folder) as cells:
            running = _Running(request.engine, cells[0].experiment, folder.path, clock)
            cores = ENGINES[request.engine].cores(cells[0].experiment).client
            if running.engine.capabilities.deterministic:
                folder.expect_again()
            try:
                progress.state("starting the engine")
                resolved = await running.start()
                async with run_trace(cells, running.engine, resolved, folder), _pinned(cores):
                    while (wanted := choose(folder.path)) is not None:
                        loads = preflight(msgspec.structs.replace(request, cells=[wanted.cell]))
                        # The run's device is in the first cell's experiment alone.
                        placed = cells[0].experiment.model_copy(update={"workload": wanted.cell.experiment.workload})
                        on_device = msgspec.structs.replace(wanted.cell, experiment=placed)
                        _enter(folder, wanted, resolved, exact=trials_measured(placed, request.engine) == 1)
                        load = loads[wanted.cell.key]
                        resolved = await _measure_wanted(
                            running, wanted._replace(cell=on_device), resolved, load, folder, progress
                        )
            finally:
                await asyncio.shield(running.engine.stop())


def _enter(folder: RunFolder, wanted: NextLoad, resolved: Resolved, *, exact: bool) -> None:
    """The cell's entry in the manifest, with as many trials as were asked of it so far."""
    cells = folder.manifest.cells
    if all(entry.key != wanted.cell.key for entry in cells):
        cells.append(msgspec.structs.replace(_cell_entry(wanted.cell), device=cells[0].device))
    entry = folder.manifest.cell(wanted.cell.key)
    entry.status, entry.resolved = "started", resolved
    # Rows of a first trial that was broken off are told from whole ones where there are several.
    broken_off = not exact and len(folder.manifest.attempts) > 1
    entry.ask_trials(max(wanted.trial, int(broken_off)) + 1)
    folder.save_manifest()


async def _measure_wanted(
    running: _Running, wanted: NextLoad, resolved: Resolved, load: FreeLoad, folder: RunFolder, progress: Progress
) -> Resolved:
    cell, engine = wanted.cell, running.engine
    exact = trials_measured(cell.experiment, engine.name) == 1
    samples = [] if exact else read_samples(folder.path)
    if wanted.trial not in {trial for trial, _ in ended_trials(samples, FREE_LOAD).get(cell.key, ())}:
        if running.used and not empties_all(engine.capabilities):
            progress.state("starting the engine again, for fresh caches")
            resolved = await running.start_again()
        trial = None if exact else wanted.trial
        await measure_load(running.engine, cell, resolved, load, folder, progress, trial)
        running.used = True
    entry = folder.manifest.cell(cell.key)
    if isinstance(running.engine, KeepsRecord):
        entry.record = running.engine.record() if exact else _last_trial(folder, cell.key)
    entry.status = "complete"
    folder.save_manifest()
    return resolved


def _last_trial(folder: RunFolder, key: str) -> CellRecord:
    """What the device did in the cell's last trial; samples.jsonl has it of each."""
    found = [sample.storage for sample in read_samples(folder.path) if sample.cell == key]
    return CellRecord(storage=found[-1])


def _measured(folder: RunFolder, cells: Collection[str]) -> int:
    """Rows of these complete cells, without those of trials that were begun anew."""
    several = {key for key in cells if trials_asked(folder.manifest.cell(key).config) > 1}
    ended = ended_trials(read_samples(folder.path), FREE_LOAD) if several else {}
    rows = (row for row in read_rows(folder.path) if row.cell in cells and row.phase == "measure")
    return sum(row.cell not in several or (row.sample, row.attempt) in ended.get(row.cell, ()) for row in rows)


async def _send_trials(
    running: _Running, cell: Cell, resolved: Resolved, load: FreeLoad, folder: RunFolder, progress: Progress
) -> Resolved:
    """Sends the load as often as measure.trials asks, but for trials that an earlier attempt ended."""
    can, trials = running.engine.capabilities, trials_measured(cell.experiment, running.engine.name)
    ended = set()
    if trials > 1:
        ended = {trial for trial, _ in ended_trials(read_samples(folder.path), FREE_LOAD).get(cell.key, ())}
        progress.advance(len(ended) * len(load.requests))
    for trial in range(trials):
        if trial in ended:
            continue
        if trials > 1 and running.used and not empties_all(can):
            progress.state("starting the engine again, for fresh caches")
            resolved = await running.start_again()
        await measure_load(running.engine, cell, resolved, load, folder, progress, trial if trials > 1 else None)
        running.used = True
    return resolved


def trials_measured(experiment: Experiment, engine: EngineName) -> int:
    """How often a free load is sent: once, whatever is asked, where it would repeat exactly."""
    kind = ENGINES[engine]
    exact = kind.simulated and kind.disk(experiment).moves == "modelled"
    return 1 if exact else experiment.measure.trials


@contextlib.asynccontextmanager
async def _pinned(cores: tuple[int, ...] | None) -> Any:
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, set(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
