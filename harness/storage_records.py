"""What is recorded of real devices: operations, their times, and what requests did with KV entries."""

from __future__ import annotations

import msgspec


class LatencyParts(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles (p50, p90 …) of an operation's seconds, and of its two parts. None: there was no operation."""

    total: dict[str, float | None]
    device: dict[str, float | None]
    host: dict[str, float | None]


class OperationFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All operations of one direction. device_bytes: what the device counted; None: it does not say.

    transfer_s: percentiles of whole transfers, each of one or more operations that were asked for together.
    taken_bytes: of moved_bytes, those that a write took straight from the memory of a tier above: no operation of that
    tier read them."""

    operations: int
    asked_bytes: int
    moved_bytes: int
    device_bytes: int | None
    latency_s: LatencyParts
    transfer_s: dict[str, float | None] = {}
    taken_bytes: int = 0


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens over a time, and which tokens over which time. None: no time has passed."""

    tokens_per_s: float | None
    formula: str


class RealTierFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one tier's device did, and what it held at the end. device: as the settings name it, e.g. 'ram'."""

    device: str
    read: OperationFigures
    write: OperationFigures
    entries: int
    held_bytes: int


class HitFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Look-ups of one kind of entry, and those that a tier held."""

    asked: int
    hit: int
    asked_tokens: int
    hit_tokens: int


class KvFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What requests did with KV entries, of requests that finished in the measured time; bytes are whole slots.

    hits: by kind of entry. load, prefill, decode: bytes of entries read before the first token, written, and read again
    for output tokens. demoted, dropped: bytes that moved down to make room, and that the last tier gave up, for these
    requests. amplification: tokens whose KV was read, over tokens generated; None: none was generated.
    io_s, queue_s, generation_s, end_to_end_s: mean and percentiles of a request's waits for transfers, for its turn and
    for its tokens, and of all of it from when it was meant to go. by_tier: of each tier, the nearest first.
    """

    hits: dict[str, HitFigures]
    load_read_bytes: int
    prefill_write_bytes: int
    decode_read_bytes: int
    demoted_bytes: int
    dropped_bytes: int
    amplification: float | None
    io_s: dict[str, float | None]
    queue_s: dict[str, float | None]
    generation_s: dict[str, float | None]
    end_to_end_s: dict[str, float | None]
    by_tier: dict[str, RealTierFigures]


class StorageFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the storage device did in one cell.

    page_cache: why bytes pass through the page cache; None: they do not. moved_over_s: from the first operation to the
    last one's end. cumulative_io_s: the sum of all transfers' times. errors: the most frequent ones, and how often.
    Only a load that tiers without an engine serve has the fields from `complete` on. The figures of a device are then
    those of the last tier, and cumulative_io_s is the sum of the times that requests waited for transfers.
    """

    io: str
    page_cache: str | None
    operations_sha256: str
    failed_operations: int
    errors: dict[str, int]
    moved_over_s: float | None
    cumulative_io_s: float
    read: OperationFigures
    write: OperationFigures
    complete: bool | None = None
    elapsed_s: float | None = None
    requests_finished: int | None = None
    requests_cut_off: int | None = None
    output_tokens: int | None = None
    kv_tokens: int | None = None
    throughput: dict[str, Throughput] | None = None
    kv: KvFigures | None = None
