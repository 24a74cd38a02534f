"""Where the disk tier lives: a reference device for the run, and how mode storage moves bytes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from harness.experiment.fields import PositiveFloat, Strict
from harness.experiment.units import Bytes, BytesPerS, Seconds


class DeviceSettings(Strict):
    """A reference device, made for the run: a real block device and file system that repeat to a percent.

    bandwidth and iops limit reads and writes apart; read_… and write_… take their place for one direction. latency is
    added to each request, and does not keep the device busy. backing None: RAM; else a folder for the file that holds
    the bytes. One limit at least, or a device of this machine's own speed would be no reference.

    size: the device's capacity.
    file_system: ext4, xfs or btrfs.
    bandwidth: the limit of reads, and of writes, apart.
    read_bandwidth: the limit of reads alone.
    write_bandwidth: the limit of writes alone.
    iops: operations per second of reads, and of writes, apart.
    read_iops: read operations per second.
    write_iops: write operations per second.
    latency: time added to each request.
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
    def _consistent(self) -> DeviceSettings:
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

    device: DeviceSettings | None = None
    trace: bool = False
