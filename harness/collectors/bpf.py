"""Traces block requests and file calls with bpftrace during a measurement (the scripts are in bpf/).

    trace = BpfTrace(folder, device_number=…, pids=[…])
    await trace.start(); …; lost = await trace.stop()

bpftrace writes one JSON object per line to folder/block.jsonl and folder/files.jsonl. `read_block` and `read_files`
parse these files. They return times in seconds since the moment `zero_ns` on bpftrace's clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import TracingError

SCRIPTS = Path(__file__).parent / "bpf"
BTF = Path("/sys/kernel/btf/vmlinux")
TRACEFS = (Path("/sys/kernel/tracing/events"), Path("/sys/kernel/debug/tracing/events"))
_CALLS = {"R": "read", "W": "write", "F": "sync"}
# Each file event has _WORDS numbers. Its path follows in at most _PARTS parts of _PART_BYTES bytes
# (BPFTRACE_STRLEN without the terminating zero).
_WORDS, _PARTS, _PART_BYTES = 6, 6, 63
_NAMED = ("O", "M", "N")
_MAX_PIDS = 8
_START_TIMEOUT_S, _STOP_TIMEOUT_S, _SETTLE_TIMEOUT_S, _ASK_AGAIN_S = 30.0, 15.0, 10.0, 3.0
# bpftrace has printed everything once the files keep their sizes for this many polls in a row.
_POLL_S, _STILL_POLLS = 0.05, 4
_CLOCK_LOOKS = 9
_FALLBACKS = (
    "without it samples.jsonl still has bytes from /proc/PID/io (storage_read_bytes) and from diskstats (host.device_…)"
)


class BlockRequest(msgspec.Struct, frozen=True):
    """One request at the block device. queued_s is None if the kernel split the request off another one.

    completed_s is None if the trace missed the completion: the kernel skips a tracepoint's program that would
    interrupt another one.
    """

    queued_s: float | None
    issued_s: float
    completed_s: float | None
    sector: int
    bytes: int
    write: bool


class FileCall(msgspec.Struct, frozen=True):
    """One call on a file. kind: open, read, write, sync or rename.

    For a rename, path is the new name and old_path the former one.
    """

    kind: str
    at_s: float
    took_s: float
    pid: int
    path: str
    offset: int = -1
    bytes: int = 0
    flags: int = 0
    old_path: str = ""


def check_traceable() -> None:
    """Raises TracingError if bpftrace cannot trace on this machine."""
    if os.geteuid() != 0:
        raise TracingError(f"storage.trace: bpftrace needs root; use sudo, or leave trace out ({_FALLBACKS})")
    if not shutil.which("bpftrace"):
        raise TracingError(f"storage.trace: no bpftrace here; run: sudo apt-get install -y bpftrace ({_FALLBACKS})")
    if not any(place.is_dir() for place in TRACEFS):
        cure = "sudo mount -t tracefs tracefs /sys/kernel/tracing"
        raise TracingError(f"storage.trace: tracefs is not mounted; run: {cure} ({_FALLBACKS})")
    if not BTF.exists():
        raise TracingError(f"storage.trace: this kernel has no {BTF}; use CONFIG_DEBUG_INFO_BTF ({_FALLBACKS})")


class BpfTrace:
    """Runs both scripts. The kernel ends them when this process ends, however it ends."""

    def __init__(self, folder: Path, *, device_number: int, pids: Sequence[int]) -> None:
        self._folder = folder
        block = ["block.bt", "0", str(device_number), "1"]
        files = ["files.bt", *map(str, pids[:_MAX_PIDS])]
        self._commands = {"block": block, **({"files": files} if pids else {})}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    async def start(self) -> None:
        """Returns once both scripts receive events. Raises TracingError with bpftrace's own message."""
        check_traceable()
        self._folder.mkdir(parents=True, exist_ok=True)
        env = {
            **os.environ,
            "BPFTRACE_STRLEN": str(_PART_BYTES + 1),
            "BPFTRACE_MAP_KEYS_MAX": "65536",
            "BPFTRACE_PERF_RB_PAGES": "512",
        }
        for name, (script, *arguments) in self._commands.items():
            output = ["-f", "json", "-B", "line", "-o", str(self._folder / f"{name}.jsonl")]
            with (self._folder / f"{name}.log").open("wb") as log:
                self._running[name] = subprocess.Popen(
                    ["setpriv", "--pdeathsig", "INT", "bpftrace", *output, str(SCRIPTS / script), *arguments],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=env,
                )  # fmt: skip
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not all(map(self._is_ready, self._running)):
            dead = [name for name, process in self._running.items() if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                await self.stop()
                words = " ".join((self._folder / f"{(dead or ['block'])[0]}.log").read_text(errors="replace").split())
                raise TracingError(f"bpftrace did not start: {words[-300:]}; try it by hand ({_FALLBACKS})")
            await asyncio.sleep(0.05)
        # bpftrace writes its events only on idle cores, so that the measured processes do not wait for it.
        self._schedule(os.SCHED_IDLE)

    def _schedule(self, policy: int) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.sched_setscheduler(process.pid, policy, os.sched_param(0))

    def _is_ready(self, name: str) -> bool:
        path = self._folder / f"{name}.jsonl"
        return path.exists() and b'"ready ' in path.read_bytes()[:4096]

    def zero_ns(self, clock: Callable[[], float]) -> int:
        """The moment, on bpftrace's clock, at which the caller's clock, in seconds, was 0.

        The caller's clock runs at the rate of CLOCK_MONOTONIC. It is read between two looks at that clock, and the
        closest two of several count: where the process loses its core in between, all events would be early.
        Some versions of bpftrace include the machine's suspended time in nsecs; the first line of the output shows
        which kind this one is.
        """
        ready_ns = next(
            int(line.split()[1]) for line in _lines(self._folder / "block.jsonl") if line.startswith("ready")
        )
        looks = [(time.monotonic_ns(), clock(), time.monotonic_ns()) for _ in range(_CLOCK_LOOKS)]
        before_ns, now_s, after_ns = min(looks, key=lambda look: look[2] - look[0])
        asleep_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns() if ready_ns > after_ns else 0
        return (before_ns + after_ns) // 2 + asleep_ns - round(now_s * 1e9)

    async def stop(self) -> int:
        """Ends both scripts and returns the number of lost events."""
        self._schedule(os.SCHED_OTHER)
        await self._settle()
        deadline, ask_s = time.monotonic() + _STOP_TIMEOUT_S, 0.0
        while left := [process for process in self._running.values() if process.poll() is None]:
            if (now_s := time.monotonic()) >= ask_s:
                # Asked again: bpftrace misses a signal that comes while it handles events.
                ask_s = now_s + _ASK_AGAIN_S
                for process in left:
                    process.send_signal(signal.SIGKILL if now_s > deadline else signal.SIGINT)
            await asyncio.sleep(0.02)
        return sum(lost_events(self._folder / f"{name}.jsonl") for name in self._running)

    async def _settle(self) -> None:
        """Waits until bpftrace has printed its queued lines; it prints one core's queue per interval."""
        deadline, sizes, still = time.monotonic() + _SETTLE_TIMEOUT_S, [-1], 0
        files = [self._folder / f"{name}.jsonl" for name in self._running]
        while still < _STILL_POLLS and time.monotonic() < deadline:
            before, sizes = sizes, [file.stat().st_size for file in files if file.exists()]
            still = still + 1 if sizes == before else 0
            await asyncio.sleep(_POLL_S)


def lost_events(path: Path) -> int:
    """Counts the events that bpftrace dropped and the lines that it could not store or did not print."""
    lost, core = 0, ""
    parts: dict[str, int] = {}
    for item in _items(path):
        data = item["data"]
        if item["type"] == "lost_events":
            lost += int(data["events"])
        elif item["type"] == "map":
            lost += len(data.get("@line", ()))
        elif item["type"] == "printf":
            # bpftrace prints a line that it could not store as zeros, and a path's part as empty or out of place.
            kind, _, text = str(data).strip("\n").partition(" ")
            if kind == "C":
                core = text
                continue
            if kind == "T":
                due = parts.get(core, 0)
                lost += not due or (due == _PARTS and not text)
            lost += kind == "B" and text.startswith("0 0 ")
            parts[core] = _PARTS if kind in _NAMED else max(0, parts.get(core, 0) - 1)
    return lost


def read_block(path: Path, zero_ns: int) -> list[BlockRequest]:
    """Reads the requests in order of issue. Raises TracingError."""
    with _explained(path):
        return _block(path, zero_ns)


def read_files(path: Path, zero_ns: int) -> list[FileCall]:
    """Reads the calls in the order in which they began. Raises TracingError.

    Calls on a file are left out if the trace missed its opening.
    """
    with _explained(path):
        return _files(path, zero_ns)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, IndexError) as error:
        raise TracingError(f"{path}: is not a trace of this version ({error}); measure again") from None


def _block(path: Path, zero_ns: int) -> list[BlockRequest]:
    def seconds(moment_ns: int) -> float:
        return (moment_ns - zero_ns) / 1e9

    def known(moment_ns: int) -> float | None:
        return seconds(moment_ns) if moment_ns else None

    requests = [
        BlockRequest(known(queued), seconds(issued), known(completed), sector, size, write == 1)
        for sector, (queued, issued, completed, size, write) in _block_events(path)
    ]
    return sorted(requests, key=lambda request: request.issued_s)


def _block_events(path: Path) -> Iterator[tuple[int, tuple[int, int, int, int, int]]]:
    """Yields (sector, (queued, issued, completed, bytes, write)), times in ns; 0 means unknown."""
    for item in _items(path):
        if item["type"] == "printf" and str(item["data"]).startswith("B "):
            queued, issued, completed, sector, size, write, _ = map(int, item["data"].split()[1:])
            if issued:
                yield sector, (queued, issued, completed, size, write)
        elif item["type"] == "map":
            for key, (queued, issued, size, write) in item["data"].get("@issued", {}).items():
                yield int(key.split(",")[1]), (queued, issued, 0, size, write)


def _files(path: Path, zero_ns: int) -> list[FileCall]:
    open_files: dict[tuple[str, str], str] = {}
    renamed: dict[str, str] = {}
    calls: list[FileCall] = []
    for _, kind, (at, took, pid, fd, *rest), name in _file_events(path):
        at_s, took_s = (int(at) - zero_ns) / 1e9, int(took) / 1e9
        if kind == "O":
            open_files[pid, fd] = name
            calls.append(FileCall("open", at_s, took_s, int(pid), name, flags=int(rest[1])))
        elif kind == "M":
            renamed[rest[0]] = name
        elif kind == "N":
            calls.append(FileCall("rename", at_s, 0.0, int(pid), name, old_path=renamed.pop(rest[0], "")))
        elif (pid, fd) in open_files:
            offset, size = map(int, rest)
            name = open_files[pid, fd]
            calls.append(FileCall(_CALLS[kind], at_s, took_s, int(pid), name, offset, max(0, size)))
    return calls


def _file_events(path: Path) -> list[tuple[int, str, list[str], str]]:
    """Returns (when, kind, words, path) sorted by time: only the events of one core arrive in order.

    A core's turn may end within a path; the path then continues in that core's next turn.
    """
    found: list[tuple[int, str, list[str], str]] = []
    unfinished: dict[str, int] = {}
    core = ""
    for line in _lines(path):
        kind, _, text = line.partition(" ")
        if kind == "C":
            core = text
        elif kind == "T":
            if core in unfinished:
                when, kind, words, name = found[unfinished[core]]
                found[unfinished[core]] = (when, kind, words, name + text)
                if len(text.encode()) < _PART_BYTES:
                    del unfinished[core]
        elif kind in (*_NAMED, *_CALLS):
            words = text.split()
            if len(words) != _WORDS:
                raise ValueError(line)
            # A file becomes open at the end of the call.
            found.append((int(words[0]) + (int(words[1]) if kind == "O" else 0), kind, words, ""))
            unfinished.pop(core, None)
            if kind in _NAMED:
                unfinished[core] = len(found) - 1
    return sorted(found, key=lambda event: event[0])


def _lines(path: Path) -> Iterator[str]:
    for item in _items(path):
        if item["type"] == "printf" and isinstance(item["data"], str):
            yield item["data"].removesuffix("\n")


def _items(path: Path) -> Iterator[dict[str, Any]]:
    """Parses each line; skips one that was cut off."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                continue
