"""Puts a prefix in a named tier, and proves from counters on both sides that it was served from there.

| state     | made by                                                   | proven by                                 |
|-----------|-----------------------------------------------------------|-------------------------------------------|
| recompute | every tier emptied                                        | all prompt tokens computed                |
| gpu       | the prefix sent before                                    | the engine's own cache served the prefix  |
| cpu       | engine's cache emptied                                    | connector served it, look-ups hit CPU RAM |
| disk      | engine's cache and CPU tier emptied                       | … look-ups hit storage, no device reads   |
| disk_cold | the same, and the chunk files dropped from the page cache | … and the device was read, all of it      |

The prompt is the shared prefix and a suffix that no other request ever has, so the hit is exactly the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from harness.engines.base import Emit, Engine
from harness.experiment.cache import Eviction
from harness.experiment.model import Experiment
from harness.experiment.workloads import PrefixWorkload, hit_tokens
from harness.records import Counters, Resolved
from traces.load import Load
from traces.request import Request, RequestRecord, Segment, Verdict, stable_id
from traces.tiers import COMPUTED, tier_names

ALL_TIERS = frozenset({"gpu", "cpu", "disk"})
# Of a disk read, this share has to come from the device when cold, and at most the rest when warm: LMCache's process
# also reads a few pages that are not chunks.
_COLD_SHARE = 0.99
_SERVED_BY = {"gpu": "gpu", "cpu": "cpu", "disk": "disk", "disk_cold": "disk"}
# What must not have the prefix, so that the tier is the one that serves it.
_ABOVE: dict[str, frozenset[str]] = {
    "gpu": frozenset(),
    "cpu": frozenset({"gpu"}),
    "disk": frozenset({"gpu", "cpu"}),
    "disk_cold": frozenset({"gpu", "cpu", "page_cache"}),
}


@dataclass
class Probe:
    """The requests that one cell sends, and where its prefixes are right now."""

    cell: str
    experiment: Experiment
    workload: PrefixWorkload
    resolved: Resolved
    resident: set[str] = field(default_factory=set)
    stray_tokens: int = 0

    @property
    def hit_tokens(self) -> int:
        """Tokens of the prefix that every measured request has to be served from its tier."""
        return hit_tokens(self.workload.prompt_tokens, self.workload.hit_rate, self.experiment.cache.chunk_tokens)

    def requests(self, tier: str, index: int, *, fresh_prefix: bool = False) -> list[Request]:
        """One sample: `concurrency` requests, each with its own prefix and a suffix used once."""
        name = (self.experiment.seed, self.cell, tier, index)
        suffix_tokens = self.workload.prompt_tokens - self.hit_tokens
        return [
            Request(
                id=f"{tier}-{index:05d}-{slot:03d}",
                prompt=(*self._prefix(slot, *(name if fresh_prefix else ())),
                        Segment(stable_id("suffix", *name, slot), suffix_tokens)),
                output_tokens=self.workload.output_tokens,
                at_s=0.0,
            )
            for slot in range(self.workload.concurrency)
        ]  # fmt: skip

    def warmers(self, tier: str, index: int) -> list[Request]:
        """The bare prefixes, one request each; none at a hit rate of 0."""
        if not self.hit_tokens:
            return []
        return [
            Request(id=f"warm-{tier}-{index:05d}-{slot:03d}", prompt=self._prefix(slot), output_tokens=1)
            for slot in range(self.workload.concurrency)
        ]

    def _prefix(self, slot: int, *own: object) -> tuple[Segment, ...]:
        if not self.hit_tokens:
            return ()
        return (Segment(stable_id("prefix", self.experiment.seed, self.cell, slot, *own), self.hit_tokens),)


async def place(engine: Engine, probe: Probe, tier: str, index: int, emit: Emit) -> None:
    """Brings the probe's prefixes into the state `tier`; warm-up requests are emitted."""
    resets = engine.capabilities.resets
    if tier == "recompute":
        await _empty(engine, probe, ALL_TIERS & resets)
        return
    lost = _SERVED_BY[tier] not in probe.resident
    crowded = probe.stray_tokens > _stray_limit(probe)
    # The cache server looks for every prompt, and reads what only its storage holds: the engine's own hit waits for it.
    read_first = tier == "gpu" and "disk" in probe.resident and "cpu" not in probe.resident
    # A prefix comes up into the engine's cache by being asked for; into a tier below only by being computed anew.
    if crowded or read_first or (lost and tier != "gpu"):
        await _empty(engine, probe, ALL_TIERS & resets)
    if crowded or read_first or lost:
        computed = not probe.resident
        await engine.replay(Load(probe.warmers(tier, index), concurrency=1), emit)
        probe.resident |= ALL_TIERS if computed else {"gpu"}
    await engine.metrics()  # waits for the stores, so that nothing is still on its way down
    await _empty(engine, probe, _ABOVE[tier] & resets)


async def _empty(engine: Engine, probe: Probe, tiers: frozenset[str]) -> None:
    if tiers:
        await engine.reset(tiers)
    probe.resident -= tiers
    if tiers >= ALL_TIERS & engine.capabilities.resets:
        probe.stray_tokens = 0


def _stray_limit(probe: Probe) -> int:
    """Suffix tokens that may lie about before they could push the prefixes out of the smallest tier.

    LMCache begins to evict at its watermark; the prefixes themselves and the next sample have to fit below that.
    """
    per_token = probe.resolved.kv_bytes_per_token or 1
    sizes = [size for size in (probe.resolved.cpu_bytes, probe.resolved.disk_bytes) if size]
    sample = probe.workload.concurrency * probe.workload.prompt_tokens
    share = (probe.experiment.cache.eviction or Eviction()).watermark - 0.05
    return max(0, int(share * min(sizes) / per_token) - 2 * sample) if sizes else 2**61


def after_sample(probe: Probe, tier: str, verdict: Verdict, *, fresh_prefix: bool) -> None:
    """What a measured sample itself left behind: it computed or fetched the prefixes, and its suffixes stay.

    After one that was not proven nobody knows where the prefixes are: the next one starts from empty tiers.
    """
    if verdict != "proven":
        probe.resident.clear()
        probe.stray_tokens = 2**62
        return
    probe.stray_tokens += probe.workload.concurrency * (probe.workload.prompt_tokens - probe.hit_tokens)
    if tier != "recompute":
        probe.resident.add("gpu")
    elif not fresh_prefix:
        probe.resident |= ALL_TIERS


def needs_fresh_prefix(engine: Engine, tier: str) -> bool:
    """Where an offload tier cannot be emptied, a recompute sample brings a prefix that nobody has seen."""
    return tier == "recompute" and not engine.capabilities.resets & {"cpu", "disk"}


def expected_counters(probe: Probe, tier: str) -> Counters:
    """By how much the counters have to move for one sample served by `tier`."""
    count, prompt_tokens = probe.workload.concurrency, probe.workload.prompt_tokens
    hit = 0 if tier == "recompute" else probe.hit_tokens
    expected: dict[str, int] = {"computed_tokens": count * (prompt_tokens - hit)}
    expected["gpu_hit_tokens"] = count * hit if tier == "gpu" else 0
    expected["external_tokens"] = 0 if tier in ("recompute", "gpu") else count * hit
    # LMCache's look-ups also hit when the engine's own cache had served the tokens: no evidence for gpu.
    if hit and tier in ("cpu", "disk", "disk_cold"):
        expected["cpu_hit_tokens"] = count * hit if tier == "cpu" else 0
        expected["disk_hit_tokens"] = 0 if tier == "cpu" else count * hit
    if hit and tier in ("disk", "disk_cold"):
        expected["disk_loaded_chunks"] = count * hit // probe.experiment.cache.chunk_tokens
    if hit and tier == "disk_cold":
        expected["disk_device_read_bytes"] = count * hit * (probe.resolved.kv_bytes_per_token or 0)
    elif hit and tier == "disk":
        expected["disk_device_read_bytes"] = 0
    return Counters.of(expected)


def prove(probe: Probe, tier: str, observed: Counters, rows: Sequence[RequestRecord]) -> tuple[Verdict, str | None]:
    """Compares what moved with what had to. 'unproven': a counter that the proof needs is not reported."""
    failed = next((row.error for row in rows if row.error is not None), None)
    if failed is not None:
        return "unproven", f"a request of the sample failed: {failed}"
    expected = expected_counters(probe, tier)
    if probe.resolved.cpu_bytes is None or probe.experiment.cache.disk is None:
        # In-process connectors tell hits in one total; expectations on a tier that is not there do not apply.
        expected = _without_absent_tiers(expected, observed)
    whole = probe.workload.concurrency * probe.hit_tokens * (probe.resolved.kv_bytes_per_token or 0)
    moved = observed.named()
    for name, wanted in expected.named().items():
        seen = moved.get(name)
        if seen is None:
            return "unproven", f"the engine does not report {name}"
        if not _agrees(name, wanted, seen, whole):
            return "contradicted", f"{name} moved by {seen}, {tier} needs {wanted}"
    hit = 0 if tier == "recompute" else probe.hit_tokens
    odd = next((row for row in rows if row.cached_tokens is not None and row.cached_tokens != hit), None)
    if odd is not None:
        return "contradicted", f"request {odd.id} had {odd.cached_tokens} cached tokens, {tier} needs {hit}"
    return "proven", None


def _without_absent_tiers(expected: Counters, observed: Counters) -> Counters:
    gone = {name for name in ("cpu_hit_tokens", "disk_hit_tokens") if not expected.named().get(name)}
    if "disk" not in observed.loaded_chunks:
        gone |= {"disk_loaded_chunks"}
    return Counters.of({name: wanted for name, wanted in expected.named().items() if name not in gone})


def _agrees(name: str, wanted: int, seen: int, whole_bytes: int) -> bool:
    if name != "disk_device_read_bytes":
        return seen == wanted
    return seen >= _COLD_SHARE * whole_bytes if wanted else seen <= (1 - _COLD_SHARE) * whole_bytes


def sealed(row: RequestRecord, probe: Probe, tier: str, verdict: Verdict, reason: str | None) -> RequestRecord:
    """The row with its verdict; a proven one also says how many of its tokens each tier served."""
    hit = 0 if tier == "recompute" else probe.hit_tokens
    by_tier = row.tokens_by_tier
    if verdict == "proven":
        served = dict.fromkeys(tier_names(), 0) | ({_SERVED_BY[tier]: hit} if hit else {})
        by_tier = {COMPUTED: row.prompt_tokens - hit, **served}
    return msgspec.structs.replace(
        row,
        expected_tier=tier,
        expected_hit_tokens=hit,
        verdict=verdict,
        verdict_reason=reason,
        tokens_by_tier=by_tier,
    )
