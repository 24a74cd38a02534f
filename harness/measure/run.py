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
from collections.abc import Callable, Coroutine, Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from harness.blockio.attach import check_run_storage, run_device, run_trace
from harness.engines import ENGINES
from harness.engines.base import KeepsRecord
from harness.engines.kind import EngineName
from harness.errors import EngineError, Interrupted
from harness.experiment.loads import FreeLoad, Loads
from harness.experiment.model import results_root
from harness.experiment.read import Cell
from harness.experiment.workloads import PrefixWorkload
from harness.measure.cell import LoadMemory, Progress, measure_load
from harness.measure.executors import chosen
from harness.measure.group import Running, engine_key, last_trial, pinned, repeats, run_group, trials_measured
from harness.measure.placing import empties_all
from harness.measure.preflight import check_cache, check_experiment, check_quotes, check_resumed
from harness.measure.sampling import Sampler
from harness.measure.spread import spread
from harness.measure.workers import Executor
from harness.records import Capabilities, Origin, Resolved
from harness.results import provenance
from harness.results.folder import RunFolder, read_rows, read_samples
from harness.results.manifest import Attempt, CellEntry, Manifest, RunStatus, read_manifest
from harness.results.summary import FREE_LOAD
from harness.results.trials import ended_trials
from simulator.models import load_model


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, and into which folder: one that does not exist yet, or, with resume, an unfinished run's.

    on: over which workers (executors.py) the cells are spread; None: this process measures them one after another.
    """

    name: str
    cells: list[Cell]
    engine: EngineName
    experiment: Origin
    command: str = ""
    folder: Path
    resume: bool = False
    on: str | None = None


class Checked(NamedTuple):
    """What the preflight has made: the free loads, and of each cell that has one, how many requests it has."""

    loads: Loads
    requests: dict[str, int]


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
    executor = None if request.on is None else chosen(request.on, request.engine, request.cells)
    checked = preflight(request)
    return _carried_out(request, lambda folder: _run_all(request, folder, checked, executor, progress))


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
        # On a full disk the manifest stays as it was, too; what ended the run is told first.
        with contextlib.suppress(EngineError):
            _end(folder, "failed", str(error) or type(error).__name__)
        raise
    _end(folder, "complete")
    return folder.path


def preflight(request: RunRequest) -> Checked:
    """Checks every cell before anything starts."""
    loads, requests = Loads(), dict[str, int]()
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
            load = loads.of(experiment)
            requests[cell.key] = len(load.requests)
            if request.resume and not abilities[key].deterministic and experiment.measure.trials == 1:
                check_resumed(cell.key, load, _rows_of(request.folder, cell.key))
            check_quotes(cell.key, load, abilities[key], request.engine)
            kind.check_load(experiment, model, load.requests)
    return Checked(loads, requests)


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
    try:
        folder.save_manifest()
    finally:
        folder.close()


# ---- the loop


async def _run_all(
    request: RunRequest, folder: RunFolder, checked: Checked, executor: Executor | None, progress: Progress
) -> None:
    started = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - started

    def group_of(cell: Cell) -> Hashable:
        # On an engine of its own, a computed cell's times do not depend on the cells before it. A validation's passes
        # over one cell have the same overrides, and go on as on the real engine: ARC remembers what it dropped.
        alone = repr(cell.overrides) if repeats(cell.experiment, request.engine) else None
        return engine_key(cell), alone

    later_s = _sampled_later_s(request.cells)
    with _signals_cancel():
        progress.start(_total(request, checked.requests), request.name)
        if executor is not None:
            await spread(request.cells, request.engine, folder, executor, checked.loads, progress)
            return
        for _, group in itertools.groupby(request.cells, key=group_of):
            async with run_device(list(group), request.engine, folder) as cells:
                running = Running(request.engine, cells[0].experiment, folder.path, clock)
                await run_group(running, cells, folder, checked.loads, later_s, progress)


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


def _total(request: RunRequest, requests: dict[str, int]) -> int | None:
    """Requests that will be measured; None where sampling decides on the way."""
    total = 0
    for cell in request.cells:
        workload, measure = cell.experiment.workload, cell.experiment.measure
        if not isinstance(workload, PrefixWorkload):
            total += requests[cell.key] * trials_measured(cell.experiment, request.engine)
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


async def _run_chosen(request: RunRequest, folder: RunFolder, choose: Choose, progress: Progress) -> None:
    started = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - started

    with _signals_cancel():
        progress.start(None, request.name)
        async with run_device(request.cells, request.engine, folder) as cells:
            running = Running(request.engine, cells[0].experiment, folder.path, clock)
            cores = ENGINES[request.engine].cores(cells[0].experiment).client
            if running.engine.capabilities.deterministic:
                folder.expect_again()
            try:
                progress.state("starting the engine")
                resolved = await running.start()
                async with run_trace(cells, running.engine, resolved, folder), pinned(cores):
                    while (wanted := choose(folder.path)) is not None:
                        loads = preflight(msgspec.structs.replace(request, cells=[wanted.cell])).loads
                        # The run's device is in the first cell's experiment alone.
                        placed = cells[0].experiment.model_copy(update={"workload": wanted.cell.experiment.workload})
                        on_device = msgspec.structs.replace(wanted.cell, experiment=placed)
                        exact = trials_measured(placed, request.engine) == 1
                        _enter(folder, wanted, resolved, running.start_s, exact=exact)
                        load = loads.of(wanted.cell.experiment)
                        resolved = await _measure_wanted(
                            running, wanted._replace(cell=on_device), resolved, load, folder, progress
                        )
            finally:
                await asyncio.shield(running.engine.stop())


def _enter(folder: RunFolder, wanted: NextLoad, resolved: Resolved, start_s: float, *, exact: bool) -> None:
    """The cell's entry in the manifest, with as many trials as were asked of it so far."""
    cells = folder.manifest.cells
    if all(entry.key != wanted.cell.key for entry in cells):
        cells.append(msgspec.structs.replace(_cell_entry(wanted.cell), device=cells[0].device))
    entry = folder.manifest.cell(wanted.cell.key)
    entry.status, entry.resolved, entry.start_s = "started", resolved, start_s
    # Rows of a first trial that was broken off are told from whole ones where there are several.
    broken_off = not exact and len(folder.manifest.attempts) > 1
    entry.ask_trials(max(wanted.trial, int(broken_off)) + 1)
    folder.save_manifest()


async def _measure_wanted(
    running: Running, wanted: NextLoad, resolved: Resolved, load: FreeLoad, folder: RunFolder, progress: Progress
) -> Resolved:
    cell, engine = wanted.cell, running.engine
    exact = trials_measured(cell.experiment, engine.name) == 1
    samples = [] if exact else read_samples(folder.path)
    if wanted.trial not in {trial for trial, _ in ended_trials(samples, FREE_LOAD).get(cell.key, ())}:
        if running.used and not empties_all(engine.capabilities):
            progress.state("starting the engine again, for fresh caches")
            resolved = await running.start_again()
        trial = None if exact else wanted.trial
        await measure_load(running.engine, cell, resolved, load, folder, progress, trial, LoadMemory())
        running.used = True
    entry = folder.manifest.cell(cell.key)
    if isinstance(running.engine, KeepsRecord):
        entry.record = running.engine.record() if exact else last_trial(folder, cell.key)
    entry.status = "complete"
    folder.save_manifest()
    return resolved
