"""What is recorded besides requests: abilities, counters, resolved sizes, samples, the host, traces of I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from harness.storage_records import StorageFigures
from traces.request import Verdict
from traces.tiers import all_states, all_tiers, tier_named


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can do, asked before anything starts.

    tiers: the tiers that hold its KV, as configured.
    resets: what `reset` can empty; names in one set are emptied together. Tiers, and the 'page_cache'.
    evidence: by warm state, the counters (Counters.named) that prove it; a state without entry cannot be proven.
    deterministic: the same load on a fresh engine gives the same records, so a resumed run can begin again.
    virtual_time: its seconds are computed, not waited for.
    routings: the values of deployment.routing that it takes with several instances; empty: it runs one instance only.
    quotes: it tells its answers token by token, so that later prompts can hold them.
    starts_empty: each start of it has empty caches; not of a server that runs already.
    keeps: the tiers that a restart of it and its cache server leaves as they are, while it empties the others; empty:
    it is not restarted (base.py, Restarts). no_restart: why not, and the cure, as a clause.
    evicts_when_full: the RAM behind its GPU; otherwise from a watermark on, as LMCache and Mooncake do.
    """

    tiers: frozenset[str] = frozenset()
    resets: frozenset[frozenset[str]] = frozenset()
    evidence: dict[str, frozenset[str]] = {}
    deterministic: bool = False
    virtual_time: bool = False
    routings: frozenset[str] = frozenset()
    quotes: bool = False
    starts_empty: bool = True
    keeps: frozenset[str] = frozenset()
    no_restart: str = "the harness does not start it; use an engine that the harness starts"
    evicts_when_full: bool = False


def singly(names: Iterable[str]) -> frozenset[frozenset[str]]:
    """Resets of an engine that empties each of these on its own."""
    return frozenset(frozenset({name}) for name in names)


def evidence_in(tiers: Collection[str], keeps: Collection[str] = ()) -> dict[str, frozenset[str]]:
    """What proves each state that these tiers can have, where the engine and its cache server report all of it. keeps:
    the tiers that a restart leaves as they are.

    Look-ups of a cache server also hit where the engine's own tier has served the tokens: they are evidence for the
    states of the tiers behind a connector alone.
    """
    found = {}
    behind = [tier.name for tier in all_tiers() if tier.offload and tier.name in tiers]
    for state in all_states():
        if not state.needs <= set(tiers) or (state.restarted and state.served_by not in keeps):
            continue
        names = {"computed_tokens", "external_tokens"}
        names |= {f"{tier.name}_hit_tokens" for tier in all_tiers() if not tier.offload}
        if state.served_by in behind:
            names |= {f"{tier}_hit_tokens" for tier in behind}
        if state.served_by is not None and state.from_device is not None:
            names |= {f"{state.served_by}_loaded_chunks", f"{state.served_by}_device_read_bytes"}
            names |= {f"{state.served_by}_sent_bytes"} if tier_named(state.served_by).kind == "store" else set()
        found[state.name] = frozenset(names)
    return found


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Running totals from the engine's and the cache server's own counters. None, or a tier without entry: unreported.

    The engine counts prompt tokens by source: computed_tokens (prefill), hit_tokens of its own tier, and
    external_tokens (through a connector). The cache server counts by tier: hit_tokens of its look-ups, loaded_chunks
    from storage, and device_read_bytes, which its process got from the tier's device (a read that the page cache
    answers adds none). stores_begun, stores_ended: chunks on their way to storage. A store behind a network counts by
    itself: sent_bytes that left it, the reads that it answered, and device_read_bytes of its own process.

    A reference accelerator counts its steps, loads and stores: paced, the microseconds that they were to take
    (asked_us), those that ended late, and the microseconds by which all of them ended after their due moments
    (overrun_us). at_us: sums of moments on the run's clock: 'arrivals' of requests at the scheduler, 'ends' of steps.

    by_instance: of several instances, what each one and a cache server of its own count; a cache server that they share
    counts in the totals alone.
    """

    computed_tokens: int | None = None
    hit_tokens: dict[str, int] = {}
    external_tokens: int | None = None
    loaded_chunks: dict[str, int] = {}
    device_read_bytes: dict[str, int] = {}
    sent_bytes: dict[str, int] = {}
    reads: dict[str, int] = {}
    stores_begun: int | None = None
    stores_ended: int | None = None
    paced: dict[str, int] = {}
    asked_us: dict[str, int] = {}
    late: dict[str, int] = {}
    overrun_us: dict[str, int] = {}
    at_us: dict[str, int] = {}
    by_instance: tuple[Counters, ...] = ()

    def since(self, earlier: Counters) -> Counters:
        """What moved since then; only counters that both report."""
        before = earlier.named()
        moved = Counters.of({name: now - before[name] for name, now in self.named().items() if name in before})
        each = zip(self.by_instance, earlier.by_instance, strict=True)
        return msgspec.structs.replace(moved, by_instance=tuple(now.since(then) for now, then in each))

    def named(self) -> dict[str, int]:
        """Every reported counter by name: a tier's own is 'TIER_COUNTER', as in 'cpu_hit_tokens'."""
        found: dict[str, int] = {}
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if isinstance(value, dict):
                found |= {f"{tier}_{field}": number for tier, number in value.items()}
            elif isinstance(value, int):
                found[field] = value
        return found

    @classmethod
    def of_all(cls, instances: Sequence[Mapping[str, int | None]], shared: Mapping[str, int | None]) -> Counters:
        """The totals of several instances and of what they share, by the names of `named`. What one of them does not
        report (None) has no total; what has not begun to count in one of them (no entry) is 0 there."""
        parts, totals = [*instances, shared], dict[str, int | None]()
        for name in dict.fromkeys(name for part in parts for name in part):
            told = [part[name] for part in parts if name in part]
            known = [value for value in told if value is not None]
            totals[name] = sum(known) if len(known) == len(told) else None
        each = tuple(cls.of(part) for part in instances) if len(instances) > 1 else ()
        return msgspec.structs.replace(cls.of(totals), by_instance=each)

    @classmethod
    def of(cls, named: Mapping[str, int | None]) -> Counters:
        """The counters of these names, as `named` gives them; None is not reported."""
        fields: dict[str, Any] = {}
        for name, value in named.items():
            if value is None:
                continue
            by_tier = next((field for field in COUNTERS_BY_TIER if name.endswith(f"_{field}")), None)
            if by_tier is None:
                fields[name] = value
            else:
                fields.setdefault(by_tier, {})[name.removesuffix(f"_{by_tier}")] = value
        return cls(**fields)


COUNTERS_BY_TIER = (
    *("hit_tokens", "loaded_chunks", "device_read_bytes", "sent_bytes", "reads"),
    *("paced", "asked_us", "late", "overrun_us", "at_us"),
)


# Of the time that an accelerator's steps were to take, the share that they may end late.
MAX_LATE_SHARE = 0.02


def late_share(moved: Iterable[Counters]) -> float | None:
    """By how much an accelerator's steps ended late, as a share of the time that they were to take; None: no steps."""
    asked_us = overrun_us = 0
    for counters in moved:
        asked_us += counters.asked_us.get("steps", 0)
        overrun_us += counters.overrun_us.get("steps", 0)
    return overrun_us / asked_us if asked_us else None


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much an engine's scheduler puts into one step. None: the engine does not say."""

    max_batched_tokens: int | None = None
    max_sequences: int | None = None


class EvictionRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a cache server evicts from CPU RAM: at `watermark` of its size it drops `ratio` of its chunks."""

    policy: str
    watermark: float
    ratio: float

    def __str__(self) -> str:
        return f"{self.policy} (watermark {self.watermark:g}, ratio {self.ratio:g})"


class ClusterShape(msgspec.Struct, frozen=True, kw_only=True):
    """Several instances behind one router, and the tiers that they share."""

    instances: int
    routing: str
    shared: tuple[str, ...] = ()


class StoreFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How mode storage moves bytes. page_cache: why they pass through the page cache; None: they do not."""

    io: str
    page_cache: str | None
    slot_bytes: int


# The errors of requests that measure.budget, or workload.duration without a drain, ended: they had no more time.
CUT_OFF = "not finished when the time (measure.budget) was over"
CUT_SHORT = "not finished when the time (workload.duration) was over"


def is_cut_off(error: str | None) -> bool:
    """Whether a row's error says only that its load's time was over: nothing went wrong."""
    return error in (CUT_OFF, CUT_SHORT)


class LoadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a free load asked for, and what of it was sent.

    requests: of the whole schedule. unfinished: under way when the duration was over, of which `drain` let the rest
    end. duration_s None: no limit. asked_per_s: requests that a second of the schedule asks for, if every answer comes
    in time; None: the load has no pace of its own.
    beyond_model: turns that no request came to, because the session's prompt would exceed the model's length.
    """

    requests: int
    sent: int
    unfinished: int
    duration_s: float | None
    drain: bool
    asked_per_s: float | None
    beyond_model: int = 0


class PresetFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Whose machine the simulator stood for. standing: how far its predictions may be believed, as a clause."""

    name: str
    machine: str
    date: str
    standing: str


class AcceleratorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Whose pace a real engine kept on a machine without that GPU. standing: how far the constants may be believed, as
    a clause. link: paced, or copied by the cache server. fitted_on: the model that the constants are of. other_model:
    the engine's own where its layers have another shape; None: the same. assumed: constants of the pace that no
    published time shows."""

    name: str
    machine: str
    date: str
    standing: str
    link: str
    fitted_on: str
    other_model: str | None = None
    assumed: tuple[str, ...] = ()

    def __str__(self) -> str:
        stood = f"reference accelerator {self.name}, no GPU"
        return stood if self.other_model is None else f"{stood}, steps of {self.fitted_on} for {self.other_model}"

    @property
    def doubt(self) -> str | None:
        """Why its times are not those of this GPU with this model, and the cure; None: nothing says so."""
        if self.other_model is None:
            return None
        return (
            f"{self.name} was fitted on {self.fitted_on}, and {self.other_model} has other layers: bytes of KV are"
            f" {self.other_model}'s, steps take {self.fitted_on}'s time. For both of one model, name a preset of"
            " `harness list presets` that was fitted on it."
        )


class Replacement(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an engine that is not its own. ours: file and line of the stand-in. theirs: what it stands for."""

    ours: str
    theirs: str
    why: str


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine says of itself once it runs: never what the configuration hoped for.

    Capacities in bytes, None where unknown. io_pids: processes whose file I/O is the disk tier's; a manifest has those,
    and the url, of the first start, whatever states restart the engine. scheduler, eviction,
    cluster, store: how the engine and its cache work; None: the engine does not say, or has none. url: where a server
    answers. connector: how the engine reaches the cache. cache_config: what it says of its cache beside sizes.
    disk_device: the block device below the disk tier. remote_store: which store the remote tier is, and the network
    to it. open_to_all: 'PROGRAM PORT' of each socket of our processes that
    listens beyond this machine's loopback. preset: of a simulator; None: the times are a machine's own. accelerator:
    what stands for the GPU of a real engine; None: nothing does. replaced: parts of the engine that are not its own.
    """

    gpu_bytes: int | None = None
    cpu_bytes: int | None = None
    pool_bytes: int | None = None
    disk_bytes: int | None = None
    remote_bytes: int | None = None
    gpu_blocks: int | None = None
    block_tokens: int | None = None
    chunk_tokens: int | None = None
    kv_bytes_per_token: int | None = None
    max_prompt_tokens: int | None = None
    vocab_size: int | None = None
    io_pids: tuple[int, ...] = ()
    versions: dict[str, str] = {}
    scheduler: SchedulerLimits = SchedulerLimits()
    eviction: EvictionRules | None = None
    cluster: ClusterShape | None = None
    store: StoreFacts | None = None
    disk_file_system: str | None = None
    disk_device: str | None = None
    remote_store: str | None = None
    open_to_all: tuple[str, ...] = ()
    url: str | None = None
    connector: str | None = None
    cache_config: dict[str, str] = {}
    calibration_source: str | None = None
    preset: PresetFacts | None = None
    accelerator: AcceleratorFacts | None = None
    replaced: tuple[Replacement, ...] = ()

    def bytes_of(self, tier: str) -> int | None:
        """A tier's capacity, of all instances together."""
        size: int | None = getattr(self, f"{tier}_bytes", None)
        return size

    def bytes_for_one(self, tier: str) -> int | None:
        """What of a tier one instance has, or all share."""
        size, copies = self.bytes_of(tier), 1
        if self.cluster is not None and tier not in self.cluster.shared:
            copies = self.cluster.instances
        return None if size is None else size // copies


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Which file an experiment was read from. None: it was not kept."""

    path: str | None = None
    sha256: str | None = None


class TraceOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Which recorded trace a load came from. left_out: requests of the part that was asked for, too long to send.

    tokenizer_sha256: of the file that counted a text's tokens; None: no tokenizer did.
    """

    name: str
    sha256: str
    format: str
    requests: int
    total_requests: int
    left_out: int
    tokenizer_sha256: str | None = None


class HitCeiling(msgspec.Struct, frozen=True, kw_only=True):
    """The most of a free load's prompt tokens that any cache could have served, as a share; computed.

    of_size: any cache of size_tokens, the room of all tiers together; of_any_size: any cache at all. reason: why one of
    them, or both, are not known.
    """

    of_size: float | None = None
    size_tokens: int | None = None
    of_any_size: float | None = None
    reason: str | None = None


class CellRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of a cell besides rows and counters. storage: the figures of mode storage."""

    storage: StorageFigures | None = None


class HostSample(msgspec.Struct, frozen=True, kw_only=True):
    """What else the machine did meanwhile. Shares are of all cores' time; None: this kernel does not say. core_loop_s,
    client_loop_s: what a fixed loop took on the engine's core and the client's, before and after (cores.py); None: it
    has no core.
    touch_s_per_gib: what free memory took that the host may have had (memory.py, OwnMemory); None: there was enough.
    taken_share: of pages that had rested, those that the host had taken (memory.py, RestedPages); None: not looked.
    engine_touch_s: what the last pass over the engine's memory took, to get back such pages of it (resident.py); None:
    the host had taken few. core_wait_s: how long the sample waited for its cores to be quick; None: it did not ask.
    reported_bytes: free memory that the kernel offered to a virtual machine's host; None: it does not count that."""

    steal_share: float | None = None
    foreign_cpu_share: float | None = None
    busy_share: float | None = None
    core_loop_s: float | None = None
    client_loop_s: float | None = None
    core_wait_s: float | None = None
    touch_s_per_gib: float | None = None
    taken_share: float | None = None
    engine_touch_s: float | None = None
    device_read_bytes: int | None = None
    device_write_bytes: int | None = None
    reported_bytes: int | None = None


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One measured batch: what the counters moved by, against what they had to. A free load has no verdict.

    load: of a free load; None in older files. storage: of one of several trials in mode storage.
    """

    cell: str
    tier: str
    index: int
    attempt: int = 0
    started_s: float
    ended_s: float
    verdict: Verdict | None
    reason: str | None = None
    observed: Counters
    expected: Counters
    host: HostSample = HostSample()
    load: LoadFacts | None = None
    storage: StorageFigures | None = None


class IoTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What one trace in io/N is about: whose, of which device, and when its clock (nanoseconds) was the run's 0."""

    cells: tuple[str, ...]
    attempt: int
    path: str
    device_number: int
    pids: tuple[int, ...]
    zero_ns: int
    started_s: float
    ended_s: float
    lost_events: int
