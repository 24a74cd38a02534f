"""Spreads a run's cells over workers, and writes what comes back in the cells' order.

The run folder is the one that a single process would have written: a cell's rows do not depend on where they are
computed, this process alone writes, and what comes early waits for the cells before it.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial

from harness.engines.kind import EngineName
from harness.errors import EngineError
from harness.experiment.loads import Loads, load_key
from harness.experiment.model import Experiment
from harness.experiment.read import Cell
from harness.experiment.workloads import TraceWorkload
from harness.measure.cell import Progress
from harness.measure.task import Batch, CellOutcome, decode_outcomes, encode_batch, encode_load
from harness.measure.workers import Executor, Loadable, WorkerDiedError
from harness.results.folder import RunFolder
from harness.results.manifest import CellEntry

# So long a batch takes: long beside handing it over, short beside losing it with its worker.
_BATCH_S = 2.0
# A cell whose worker has ended so often ends the run.
_TRIES = 3
# What may wait for an earlier cell; then no later one begins.
_MOST_KEPT_BYTES = 512 * 2**20


async def spread(
    cells: Sequence[Cell],
    engine: EngineName,
    folder: RunFolder,
    executor: Executor,
    loads: Loads,
    progress: Progress,
) -> None:
    """Measures all cells. Raises what a cell raised, when those before it are written; EngineError where workers end
    again and again."""
    folder.expect_again()
    try:
        progress.state(f"starting {executor.name}")
        workers = await executor.start()
        await _Spread(cells, engine, folder, executor, loads, progress, workers).run()
    finally:
        # A second Ctrl-C must not leave workers behind.
        await asyncio.shield(executor.stop())


class _Spread:
    """The cells of one run. A cell is named by its number, its place in the run's order."""

    def __init__(
        self,
        cells: Sequence[Cell],
        engine: EngineName,
        folder: RunFolder,
        executor: Executor,
        loads: Loads,
        progress: Progress,
        workers: int,
    ) -> None:
        self._cells, self._engine, self._folder = cells, engine, folder
        self._executor, self._loads, self._progress, self._workers = executor, loads, progress, workers
        self._left = deque(range(len(cells)))
        self._deaths = Counter[int]()
        self._kept: dict[int, CellOutcome] = {}
        self._kept_bytes = 0
        self._written = 0
        self._took_s: list[float] = []
        self._room = asyncio.Condition()

    async def run(self) -> None:
        working = [asyncio.create_task(self._work(worker)) for worker in range(self._workers)]
        try:
            await asyncio.gather(*working)
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            self._folder.save_manifest()

    async def _work(self, worker: int) -> None:
        while numbers := await self._next():
            batch = Batch(
                engine=self._engine, folder=str(self._folder.path.absolute()), cells=[*map(self._entry, numbers)]
            )
            try:
                answer = await self._executor.work(worker, encode_batch(batch), self._loads_of(numbers))
            except WorkerDiedError as death:
                self._died(numbers, str(death))
                continue
            await self._take(numbers, decode_outcomes(answer))

    async def _next(self) -> list[int]:
        """The next batch; none is left where it is empty."""
        async with self._room:
            await self._room.wait_for(self._may_begin)
            return [self._left.popleft() for _ in range(min(self._size(), len(self._left)))]

    def _size(self) -> int:
        """Cells in a batch; at the end of a run fewer, so that all workers end together."""
        if not self._took_s or self._deaths:
            return 1
        mean_s = sum(self._took_s) / len(self._took_s)
        return max(1, min(int(_BATCH_S / mean_s), len(self._left) // (2 * self._workers)))

    def _may_begin(self) -> bool:
        return not self._left or self._kept_bytes < _MOST_KEPT_BYTES or self._left[0] == self._written

    def _entry(self, number: int) -> CellEntry:
        """What a worker has to know of a cell."""
        entry = self._folder.manifest.cells[number]
        return CellEntry(key=entry.key, overrides=entry.overrides, config=entry.config)

    def _loads_of(self, numbers: Sequence[int]) -> Loadable:
        """Those that are made from files; a worker makes the others as quickly itself."""
        asked = [self._cells[number].experiment for number in numbers]
        recorded = {load_key(one): one for one in asked if isinstance(one.workload, TraceWorkload)}
        return {key: partial(self._encoded, one) for key, one in recorded.items()}

    def _encoded(self, experiment: Experiment) -> bytes:
        return encode_load(self._loads.of(experiment))

    def _died(self, numbers: Sequence[int], how: str) -> None:
        """The batch is measured again, cell by cell, so that one that ends its workers is found."""
        self._deaths.update(numbers)
        if len(numbers) == 1 and self._deaths[numbers[0]] >= _TRIES:
            raise EngineError(
                f"cell {self._cells[numbers[0]].key}: its worker has ended {self._deaths[numbers[0]]} times ({how});"
                f" was memory short? Use fewer workers than --on {self._executor.name}, then --resume"
            )
        self._progress.note(f"a worker has ended ({how}); {len(numbers)} cells are measured again")
        self._left.extendleft(reversed(numbers))

    async def _take(self, numbers: Sequence[int], outcomes: Sequence[CellOutcome]) -> None:
        for number, outcome in zip(numbers, outcomes, strict=False):
            self._kept[number] = outcome
            self._kept_bytes += len(outcome.rows)
            self._took_s.append(outcome.took_s)
            self._progress.advance(outcome.advanced)
            if outcome.error is not None:
                # One process would have come no further.
                self._left = deque(earlier for earlier in self._left if earlier < number)
        while self._written in self._kept:
            self._write(self._kept.pop(self._written))
        self._progress.state(f"{self._written} of {len(self._cells)} cells on {self._executor.name}")
        async with self._room:
            self._room.notify_all()

    def _write(self, outcome: CellOutcome) -> None:
        """The next cell in the run's order. Raises what ended it."""
        entry = self._folder.manifest.cells[self._written]
        entry.resolved, entry.start_s = outcome.resolved, outcome.start_s
        entry.trace, entry.record = outcome.trace, outcome.record
        entry.status = "started" if outcome.error else "complete"
        self._folder.append_encoded(outcome.rows, outcome.samples)
        self._folder.save_cells()
        for note in outcome.notes:
            self._progress.note(note)
        self._kept_bytes -= len(outcome.rows)
        self._written += 1
        if outcome.error is not None:
            raise pickle.loads(outcome.error)
