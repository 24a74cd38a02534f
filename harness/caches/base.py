"""The seams of cache servers and of what lies below them.

A CacheServer holds KV behind an engine; a Backend is the storage that a cache server writes to. An engine asks its
cache server how it is reached (`connection`), and what it has counted (`settle`); it knows no cache server by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from harness.collectors.prometheus import Metrics
from harness.experiment.cache import Cache
from harness.processes.child import Child
from harness.records import EvictionRules
from traces.tiers import PAGE_CACHE


class Attached(msgspec.Struct, frozen=True, kw_only=True):
    """A cache server that runs already. pid and disk_path None: not known, so that less can be proven or emptied."""

    url: str
    pid: int | None = None
    disk_path: Path | None = None


class CachePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine asks for. folder: the run's. python: the environment of engine and server. shared_memory: KV
    passes through it. page_locked_by: the folder of kv_accelerator, whose page_locked does what a GPU that is not here
    does to that memory. kv_bytes_per_token: of the engine's model. attached: use this server instead of one of our own.
    number: which of several servers it is, for its files' names; folder_number: which of several folders it has.
    beside: the servers made before it over the same store; () where it has a store of its own, or none. store_args:
    more arguments for the store's server.
    """

    engine: str
    python: Path
    cache: Cache
    folder: Path
    cores: tuple[int, ...] | None = None
    shared_memory: bool = False
    page_locked_by: Path | None = None
    kv_bytes_per_token: int = 1
    args: tuple[str, ...] = ()
    start_timeout_s: float = 300.0
    attached: Attached | None = None
    number: int = 0
    folder_number: int = 0
    beside: tuple[CacheServer, ...] = ()
    store_args: tuple[str, ...] = ()

    @property
    def disk_folder(self) -> Path:
        """A folder of our own below the configured path: it is deleted at the end."""
        disk = self.cache.disk
        name = numbered(f"kv-harness-{self.folder.name}", self.folder_number)
        return (Path(disk.path) if disk and disk.path else self.folder) / name

    def log(self, name: str) -> Path:
        """Of one of the server's processes."""
        return self.folder / "logs" / f"{numbered(name, self.number)}.log"


def numbered(name: str, number: int) -> str:
    """The name of one of several: the first has no number."""
    return f"{name}-{number}" if number else name


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is started with to reach the cache server: arguments, and names of the environment. stored:
    folders of a cache server within the engine, which end with the engine's process unless that is told to keep them.
    """

    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    stored: tuple[Path, ...] = ()


class CacheResolved(msgspec.Struct, frozen=True, kw_only=True):
    """What the cache server says of itself. None: it does not say."""

    cpu_bytes: int | None = None
    pool_bytes: int | None = None
    remote_store: str | None = None
    chunk_tokens: int | None = None
    eviction: EvictionRules | None = None
    versions: dict[str, str] = {}


class EngineSide(msgspec.Struct, frozen=True, kw_only=True):
    """What a server within an engine counts by: the engine's metrics, and bytes that its process read from devices."""

    metrics: Metrics
    read_bytes: int | None


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """Totals. lookups: requests that the server has looked up; None: it does not count them. counters: by the names of
    Counters.named; None: not reported. of_store: what the store below says, for all servers over it together: each of
    them tells the whole."""

    lookups: int | None = None
    counters: Mapping[str, int | None] = {}
    of_store: Mapping[str, int | None] = {}


class Backend(Protocol):
    """Storage below a cache server."""

    @property
    def scratch(self) -> tuple[Path, ...]:
        """Folders that are deleted when the server ends, unless it keeps what is stored."""

    @property
    def file_system(self) -> str | None:
        """What it lies on; None where there is no file system."""

    @property
    def device(self) -> str | None:
        """The block device below it; None where there is none."""

    def prepare(self) -> None:
        """Before the server starts."""

    def spec(self) -> dict[str, Any]:
        """How the server's own configuration names it."""

    def clear(self) -> None:
        """Removes every chunk. The server is idle."""

    def make_cold(self) -> None:
        """The next read of any chunk reaches the device. The server is idle."""

    def read_bytes(self, server_bytes: int | None) -> int | None:
        """Bytes that came from the device, in total. server_bytes: what the kernel counts for the server's process."""


class CacheServer(Protocol):
    """Lifecycle: start, ready, then any of the others, stop. stop is safe at any time, twice too.

    One that keeps a tier through a restart (CacheKind.keeps) may be started again after a stop that keeps.
    """

    @property
    def children(self) -> tuple[Child, ...]:
        """Processes that we started, without which a run cannot go on."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes whose I/O is the storage tier's; none where it is the engine's or not known."""

    @property
    def backend(self) -> Backend | None:
        """What lies below it; None: RAM alone."""

    @property
    def precedes(self) -> bool:
        """Whether it has to answer before an engine starts; if not, both may come up at once."""

    def start(self) -> None:
        """Starts child processes, if any. Raises EngineError."""

    async def ready(self) -> None:
        """Waits until it would answer an engine. Raises EngineError with the log's last lines."""

    def connection(self) -> Connection:
        """For an engine that is about to start."""

    async def resolved(self) -> CacheResolved:
        """Once it is ready."""

    async def settle(self, engine: EngineSide) -> Reading:
        """Totals, after every store that was begun has ended. Raises EngineError where one never ends."""

    async def clear(self, tier: str) -> None:
        """Empties 'cpu', 'pool', 'disk' or 'remote', or drops chunks from the 'page_cache'; waits until done. Raises
        EngineError."""

    async def stop(self, *, keep: bool = False) -> None:
        """Ends what start began. keep: its storage stays, and another process of ours deletes it."""


async def clear_tiers(servers: Sequence[CacheServer], what: frozenset[str]) -> None:
    """Clears each of `what`. A disk that is emptied has nothing in the page cache, and emptying a tier may write files:
    so the page cache comes last, if at all. Where servers share a folder, the last one's clearing leaves it empty."""
    covered = {PAGE_CACHE} if "disk" in what else set()
    for tier in sorted(what - covered, key=lambda tier: (tier == PAGE_CACHE, tier)):
        for server in servers:
            await server.clear(tier)
