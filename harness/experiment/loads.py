"""From a free workload's configuration to the requests that are sent. The same requests for every engine."""

from __future__ import annotations

import msgspec

from harness.experiment.model import Experiment
from harness.experiment.workloads import PersonasWorkload, SessionsWorkload, SyntheticWorkload, TraceWorkload
from harness.records import TraceOrigin
from traces.catalogue import find_trace
from traces.formats import TraceOptions, open_trace
from traces.personas import Persona, PersonaSpec, persona_requests
from traces.request import Request
from traces.synth import SessionSpec, SyntheticSpec, conversation, synthetic, warmers


class FreeLoad(msgspec.Struct, frozen=True):
    """Requests in order, those that warm the cache first, the closed loop's width, and where a trace came from."""

    requests: tuple[Request, ...]
    warmers: tuple[Request, ...] = ()
    concurrency: int | None = None
    trace: TraceOrigin | None = None


def free_load(experiment: Experiment) -> FreeLoad:
    """Raises TraceError or SpecError, both ValueErrors of one line."""
    workload = experiment.workload
    if isinstance(workload, SyntheticWorkload):
        return _synthetic(workload, experiment)
    if isinstance(workload, SessionsWorkload):
        return _sessions(workload, experiment.seed)
    if isinstance(workload, PersonasWorkload):
        return _personas(workload, experiment.seed)
    if isinstance(workload, TraceWorkload):
        return _trace(workload)
    raise TypeError(f"a {workload.kind} workload has no free load")


def _synthetic(workload: SyntheticWorkload, experiment: Experiment) -> FreeLoad:
    spec = SyntheticSpec(
        requests=workload.requests,
        prompt_tokens=workload.prompt_tokens,
        hit_rate=workload.hit_rate,
        prefixes=workload.prefixes,
        zipf=workload.zipf,
        output_tokens=workload.output_tokens,
        granularity_tokens=experiment.cache.chunk_tokens,
        arrivals=workload.arrivals,
        rate_per_s=workload.rate_per_s,
    )
    first = warmers(spec, experiment.seed) if workload.warm else ()
    return FreeLoad(synthetic(spec, experiment.seed), first, workload.concurrency)


def _sessions(workload: SessionsWorkload, seed: int) -> FreeLoad:
    spec = SessionSpec(
        sessions=workload.sessions,
        turns=workload.turns,
        system_tokens=workload.system_tokens,
        user_tokens=workload.user_tokens,
        output_tokens=workload.output_tokens,
        think_s=workload.think,
        arrivals=workload.arrivals,
        rate_per_s=workload.rate_per_s,
    )
    return FreeLoad(conversation(spec, seed), (), workload.concurrency)


def _personas(workload: PersonasWorkload, seed: int) -> FreeLoad:
    kinds = tuple(
        Persona(
            name=persona.name,
            share=persona.share,
            context_tokens=persona.context_tokens,
            output_tokens=persona.output_tokens,
            think_s=persona.think,
        )
        for persona in workload.personas
    )
    spec = PersonaSpec(users=workload.users, turns=workload.turns, personas=kinds)
    return FreeLoad(persona_requests(spec, seed), (), workload.users)


def _trace(workload: TraceWorkload) -> FreeLoad:
    options = TraceOptions(
        start=workload.start,
        limit=workload.limit,
        block_tokens=workload.block_tokens,
        max_prompt_tokens=workload.max_prompt_tokens,
        max_output_tokens=workload.max_output_tokens,
        time_scale=workload.time_scale,
    )
    trace = open_trace(find_trace(workload.trace), options=options)
    origin = TraceOrigin(
        name=trace.name,
        sha256=trace.sha256,
        format=trace.format,
        requests=len(trace.requests),
        total_requests=trace.total_requests,
        left_out=trace.left_out,
    )
    return FreeLoad(trace.requests, (), workload.concurrency, origin)
