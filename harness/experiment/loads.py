"""From a free workload's configuration to the requests that are sent. The same requests for every engine."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from harness.experiment.classes import ServiceClass
from harness.experiment.fields import Strict
from harness.experiment.model import Experiment
from harness.experiment.workloads import (
    FreeWorkload,
    PersonasWorkload,
    PrefixWorkload,
    QaWorkload,
    RoundsWorkload,
    SessionsWorkload,
    SyntheticWorkload,
    TraceWorkload,
)
from harness.records import TraceOrigin
from simulator.models import load_model
from traces.catalogue import find_trace
from traces.errors import SpecError
from traces.formats import TraceOptions, open_trace
from traces.load import Load
from traces.personas import Documents, Persona, PersonaSpec, SharedPrompts, document_requests, persona_requests
from traces.qa import QaSpec, qa_requests, qa_warmers
from traces.request import Request, stable_id
from traces.rounds import RoundSpec, rounds_load
from traces.synth import SessionSpec, SyntheticSpec, conversation, synthetic, warmers

_Spec = TypeVar("_Spec")
# Of a long trace, a load has as many objects as the trace has blocks.
_KEPT = 4


class FreeLoad(msgspec.Struct, frozen=True):
    """Requests in order, those that warm the cache first, Load's limits, and where a trace came from.

    asked_per_s: how many of the requests a second asks for, if every answer comes in time; None: the load has no pace
    of its own. beyond_model: turns left out, because their sessions end before them.
    """

    requests: tuple[Request, ...]
    warmers: tuple[Request, ...] = ()
    concurrency: int | None = None
    trace: TraceOrigin | None = None
    active_sessions: int | None = None
    gaps_s: tuple[float, ...] = ()
    fifo: bool = False
    shuffle_seed: int | None = None
    duration_s: float | None = None
    drain: bool = True
    warm_up_s: float | None = None
    asked_per_s: float | None = None
    beyond_model: int = 0

    def schedule(self, requests: Sequence[Request]) -> Load:
        """A fresh Load of these requests, all of the load's or what is left of them."""
        return Load(
            requests,
            self.concurrency,
            active_sessions=self.active_sessions,
            gaps_s=self.gaps_s,
            fifo=self.fifo,
            shuffle_seed=self.shuffle_seed,
            duration_s=self.duration_s,
            drain=self.drain,
            warm_up_s=self.warm_up_s,
        )


class Loads:
    """Free loads, each made once for all cells that ask for the same; the last few stay."""

    def __init__(self) -> None:
        self._made: dict[str, FreeLoad] = {}

    def of(self, experiment: Experiment) -> FreeLoad:
        """As free_load has it."""
        return self.keep(load_key(experiment), lambda: free_load(experiment))

    def keep(self, key: str, make: Callable[[], FreeLoad]) -> FreeLoad:
        """The load of this key (load_key), made if it is not among those that stayed."""
        load = self._made.pop(key, None) or make()
        self._made[key] = load
        if len(self._made) > _KEPT:
            del self._made[next(iter(self._made))]
        return load


def load_key(experiment: Experiment) -> str:
    """Experiments with the same key have the same free load."""
    return repr((experiment.workload, experiment.seed, experiment.cache.chunk_tokens, experiment.model))


def free_load(experiment: Experiment) -> FreeLoad:
    """A generated session ends before the first prompt that, with its answer, exceeds the model's length; a persona
    begins another conversation there.

    Raises TraceFileError, SpecError or ModelError, all UserErrors of one line.
    """
    workload = experiment.workload
    if isinstance(workload, PrefixWorkload):
        raise TypeError(f"a {workload.kind} workload has no free load")
    load = _unlimited(workload, experiment)
    if not isinstance(workload, TraceWorkload | SyntheticWorkload):
        load = _within_model(load, load_model(experiment.model).max_position)
    return msgspec.structs.replace(
        load,
        requests=_classed(load.requests, workload.classes, experiment.seed),
        duration_s=workload.duration,
        drain=workload.drain,
        warm_up_s=workload.warm_up,
    )


def _classed(requests: tuple[Request, ...], classes: tuple[ServiceClass, ...], seed: int) -> tuple[Request, ...]:
    """The requests with their classes of service: a conversation is of one, a request without one by itself."""
    if not classes:
        return requests
    ends = list(itertools.accumulate(each.share for each in classes))

    def class_of(request: Request) -> ServiceClass:
        drawn = stable_id("class", seed, request.session or request.id) / 2**63
        return classes[bisect.bisect_right(ends, drawn * ends[-1], hi=len(ends) - 1)]

    found = ((request, class_of(request)) for request in requests)
    return tuple(msgspec.structs.replace(one, service=own.name, priority=own.priority) for one, own in found)


def _unlimited(workload: FreeWorkload, experiment: Experiment) -> FreeLoad:
    seed = experiment.seed
    if isinstance(workload, SyntheticWorkload):
        spec = _spec(SyntheticSpec, workload, granularity_tokens=experiment.cache.chunk_tokens)
        first = warmers(spec, seed) if workload.warm else ()
        return FreeLoad(synthetic(spec, seed), first, workload.concurrency)
    if isinstance(workload, SessionsWorkload):
        requests = conversation(_spec(SessionSpec, workload, think_s=workload.think), seed)
        return FreeLoad(
            requests,
            concurrency=workload.concurrency,
            active_sessions=workload.active_sessions,
            fifo=workload.order == "fifo",
            shuffle_seed=seed if workload.order == "random" else None,
        )
    if isinstance(workload, RoundsWorkload):
        rounds = rounds_load(_spec(RoundSpec, workload), seed)
        return FreeLoad(
            rounds.requests,
            concurrency=workload.parallel,
            gaps_s=rounds.gaps_s,
            fifo=rounds.fifo,
            shuffle_seed=rounds.shuffle_seed,
        )
    if isinstance(workload, PersonasWorkload):
        kinds = tuple(_spec(Persona, persona, think_s=persona.think) for persona in workload.personas)
        shared = workload.system and _spec(SharedPrompts, workload.system)
        documents = workload.documents and _spec(Documents, workload.documents)
        most_tokens = min(workload.conversation_tokens or sys.maxsize, load_model(experiment.model).max_position)
        personas = _spec(
            PersonaSpec, workload, personas=kinds, system=shared, documents=documents, conversation_tokens=most_tokens
        )
        first = document_requests(personas, seed)
        return FreeLoad(persona_requests(personas, seed), first, workload.concurrency or workload.users)
    if isinstance(workload, QaWorkload):
        return _qa(_spec(QaSpec, workload, duration_s=workload.duration), workload, seed)
    return _trace(workload, seed)


def _within_model(load: FreeLoad, most_tokens: int) -> FreeLoad:
    """most_tokens: of a prompt with its answer."""
    kept: list[Request] = []
    ended: set[str] = set()
    for request in load.requests:
        session = request.session or request.id
        if request.prompt_tokens + request.output_tokens > most_tokens:
            ended.add(session)
        if session not in ended:
            kept.append(request)
    if not kept:
        shortest = load.requests[0]
        raise SpecError(
            f"workload: request {shortest.id} has {shortest.prompt_tokens} + {shortest.output_tokens} tokens, the model"
            f" takes {most_tokens}; ask for fewer tokens"
        )
    asked_per_s = load.asked_per_s and load.asked_per_s * len(kept) / len(load.requests)
    left_out = len(load.requests) - len(kept)
    return msgspec.structs.replace(load, requests=tuple(kept), asked_per_s=asked_per_s, beyond_model=left_out)


def _spec(kind: type[_Spec], section: Strict, **others: Any) -> _Spec:
    """A generator's spec from the section's values of the same names; others: what the section has another name for."""
    names = {field.name for field in dataclasses.fields(kind)} - others.keys()  # type: ignore[arg-type]
    return kind(**{name: getattr(section, name) for name in names if name in type(section).model_fields}, **others)


def _qa(spec: QaSpec, workload: QaWorkload, seed: int) -> FreeLoad:
    requests = qa_requests(spec, seed)
    warmers = qa_warmers(spec, seed, workload.warm_up_requests, workload.warm_up_tokens)
    return FreeLoad(requests, warmers, asked_per_s=len(requests) / spec.duration_s)


def _trace(workload: TraceWorkload, seed: int) -> FreeLoad:
    tokenizer = None if workload.tokenizer is None else Path(workload.tokenizer).expanduser()
    trace = open_trace(
        find_trace(workload.trace), options=_spec(TraceOptions, workload, tokenizer=tokenizer, seed=seed)
    )
    if workload.active_sessions is not None and all(request.session is None for request in trace.requests):
        raise SpecError(
            f"workload.active_sessions: the trace {trace.name} has no conversations ({workload.active_sessions}); leave"
            " it out, or limit concurrency"
        )
    origin = TraceOrigin(
        name=trace.name,
        sha256=trace.sha256,
        format=trace.format,
        requests=len(trace.requests),
        total_requests=trace.total_requests,
        left_out=trace.left_out,
        tokenizer_sha256=trace.tokenizer_sha256,
    )
    return FreeLoad(
        trace.requests,
        concurrency=workload.concurrency,
        trace=origin,
        active_sessions=workload.active_sessions,
    )
