"""`harness io`: what runs did to their disks, what fio does to them, and a run's calls done again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from harness.commands.errors import DONE, told
from harness.errors import ConfigError, FioError, ReplayError


@told
def characterize(*folders: Annotated[Path, Parameter(help="Folders of runs that had storage.trace.")]) -> int:
    """Compares what runs did to their block devices and files.

    It makes io.json and report.html again.

    Example: harness io characterize results/*
    """
    from harness.report.io.tables import render_traces
    from harness.report.refresh import seal
    from harness.results.traced import read_io

    if not folders:
        raise ConfigError("no folder given; name a traced run's, e.g. harness io characterize results/*")
    found = []
    for folder in folders:
        seal(folder)
        if (io := read_io(folder)) is None:
            raise ConfigError(f"{folder}: holds no trace; run it again with --set storage.trace=true (root, bpftrace)")
        found.append(io)
    print(render_traces(found))
    return DONE


@told
def baseline(
    folder: Annotated[Path, Parameter(help="A folder on the storage in question.")],
    /,
    *,
    run: Annotated[Path | None, Parameter(help="A traced run: its sizes and depth too, and its efficiency.")] = None,
    seconds: Annotated[
        int,
        Parameter(help="How long each job reads, after a ramp of a twelfth of that; the published baselines take 120."),
    ] = 5,
) -> int:
    """Measures what fio reaches in a folder.

    Random reads of 128 KiB: psync with 32 jobs, and io_uring with 4 jobs of depth 64, registered files and buffers.
    With --run, also a job like the run's reads. Writes are sequential: they fill the files.

    Example: harness io baseline /mnt/nvme --run results/quickstart-vllm-…
    """
    from harness.blockio.fio import FIXED, as_the_run, measure
    from harness.experiment.units import format_bytes
    from harness.results.traced import read_io

    io = None if run is None else read_io(run)
    if run is not None and io is None:
        raise FioError(f"{run}: holds no io.json; run it with storage.trace, then harness io characterize {run}")
    best = 0.0
    for job in [*FIXED, *([as_the_run(io)] if io else [])]:
        found = measure(folder, job, seconds)
        best = max(best, found.read_bytes_per_s)
        print(
            f"{job.name:24} {format_bytes(job.block_bytes):>7}  read {format_bytes(found.read_bytes_per_s):>9}/s"
            f" p50 {found.read_p50_s * 1000:8.2f} ms   write {format_bytes(found.write_bytes_per_s):>9}/s"
            f" p50 {found.write_p50_s * 1000:8.2f} ms",
            flush=True,
        )
    for trace in io.traces if io else []:
        reached = trace.block.read.bytes_per_s or 0.0
        print(f"{run}: {format_bytes(reached)}/s while reading, {reached / best:.1%} of fio's best")
    return DONE


@told
def replay(
    run: Annotated[Path, Parameter(help="A traced run.")],
    folder: Annotated[Path, Parameter(help="Where to replay; files are made there, and removed.")],
    /,
    *,
    fio: Annotated[Path | None, Parameter(help="Write a fio job (and its iolog) into this folder instead.")] = None,
    timed: Annotated[bool, Parameter(help="Keep the times between calls; else as fast as it goes.")] = False,
) -> int:
    """Does a run's file calls again, in order, on another device.

    Example: harness io replay results/quickstart-vllm-… /mnt/other
    """
    from harness.blockio.replay import replay, run_operations, write_fio_job
    from harness.experiment.units import format_bytes

    steps = run_operations(run)
    if not folder.is_dir():
        raise ReplayError(f"{folder}: no such folder; name one on the device to replay on")
    if fio is not None:
        write_fio_job(steps, folder, fio)
        print(f"cd {fio} && fio run.fio")
        return DONE
    took_s, read, written = replay(steps, folder, timed=timed)
    print(f"{len(steps)} calls: {format_bytes(read)} read, {format_bytes(written)} written, {took_s:.3f} s in calls")
    return DONE
