"""One cell: a prefix measured tier by tier until there are samples enough, or a free load sent once.

A sample is: place → count → send → count → prove → write. Nothing here starts or stops an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from harness.collectors.host import between, read_host
from harness.collectors.memory import OwnMemory
from harness.collectors.priority import before_others
from harness.collectors.resident import ResidentPages
from harness.collectors.steady import SteadyCores
from harness.engines import ENGINES
from harness.engines.base import Emit, Engine, HasProcesses, KeepsRecord, TellsCause
from harness.experiment.loads import FreeLoad
from harness.experiment.read import Cell
from harness.experiment.workloads import PrefixWorkload
from harness.measure.placing import Probe, after_sample, everything, needs_fresh_prefix, place, sets_of
from harness.measure.preflight import check_prompts, check_reach, check_states, check_working_set
from harness.measure.proof import expected_counters, prove, stored_below_memory, with_verdict
from harness.measure.sampling import Sampler
from harness.records import Counters, HostSample, LoadFacts, Resolved, Sample
from harness.results.folder import RunFolder, read_rows
from harness.results.rows import metric_values
from harness.results.summary import FREE_LOAD, counted
from traces.load import Load
from traces.request import Request, RequestRecord
from traces.tiers import state_named

_WORDS_EVERY = 20
# A stored byte takes free memory in the page cache and in a reference device; a sample's first tokens come while the
# first chunks are written. The kernel gives memory block by block, so more than is needed has to be there.
_FREE_TIMES = 1.5
_STORED_TIMES = 4
_STORED_AT_MOST_BYTES = 1 << 30
# Of the engine's memory, a lone hit meets some hundred pages that had rested.
_GET_BACK_FROM = 0.01
PhaseOf = Callable[[RequestRecord], str]


class Progress(Protocol):
    """What the run tells while it goes on."""

    def start(self, total: int | None, label: str) -> None: ...
    def advance(self, n: int = 1) -> None: ...
    def state(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...


def _attempt(folder: RunFolder, engine: Engine) -> int:
    """Which attempt new rows belong to. A deterministic engine begins again, and its rows are the first attempt's."""
    return 0 if engine.capabilities.deterministic else len(folder.manifest.attempts) - 1


class TierMeasurement:
    """Rounds over the tiers of one cell, until the sampler has enough."""

    def __init__(
        self,
        engine: Engine,
        cell: Cell,
        resolved: Resolved,
        folder: RunFolder,
        progress: Progress,
        memory: OwnMemory,
        steady: SteadyCores,
        later_s: float = 0.0,
    ) -> None:
        """memory, steady: of all cells of one engine. later_s: most seconds that later cells of the run will sample
        for, which the progress line tells."""
        workload = cell.experiment.workload
        assert isinstance(workload, PrefixWorkload)
        self._engine, self._cell, self._folder, self._progress = engine, cell, folder, progress
        self._measure, self._later_s = cell.experiment.measure, later_s
        self._probe = Probe(cell.key, cell.experiment, workload, resolved, engine.capabilities)
        self._sampler = Sampler(
            self._measure, {tier: sets_of(state_named(tier), self._probe) for tier in self._measure.tiers}
        )
        self._memory, self._steady = memory, steady
        self._memory_of = {tier: self._memory_for(tier) for tier in self._measure.tiers}
        self._engine_memory = ResidentPages(engine.pids) if isinstance(engine, HasProcesses) else None
        self._errors, self._warm = 0, set[str]()
        self._placed_s: float | None = None  # what placing took for the last sample that needed a restart
        self._attempt = _attempt(folder, engine)

    async def run(self) -> None:
        check_working_set(self._cell.experiment, self._probe.resolved)
        check_states(self._cell.experiment, self._probe.capabilities, self._probe.resolved)
        if not self._engine.capabilities.deterministic:
            self._recall()
        await self._engine.reset(everything(self._engine.capabilities))
        start_s = self._engine.now_s()
        while tiers := self._sampler.round(self._engine.now_s() - start_s):
            for tier in tiers:
                start_s += await self._warm_up(tier)  # which the budget is not for
                self._progress.state(self._state(tier, self._engine.now_s() - start_s))
                await self._sample(tier, self._sampler.samples_of(tier))
        for tier in self._sampler.gave_up():
            self._progress.note(f"{self._cell.key}: {tier} could not be proven; its rows are kept, and left out")

    async def _warm_up(self, tier: str) -> float:
        """Samples that do not count, before the first one of a tier that does; the seconds that they took. What was
        placed for them serves that one, too."""
        if tier in self._warm or state_named(tier).restarted:
            return 0.0  # each sample after a restart meets processes that nothing has warmed up
        self._warm.add(tier)
        began_s = self._engine.now_s()
        for number in range(1, self._measure.warm_up + 1):
            self._progress.state(f"{self._cell.key} {tier} warming up")
            await self._sample(tier, -number)
        return self._engine.now_s() - began_s

    def _state(self, tier: str, elapsed_s: float) -> str:
        """What is measured now and, where the number of samples is open, the most time that they may take."""
        short = ",".join(f"{key.rsplit('.', 1)[-1]}={value}" for key, value in self._cell.overrides.items())
        words = " ".join(filter(None, [short, self._sampler.state(tier)])) + _failed(self._errors)
        if state_named(tier).restarted:
            words += ", restarting engine and cache server first"
            words += f" (the last time {self._placed_s:.0f} s)" if self._placed_s is not None else ""
        # A virtual clock's budget says nothing about how long a user waits.
        if self._measure.until is None or self._measure.budget is None or self._engine.capabilities.virtual_time:
            return words
        left_s = max(0.0, self._measure.budget - elapsed_s) + self._later_s
        left = f"{left_s:.0f} s" if left_s < 120 else f"{left_s / 60:.0f} min"
        return f"{words}, at most {left} of sampling left"

    def _recall(self) -> None:
        """Tells the sampler what earlier attempts finished."""
        rows: dict[tuple[str, int], list[RequestRecord]] = {}
        for row in read_rows(self._folder.path):
            if row.cell == self._cell.key and row.phase == "measure" and row.expected_tier is not None:
                rows.setdefault((row.expected_tier, row.sample), []).append(row)
        for (tier, _), group in rows.items():
            self._add(tier, group)

    async def _sample(self, tier: str, index: int) -> None:
        """One sample: place, count, send, count, prove, write. One that only warms up has an index below 0."""
        engine, probe = self._engine, self._probe
        began_s = engine.now_s()
        warm: list[RequestRecord] = []
        rows: list[RequestRecord] = []
        await _have(self._memory, max(self._memory_of.values()))
        await place(engine, probe, tier, index, warm.append)
        touch_s_per_gib = await _have(self._memory, self._memory_of[tier])
        fresh = needs_fresh_prefix(engine.capabilities, tier)
        taken_share = self._memory.taken_share()
        engine_touch_s = await self._get_back(taken_share)
        waiting = self._measure.steady if state_named(tier).quick else None
        core_wait_s = None if waiting is None else await self._steady.wait(waiting)
        before, host = await engine.metrics(), _watch(engine, self._cell, self._folder.path)
        started_s = engine.now_s()
        with _before_others(engine, self._cell):
            await engine.replay(Load(probe.requests(tier, index, fresh_prefix=fresh)), rows.append)
        ended_s, own = engine.now_s(), {"touch_s_per_gib": touch_s_per_gib, "taken_share": taken_share}
        host_sample = msgspec.structs.replace(host(), engine_touch_s=engine_touch_s, core_wait_s=core_wait_s, **own)
        observed = (await engine.metrics()).since(before)
        self._placed_s = started_s - began_s if state_named(tier).restarted else self._placed_s
        verdict, reason = prove(probe, tier, observed, rows)
        if verdict == "contradicted" and isinstance(engine, TellsCause) and (cause := engine.cause()):
            reason = f"{reason}; {cause}"
        after_sample(probe, tier, verdict, fresh_prefix=fresh)
        common = {"cell": self._cell.key, "sample": index, "attempt": self._attempt}
        if index < 0:
            self._folder.append_rows([msgspec.structs.replace(r, phase="warm", **common) for r in (*warm, *rows)])
            return
        done = [with_verdict(msgspec.structs.replace(row, **common), probe, tier, verdict, reason) for row in rows]
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
        self._add(tier, done, started_s - began_s, engine.now_s() - started_s)

    async def _get_back(self, taken_share: float | None) -> float | None:
        """Of the engine's memory, what the host has taken: a machine that keeps its memory answers without."""
        if self._engine_memory is None or (taken_share or 0.0) < _GET_BACK_FROM:
            return None
        return await asyncio.to_thread(self._engine_memory.touch)

    def _memory_for(self, tier: str) -> int:
        """Bytes of free memory that a sample which reads the device, or stores below memory, has to find: a virtual
        machine's host may have taken them, and other work on the store's core, the client's, would wait with it."""
        if self._engine.capabilities.virtual_time:
            return 0
        read_bytes = sum(expected_counters(self._probe, tier).device_read_bytes.values())
        stored_bytes = min(_STORED_TIMES * stored_below_memory(self._probe, tier), _STORED_AT_MOST_BYTES)
        return int(_FREE_TIMES * (read_bytes + stored_bytes))

    def _add(self, tier: str, rows: list[RequestRecord], placing_s: float = 0.0, took_s: float = 0.0) -> None:
        metric = self._measure.until.metric if self._measure.until else "ttft_s"
        self._errors += sum(row.error is not None for row in rows)
        good = [row for row in rows if counted(row)]
        self._sampler.add(tier, metric_values(good, metric), proven=bool(good), placing_s=placing_s, took_s=took_s)
        self._progress.advance(len(rows))


def _before_others(engine: Engine, cell: Cell) -> contextlib.AbstractContextManager[None]:
    """Where cache servers have the client's cores, a write of theirs would hold up requests and time stamps."""
    if engine.capabilities.virtual_time or not ENGINES[engine.name].cores(cell.experiment).client:
        return contextlib.nullcontext()
    return before_others()


def _failed(errors: int) -> str:
    return f", {errors} failed" if errors else ""


def _watch(engine: Engine, cell: Cell, results: Path) -> Callable[[], HostSample]:
    """Starts a look at the machine; the returned function ends it. A virtual engine does not depend on it.

    The device is the one that has the engine's disk tier.
    """
    if engine.capabilities.virtual_time:
        return HostSample
    kind = ENGINES[engine.name]
    device_path, cores = kind.disk_path(cell.experiment, results), kind.cores(cell.experiment)
    first = [each[0] if each else None for each in (cores.of_engines, cores.client)]
    before = read_host(device_path, *first)
    return lambda: between(before, read_host(device_path, *first))


async def _have(memory: OwnMemory, size_bytes: int) -> float | None:
    return await asyncio.to_thread(memory.have, size_bytes) if size_bytes > 0 else None


class LoadMemory:
    """Free memory for the next pass of a load: half more than its last one read from the device and stored. A virtual
    machine's host takes what one pass has freed before the next one needs it."""

    def __init__(self, memory: OwnMemory | None = None) -> None:
        """memory: of all cells of one engine; None: nothing is seen to, as where no time passes."""
        self._memory, self._moved_bytes = memory, dict[str, int]()

    async def have(self, cell: Cell) -> float | None:
        """As OwnMemory.have; None, too, before the first pass."""
        moved_bytes = self._moved_bytes.get(self._name(cell), 0)
        return None if self._memory is None else await _have(self._memory, int(_FREE_TIMES * moved_bytes))

    def passed(self, cell: Cell, resolved: Resolved, observed: Counters, host: HostSample) -> None:
        # Of what is stored, the kernel may write most to the device after the pass: it has to have memory all the same.
        chunk_bytes = cell.experiment.cache.chunk_tokens * (resolved.kv_bytes_per_token or 0)
        stored_bytes = (observed.stores_ended or 0) * chunk_bytes
        self._moved_bytes[self._name(cell)] = stored_bytes + (host.device_read_bytes or 0)

    def _name(self, cell: Cell) -> str:
        """The same for cells that send the same load."""
        return repr(cell.experiment.workload)


async def measure_load(
    engine: Engine,
    cell: Cell,
    resolved: Resolved,
    load: FreeLoad,
    folder: RunFolder,
    progress: Progress,
    trial: int | None,
    held: LoadMemory,
) -> None:
    """Sends the load once, from fresh caches. trial: which of several, begun anew after an earlier attempt; None: the
    only one, which goes on where an earlier attempt stopped. held: what sees to free memory."""
    check_prompts(load.requests, resolved, cell.experiment.workload.kind)
    check_reach(cell.experiment, load.requests, resolved)
    folder.manifest.cell(cell.key).trace = load.trace
    folder.save_cells()
    several = trial is not None
    label = cell.key if trial is None else f"{cell.key}, trial {trial + 1} of {cell.experiment.measure.trials},"
    finished = set() if engine.capabilities.deterministic or several else _finished(folder, cell.key)
    rest = [request for request in load.requests if request.id not in finished]
    progress.advance(len(finished))
    services = {request.id: request.service for request in load.requests if request.service is not None}

    def writer(phase: str, phase_of: PhaseOf | None = None) -> Emit:
        common = {"cell": cell.key, "phase": phase, "sample": trial or 0, "attempt": _attempt(folder, engine)}
        return _writer(folder, progress, label, common, services, phase_of)

    for number in range(1, cell.experiment.measure.warm_up + 1) if rest else ():
        await _fresh(engine, load, label, progress, writer("warm"), several=several)
        progress.state(f"{label} warming up, pass {number}")
        _, observed, host = await _pass(engine, cell, folder, load.schedule(load.requests), lambda: writer("warm"))
        held.passed(cell, resolved, observed, host)
    if rest:
        await _fresh(engine, load, label, progress, writer("warm"), several=several)
    progress.state(label)
    touch_s_per_gib = await held.have(cell)
    schedule = load.schedule(_from_now(rest))
    # More requests at a time could keep the core busy, and the cache servers would starve.
    with _before_others(engine, cell) if load.concurrency == 1 else contextlib.nullcontext():
        started_s, observed, host = await _pass(
            engine, cell, folder, schedule, lambda: writer("measure", _phases(schedule, engine))
        )
    progress.advance(schedule.unsent)
    held.passed(cell, resolved, observed, host)
    folder.append_sample(
        Sample(
            cell=cell.key,
            tier=FREE_LOAD,
            index=trial or 0,
            attempt=_attempt(folder, engine),
            started_s=started_s,
            ended_s=engine.now_s(),
            verdict=None,
            observed=observed,
            expected=Counters(),
            host=msgspec.structs.replace(host, touch_s_per_gib=touch_s_per_gib),
            load=_facts(load, schedule),
            storage=engine.record().storage if several and isinstance(engine, KeepsRecord) else None,
        )
    )


async def _pass(
    engine: Engine, cell: Cell, folder: RunFolder, load: Load, writer: Callable[[], Emit]
) -> tuple[float, Counters, HostSample]:
    """Sends a load; when it began, what the counters moved by, and what the machine did meanwhile. writer: called when
    it begins."""
    before, started_s = await engine.metrics(), engine.now_s()
    host = _watch(engine, cell, folder.path)
    await engine.replay(load, writer())
    return started_s, (await engine.metrics()).since(before), host()


def _facts(load: FreeLoad, schedule: Load) -> LoadFacts:
    return LoadFacts(
        requests=len(load.requests),
        sent=len(load.requests) - schedule.unsent,
        unfinished=schedule.unfinished,
        duration_s=load.duration_s,
        drain=load.drain,
        asked_per_s=load.asked_per_s,
        beyond_model=load.beyond_model,
    )


async def _fresh(engine: Engine, load: FreeLoad, label: str, progress: Progress, write: Emit, *, several: bool) -> None:
    """Empties what can be emptied, and sends what the load wants to be there. several: the load has other trials."""
    what = everything(engine.capabilities)
    if several:
        # A later trial would find in the page cache what the one before had read.
        what = what.union(*engine.capabilities.resets)
    await engine.reset(what)
    if load.warmers:
        progress.state(f"{label} warming {len(load.warmers)} prefixes")
        await engine.replay(Load(load.warmers, concurrency=1), write)


def _phases(load: Load, engine: Engine) -> PhaseOf | None:
    """Which rows of a load that begins now are of its warm-up or its drain; None: all are measured."""
    if load.counted_s is None:
        return None
    start_s = engine.now_s()
    from_s, to_s = (start_s + moment_s for moment_s in load.counted_s)

    def phase_of(row: RequestRecord) -> str:
        ended_s = engine.now_s() if row.last_token_s is None else row.last_token_s
        return "warm" if ended_s < from_s else "measure" if ended_s <= to_s else "drain"

    return phase_of


def _writer(
    folder: RunFolder,
    progress: Progress,
    label: str,
    common: dict[str, Any],
    services: Mapping[str, str],
    phase_of: PhaseOf | None,
) -> Emit:
    """What keeps each row of a free load as it comes, and tells of the measured ones. common: fields of every row.
    services: classes of service by request id."""
    so_far, measured = _SoFar(label), common["phase"] == "measure"

    def write(row: RequestRecord) -> None:
        phase = {} if phase_of is None else {"phase": phase_of(row)}
        folder.append_rows([msgspec.structs.replace(row, service=services.get(row.id), **common | phase)])
        progress.advance(measured)
        if measured and so_far.add(row):
            progress.state(so_far.words())

    return write


class _SoFar:
    """What the progress line says of a free load: its mean TTFT and failures."""

    def __init__(self, label: str) -> None:
        self._label, self._sum_s, self._answered, self._errors = label, 0.0, 0, 0

    def add(self, row: RequestRecord) -> bool:
        """Whether it is time for new words: after a failure, and now and then."""
        if row.error is not None or row.ttft_s is None:
            self._errors += 1
            return True
        self._sum_s += row.ttft_s
        self._answered += 1
        return self._answered % _WORDS_EVERY == 1

    def words(self) -> str:
        mean = f" mean TTFT {self._sum_s / self._answered:.3g} s" if self._answered else ""
        return f"{self._label}{mean}{_failed(self._errors)}"


def _finished(folder: RunFolder, key: str) -> set[str]:
    return {row.id for row in read_rows(folder.path) if row.cell == key and row.phase == "measure"}


def _from_now(requests: Sequence[Request]) -> list[Request]:
    """What is left of a load, its first intended time moved to now: a resumed run does not wait for what is done."""
    first_s = min((request.at_s for request in requests if request.at_s is not None), default=0.0)
    if not first_s:
        return list(requests)
    return [
        request if request.at_s is None else msgspec.structs.replace(request, at_s=request.at_s - first_s)
        for request in requests
    ]
