"""From a free workload's configuration to the requests that are sent. The same requests for every engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from harness.experiment.fields import Strict
from harness.experiment.model import Experiment
from harness.experiment.workloads import (
    PersonasWorkload,
    RoundsWorkload,
    SessionsWorkload,
    SyntheticWorkload,
    TraceWorkload,
)
from harness.records import TraceOrigin
from traces.catalogue import find_trace
from traces.formats import TraceOptions, open_trace
from traces.load import Load
from traces.personas import Persona, PersonaSpec, persona_requests
from traces.request import Request
from traces.rounds import RoundSpec, rounds_load
from traces.synth import SessionSpec, SyntheticSpec, conversation, synthetic, warmers

_Spec = TypeVar("_Spec")


class FreeLoad(msgspec.Struct, frozen=True):
    """Requests in order, those that warm the cache first, Load's limits, and where a trace came from."""

    requests: tuple[Request, ...]
    warmers: tuple[Request, ...] = ()
    concurrency: int | None = None
    trace: TraceOrigin | None = None
    active_sessions: int | None = None
    gaps_s: tuple[float, ...] = ()
    shuffle_seed: int | None = None

    def schedule(self, requests: Sequence[Request]) -> Load:
        """A fresh Load of these requests, all of the load's or what is left of them."""
        return Load(
            requests,
            self.concurrency,
            active_sessions=self.active_sessions,
            gaps_s=self.gaps_s,
            shuffle_seed=self.shuffle_seed,
        )


def free_load(experiment: Experiment) -> FreeLoad:
    """Raises TraceFileError or SpecError, both UserErrors of one line."""
    workload, seed = experiment.workload, experiment.seed
    if isinstance(workload, SyntheticWorkload):
        spec = _spec(SyntheticSpec, workload, granularity_tokens=experiment.cache.chunk_tokens)
        first = warmers(spec, seed) if workload.warm else ()
        return FreeLoad(synthetic(spec, seed), first, workload.concurrency)
    if isinstance(workload, SessionsWorkload):
        requests = conversation(_spec(SessionSpec, workload, think_s=workload.think), seed)
        return FreeLoad(requests, concurrency=workload.concurrency, active_sessions=workload.active_sessions)
    if isinstance(workload, RoundsWorkload):
        rounds = rounds_load(_spec(RoundSpec, workload), seed)
        return FreeLoad(
            rounds.requests, concurrency=workload.parallel, gaps_s=rounds.gaps_s, shuffle_seed=rounds.shuffle_seed
        )
    if isinstance(workload, PersonasWorkload):
        kinds = tuple(_spec(Persona, persona, think_s=persona.think) for persona in workload.personas)
        requests = persona_requests(_spec(PersonaSpec, workload, personas=kinds), seed)
        return FreeLoad(requests, concurrency=workload.users)
    if isinstance(workload, TraceWorkload):
        return _trace(workload)
    raise TypeError(f"a {workload.kind} workload has no free load")


def _spec(kind: type[_Spec], section: Strict, **others: Any) -> _Spec:
    """A generator's spec from the section's values of the same names; others: what the section has another name for."""
    names = {field.name for field in dataclasses.fields(kind)} - others.keys()  # type: ignore[arg-type]
    return kind(**{name: getattr(section, name) for name in names if name in type(section).model_fields}, **others)


def _trace(workload: TraceWorkload) -> FreeLoad:
    trace = open_trace(find_trace(workload.trace), options=_spec(TraceOptions, workload))
    origin = TraceOrigin(
        name=trace.name,
        sha256=trace.sha256,
        format=trace.format,
        requests=len(trace.requests),
        total_requests=trace.total_requests,
        left_out=trace.left_out,
    )
    return FreeLoad(trace.requests, concurrency=workload.concurrency, trace=origin)
