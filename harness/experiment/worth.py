"""The points that answer whether a cache behind the engine is worth it: without it and with it, by prefix length.

cells = worth_cells(load_experiment(Path("quickstart")), lengths=(1024, 4096), engine="vllm")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from harness.engines import ENGINES
from harness.errors import ConfigError
from harness.experiment.read import Cell, Plan
from harness.experiment.workloads import PrefixWorkload
from traces.tiers import all_states, tier_named

_LENGTH = "workload.prompt_tokens"
# The shares of the file's prompt that are measured unless lengths are given.
_PARTS = (8, 4, 2, 1)


def worth_cells(plan: Plan, lengths: Sequence[int], engine: str) -> list[Cell]:
    """First every length without the cache server, then every length with it: an engine is started once a side.

    lengths: tokens of the prefixes, rounded up to whole chunks; none given: those of the file's axis, or an eighth, a
    quarter, half and all of its prompt. A server that runs already keeps its cache server, so that only the second
    side is there. Raises ConfigError.
    """
    base = plan.experiment
    workload = base.workload
    if not isinstance(workload, PrefixWorkload):
        raise ConfigError(
            f"{plan.path}: worth compares the places of one prefix, and workload.kind is {workload.kind}; use kind"
            " prefix, or sweep a free load with --set 'sweep.cache.cpu=[null, 1GiB]'"
        )
    states = _compared_states(plan)
    axes: dict[str, tuple[Any, ...]] = {}
    if not ENGINES[engine].runs_already(base):
        cache = plan.raw["cache"]
        axes["cache.cpu"] = (None, cache["cpu"])
    axes[_LENGTH] = tuple(chunks + 1 for chunks in _whole_chunks(plan, lengths, workload))
    raw = plan.raw | {
        "workload": plan.raw["workload"] | {"hit_rate": 1.0},
        "measure": plan.raw["measure"] | {"tiers": states, "goals": []},
    }
    return msgspec.structs.replace(plan, raw=raw, axes=axes).cells()


def _compared_states(plan: Plan) -> list[str]:
    """Recomputing, and every state of the file that something behind the engine serves."""
    asked = plan.experiment.measure.tiers
    behind = [
        state.name
        for state in all_states()
        if state.name in asked and state.served_by is not None and tier_named(state.served_by).offload
    ]
    if not behind or plan.experiment.cache.cpu is None:
        could = ", ".join(s.name for s in all_states() if s.served_by is not None and tier_named(s.served_by).offload)
        raise ConfigError(
            f"{plan.path}: has no cache behind the engine to judge; set cache.cpu, and name some of {could} in"
            " measure.tiers"
        )
    return [state.name for state in all_states() if state.served_by is None] + behind


def _whole_chunks(plan: Plan, lengths: Sequence[int], workload: PrefixWorkload) -> list[int]:
    """Tokens of each prefix, in whole chunks, ascending and each once."""
    chunk = plan.experiment.cache.chunk_tokens
    if any(tokens < 1 for tokens in lengths):
        raise ConfigError(f"--tokens {min(lengths)}: a prefix has at least one token")
    wanted = list(lengths)
    if not wanted:
        axis = plan.axes.get(_LENGTH, ())
        wanted = [length - 1 for length in axis] or [(workload.prompt_tokens - 1) // part for part in _PARTS]
    return sorted({max(1, -(-tokens // chunk)) * chunk for tokens in wanted})
