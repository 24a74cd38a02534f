"""Where the disk tier lives: a reference device for the run, and how mode storage moves bytes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from harness.experiment.fields import PositiveFloat, Strict
from harness.experiment.units import Bytes, BytesPerS, Seconds


class Device(Strict):
    """A reference device, made for the run: a real block device and file system that repeat to a percent.

    bandwidth and iops limit reads and writes apart; read_… and write_… take their place for one direction. latency is
    added to each request, and does not keep the device busy. backing None: RAM; else a folder for the file that holds
    the bytes. One limit at least, or a device of this machine's own speed would be no reference.
    """

    size: Bytes = 4 * 2**30
    file_system: Annotated[str, Field(pattern=r"^[a-z0-9]{2,16}$")] = "ext4"
    bandwidth: BytesPerS | None = None
    read_bandwidth: BytesPerS | None = None
    write_bandwidth: BytesPerS | None = None
    iops: PositiveFloat | None = None
    read_iops: PositiveFloat | None = None
    write_iops: PositiveFloat | None = None
    latency: Seconds = 0.0
    backing: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Device:
        limits = (self.bandwidth, self.read_bandwidth, self.write_bandwidth, self.iops, self.read_iops, self.write_iops)
        if all(limit is None for limit in limits):
            raise ValueError("names no limit; give it a bandwidth, e.g. 400MiB/s, or iops")
        if any(limit is not None and not limit for limit in limits):
            raise ValueError("a bandwidth of 0 would never answer; leave it out for no limit")
        if self.size < 320 * 2**20:
            raise ValueError(f"size {self.size} bytes is too small for a file system; use 320MiB or more")
        return self


class Storage(Strict):
    """Where the disk tier lives, and whether its I/O is traced.

    device: a reference device made for the run, in place of cache.disk.path. trace: bpftrace follows the tier's block
    device and the files of the cache server's processes while cells are measured (root).
    """

    device: Device | None = None
    trace: bool = False


class StorageSettings(Strict):
    """Mode storage: how the disk tier's bytes move. With cache.gpu 0B all KV is on disk, and no engine is simulated.

    layout slab: all chunks in one preallocated file; files: a file a chunk, by the system calls of LMCache's adapter
    (cache.disk.adapter, cache.disk.odirect), which also says how many go on at once, so that io, depth, direct and
    fsync are not for it. io auto: io_uring where the kernel lets us, else threads. depth: operations that the device
    has at once. fsync: a write has ended when it is durable. verify: what is read is compared with what was written.
    reserve: what the file system keeps free. keep_files: the chunks' file or files stay. compute none: the GPU takes no
    time.
    decode_read_tokens: with cache.gpu 0B, the context is read again for every so many output tokens; 0: never.
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
