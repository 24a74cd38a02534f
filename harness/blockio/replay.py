"""Repeats a run's file calls in order on another device, or writes them as a fio job with an iolog.

The replay covers the calls in files.jsonl below the disk tier's folder: opens, reads, writes (of zeros) and syncs, at
their offsets. It first creates files that existed before the run, as long as the run's calls reach. Calls that
overlapped in the run follow one another in the replay.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from harness.collectors.bpf import FileCall, read_files
from harness.errors import ReplayError
from harness.results.folder import read_traces


class ReplayStep(msgspec.Struct, frozen=True):
    """One call. kind: open, read, write or sync; file: its number; offset and bytes as in the run."""

    at_s: float
    kind: str
    file: int
    offset: int = 0
    bytes: int = 0


def operations(calls: Sequence[FileCall], below: str) -> list[ReplayStep]:
    """The calls on files below a folder, in order; calls at the file's own position get explicit offsets."""
    files: dict[str, int] = {}
    numbers = itertools.count()
    position: dict[str, int] = {}
    found: list[ReplayStep] = []
    for call in sorted(calls, key=lambda call: call.at_s):
        if not call.path.startswith(below):
            continue
        if call.kind == "rename":
            if call.old_path in files:
                files[call.path] = files.pop(call.old_path)
            continue
        if call.path not in files:
            files[call.path] = next(numbers)
        number = files[call.path]
        if call.kind == "open":
            position[call.path] = 0
            found.append(ReplayStep(call.at_s, "open", number))
        elif call.kind == "sync":
            found.append(ReplayStep(call.at_s, "sync", number))
        elif call.bytes:
            at = call.offset if call.offset >= 0 else position.get(call.path, 0)
            position[call.path] = at + call.bytes
            found.append(ReplayStep(call.at_s, call.kind, number, at, call.bytes))
    return found


def run_operations(run: Path) -> list[ReplayStep]:
    """All operations of a traced run. Raises ReplayError."""
    found = [
        operation
        for place, about in read_traces(run)
        for operation in operations(read_files(place / "files.jsonl", about.zero_ns), about.path)
    ]
    if not found:
        raise ReplayError(f"{run}: holds no traced file calls; run it with storage.trace (root, bpftrace)")
    return found


def lengths(steps: Sequence[ReplayStep]) -> dict[int, int]:
    """Length in bytes that each file reaches."""
    ends: dict[int, int] = {}
    for step in steps:
        ends[step.file] = max(ends.get(step.file, 0), step.offset + step.bytes)
    return ends


def replay(steps: Sequence[ReplayStep], folder: Path, *, timed: bool = False) -> tuple[float, int, int]:
    """Returns seconds in calls, bytes read and bytes written. Drops a file's pages at each open: the device reads."""
    with tempfile.TemporaryDirectory(prefix="kv-harness-replay-", dir=folder) as own, _files(Path(own), steps) as files:
        begin_s, first_s, in_calls_s = time.perf_counter(), steps[0].at_s, 0.0
        moved = {"read": 0, "write": 0}
        for step in steps:
            file = files[step.file]
            if timed:
                time.sleep(max(0.0, step.at_s - first_s - (time.perf_counter() - begin_s)))
            if step.kind == "open":
                os.fdatasync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            began_s = time.perf_counter()
            if step.kind == "read":
                moved["read"] += len(os.pread(file, step.bytes, step.offset))
            elif step.kind == "write":
                moved["write"] += os.pwrite(file, bytes(step.bytes), step.offset)
            elif step.kind == "sync":
                os.fsync(file)
            in_calls_s += time.perf_counter() - began_s
    return in_calls_s, moved["read"], moved["write"]


@contextlib.contextmanager
def _files(folder: Path, steps: Sequence[ReplayStep]) -> Iterator[dict[int, int]]:
    """Opens files as long as the run's files, so that reads find bytes."""
    opened: dict[int, int] = {}
    try:
        for number, length in lengths(steps).items():
            opened[number] = os.open(folder / str(number), os.O_RDWR | os.O_CREAT)
            for at in range(0, length, 2**20):
                os.pwrite(opened[number], bytes(min(2**20, length - at)), at)
            os.fsync(opened[number])
        yield opened
    finally:
        for file in opened.values():
            os.close(file)


def iolog(steps: Sequence[ReplayStep], folder: Path) -> str:
    """The same operations as fio's iolog, version 2. Names are absolute: fio 3.33 crashes on relative ones."""
    lines = ["fio version 2 iolog"]
    names = {number: f"{folder.absolute()}/chunk-{number}" for number in lengths(steps)}
    lines += [f"{name} add" for name in names.values()] + [f"{name} open" for name in names.values()]
    for step in steps:
        if step.kind in ("read", "write"):
            lines.append(f"{names[step.file]} {step.kind} {step.offset} {step.bytes}")
        elif step.kind == "sync":
            lines.append(f"{names[step.file]} sync 0 0")
    return "\n".join([*lines, *(f"{name} close" for name in names.values())]) + "\n"


def write_fio_job(steps: Sequence[ReplayStep], folder: Path, into: Path) -> None:
    """Writes run.fio and run.iolog into a new folder: fio repeats the same operations with them."""
    into.mkdir(parents=True, exist_ok=True)
    (into / "run.iolog").write_text(iolog(steps, folder))
    largest = max(step.bytes for step in steps)
    (into / "run.fio").write_text(f"[run]\nread_iolog=run.iolog\nioengine=psync\nbs={largest}\n")
