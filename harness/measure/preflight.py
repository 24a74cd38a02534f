"""What can be known to fail before anything starts, said on one line with the cure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.engines import ENGINES
from harness.errors import PreflightError
from harness.experiment.deployment import Deployment
from harness.experiment.loads import FreeLoad
from harness.experiment.model import Experiment
from harness.experiment.units import format_bytes, format_compared
from harness.experiment.workloads import PrefixWorkload
from harness.measure.placing import empties_all, kept_share, obstacle
from harness.records import Capabilities, Resolved
from simulator.models import ModelSpec
from traces.request import Request
from traces.tiers import all_tiers, state_named, tier_names


def check_experiment(
    experiment: Experiment, model: ModelSpec, capabilities: Capabilities, engine: str, results: Path
) -> None:
    """Before the engine starts. Raises PreflightError."""
    kind = ENGINES[engine]
    if not experiment.cache.gpu and not kind.without_gpu:
        can = " or ".join(name for name, other in ENGINES.items() if other.without_gpu)
        raise PreflightError(
            f"cache.gpu is 0: tiers without an engine are for --engine {can}, not {engine}; give it a size"
        )
    _check_deployment(experiment.deployment, capabilities, engine)
    if experiment.measure.budget is not None and _free(experiment) and capabilities.evidence:
        raise PreflightError("measure.budget: a free load has no samples to end between; set workload.duration instead")
    _check_restarts(experiment, capabilities, engine)
    _check_capabilities(experiment, capabilities, engine)
    _check_trials(experiment, capabilities, engine)
    if experiment.cache.eviction is not None and experiment.cache.cpu is None:
        raise PreflightError("cache.eviction needs cache.cpu, the tier that evicts; give it a size, e.g. 1GiB")
    if isinstance(experiment.workload, PrefixWorkload):
        configured = Resolved(
            **experiment.cache.sizes,
            kv_bytes_per_token=model.kv_bytes_per_token,
            max_prompt_tokens=model.max_position - 1,
        )
        check_working_set(experiment, configured)
        check_states(experiment, capabilities, configured)
    kind.check(experiment, results)


def _free(experiment: Experiment) -> bool:
    return not isinstance(experiment.workload, PrefixWorkload)


def check_cache(experiment: Experiment, model: ModelSpec) -> None:
    """Whether the tiers hold at least one block or chunk of this model. Raises PreflightError."""
    cache, per_token = experiment.cache, model.kv_bytes_per_token
    for tier in all_tiers():
        size, tokens, what = cache.bytes_of(tier.name), cache.chunk_tokens, "one chunk"
        if not tier.offload:
            tokens, what = 2 * cache.block_tokens, "two blocks, one of which the engine keeps for itself"
        if size and size < tokens * per_token:
            raise PreflightError(
                f"cache.{tier.name} {format_bytes(size)} does not hold {what}: {tokens} tokens of"
                f" {format_bytes(per_token)}; enlarge it"
            )


def _check_deployment(deployment: Deployment, capabilities: Capabilities, engine: str) -> None:
    if deployment.instances == 1 or deployment.routing in capabilities.routings:
        return
    where = f"deployment.instances {deployment.instances}: engine {engine}"
    if not capabilities.routings:
        raise PreflightError(f"{where} runs one instance; set it to 1, or use --engine sim")
    can = ", ".join(sorted(capabilities.routings))
    raise PreflightError(f"{where} does not route {deployment.routing}; set deployment.routing to one of {can}")


def _check_restarts(experiment: Experiment, capabilities: Capabilities, engine: str) -> None:
    states = [state for name in experiment.measure.tiers if (state := state_named(name)).restarted]
    for state in states:
        if state.served_by not in capabilities.keeps:
            raise PreflightError(
                f"measure.tiers {state.name}: engine {engine}, as configured, cannot be restarted so that"
                f" {state.served_by} keeps the prefix: {capabilities.no_restart}, or remove the state"
            )
    if states and experiment.storage is not None and experiment.storage.trace:
        raise PreflightError(
            f"measure.tiers {states[0].name}: a restart ends the processes that storage.trace follows; remove one of"
            " the two"
        )


def _check_capabilities(experiment: Experiment, capabilities: Capabilities, engine: str) -> None:
    missing = [state for state in experiment.measure.tiers if state not in capabilities.evidence]
    if missing:
        can = ", ".join(sorted(capabilities.evidence)) or "none"
        cure = ENGINES[engine].unproven(experiment)
        raise PreflightError(
            f"measure.tiers: engine {engine}, as configured, cannot prove {', '.join(missing)} (it can: {can});"
            f" {cure + '; else ' if cure else ''}remove them, or use a workload without tiers"
        )


def _check_trials(experiment: Experiment, capabilities: Capabilities, engine: str) -> None:
    """Trials need fresh caches: a reset of all tiers, or a start anew."""
    trials = experiment.measure.trials
    if trials == 1 or empties_all(capabilities):
        return
    if not capabilities.starts_empty:
        raise PreflightError(
            f"measure.trials {trials}: engine {engine}, as configured, runs already and cannot empty all of its caches,"
            " so that a second trial would hit what the first one left; set it to 1"
        )
    if experiment.storage is not None and experiment.storage.trace:
        raise PreflightError(
            f"measure.trials {trials}: engine {engine}, as configured, has to start again between trials, and"
            " storage.trace would lose it; remove one of the two"
        )


def check_working_set(experiment: Experiment, resolved: Resolved) -> None:
    """Whether the probe's prompts fit the tiers that have to hold them. Raises PreflightError."""
    workload = experiment.workload
    assert isinstance(workload, PrefixWorkload)
    per_token = resolved.kv_bytes_per_token or 0
    total_tokens = workload.prompt_tokens + workload.output_tokens
    need = workload.concurrency * total_tokens * per_token
    if resolved.max_prompt_tokens is not None and total_tokens > resolved.max_prompt_tokens + 1:
        raise PreflightError(
            f"workload.prompt_tokens {workload.prompt_tokens} + {workload.output_tokens} output exceed the"
            f" {resolved.max_prompt_tokens + 1} tokens that the engine takes; shorten the prompt or enlarge cache.gpu"
        )
    names = tier_names()
    lowest = max(
        (names.index(tier) for name in experiment.measure.tiers for tier in state_named(name).needs), default=0
    )
    # KV passes through the tiers above the one that serves it.
    for tier in names[: lowest + 1]:
        size, share = resolved.bytes_for_one(tier), kept_share(tier, experiment)
        if size is not None and need > share * size:
            needed, stays = format_compared(need, share * size)
            raise PreflightError(
                f"workload: {workload.concurrency} x {total_tokens} tokens are {needed} of KV, more than the {stays}"
                f" that stay in cache.{tier} ({format_bytes(size)}); enlarge it, or lower workload.prompt_tokens or"
                " concurrency"
            )


def check_states(experiment: Experiment, capabilities: Capabilities, resolved: Resolved) -> None:
    """Whether the engine can be brought into every state that is to be measured. Raises PreflightError."""
    for name in experiment.measure.tiers:
        if reason := obstacle(state_named(name), experiment, capabilities, resolved):
            raise PreflightError(f"measure.tiers {name}: {reason}")


def check_reach(experiment: Experiment, requests: Sequence[Request], resolved: Resolved) -> None:
    """Whether a free load spills into the tier that measure.must_reach names, and fits it. Raises PreflightError."""
    tier = experiment.measure.must_reach
    if tier is None:
        return
    need = unique_tokens(requests) * (resolved.kv_bytes_per_token or 0)
    names = tier_names()[: tier_names().index(tier)]
    above, size = sum(resolved.bytes_of(name) or 0 for name in names), resolved.bytes_of(tier)
    if need <= above:
        needed, held = format_compared(need, above)
        raise PreflightError(
            f"measure.must_reach {tier}: the load's {needed} of KV fit the {held} above that"
            f" tier and never reach it; shrink cache.{' and cache.'.join(names)}, or send more prefixes"
        )
    if size is not None and need > size + above:
        needed, held = format_compared(need, size + above)
        raise PreflightError(
            f"measure.must_reach {tier}: the load's {needed} of KV exceed the {held} of cache.{tier}"
            " and the tiers above it; enlarge it, or send fewer prefixes"
        )


def check_quotes(key: str, load: FreeLoad, capabilities: Capabilities, engine: str) -> None:
    """Whether the engine tells the answers that later prompts hold. Raises PreflightError."""
    if capabilities.quotes or not any(request.quotes for request in load.requests):
        return
    cure = ENGINES[engine].untold
    raise PreflightError(
        f"cell {key}: answers quoted: engine {engine}, as configured, does not tell its answers token by token;"
        f" {cure + ', or ' if cure else ''}use answers synthetic"
    )


def check_resumed(key: str, load: FreeLoad, rows: int) -> None:
    """Whether the rest of a load, of which so many requests have ended, can be sent. Raises PreflightError."""
    if not rows:
        return
    if load.duration_s is not None:
        raise PreflightError(
            f"cell {key}: {rows} requests of a load with workload.duration are there, and its time cannot be stopped"
            " and go on; start a new run"
        )
    if any(request.quotes for request in load.requests):
        raise PreflightError(
            f"cell {key}: {rows} requests of a load that quotes answers are there, and their answers were not kept;"
            " start a new run"
        )


def unique_tokens(requests: Sequence[Request]) -> int:
    """Distinct prompt tokens: what a cache that never evicts would hold, by shared leading segments."""
    chains: dict[tuple[int, int, int], int] = {}
    total = 0
    for request in requests:
        chain = 0
        for segment in request.prompt:
            key = (chain, segment.hash_id, segment.tokens)
            if key not in chains:
                chains[key] = len(chains) + 1
                total += segment.tokens
            chain = chains[key]
    return total


def check_prompts(requests: Sequence[Request], resolved: Resolved, kind: str) -> None:
    """Whether the engine takes every request of a free load. Raises PreflightError."""
    longest = max(requests, key=lambda request: request.prompt_tokens + request.output_tokens, default=None)
    limit = resolved.max_prompt_tokens
    if longest is None or limit is None or longest.prompt_tokens + longest.output_tokens <= limit + 1:
        return
    shorten = "ask for fewer turns or tokens"
    if kind == "trace":
        shorten = "set workload.max_prompt_tokens, scale with workload.block_tokens"
    raise PreflightError(
        f"workload: request {longest.id} has {longest.prompt_tokens} + {longest.output_tokens} tokens, the engine takes"
        f" {limit + 1}; {shorten}, or enlarge cache.gpu"
    )
