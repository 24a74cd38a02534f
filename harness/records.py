"""What is recorded besides requests: abilities, counters, resolved sizes, samples, the host, traces of I/O."""

from __future__ import annotations

from typing import Any

import msgspec

from traces.request import Verdict


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can do, asked before anything starts.

    resets: what `reset` can empty, of 'gpu', 'cpu', 'disk', 'page_cache'.
    proves: the warm states for which its counters are evidence enough.
    deterministic: the same load on a fresh engine gives the same records, so a resumed run can begin again.
    virtual_time: its seconds are computed, not waited for.
    """

    resets: frozenset[str] = frozenset()
    proves: frozenset[str] = frozenset()
    deterministic: bool = False
    virtual_time: bool = False


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Running totals from the engine's and the cache server's own counters. None: it does not report that.

    Engine side, prompt tokens by source: computed (prefill), gpu (its own prefix cache), external (a connector).
    Cache-server side: tokens of look-ups that the CPU tier (l1) and the storage tier (l2) answered, chunks loaded
    from storage, objects whose store was begun and ended, and bytes that the server's process got from storage
    devices (a read that the page cache answers adds none).
    """

    computed_tokens: int | None = None
    gpu_hit_tokens: int | None = None
    external_tokens: int | None = None
    l1_hit_tokens: int | None = None
    l2_hit_tokens: int | None = None
    l2_loaded_chunks: int | None = None
    stores_begun: int | None = None
    stores_ended: int | None = None
    storage_read_bytes: int | None = None

    def since(self, earlier: Counters) -> Counters:
        """Field by field difference; None where either side is None."""
        pairs = ((f, getattr(self, f), getattr(earlier, f)) for f in self.__struct_fields__)
        return Counters(**{f: None if a is None or b is None else a - b for f, a, b in pairs})


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


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine says of itself once it runs: never what the configuration hoped for.

    Capacities in bytes, None where unknown. io_pids: processes whose file I/O is the disk tier's. scheduler, eviction,
    cluster, store: how the engine and its cache work; None: the engine does not say, or has none. url: where a server
    answers. connector: how vLLM reaches the cache. cache_config: the labels of vLLM's metric of that name.
    """

    gpu_bytes: int | None = None
    cpu_bytes: int | None = None
    disk_bytes: int | None = None
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
    url: str | None = None
    connector: str | None = None
    cache_config: dict[str, str] = {}
    calibration_source: str | None = None


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Which file an experiment was read from. None: it was not kept."""

    path: str | None = None
    sha256: str | None = None


class TraceOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Which recorded trace a load came from. left_out: requests of the part that was asked for, too long to send."""

    name: str
    sha256: str
    format: str
    requests: int
    total_requests: int
    left_out: int


class CellRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of a cell besides rows and counters. storage: the figures of mode storage."""

    storage: dict[str, Any] | None = None


class HostSample(msgspec.Struct, frozen=True, kw_only=True):
    """What else the machine did meanwhile. Shares are of all cores' time; None: this kernel does not say. core_loop_s:
    what a fixed loop took on the engine's core, before and after (host.py, core_loop_s); None: it has no core."""

    steal_share: float | None = None
    foreign_cpu_share: float | None = None
    busy_share: float | None = None
    core_loop_s: float | None = None
    device_read_bytes: int | None = None
    device_write_bytes: int | None = None


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One measured batch: what the counters moved by, against what they had to. A free load has no verdict."""

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
