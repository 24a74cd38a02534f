"""The tiers below the GPU, from the one next to it down: one to four levels, each with its size, rules and device.

    levels = standard_levels(tier_policy("sglang-0.5.23-hicache-wait"), tier_policy("mooncake-0.3.13"),
                             {"cpu": 36 << 30, "pool": 80 << 30, "remote": 14 << 40})

The first level's pack says how the engine and the tiers meet: what a store writes where, who reads ahead, what stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import msgspec

from simulator.calibration import TRANSFER, Calibration
from simulator.errors import ModelError
from simulator.policies import TierPolicy
from traces.tiers import PAGE_CACHE, Tier, all_tiers, tier_named, tier_names

# The calibration need not know the constants of a device that the core does not use.
UNUSED_DEVICE = SimpleNamespace(
    latency_s=0.0, chunk_s=0.0, byte_s=0.0, shared_byte_s=0.0, shared_chunk_s=0.0, depth=1, link=None
)


class RemoteDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A store that each instance reaches over a link of its own (core/src/tiers/remote.rs). An operation moves a chunk.

    latency_s: for which an operation waits. overhead_s: an instance's own work on each operation, one after another.
    bytes_per_s: of one link. total_bytes_per_s: of all instances together; inf: no bound. connections: operations that
    an instance has in flight. Reads and writes have these figures each.
    """

    latency_s: float = 0.0
    overhead_s: float = 0.0
    bytes_per_s: float
    total_bytes_per_s: float = math.inf
    connections: int = 1

    def __post_init__(self) -> None:
        times = (("latency_s", self.latency_s), ("overhead_s", self.overhead_s))
        for name, value in times:
            if not 0 <= value < math.inf:
                raise ModelError(f"remote device: {name} must be 0 or more, not {value:g}")
        for name, rate in (("bytes_per_s", self.bytes_per_s), ("total_bytes_per_s", self.total_bytes_per_s)):
            if not rate > 0 or (name == "bytes_per_s" and math.isinf(rate)):
                raise ModelError(f"remote device: {name} must be above 0, not {rate:g}")
        if self.connections < 1:
            raise ModelError(f"remote device: connections must be at least 1, not {self.connections}")


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """A tier below the GPU.

    name: the tier's (traces/tiers.py), which says whether it is memory or storage.
    policy: of memory, the pack by which it empties itself; of storage, the pack whose disk it is.
    device: whose constants of the calibration time it ("pool": pool.read.* and pool.write.*), or a remote device; None:
    the tier's own constants.
    shared: all instances of a cluster have it in common; so they have what is below it.
    exclusive: stores pass it by. It gets what the level above drops, and drops what the first level reads and keeps.
    """

    name: str
    capacity_bytes: int
    policy: TierPolicy
    device: str | RemoteDevice | None = None
    shared: bool = False
    exclusive: bool = False

    @property
    def tier(self) -> Tier:
        return tier_named(self.name)

    @property
    def stores(self) -> bool:
        """Whether it is no memory: the disk's rules of its pack are its own."""
        return self.tier.kind != "memory"


class DiskWays(NamedTuple):
    """How storage is read. odirect: past the page cache. bytes_per_s: the limit of its device. depth: workers that
    read chunks, for all requests in their order. external: the caller makes its transfers."""

    odirect: bool = False
    bytes_per_s: float | None = None
    depth: int = 1
    external: bool = False


def standard_levels(first: TierPolicy, below: TierPolicy, sizes: Mapping[str, int | None]) -> tuple[Level, ...]:
    """A level for each tier that has a size. first: the pack of the tier next to the GPU. below: that of other memory.
    Storage follows the pack of the memory above it."""
    levels: list[Level] = []
    for tier in all_tiers():
        if (size := sizes.get(tier.name)) is None or not tier.offload:
            continue
        stores = tier.kind != "memory"
        policy = first if tier.name == "cpu" or (stores and not levels) else levels[-1].policy if stores else below
        levels.append(Level(name=tier.name, capacity_bytes=size, policy=policy))
    return tuple(levels)


def check_levels(levels: Sequence[Level]) -> None:
    """ModelError: names that are no offload tier's, or in another order than that of the tiers; a shared level above a
    private one."""
    known = [name for name in tier_names() if tier_named(name).offload]
    names = [level.name for level in levels]
    if names != [name for name in known if name in names]:
        raise ModelError(f"levels: {', '.join(names)} must be some of {', '.join(known)}, each once and in this order")
    shared = [level.shared for level in levels]
    if shared != sorted(shared):
        raise ModelError("levels: a private level cannot be behind a shared one; share it too")
    if levels and levels[0].exclusive:
        raise ModelError(f"levels: {names[0]} is next to the GPU, and stores begin there; it cannot be exclusive")


def engine_facing(level: Level) -> TierPolicy:
    """The pack by which the engine and the level next to it meet. Storage without memory above it (GPU direct storage)
    empties itself as its pack's disk does, when a write needs room; without that, a full one takes no more."""
    if not level.stores:
        return level.policy
    return msgspec.structs.replace(level.policy, evict_on_demand=level.policy.disk_evicts, tick_s=0.0)


def private_levels(levels: Iterable[Level]) -> int:
    """How many levels, from the first one on, each instance has for itself; at least one."""
    return max(1, sum(not level.shared for level in levels))


def core_levels(
    levels: Sequence[Level], calibration: Calibration, chunk_bytes: int, ways: DiskWays
) -> list[SimpleNamespace]:
    """The levels as the core takes them (`core/src/tiers/config.rs`). CalibrationError: a constant that is unknown."""
    return [_core_level(index, level, calibration, chunk_bytes, ways) for index, level in enumerate(levels)]


def _core_level(
    index: int, level: Level, calibration: Calibration, chunk_bytes: int, ways: DiskWays
) -> SimpleNamespace:
    policy, device, chunk_bytes = level.policy, level.device or level.name, max(chunk_bytes, 1)
    stored, cached = level.stores, level.tier.kind == "storage" and level.device is None
    external = cached and ways.external
    ticks = None
    if index and not stored and not policy.evict_on_demand and policy.tick_s > 0:
        # The fields of the pack are those that the core looks for.
        ticks = policy
    return SimpleNamespace(
        name=level.name,
        chunks=level.capacity_bytes // chunk_bytes,
        eviction=policy.disk_eviction if stored else policy.eviction,
        lease_s=policy.lease_s,
        ticks=ticks,
        takes_dropped=level.exclusive or (stored and index > 0 and policy.disk_takes != "stores"),
        offload_every_s=policy.disk_heartbeat_s if stored and index and policy.disk_takes == "offloaded" else 0.0,
        writes_use=policy.writes_use and not stored,
        exclusive=level.exclusive,
        promotes=stored and index > 1 and policy.disk_promotes,
        buffer_chunks=policy.disk_buffer_bytes // chunk_bytes if stored else 0,
        evicts=policy.disk_evicts if stored else policy.evict_on_demand,
        watermark=policy.disk_watermark if stored else 1.0,
        target=policy.disk_target if stored else 1.0,
        read=UNUSED_DEVICE if external else _device(device, "read", calibration, chunk_bytes, ways if stored else None),
        write=UNUSED_DEVICE if external else _device(device, "write", calibration, chunk_bytes, None),
        page_cache_read=_device(PAGE_CACHE, "read", calibration, chunk_bytes, ways)
        if cached and index and not ways.odirect
        else None,
        external=external,
    )


def _device(
    of: str | RemoteDevice, way: str, calibration: Calibration, chunk_bytes: int, reads: DiskWays | None
) -> SimpleNamespace:
    """reads: how storage is read through it; None: it is no storage, or written to."""
    if isinstance(of, RemoteDevice):
        return SimpleNamespace(
            latency_s=0.0,
            chunk_s=of.overhead_s,
            byte_s=1 / of.bytes_per_s,
            shared_byte_s=1 / of.total_bytes_per_s,
            shared_chunk_s=0.0,
            depth=1,
            link=SimpleNamespace(latency_s=of.latency_s, connections=of.connections),
        )
    name = f"{of}.{way}"
    latency_s, chunk_s, bytes_per_s, shared_bytes_per_s = (calibration.constant(f"{name}.{one}") for one in TRANSFER)
    if reads is not None and reads.bytes_per_s is not None and not name.startswith(PAGE_CACHE):
        # An operation moves its data no faster than the device. The limit hides none of its other costs: LMCache's fs
        # opens, reads and closes one file after another (fs_l2_adapter.py, _execute_load).
        bytes_per_s = min(bytes_per_s, reads.bytes_per_s)
        shared_bytes_per_s = min(shared_bytes_per_s, reads.bytes_per_s)
    serial_s, copy_s, byte_s = 0.0, 0.0, 1 / bytes_per_s
    if reads is not None and calibration.copied_reads:
        cached, known = name.startswith(PAGE_CACHE), reads.bytes_per_s is not None
        # The kernel reads ahead while it copies: when the device is done, less than a whole copy is left.
        copied_by = name if known else f"{PAGE_CACHE}.read"
        copy_s = chunk_bytes / calibration.constant(f"{copied_by}.bytes_per_s")
        byte_s = 0.0 if cached else 1 / reads.bytes_per_s if reads.bytes_per_s is not None else byte_s
    if reads is not None and calibration.serial_chunks:
        serial_s = calibration.constant(f"{PAGE_CACHE}.read.chunk_s") + copy_s
    return SimpleNamespace(
        latency_s=latency_s,
        chunk_s=chunk_s + copy_s,
        byte_s=byte_s,
        shared_byte_s=1 / shared_bytes_per_s,
        shared_chunk_s=serial_s,
        depth=1 if reads is None else reads.depth,
        link=None,
    )
