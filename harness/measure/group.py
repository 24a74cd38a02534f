"""A group of cells, measured one after another on an engine that is started for them and stopped after them.

    await run_group(Running(name, experiment, folder.path, clock), cells, folder, Loads(), later_s, progress)

Free loads go through as often as measure.trials asks. Nothing here opens or ends a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from harness.blockio.attach import run_trace
from harness.collectors.memory import MAX_TAKEN_SHARE, OwnMemory, RestedPages, taken_in_words
from harness.collectors.steady import SteadyCores
from harness.engines import ENGINES
from harness.engines.base import KeepsRecord
from harness.engines.kind import EngineName
from harness.experiment.loads import FreeLoad, Loads
from harness.experiment.model import Experiment
from harness.experiment.read import Cell
from harness.experiment.workloads import PrefixWorkload
from harness.measure.cell import LoadMemory, Progress, TierMeasurement, measure_load
from harness.measure.placing import empties_all
from harness.records import CellRecord, Resolved
from harness.results.folder import RunFolder, read_rows, read_samples
from harness.results.summary import FREE_LOAD
from harness.results.trials import ended_trials, trials_asked
from simulator.models import load_model
from traces.tiers import state_named


def engine_key(cell: Cell) -> str:
    """Cells with the same key are measured on the same running engine."""
    experiment = cell.experiment
    timeout_s = experiment.measure.request_timeout
    around = (experiment.deployment, experiment.cache, experiment.storage)
    return repr((experiment.model, experiment.seed, *around, experiment.engines, timeout_s))


def repeats(experiment: Experiment, engine: EngineName) -> bool:
    """Whether a cell is computed from a model alone, so that it gives the same rows wherever it is measured."""
    kind = ENGINES[engine]
    return kind.simulated and kind.disk(experiment).moves == "modelled"


class Running:
    """A group's engine, and a fresh start in its place where nothing else empties its caches."""

    def __init__(self, name: EngineName, experiment: Experiment, folder: Path, clock: Callable[[], float]) -> None:
        self._arguments = (experiment, load_model(experiment.model), folder, clock)
        self._make = ENGINES[name].make
        self.engine = self._make(*self._arguments)
        self.used = False
        # A cell before has restarted it: what is measured next meets processes that have just begun.
        self.restarted = False
        self.start_s = 0.0

    async def start(self) -> Resolved:
        began_s = self.engine.now_s()
        await self.engine.start()
        resolved = await self.engine.ready()
        self.start_s = self.engine.now_s() - began_s
        return resolved

    async def start_again(self) -> Resolved:
        await self.engine.stop()
        self.engine, self.used, self.restarted = self._make(*self._arguments), False, False
        return await self.start()


async def run_group(
    running: Running,
    cells: list[Cell],
    folder: RunFolder,
    loads: Loads,
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
    cores = ENGINES[name].cores(cells[0].experiment)
    memory = OwnMemory(None if can.virtual_time else RestedPages())
    held = LoadMemory(None if can.virtual_time else memory)
    steady = SteadyCores(() if can.virtual_time else cores.firsts)
    try:
        progress.state("starting the engine")
        resolved = await running.start()
        if (taken := memory.taken_share() or 0.0) > MAX_TAKEN_SHARE:
            progress.note(taken_in_words(taken))
        if resolved.accelerator and resolved.accelerator.doubt:
            progress.note(resolved.accelerator.doubt)
        async with run_trace(cells, running.engine, resolved, folder), pinned(cores.client):
            for cell in cells:
                if running.restarted:
                    progress.state("starting the engine again: the cell before has restarted it")
                    resolved = await running.start_again()
                entry = folder.manifest.cell(cell.key)
                entry.status, entry.resolved, entry.start_s = "started", resolved, running.start_s
                folder.save_cells()
                if isinstance(cell.experiment.workload, PrefixWorkload):
                    running.restarted = any(state_named(name).restarted for name in cell.experiment.measure.tiers)
                    later = later_s[cell.key]
                    tiers = TierMeasurement(running.engine, cell, resolved, folder, progress, memory, steady, later)
                    await tiers.run()
                else:
                    load = loads.of(cell.experiment)
                    resolved = await _send_trials(running, cell, resolved, load, folder, progress, held)
                if isinstance(running.engine, KeepsRecord):
                    several = trials_measured(cell.experiment, name) > 1
                    entry.record = last_trial(folder, cell.key) if several else running.engine.record()
                entry.status = "complete"
                folder.save_cells()
    finally:
        memory.let_go()
        # A second Ctrl-C must not leave an engine behind.
        await asyncio.shield(running.engine.stop())


def last_trial(folder: RunFolder, key: str) -> CellRecord:
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
    running: Running,
    cell: Cell,
    resolved: Resolved,
    load: FreeLoad,
    folder: RunFolder,
    progress: Progress,
    held: LoadMemory,
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
        number = trial if trials > 1 else None
        await measure_load(running.engine, cell, resolved, load, folder, progress, number, held)
        running.used = True
    return resolved


def trials_measured(experiment: Experiment, engine: EngineName) -> int:
    """How often a free load is sent: once, whatever is asked, where it would repeat exactly."""
    return 1 if repeats(experiment, engine) else experiment.measure.trials


@contextlib.asynccontextmanager
async def pinned(cores: tuple[int, ...] | None) -> Any:
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, set(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
