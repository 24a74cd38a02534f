"""Proves from counters on both sides, the engine's and the cache server's, which tier served a sample.

| served by                | proven by                                                                            |
|--------------------------|--------------------------------------------------------------------------------------|
| none: computed           | all prompt tokens computed                                                           |
| the engine's own tier    | the engine's own cache served the prefix                                             |
| RAM behind a connector   | the connector served it, look-ups hit that tier and no other                         |
| storage, page cache warm | … look-ups hit storage, all its chunks were loaded, and no byte came from the device |
| storage, page cache cold | … and all of them came from the device                                               |
| a remote store           | look-ups hit the store, all its chunks were loaded, and the store says that it sent  |
|                          | them; from RAM, or for `remote_cold` from its own device                             |
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from harness.measure.placing import Probe
from harness.records import Counters
from traces.request import RequestRecord, TokensByTier, Verdict
from traces.tiers import COMPUTED, all_tiers, state_named, tier_named, tier_names

# Of a storage read, this share has to come from the device when cold, and at most the rest when warm: LMCache's process
# also reads a few pages that are not chunks.
_COLD_SHARE = 0.99
# Prompt tokens by source, as an engine counts them.
_SERVES = {
    "computed_tokens",
    "external_tokens",
    *(f"{tier.name}_hit_tokens" for tier in all_tiers() if not tier.offload),
}


def expected_counters(probe: Probe, name: str) -> Counters:
    """By how much each counter that the engine gives as evidence has to move for one sample served in that state."""
    state, count = state_named(name), probe.workload.concurrency
    hit = _hit_tokens(probe, name)
    expected = {"computed_tokens": count * (probe.workload.prompt_tokens - hit), "external_tokens": 0}
    for tier in all_tiers():
        served = count * hit if tier.name == state.served_by else 0
        expected[f"{tier.name}_hit_tokens"] = served
        if not served:
            continue
        expected["external_tokens"] = served if tier.offload else 0
        if state.from_device is not None:
            chunk_tokens = probe.resolved.chunk_tokens or probe.experiment.cache.chunk_tokens
            expected[f"{tier.name}_loaded_chunks"] = served // chunk_tokens
            read_bytes = served * (probe.resolved.kv_bytes_per_token or 0)
            expected[f"{tier.name}_device_read_bytes"] = read_bytes if state.from_device else 0
            expected[f"{tier.name}_sent_bytes"] = read_bytes
    evidence = probe.capabilities.evidence.get(name, frozenset(expected))
    if not hit:
        evidence -= {f"{tier.name}_hit_tokens" for tier in all_tiers() if tier.offload}
    return Counters.of({counter: value for counter, value in expected.items() if counter in evidence})


def stored_below_memory(probe: Probe, name: str) -> int:
    """Bytes that the tiers behind memory are given by one sample in that state: what the engine computes for it."""
    if not any(tier.kind in ("storage", "store") for tier in map(tier_named, probe.experiment.cache.tiers)):
        return 0
    computed = probe.workload.prompt_tokens - _hit_tokens(probe, name)
    return probe.workload.concurrency * computed * (probe.resolved.kv_bytes_per_token or 0)


def prove(probe: Probe, name: str, observed: Counters, rows: Sequence[RequestRecord]) -> tuple[Verdict, str | None]:
    """Compares what moved with what had to. 'unproven': a counter that the proof needs is not reported."""
    failed = next((row.error for row in rows if row.error is not None), None)
    if failed is not None:
        return "unproven", f"a request of the sample failed: {failed}"
    if name not in probe.capabilities.evidence:
        return "unproven", f"the engine's counters are no evidence for {name}"
    whole_bytes = probe.workload.concurrency * probe.hit_tokens * (probe.resolved.kv_bytes_per_token or 0)
    moved = observed.named()
    for counter, wanted in expected_counters(probe, name).named().items():
        seen = moved.get(counter)
        if seen is None:
            return "unproven", f"the engine does not report {counter}"
        if not _agrees(counter, wanted, seen, whole_bytes):
            return "contradicted", f"{counter} moved by {seen}, {name} needs {wanted}"
    for number, other in enumerate(observed.by_instance):
        served = {counter: tokens for counter, tokens in other.named().items() if counter in _SERVES and tokens}
        if number != probe.asked and served:
            return "contradicted", f"instance {number} served tokens ({_told(served)}), {name} asks {probe.asked}"
    hit = _hit_tokens(probe, name)
    odd = next((row for row in rows if row.cached_tokens is not None and row.cached_tokens != hit), None)
    if odd is not None:
        return "contradicted", f"request {odd.id} had {odd.cached_tokens} cached tokens, {name} needs {hit}"
    wanted_by_tier = _by_tier(probe, name)
    for row in rows:
        told = {source: tokens for source, tokens in row.tokens_by_tier.items() if tokens is not None}
        if any(tokens != wanted_by_tier[source] for source, tokens in told.items()):
            return "contradicted", f"request {row.id} had its tokens from {_told(told)}, {name} needs {hit}"
    return "proven", None


def _by_tier(probe: Probe, name: str) -> dict[str, int]:
    """Tokens of one request by where they come from."""
    hit, served_by = _hit_tokens(probe, name), state_named(name).served_by
    served = {tier: hit if tier == served_by else 0 for tier in tier_names()}
    return {COMPUTED: probe.workload.prompt_tokens - hit, **served}


def _told(by_tier: dict[str, int]) -> str:
    return ", ".join(f"{source} ({tokens})" for source, tokens in by_tier.items() if tokens)


def _hit_tokens(probe: Probe, name: str) -> int:
    return 0 if state_named(name).served_by is None else probe.hit_tokens


def _agrees(counter: str, wanted: int, seen: int, whole_bytes: int) -> bool:
    if not counter.endswith(("_device_read_bytes", "_sent_bytes")):
        return seen == wanted
    return seen >= _COLD_SHARE * whole_bytes if wanted else seen <= (1 - _COLD_SHARE) * whole_bytes


def with_verdict(row: RequestRecord, probe: Probe, name: str, verdict: Verdict, reason: str | None) -> RequestRecord:
    """The row with its verdict; a proven one also says how many of its tokens each tier served."""
    by_tier: TokensByTier = {**_by_tier(probe, name)} if verdict == "proven" else row.tokens_by_tier
    return msgspec.structs.replace(
        row,
        expected_tier=name,
        expected_hit_tokens=_hit_tokens(probe, name),
        verdict=verdict,
        verdict_reason=reason,
        tokens_by_tier=by_tier,
    )
