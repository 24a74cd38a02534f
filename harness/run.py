"""THE run loop: preflight → start → ready → (warm → prove → measure)… → stop → seal.

    folder = run(RunRequest(cells=plan.cells(), engine="sim", experiment_path=path, name="quickstart"), progress)

A failed request is a row; a failed run is an exception with a cure, and a folder that can be resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from harness import provenance
from harness.collectors.host import between, read_host
from harness.config import EngineName, PrefixWorkload, results_root
from harness.engines import make_engine
from harness.engines.base import Capabilities, Counters, Engine, Resolved
from harness.experiments import Cell
from harness.loads import FreeLoad, free_load
from harness.preflight import check_cache, check_experiment, check_prompts, check_reach, check_working_set
from harness.results import HostSample, RunFolder, Sample, read_rows
from harness.sampling import Sampler
from harness.summary import FREE_LOAD, counted, metric_values
from harness.warmup import Probe, after_sample, expected_counters, needs_fresh_prefix, place, prove, sealed
from simulator.models import ModelSpec, load_model
from traces.load import Load
from traces.request import RequestRecord


class Progress(Protocol):
    """What the run tells while it goes on."""

    def start(self, total: int | None, label: str) -> None: ...
    def advance(self, n: int = 1) -> None: ...
    def state(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. out None: a new folder under the results root; resume: an unfinished run's folder."""

    name: str
    cells: list[Cell]
    engine: EngineName
    experiment: dict[str, Any]
    command: str = ""
    out: Path | None = None
    resume: Path | None = None


class Interrupted(Exception):
    """Ctrl-C or SIGTERM; `signal` says which. The folder can be resumed."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.signal = number


def run(request: RunRequest, progress: Progress) -> Path:
    """Measures every cell and seals the folder; returns it.

    Raises PreflightError, ConfigError and other ValueErrors before anything starts, EngineError and Interrupted when
    the run fails on its way: its rows are kept, and --resume goes on.
    """
    model = load_model(request.cells[0].experiment.model)
    loads = _preflight(request)
    folder = _open(request)
    try:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(_run_all(request, folder, model, loads, progress))
    except BaseException as error:
        _fail(folder, error)
        raise
    folder.save_manifest(status="complete", finished_at=provenance.now())
    folder.close()
    return folder.path


def _preflight(request: RunRequest) -> dict[str, FreeLoad]:
    """Checks every cell before anything starts; returns the free loads, by cell."""
    loads: dict[str, FreeLoad] = {}
    abilities: dict[str, Capabilities] = {}
    results = (request.out or results_root()).absolute()
    for cell in request.cells:
        experiment, key = cell.experiment, _engine_key(cell)
        model = load_model(experiment.model)
        check_cache(experiment, model)
        if key not in abilities:
            abilities[key] = make_engine(request.engine, experiment, model, results, time.perf_counter).capabilities
        check_experiment(experiment, model, abilities[key], request.engine, results)
        if not isinstance(experiment.workload, PrefixWorkload):
            loads[cell.key] = free_load(experiment)
    return loads


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


# ---- the folder


def _open(request: RunRequest) -> RunFolder:
    attempt = {"started_at": provenance.now(), "ended_at": None, "pid": os.getpid()}
    if request.resume is not None:
        folder = RunFolder.resume(request.resume)
        folder.save_manifest(status="started", error=None, attempts=[*folder.manifest["attempts"], attempt])
        return folder
    created = provenance.now()
    run_id = f"{request.name}-{request.engine}-{created.replace(':', '').replace('-', '')}-{os.getpid()}"
    manifest = {
        "run_id": request.out.name if request.out else run_id,
        "name": request.name,
        "status": "started",
        "error": None,
        "engine": request.engine,
        "experiment": request.experiment,
        "command": request.command,
        "created_at": created,
        "finished_at": None,
        "seed": request.cells[0].experiment.seed,
        "git": provenance.git(),
        "host": provenance.host(),
        "versions": provenance.versions(),
        "attempts": [attempt],
        "cells": [_cell_entry(cell) for cell in request.cells],
    }
    return RunFolder.create(request.out or results_root() / run_id, manifest)


def _cell_entry(cell: Cell) -> dict[str, Any]:
    config = cell.experiment.model_dump(mode="json")
    return {"key": cell.key, "overrides": cell.overrides, "config": config, "resolved": None, "status": "waiting"}


def _fail(folder: RunFolder, error: BaseException) -> None:
    folder.manifest["attempts"][-1]["ended_at"] = provenance.now()
    text = str(error) or type(error).__name__
    folder.save_manifest(status="failed", error=text, finished_at=provenance.now())
    folder.close()


# ---- the loop


async def _run_all(
    request: RunRequest, folder: RunFolder, model: ModelSpec, loads: dict[str, FreeLoad], progress: Progress
) -> None:
    started = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - started

    with _signals_cancel():
        progress.start(_total(request.cells, loads), request.name)
        for _, group in itertools.groupby(request.cells, key=_engine_key):
            cells = list(group)
            engine = make_engine(request.engine, cells[0].experiment, model, folder.path, clock)
            await _run_group(engine, cells, folder, loads, progress)
    folder.manifest["attempts"][-1]["ended_at"] = provenance.now()


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


def _engine_key(cell: Cell) -> str:
    """Cells with the same key are measured on the same running engine."""
    experiment = cell.experiment
    return repr((experiment.model, experiment.seed, experiment.cache, experiment.engines))


def _total(cells: Sequence[Cell], loads: dict[str, FreeLoad]) -> int | None:
    """Requests that will be measured; None where sampling decides on the way."""
    total = 0
    for cell in cells:
        workload, measure = cell.experiment.workload, cell.experiment.measure
        if not isinstance(workload, PrefixWorkload):
            total += len(loads[cell.key].requests)
        elif measure.samples is None:
            return None
        else:
            total += len(measure.tiers) * measure.samples * workload.concurrency
    return total


async def _run_group(
    engine: Engine, cells: list[Cell], folder: RunFolder, loads: dict[str, FreeLoad], progress: Progress
) -> None:
    if engine.capabilities.deterministic:
        folder.expect_again()
    elif all(_entry(folder, cell.key)["status"] == "complete" for cell in cells):
        progress.advance(sum(1 for row in read_rows(folder.path) if row.phase == "measure"))
        return
    cores = cells[0].experiment.engines.vllm.cores.client
    try:
        progress.state("starting the engine")
        await engine.start()
        resolved = await engine.ready()
        with _pinned(cores if engine.name == "vllm" else None):
            for cell in cells:
                _update(folder, cell.key, status="started", resolved=msgspec.to_builtins(resolved))
                if isinstance(cell.experiment.workload, PrefixWorkload):
                    await _TierMeasurement(engine, cell, resolved, folder, progress).run()
                else:
                    await _measure_load(engine, cell, resolved, loads[cell.key], folder, progress)
                _update(folder, cell.key, status="complete")
    finally:
        # A second Ctrl-C must not leave an engine behind.
        await asyncio.shield(engine.stop())


@contextlib.contextmanager
def _pinned(cores: tuple[int, ...] | None) -> Any:
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, set(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _entry(folder: RunFolder, key: str) -> dict[str, Any]:
    entry: dict[str, Any] = next(cell for cell in folder.manifest["cells"] if cell["key"] == key)
    return entry


def _update(folder: RunFolder, key: str, **changes: Any) -> None:
    _entry(folder, key).update(changes)
    folder.save_manifest()


def _attempt(folder: RunFolder, engine: Engine) -> int:
    """Which attempt new rows belong to. A deterministic engine begins again, and its rows are the first attempt's."""
    return 0 if engine.capabilities.deterministic else len(folder.manifest["attempts"]) - 1


# ---- one cell, tier by tier


class _TierMeasurement:
    """Rounds over the tiers of one cell, until the sampler has enough."""

    def __init__(self, engine: Engine, cell: Cell, resolved: Resolved, folder: RunFolder, progress: Progress) -> None:
        workload = cell.experiment.workload
        assert isinstance(workload, PrefixWorkload)
        self._engine, self._cell, self._folder, self._progress = engine, cell, folder, progress
        self._measure = cell.experiment.measure
        self._probe = Probe(cell.key, cell.experiment, workload, resolved)
        self._sampler = Sampler(self._measure)
        self._attempt = _attempt(folder, engine)
        disk = cell.experiment.cache.disk
        self._device_path = Path(disk.path) if disk and disk.path else folder.path

    async def run(self) -> None:
        check_working_set(self._cell.experiment, self._probe.resolved)
        if not self._engine.capabilities.deterministic:
            self._recall()
        await self._engine.reset(frozenset({"gpu", "cpu", "disk"}) & self._engine.capabilities.resets)
        start_s = self._engine.now_s()
        while tiers := self._sampler.round(self._engine.now_s() - start_s):
            for tier in tiers:
                self._progress.state(f"{self._cell.key} {self._sampler.state(tier)}")
                await self._sample(tier, self._sampler.samples_of(tier))
        for tier in self._sampler.gave_up():
            self._progress.note(f"{self._cell.key}: {tier} could not be proven; its rows are kept, and left out")

    def _recall(self) -> None:
        """Tells the sampler what earlier attempts finished."""
        rows: dict[tuple[str, int], list[RequestRecord]] = {}
        for row in read_rows(self._folder.path):
            if row.cell == self._cell.key and row.phase == "measure" and row.expected_tier is not None:
                rows.setdefault((row.expected_tier, row.sample), []).append(row)
        for (tier, _), group in rows.items():
            self._add(tier, group)

    async def _sample(self, tier: str, index: int) -> None:
        """One sample: place, count, send, count, prove, write."""
        engine, probe = self._engine, self._probe
        warm: list[RequestRecord] = []
        rows: list[RequestRecord] = []
        await place(engine, probe, tier, index, warm.append)
        fresh = needs_fresh_prefix(engine, tier)
        before, host = await engine.metrics(), self._host()
        started_s = engine.now_s()
        await engine.replay(Load(probe.requests(tier, index, fresh_prefix=fresh)), rows.append)
        ended_s, host_sample = engine.now_s(), host()
        observed = (await engine.metrics()).since(before)
        after_sample(probe, tier, fresh_prefix=fresh)
        verdict, reason = prove(probe, tier, observed, rows)
        common = {"cell": self._cell.key, "sample": index, "attempt": self._attempt}
        done = [sealed(msgspec.structs.replace(row, **common), probe, tier, verdict, reason) for row in rows]
        self._folder.append_sample(
            Sample(
                cell=self._cell.key,
                tier=tier,
                index=index,
                attempt=self._attempt,
                started_s=started_s,
                ended_s=ended_s,
                verdict=verdict,
                reason=reason,
                observed=observed,
                expected=expected_counters(probe, tier),
                host=host_sample,
            )
        )
        # One write for the sample: a crash leaves all of its rows or none.
        self._folder.append_rows([*(msgspec.structs.replace(row, phase="warm", **common) for row in warm), *done])
        self._add(tier, done)

    def _add(self, tier: str, rows: list[RequestRecord]) -> None:
        metric = self._measure.until.metric if self._measure.until else "ttft_s"
        good = [row for row in rows if counted(row)]
        self._sampler.add(tier, metric_values(good, metric), proven=bool(good))
        self._progress.advance(len(rows))

    def _host(self) -> Callable[[], HostSample]:
        """Starts a look at the machine; the returned function ends it. A virtual engine does not depend on it."""
        if self._engine.capabilities.virtual_time:
            return HostSample
        before = read_host(self._device_path)
        return lambda: between(before, read_host(self._device_path))


# ---- one cell, as a free load


async def _measure_load(
    engine: Engine, cell: Cell, resolved: Resolved, load: FreeLoad, folder: RunFolder, progress: Progress
) -> None:
    check_prompts(load.requests, resolved)
    check_reach(cell.experiment, load.requests, resolved)
    _update(folder, cell.key, trace=load.trace)
    finished = set() if engine.capabilities.deterministic else _finished(folder, cell.key)
    rest = [request for request in load.requests if request.id not in finished]
    progress.advance(len(finished))
    attempt = _attempt(folder, engine)

    def writer(phase: str) -> Callable[[RequestRecord], None]:
        def write(row: RequestRecord) -> None:
            folder.append_rows([msgspec.structs.replace(row, cell=cell.key, phase=phase, attempt=attempt)])
            progress.advance(phase == "measure")

        return write

    await engine.reset(frozenset({"gpu", "cpu", "disk"}) & engine.capabilities.resets)
    if rest and load.warmers:
        progress.state(f"{cell.key} warming {len(load.warmers)} prefixes")
        await engine.replay(Load(load.warmers, concurrency=1), writer("warm"))
    progress.state(cell.key)
    before, started_s = await engine.metrics(), engine.now_s()
    host = None if engine.capabilities.virtual_time else read_host(folder.path)
    await engine.replay(Load(_from_now(rest), load.concurrency), writer("measure"))
    _append_load_sample(engine, folder, cell.key, attempt, started_s, (await engine.metrics()).since(before), host)


def _append_load_sample(
    engine: Engine, folder: RunFolder, key: str, attempt: int, started_s: float, observed: Counters, host: Any
) -> None:
    folder.append_sample(
        Sample(
            cell=key,
            tier=FREE_LOAD,
            index=0,
            attempt=attempt,
            started_s=started_s,
            ended_s=engine.now_s(),
            verdict=None,
            observed=observed,
            expected=Counters(),
            host=between(host, read_host(folder.path)) if host is not None else HostSample(),
        )
    )


def _finished(folder: RunFolder, key: str) -> set[str]:
    return {row.id for row in read_rows(folder.path) if row.cell == key and row.phase == "measure"}


def _from_now(requests: Sequence[Any]) -> list[Any]:
    """What is left of a load, its first intended time moved to now: a resumed run does not wait for what is done."""
    first_s = min((request.at_s for request in requests if request.at_s is not None), default=0.0)
    if not first_s:
        return list(requests)
    return [
        request if request.at_s is None else msgspec.structs.replace(request, at_s=request.at_s - first_s)
        for request in requests
    ]
