"""The section `engines.sim`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from harness.experiment.fields import Positive, Strict
from harness.experiment.units import Bytes, BytesPerS, Seconds
from traces.tiers import all_tiers


class StorageSettings(Strict):
    """Modes storage and tiers: how the disk tier's bytes move.

    layout slab: all chunks in one preallocated file; files: a file a chunk, by the system calls of LMCache's adapter
    (cache.disk.adapter, cache.disk.odirect), which also says how many go on at once, so that io, depth, direct and
    fsync are not for it. io auto: io_uring where the kernel lets us, else threads. depth: operations that the device
    has at once. fsync: a write has ended when it is durable. verify: what is read is compared with what was written.
    reserve: what the file system keeps free. keep_files: the chunks' file or files stay. compute none: the GPU takes no
    time, in mode storage; mode tiers has no engine that computes.

    device: where the bytes go: a file on the disk tier's path, RAM, nowhere, or GPU memory.
    direct: O_DIRECT reads and writes.
    """

    device: Literal["file", "ram", "null", "gpu"] = "file"
    layout: Literal["slab", "files"] = "slab"
    io: Literal["auto", "io_uring", "threads"] = "auto"
    depth: Annotated[int, Field(ge=1, le=4096)] = 16
    direct: bool = True
    fsync: bool = False
    verify: bool = False
    reserve: Bytes = 2**30
    keep_files: bool = False
    compute: Literal["simulated", "none"] = "simulated"

    @model_validator(mode="after")
    def _consistent(self) -> StorageSettings:
        if self.layout == "files":
            if self.device != "file":
                raise ValueError(f"layout files is of device file, not of {self.device}; correct one of them")
            if others := sorted({"io", "depth", "direct", "fsync"} & self.model_fields_set):
                raise ValueError(
                    f"{others[0]} is for layout slab; with files LMCache's adapter decides (cache.disk.adapter and"
                    " cache.disk.odirect); leave it out"
                )
        return self


class RemoteDeviceSettings(Strict):
    """A store that each instance reaches over a link of its own. Reads and writes have these figures each.

    latency: what an operation, one chunk, waits for.
    overhead: an instance's own work on each operation, one after another.
    bandwidth: of one instance's link.
    total_bandwidth: of all instances together; null: no bound.
    connections: operations that an instance has in flight.
    """

    latency: Seconds = 0.0
    overhead: Seconds = 0.0
    bandwidth: BytesPerS
    total_bandwidth: BytesPerS | None = None
    connections: Positive

    @model_validator(mode="after")
    def _moves(self) -> RemoteDeviceSettings:
        if not self.bandwidth or self.total_bandwidth == 0:
            raise ValueError("a bandwidth of 0 would never answer; give it one, e.g. 1.25GB/s")
        return self


class TiersSettings(Strict):
    """Mode tiers: no engine is simulated; requests read and write KV entries in every tier, on real devices.

    entry: what is kept and evicted whole: a chunk of cache.chunk_tokens, or what one turn adds to a prompt, in whole
    chunks (turn). placement: what makes room for a new entry, see docs/storage.md. tier_share: how much of a tier above
    another one is used. gpu: the GPU tier's bytes are in GPU memory, or stand in this machine's RAM.
    decode_read_tokens: a request reads again for every so many output tokens; 0: never. decode_reads: it then reads its
    whole context, or what its turn added, and that once more before the first token (turn).
    token_time: how long each output token takes; the MLPerf benchmark has 0, 2 and 30 ms. max_writes: entries that
    requests write at once; 0: any number. prefill_only_tokens: a turn that adds so many tokens ends with its prefill;
    null: none does.
    """

    entry: Literal["chunk", "turn"] = "chunk"
    placement: Literal["waterfall", "spillover"] = "waterfall"
    tier_share: Annotated[float, Field(gt=0.0, le=1.0, strict=False)] = 0.8
    gpu: Literal["gpu", "ram"] = "gpu"
    decode_read_tokens: Annotated[int, Field(ge=0, le=2**24)] = 32
    decode_reads: Literal["context", "turn"] = "context"
    token_time: Seconds = 0.0
    max_writes: Annotated[int, Field(ge=0, le=2**20)] = 0
    prefill_only_tokens: Positive | None = None


class SimSettings(Strict):
    """The simulator: whose cost constants, whose cache rules; modes storage and tiers move bytes for real.

    mode: model computes the disk tier's times; storage moves its bytes on a real device, on the wall clock; tiers moves
    those of every tier, and has no engine.
    hardware: a name of `harness list presets`, or a calibration file.
    host_time: how much longer the host's own work takes than on the machine that hardware is of, e.g. 1.4 where its
    cores are that much slower. What a GPU computes or a device reads takes as long as there.
    disk: another one, whose disk stands behind hardware's GPU and CPU RAM; null: hardware's own.
    engine_policy: the pack of the engine's rules, in simulator/policies/.
    tier_policy: the pack of the cache server's rules, in simulator/policies/.
    pool_policy: that of a memory pool behind cache.cpu, and of the disk behind such a pool.
    policies: packs by tier, in place of these two, e.g. {disk: lru}.
    devices: what times a tier: another tier, whose constants the calibration has, or a remote device's figures.
    pool_lease: how long the pool keeps what was asked for, where its pack has leases; null: the pack's.
    max_batched_tokens: tokens in one step of the scheduler at most.
    max_sequences: requests in one step of the scheduler at most.
    token_times: rows keep the moment of every token.
    storage: how bytes move.
    tiers: what requests do in mode tiers.
    """

    mode: Literal["model", "storage", "tiers"] = "model"

    hardware: str = "cpu-2core"
    host_time: Annotated[float, Field(gt=0.0, le=100.0, strict=False)] = 1.0
    disk: str | None = None
    engine_policy: str = "vllm-0.32"
    tier_policy: str = "lmcache-0.5.6-mp"
    pool_policy: str = "mooncake-0.3.13"
    policies: dict[str, str] = Field(default_factory=dict)
    devices: dict[str, str | RemoteDeviceSettings] = Field(default_factory=dict)
    pool_lease: Seconds | None = None
    max_batched_tokens: Positive = 2048
    max_sequences: Positive = 256
    token_times: bool = False
    storage: StorageSettings = StorageSettings()
    tiers: TiersSettings = TiersSettings()

    @model_validator(mode="after")
    def _named(self) -> SimSettings:
        below = [tier.name for tier in all_tiers() if tier.offload]
        devices = [name for name in self.devices.values() if isinstance(name, str)]
        for key, names in (("policies", self.policies), ("devices", self.devices), ("devices", devices)):
            if unknown := [name for name in names if name not in below]:
                raise ValueError(f"{key} names {unknown[0]}, no tier below the GPU; use some of {', '.join(below)}")
        return self
