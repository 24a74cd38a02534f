"""Follows block requests and file calls with bpftrace while something is measured (the scripts in bpf/).

    trace = BpfTrace(folder, device_number=…, pids=[…])
    await trace.start(); …; lost = await trace.stop()

Raw output, one JSON object a line, goes to folder/block.jsonl and folder/files.jsonl; `read_block` and `read_files`
read it, as seconds since a moment `zero_ns` on bpftrace's clock.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import TracingError

SCRIPTS = Path(__file__).parent / "bpf"
BTF = Path("/sys/kernel/btf/vmlinux")
TRACEFS = (Path("/sys/kernel/tracing/events"), Path("/sys/kernel/debug/tracing/events"))
_CALLS = {"R": "read", "W": "write", "F": "sync"}
# Numbers of each file event; in how many parts its path follows, and how long they are (BPFTRACE_STRLEN, less the end).
_WORDS, _PARTS, _PART_BYTES = 6, 6, 63
_NAMED = ("O", "M", "N")
_MAX_PIDS = 8
_START_TIMEOUT_S, _STOP_TIMEOUT_S, _SETTLE_TIMEOUT_S = 30.0, 15.0, 10.0
# Nothing more is told when the files are the same at so many polls in a row.
_POLL_S, _STILL_POLLS = 0.05, 4
_FALLBACKS = (
    "without it samples.jsonl still has bytes from /proc/PID/io (storage_read_bytes) and from diskstats (host.device_…)"
)


class BlockRequest(msgspec.Struct, frozen=True):
    """One request at the block device. queued_s None: the kernel split it off another one.

    completed_s None: nobody saw it complete. A tracepoint's program is skipped where it would interrupt another one.
    """

    queued_s: float | None
    issued_s: float
    completed_s: float | None
    sector: int
    bytes: int
    write: bool


class FileCall(msgspec.Struct, frozen=True):
    """One call on a file. kind: open, read, write, sync or rename (path: the new name; old_path: the one before)."""

    kind: str
    at_s: float
    took_s: float
    pid: int
    path: str
    offset: int = -1
    bytes: int = 0
    flags: int = 0
    old_path: str = ""


def check() -> None:
    """Whether bpftrace can trace here. Raises TracingError."""
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
    """Both scripts, running. They end with us, however we end."""

    def __init__(self, folder: Path, *, device_number: int, pids: Sequence[int]) -> None:
        self._folder = folder
        block = ["block.bt", "0", str(device_number), "1"]
        files = ["files.bt", *map(str, pids[:_MAX_PIDS])]
        self._commands = {"block": block, **({"files": files} if pids else {})}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    async def start(self) -> None:
        """Returns once both see events. Raises TracingError with bpftrace's own words."""
        check()
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
        # Writing events down waits until nobody else wants the core: what is measured must not wait for it.
        self._schedule(os.SCHED_IDLE)

    def _schedule(self, policy: int) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.sched_setscheduler(process.pid, policy, os.sched_param(0))

    def _is_ready(self, name: str) -> bool:
        path = self._folder / f"{name}.jsonl"
        return path.exists() and b'"ready ' in path.read_bytes()[:4096]

    def zero_ns(self, now_s: float) -> int:
        """The moment at which a clock that says now_s, and that ticks as CLOCK_MONOTONIC does, was 0.

        bpftrace's nsecs count the time that the machine slept or not, by version: its own first line tells.
        """
        ready_ns = next(
            int(line.split()[1]) for line in _lines(self._folder / "block.jsonl") if line.startswith("ready")
        )
        monotonic_ns, boot_ns = time.monotonic_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        asleep_ns = boot_ns - monotonic_ns if ready_ns > monotonic_ns else 0
        return monotonic_ns + asleep_ns - round(now_s * 1e9)

    async def stop(self) -> int:
        """Ends both; returns how many events were lost."""
        self._schedule(os.SCHED_OTHER)
        await self._settle()
        for process in self._running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for process in self._running.values():
            while process.poll() is None:
                if time.monotonic() > deadline:
                    process.kill()
                await asyncio.sleep(0.02)
        return sum(lost_events(self._folder / f"{name}.jsonl") for name in self._running)

    async def _settle(self) -> None:
        """Until bpftrace has printed what it knows: lines wait for their turn, which a core has every few intervals."""
        deadline, sizes, still = time.monotonic() + _SETTLE_TIMEOUT_S, [-1], 0
        files = [self._folder / f"{name}.jsonl" for name in self._running]
        while still < _STILL_POLLS and time.monotonic() < deadline:
            before, sizes = sizes, [file.stat().st_size for file in files if file.exists()]
            still = still + 1 if sizes == before else 0
            await asyncio.sleep(_POLL_S)


def lost_events(path: Path) -> int:
    """Events that bpftrace could not hand over, and lines that it had no room for or did not get to print."""
    lost, core = 0, ""
    parts: dict[str, int] = {}
    for item in _items(path):
        data = item["data"]
        if item["type"] == "lost_events":
            lost += int(data["events"])
        elif item["type"] == "map":
            lost += len(data.get("@line", ()))
        elif item["type"] == "printf":
            # What found no room is printed as zeros, and as a part of a path that is empty or belongs to none.
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
    """Requests in order of issue. Raises TracingError."""
    with _told(path):
        return _block(path, zero_ns)


def read_files(path: Path, zero_ns: int) -> list[FileCall]:
    """Calls in the order in which they began. A file whose opening was not seen is not among them.

    Raises TracingError.
    """
    with _told(path):
        return _files(path, zero_ns)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, IndexError) as error:
        raise TracingError(f"{path}: is no trace of this version ({error}); measure again") from None


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
    """(sector, (queued, issued, completed, bytes, write)), in ns; 0 is unknown."""
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
    """(when, kind, words, path) by time: each core's events come in order, but not all cores' together.

    A core's turn may end within a path, which goes on in its next turn.
    """
    found: list[tuple[int, str, list[str], str]] = []
    going_on: dict[str, int] = {}
    core = ""
    for line in _lines(path):
        kind, _, text = line.partition(" ")
        if kind == "C":
            core = text
        elif kind == "T":
            if core in going_on:
                when, kind, words, name = found[going_on[core]]
                found[going_on[core]] = (when, kind, words, name + text)
                if len(text.encode()) < _PART_BYTES:
                    del going_on[core]
        elif kind in (*_NAMED, *_CALLS):
            words = text.split()
            if len(words) != _WORDS:
                raise ValueError(line)
            # A file is open from the end of the call on.
            found.append((int(words[0]) + (int(words[1]) if kind == "O" else 0), kind, words, ""))
            going_on.pop(core, None)
            if kind in _NAMED:
                going_on[core] = len(found) - 1
    return sorted(found, key=lambda event: event[0])


def _lines(path: Path) -> Iterator[str]:
    for item in _items(path):
        if item["type"] == "printf" and isinstance(item["data"], str):
            yield item["data"].removesuffix("\n")


def _items(path: Path) -> Iterator[dict[str, Any]]:
    """A last line that was cut off is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                continue
