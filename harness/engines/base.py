"""The Engine seam: one working verb (`replay`) and a lifecycle.

`start · ready · reset · replay · metrics · now_s · stop`, with abilities declared before the run. The run loop knows
nothing else about engines, so the simulator, vLLM and the fake of the tests are measured by the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import msgspec

from traces.load import Load
from traces.request import RequestRecord

Emit = Callable[[RequestRecord], None]


class EngineError(Exception):
    """A run cannot go on: the engine did not start, died, or does not answer. Its text names the cure."""


class SettingsError(ValueError):
    """The settings of the chosen engine cannot work. One line, with the cure; nothing was started."""


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


@runtime_checkable
class KeepsRecord(Protocol):
    """An engine with more to say than rows and counters."""

    def record(self) -> dict[str, Any]:
        """What belongs into the manifest's entry of the cell that was just measured; begins the next cell's."""


class Engine(Protocol):
    """Lifecycle: start, ready, any number of reset/replay/metrics, stop. stop is safe at any time, twice too."""

    name: str
    capabilities: Capabilities

    async def start(self) -> None:
        """Starts the child processes, if any. Raises EngineError."""

    async def ready(self) -> Resolved:
        """Waits until requests would be answered. Raises EngineError with the log's last lines."""

    async def reset(self, what: frozenset[str]) -> None:
        """Empties tiers ('gpu', 'cpu', 'disk') or drops stored files from the 'page_cache'; waits until done."""

    async def replay(self, load: Load, emit: Emit) -> None:
        """Sends the load and emits one record a request, as each completes. A failed request is a record."""

    def now_s(self) -> float:
        """The run's clock: what the records' times are on. Virtual for a simulator."""

    async def metrics(self) -> Counters:
        """Totals, after all stores that earlier requests caused have ended."""

    async def stop(self) -> None:
        """Ends what start began; nothing stays running or listening."""
