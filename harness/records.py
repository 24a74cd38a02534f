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
    routings: the values of deployment.routing that it takes with several instances; empty: it runs one instance only.
    """

    resets: frozenset[str] = frozenset()
    proves: frozenset[str] = frozenset()
    deterministic: bool = False
    virtual_time: bool = False
    routings: frozenset[str] = frozenset()


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


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine says of itself once it runs: never what the configuration hoped for.

    Capacities in bytes, None where unknown. io_pids: processes whose file I/O is the disk tier's.
    `versions` and `details` go into the manifest as they are.
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
    details: dict[str, Any] = {}


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
