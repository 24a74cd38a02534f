"""The section `engines.sim`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from harness.experiment.fields import Positive, Strict
from harness.experiment.units import Bytes


class StorageSettings(Strict):
    """Mode storage: how the disk tier's bytes move. With cache.gpu 0B all KV is on disk, and no engine is simulated.

    layout slab: all chunks in one preallocated file; files: a file a chunk, by the system calls of LMCache's adapter
    (cache.disk.adapter, cache.disk.odirect), which also says how many go on at once, so that io, depth, direct and
    fsync are not for it. io auto: io_uring where the kernel lets us, else threads. depth: operations that the device
    has at once. fsync: a write has ended when it is durable. verify: what is read is compared with what was written.
    reserve: what the file system keeps free. keep_files: the chunks' file or files stay. compute none: the GPU takes no
    time.
    decode_read_tokens: with cache.gpu 0B, the context is read again for every so many output tokens; 0: never.

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
    decode_read_tokens: Annotated[int, Field(ge=0, le=2**24)] = 32

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


class SimSettings(Strict):
    """The simulator: whose cost constants, whose cache rules; mode storage moves the disk tier's bytes for real.

    mode: model computes the disk tier's times; storage moves its bytes on a real device, on the wall clock.
    hardware: a name of `harness list presets`, or a calibration file.
    disk: another one, whose disk stands behind hardware's GPU and CPU RAM; null: hardware's own.
    engine_policy: the pack of the engine's rules, in simulator/policies/.
    tier_policy: the pack of the cache server's rules, in simulator/policies/.
    max_batched_tokens: tokens in one step of the scheduler at most.
    max_sequences: requests in one step of the scheduler at most.
    token_times: rows keep the moment of every token.
    storage: how mode storage moves bytes.
    """

    mode: Literal["model", "storage"] = "model"

    hardware: str = "cpu-2core"
    disk: str | None = None
    engine_policy: str = "vllm-0.32"
    tier_policy: str = "lmcache-0.5.6-mp"
    max_batched_tokens: Positive = 2048
    max_sequences: Positive = 256
    token_times: bool = False
    storage: StorageSettings = StorageSettings()
