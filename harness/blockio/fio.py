"""fio's speed in a folder, and a run's share of it: an independent yardstick.

The fixed jobs repeat the two baselines of D. A. Phan, "LLM KV Cache Performance Characterization When Using Disk
Offloading for Prefix Caching", September 2025: random reads of 128 KiB past the page cache, with a ramp of a twelfth of
the measured time. Appendix A (NFS) uses psync with 32 jobs. Appendix B (NVMe) uses io_uring with depth 64, 4 jobs, and
registered files and buffers. Both measure for 120 s after a ramp of 10 s. The appendices read one large file or the raw
device; these jobs read files of their own in the folder.

Sequential writes of the same size fill the files first, and their speed is reported, too; the appendices have none.
The job `as the run` has the block size, the queue depth and the order of a traced run's reads at its device.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Literal

import msgspec

from harness.errors import FioError
from harness.experiment.units import format_bytes
from harness.results.traced import IoFigures


class Job(msgspec.Struct, frozen=True):
    """One fio job: I/O engine, block size in bytes, number of parallel jobs, queue depth and order of the reads.

    registered: io_uring's files and buffers are registered once, not mapped for each request.
    """

    name: str
    engine: str
    block_bytes: int
    jobs: int
    depth: int = 1
    reads: Literal["randread", "read"] = "randread"
    registered: bool = False


class Baseline(msgspec.Struct, frozen=True):
    """A job's bandwidth and median latency for reads and writes."""

    job: Job
    read_bytes_per_s: float
    write_bytes_per_s: float
    read_p50_s: float
    write_p50_s: float


FIXED = (
    Job("psync 128k x 32", "psync", 2**17, 32),
    Job("io_uring 128k QD64 x 4", "io_uring", 2**17, 4, 64, registered=True),
)
_FILE_BYTES = 256 * 2**20
# The appendices' 10 s before their 120 s.
_RAMP_SHARE = 1 / 12


def measure(folder: Path, job: Job, seconds: int, file_bytes: int = _FILE_BYTES) -> Baseline:
    """Writes, then reads, with O_DIRECT, in a temporary folder below the given one. Raises FioError."""
    if not shutil.which("fio"):
        raise FioError("fio is not installed; run: sudo apt-get install -y fio")
    if not folder.is_dir():
        raise FioError(f"{folder}: no such folder; name one on the storage in question")
    if shutil.disk_usage(folder).free < 1.1 * file_bytes:
        raise FioError(f"{folder}: needs {format_bytes(1.1 * file_bytes)} free for fio's files; make room")
    with tempfile.TemporaryDirectory(prefix="kv-harness-fio-", dir=folder) as own:
        written = _run(fill_command(Path(own), job, file_bytes), "write", folder)
        read = _run(read_command(Path(own), job, file_bytes, seconds), "read", folder)
    return Baseline(job, read[0], written[0], read[1], written[1])


def fill_command(folder: Path, job: Job, file_bytes: int) -> list[str]:
    """Fills each job's file completely and in order, so that the reading job finds every byte."""
    return [*_command(folder, job, file_bytes), "--rw=write"]


def read_command(folder: Path, job: Job, file_bytes: int, seconds: int) -> list[str]:
    """Reads the filled files for `seconds` after the ramp."""
    ramp_ms = round(seconds * 1000 * _RAMP_SHARE)
    return [
        *_command(folder, job, file_bytes),
        f"--rw={job.reads}",
        "--time_based",
        f"--runtime={seconds}",
        f"--ramp_time={ramp_ms}ms",
    ]


def _command(folder: Path, job: Job, file_bytes: int) -> list[str]:
    each = max(job.block_bytes, file_bytes // job.jobs // job.block_bytes * job.block_bytes)
    command = ["fio", "--name=baseline", f"--directory={folder}", f"--ioengine={job.engine}", "--direct=1"]
    command += [f"--bs={job.block_bytes}", f"--numjobs={job.jobs}", f"--iodepth={job.depth}", f"--size={each}"]
    command += ["--registerfiles=1", "--fixedbufs=1"] if job.registered else []
    return [*command, "--group_reporting", "--output-format=json"]


def _run(command: list[str], direction: str, folder: Path) -> tuple[float, float]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = " ".join(done.stderr.split())[-300:]
        raise FioError(f"fio failed in {folder}: {words}; check that its file system supports O_DIRECT")
    side = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][direction]
    return side["bw_bytes"], side["clat_ns"]["percentile"]["50.000000"] / 1e9


def as_the_run(io: IoFigures) -> Job:
    """A job with a traced run's mean read depth, its order, and the request size that carried the most bytes."""
    read = io.traces[0].block.read
    if not read.depth:
        raise FioError("the run's trace holds no reads; measure disk_cold in a traced run")
    size = max(read.sizes, key=lambda low: low * read.sizes[low])
    order: Literal["randread", "read"] = "read" if read.sequential >= read.random else "randread"
    return Job("as the run", "io_uring", size, 1, max(1, round(read.depth)), order)
