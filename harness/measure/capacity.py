"""Carries out a search for a capacity: what to measure next, by what the rows of the run's folder say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from harness.experiment.read import Cell
from harness.measure.run import NextLoad
from harness.measure.search import Search, SearchStep
from harness.results.capacity import Capacity, CapacityAnswer, SearchMode, Step, found_in, write_capacity


class CapacitySearch:
    """What `run_search` asks after each measurement. capacity.json has the steps so far; `told` hears of each."""

    def __init__(
        self,
        search: Search,
        cell_of: Callable[[int], Cell],
        *,
        mode: SearchMode,
        key: str,
        engine: str,
        goals: tuple[str, ...],
        tolerance: float,
    ) -> None:
        self._search, self._cell_of = search, cell_of
        self.told: Callable[[Step], None] | None = None
        self._asked: SearchStep | None = None
        self.found = Capacity(
            mode=mode,
            key=key,
            engine=engine,
            goals=goals,
            tolerance=tolerance,
            complete=False,
            answer=CapacityAnswer(load=None, low=None, high=None),
            steps=(),
        )

    def __call__(self, folder: Path) -> NextLoad | None:
        try:
            self._asked = next(self._search) if self._asked is None else self._next(folder, self._asked)
        except StopIteration as end:
            self._keep(folder, self.found.steps, end.value)
            return None
        return NextLoad(self._cell_of(self._asked[0]), self._trials(self._asked[0]))

    def _next(self, folder: Path, asked: SearchStep) -> SearchStep:
        load, action, reason = asked
        trial = self._trials(load)
        found = found_in(folder, self._cell_of(load).key, trial, self.found.goals)
        step = Step(load=load, trial=trial, action=action, reason=reason, found=found)
        self._keep(folder, (*self.found.steps, step))
        if self.told is not None:
            self.told(step)
        return self._search.send(found)

    def _trials(self, load: int) -> int:
        return len(self.found.of(load))

    def _keep(self, folder: Path, steps: tuple[Step, ...], answer: CapacityAnswer | None = None) -> None:
        known = {} if answer is None else {"complete": True, "answer": answer}
        self.found = msgspec.structs.replace(self.found, steps=steps, **known)
        write_capacity(folder, self.found)
