"""Transfers of chunks on a real device, what they moved and how long it took, and in which order they were asked for.

The order is kept by request: a request's transfers follow from the load, while which of two requests comes first to
the device depends on the clock. The digest is over requests in the order of their ids, each with its operations in
the order in which it asked for them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harness.collectors.host import HostReading, between, read_host
from harness.stats import percentile
from harness.storage_records import LatencyParts, OperationFigures, StorageFigures
from simulator.storage import Ended, Operation, Store

SHARES = (0.5, 0.9, 0.95, 0.99, 0.999)
_WAYS = ("read", "write")


class Finished(NamedTuple):
    """A transfer whose operations have all ended, at ended_s of time.monotonic().

    error: the first that failed. failed: keys of those that did."""

    id: int
    began_s: float
    ended_s: float
    error: str | None
    failed: tuple[int, ...]


class Taken(NamedTuple):
    """Where the bytes of a write are already: slots of another tier's store in memory."""

    tier: int
    slots: Sequence[int]


class _Transfer:
    def __init__(self, write: bool, operations: int, began_s: float, *, taken: bool) -> None:
        self.write, self.left, self.began_s, self.ended_s = write, operations, began_s, began_s
        self.taken = taken
        self.error: str | None = None
        self.failed: list[int] = []


class _Way:
    """Operations of one direction: their three times, bytes, and those that failed."""

    def __init__(self) -> None:
        self.total_s, self.device_s, self.ended_s = array("d"), array("d"), array("d")
        self.moved_bytes, self.taken_bytes = array("q"), array("q")
        # Of whole transfers: their times, and when they ended.
        self.whole_s, self.whole_ended_s = array("d"), array("d")

    def add(self, one: Ended, *, taken: bool) -> None:
        self.total_s.append(one.ended_s - one.queued_s)
        self.device_s.append(one.ended_s - one.began_s)
        self.ended_s.append(one.ended_s)
        self.moved_bytes.append(one.bytes)
        self.taken_bytes.append(one.bytes if taken else 0)


class Transfers:
    """A store's transfers and their record."""

    def __init__(self, store: Store, chunk_bytes: int, folder: Path | None) -> None:
        self.store, self.chunk_bytes, self._folder = store, chunk_bytes, folder
        self._open: dict[int, _Transfer] = {}
        self._of_operation: dict[int, tuple[int, int]] = {}
        self._ended: list[Finished] = []
        self._next_operation = 0
        self._source_of: dict[int, int] = {}
        self.read_bytes = 0
        self.begin_record()

    def begin_record(self) -> None:
        """Forgets what was recorded; what is under way counts for the new record."""
        self._ways = {way: _Way() for way in _WAYS}
        self._errors: Counter[str] = Counter()
        self._asked: dict[str, hashlib._Hash] = {}
        self._first_s: float | None = None
        self._host: HostReading | None = None if self._folder is None else read_host(self._folder)
        self._host_end: HostReading | None = None

    @property
    def pending(self) -> bool:
        return bool(self._open or self._ended)

    def take_from(self, tier: int, store: Store) -> None:
        """Lets writes take bytes from the store of that tier, if it is in memory."""
        number = self.store.take_from(store)
        if number is not None:
            self._source_of[tier] = number

    def takes_from(self, tier: int) -> bool:
        return tier in self._source_of

    def begin(
        self,
        transfer: int,
        owner: str,
        write: bool,
        chunks: Sequence[tuple[int, int]],
        now_s: float,
        taken: Taken | None = None,
    ) -> None:
        """Queues a transfer of (key, slot) chunks for the request `owner`. now_s: of time.monotonic(). taken: where a
        write takes its bytes from; None: the store makes them."""
        digest = self._asked.setdefault(owner, hashlib.sha256())
        digest.update(b"".join(b"%s %d\n" % (b"W" if write else b"R", key) for key, _ in chunks))
        self._first_s = now_s if self._first_s is None else self._first_s
        self._open[transfer] = _Transfer(write, len(chunks), now_s, taken=taken is not None)
        sources: Sequence[tuple[int, int] | None] = [None] * len(chunks)
        if taken is not None:
            sources = [(self._source_of[taken.tier], slot) for slot in taken.slots]
        operations = []
        for (key, slot), source in zip(chunks, sources, strict=True):
            self._of_operation[self._next_operation] = transfer, key
            operations.append(Operation(self._next_operation, write, slot, key, source))
            self._next_operation += 1
        self.store.submit(operations)

    def poll(self, timeout_s: float) -> list[Finished]:
        """Transfers that have ended; waits for one if there is none."""
        if not self._ended:
            for one in self.store.poll(1, max(0.0, timeout_s)):
                self._operation_ended(one)
        ended, self._ended = self._ended, []
        return ended

    def _operation_ended(self, one: Ended) -> None:
        number, key = self._of_operation.pop(one.id)
        transfer = self._open[number]
        transfer.left -= 1
        transfer.ended_s = max(transfer.ended_s, one.ended_s)
        if one.error is None:
            self._ways[_WAYS[one.write]].add(one, taken=transfer.taken)
            self.read_bytes += 0 if one.write else one.bytes
        else:
            self._errors[one.error] += 1
            transfer.error = transfer.error or one.error
            transfer.failed.append(key)
        if not transfer.left:
            self._close(number)

    def _close(self, number: int) -> None:
        transfer = self._open.pop(number)
        way = self._ways[_WAYS[transfer.write]]
        way.whole_s.append(transfer.ended_s - transfer.began_s)
        way.whole_ended_s.append(transfer.ended_s)
        failed = tuple(transfer.failed)
        self._ended.append(Finished(number, transfer.began_s, transfer.ended_s, transfer.error, failed))

    def end_record(self) -> None:
        """Reads the device's own counters: what comes later is not the record's."""
        if self._host is not None and self._host_end is None:
            self._host_end = read_host(self._folder)

    def record(self, until_s: float | None = None) -> StorageFigures:
        """What moved, of operations that ended by until_s (time.monotonic(); None: all), and how long it took."""
        self.end_record()
        host = None if self._host is None or self._host_end is None else between(self._host, self._host_end)
        device = (None, None) if host is None else (host.device_read_bytes, host.device_write_bytes)
        ends = [end for way in self._ways.values() for end in way.ended_s if until_s is None or end <= until_s]
        last_s = max(ends, default=None)
        first_s = self._first_s
        io_s = sum(sum(self._whole(way, until_s)) for way in _WAYS)
        return StorageFigures(
            io=self.store.io,
            page_cache=self.store.buffered_because,
            operations_sha256=self.digest(),
            failed_operations=sum(self._errors.values()),
            errors=dict(self._errors.most_common(5)),
            moved_over_s=None if last_s is None or first_s is None else last_s - first_s,
            cumulative_io_s=io_s,
            read=self._way("read", device[0], until_s),
            write=self._way("write", device[1], until_s),
        )

    def digest(self) -> str:
        """sha256 over all requests' operations; see the module's docstring."""
        whole = hashlib.sha256()
        for owner in sorted(self._asked):
            whole.update(f"{owner} {self._asked[owner].hexdigest()}\n".encode())
        return whole.hexdigest()

    def _whole(self, name: str, until_s: float | None) -> list[float]:
        """Seconds of each transfer that ended by then."""
        way = self._ways[name]
        ended = zip(way.whole_s, way.whole_ended_s, strict=True)
        return [took_s for took_s, end_s in ended if until_s is None or end_s <= until_s]

    def _way(self, name: str, device_bytes: int | None, until_s: float | None) -> OperationFigures:
        way = self._ways[name]
        within = [i for i, end in enumerate(way.ended_s) if until_s is None or end <= until_s]
        total_s, device_s = [way.total_s[i] for i in within], [way.device_s[i] for i in within]
        host_s = [total - device for total, device in zip(total_s, device_s, strict=True)]
        return OperationFigures(
            operations=len(within),
            asked_bytes=len(within) * self.chunk_bytes,
            moved_bytes=sum(way.moved_bytes[i] for i in within),
            taken_bytes=sum(way.taken_bytes[i] for i in within),
            device_bytes=device_bytes,
            latency_s=LatencyParts(total=percentiles(total_s), device=percentiles(device_s), host=percentiles(host_s)),
            transfer_s=percentiles(self._whole(name, until_s)),
        )


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50 to p99.9, by name; None: there are no values."""
    return {f"p{100 * share:g}": percentile(values, share) for share in SHARES}
