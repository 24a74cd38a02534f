"""Real devices: chunks of KV written to and read from a file, memory, a GPU's memory, or nothing.

    with open_store(StoreSettings(folder=Path("/mnt/nvme"), chunk_bytes=8 << 20, slots=256, depth=16)) as store:
        ended = store.run([Operation(id=0, write=True, slot=0, key=7), Operation(id=1, write=True, slot=1, key=8)])

A store has `slots` slots of one chunk each. Layout slab is one file without a name: nothing stays behind, however the
process ends; keep_files gives it a name. It measures the device. Layout files is a file a chunk, in a folder of its
own, by the system calls of LMCache's adapters: it also measures opening and renaming. `close` removes the folder,
unless keep_files. Content compresses badly and carries the chunk's key (`verify`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Protocol

import msgspec

from simulator import _core
from simulator.errors import StoreError

DeviceKind = Literal["file", "ram", "null", "gpu"]
Layout = Literal["slab", "files"]
AdapterName = Literal["fs", "fs_native"]


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """folder: the file's folder (device 'file' only); layout files makes it. chunk_bytes: rounded up to the 4 KiB that
    direct I/O moves. With layout files, `adapter` decides what runs at once: depth and io have no effect, and fsync is
    refused. model_name is part of the files' names, as in LMCache (a directory's listing order depends on the length
    of the names).

    depth: operations that the device has at once. io: 'io_uring', 'threads', or 'auto' (io_uring where it is allowed).
    direct: bypass the page cache (O_DIRECT) where the file system can. fsync: a write ends once it is durable. verify:
    compare reads with what was written. reserve_bytes: what the file system keeps free.
    """

    device: DeviceKind = "file"
    layout: Layout = "slab"
    adapter: AdapterName = "fs"
    model_name: str = "model"
    folder: Path = Path()
    chunk_bytes: int
    slots: int
    depth: int = 16
    io: Literal["auto", "io_uring", "threads"] = "auto"
    direct: bool = True
    fsync: bool = False
    verify: bool = False
    preallocate: bool = True
    reserve_bytes: int = 1 << 30
    keep_files: bool = False


class Operation(NamedTuple):
    """One chunk to write to, or to read from, a slot. key: the chunk's name, which its content carries.

    source: of a write: another store's number (`take_from`) and its slot, whose bytes are written as they are; nothing
    may write that slot before the operation has ended. None: the store makes the content."""

    id: int
    write: bool
    slot: int
    key: int
    source: tuple[int, int] | None = None


class Ended(NamedTuple):
    """What came of an operation. Times are time.monotonic()'s: queued, handed to the device, ended (durable, if
    asked). bytes: the bytes moved, whole slots unless the operation failed."""

    id: int
    write: bool
    queued_s: float
    began_s: float
    ended_s: float
    bytes: int
    error: str | None


def ended_of(ended: _core.Ended) -> Ended:
    return Ended(
        id=ended.id,
        write=ended.write,
        queued_s=ended.queued_s,
        began_s=ended.began_s,
        ended_s=ended.ended_s,
        bytes=ended.bytes,
        error=ended.error,
    )


class Store(Protocol):
    """Operations in, ends out, in the order of the ends. slot_bytes: what each operation moves."""

    slot_bytes: int
    io: str
    buffered_because: str | None

    @property
    def core(self) -> _core.Store | None:
        """The core's store, if it is one: stores of the core take bytes from each other's memory."""

    @property
    def pending(self) -> int:
        """Operations that have not ended."""

    def take_from(self, other: Store, /) -> int | None:
        """The number by which operations here name `other` as their source; None: they cannot take bytes from it."""

    def submit(self, operations: Sequence[Operation]) -> None:
        """Queues operations, in order, as one transfer. ValueError: a slot that does not exist."""

    def forget(self, keys: Sequence[int]) -> None:
        """Forgets chunks, whose operations have all ended. Deletes their files, if each chunk has one."""

    def poll(self, least: int, timeout_s: float) -> list[Ended]:
        """At least `least` ends, or those there are once the time is over or nothing is pending."""

    def close(self) -> None:
        """Waits for operations in flight and frees everything. Safe to call twice."""


class CoreStore:
    """A file, memory or nothing, in the Rust core. It releases the interpreter's lock while it waits.

    It belongs to the thread that made it: RuntimeError in another.
    """

    def __init__(self, settings: StoreSettings) -> None:
        """Raises StoreError."""
        for name, least in (("chunk_bytes", 1), ("slots", 1), ("depth", 1), ("reserve_bytes", 0)):
            if getattr(settings, name) < least:
                raise StoreError(f"{name} must be at least {least}, not {getattr(settings, name)}")
        try:
            self.core = _core.Store(settings)
        except (OSError, OverflowError, TypeError) as error:
            raise StoreError(" ".join(str(error).split())) from None
        about = self.core.about
        self.slot_bytes, self.io, self.path = about.slot_bytes, about.io, about.path
        self.buffered_because = about.buffered_because

    @property
    def pending(self) -> int:
        return self.core.pending

    def take_from(self, other: Store) -> int | None:
        return None if other.core is None else self.core.take_from(other.core)

    def submit(self, operations: Sequence[Operation]) -> None:
        self.core.submit(operations)

    def poll(self, least: int, timeout_s: float) -> list[Ended]:
        return [ended_of(one) for one in self.core.poll(least, timeout_s)]

    def run(self, operations: Sequence[Operation]) -> list[Ended]:
        """Runs all of them, as fast as they go."""
        return [ended_of(one) for one in self.core.run(operations)]

    def forget(self, keys: Sequence[int]) -> None:
        self.core.forget(keys)

    def close(self) -> None:
        self.core.close()

    def __enter__(self) -> CoreStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
