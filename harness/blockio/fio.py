"""fio's speed in a folder, and a run's share of it: an independent yardstick.

The two fixed jobs are those of the paper's appendices (psync 128k by 32 jobs; io_uring 128k, depth 64, by 4 jobs).
The job `as the run` has the block size and the queue depth of a traced run at its device.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import msgspec

from harness.errors import FioError
from harness.experiment.units import format_bytes
from harness.results.traced import IoFigures


class Job(msgspec.Struct, frozen=True):
    """One fio job: I/O engine, block size in bytes, number of parallel jobs and queue depth."""

    name: str
    engine: str
    block_bytes: int
    jobs: int
    depth: int = 1


class Baseline(msgspec.Struct, frozen=True):
    """A job's bandwidth and median latency for reads and writes."""

    job: Job
    read_bytes_per_s: float
    write_bytes_per_s: float
    read_p50_s: float
    write_p50_s: float


FIXED = (Job("psync 128k x 32", "psync", 2**17, 32), Job("io_uring 128k QD64 x 4", "io_uring", 2**17, 4, 64))
_FILE_BYTES = 256 * 2**20


def measure(folder: Path, job: Job, seconds: int, file_bytes: int = _FILE_BYTES) -> Baseline:
    """Writes, then reads, with O_DIRECT, in a temporary folder below the given one. Raises FioError."""
    if not shutil.which("fio"):
        raise FioError("fio is not installed; run: sudo apt-get install -y fio")
    if not folder.is_dir():
        raise FioError(f"{folder}: no such folder; name one on the storage in question")
    if shutil.disk_usage(folder).free < 1.1 * file_bytes:
        raise FioError(f"{folder}: needs {format_bytes(1.1 * file_bytes)} free for fio's files; make room")
    with tempfile.TemporaryDirectory(prefix="kv-harness-fio-", dir=folder) as own:
        written = _run(Path(own), job, "write", seconds, file_bytes)
        read = _run(Path(own), job, "read", seconds, file_bytes)
    return Baseline(job, read[0], written[0], read[1], written[1])


def _run(folder: Path, job: Job, direction: str, seconds: int, file_bytes: int) -> tuple[float, float]:
    each = max(job.block_bytes, file_bytes // job.jobs // job.block_bytes * job.block_bytes)
    command = [
        "fio",
        "--name=baseline",
        f"--directory={folder}",
        f"--rw={direction}",
        "--direct=1",
        "--group_reporting",
    ]
    command += [f"--bs={job.block_bytes}", f"--numjobs={job.jobs}", f"--iodepth={job.depth}", f"--size={each}"]
    # The writing job fills the files completely, so that the reading job finds every byte.
    command += [f"--ioengine={job.engine}", "--direct=1", "--group_reporting", "--output-format=json"]
    command += [] if direction == "write" else ["--time_based", f"--runtime={seconds}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = " ".join(done.stderr.split())[-300:]
        raise FioError(f"fio failed in {folder}: {words}; check that its file system supports O_DIRECT")
    side = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][direction]
    return side["bw_bytes"], side["clat_ns"]["percentile"]["50.000000"] / 1e9


def as_the_run(io: IoFigures) -> Job:
    """A job with a traced run's mean read depth and the request size that carried the most bytes."""
    read = io.traces[0].block.read
    if not read.depth:
        raise FioError("the run's trace holds no reads; measure disk_cold in a traced run")
    size = max(read.sizes, key=lambda low: low * read.sizes[low])
    return Job("as the run", "io_uring", size, 1, max(1, round(read.depth)))
