"""Runs of `harness` as a program on real engines: started, killed wherever a test says, and what they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import psutil

from harness.processes import warden
from harness.results.folder import read_rows
from harness.results.manifest import read_manifest
from tests.support.paths import ROOT
from tests.unit.measure.test_run_loop import measured

# Before the first engine of this worker: what is older than that, these tests did not leave.
STARTED_S = time.time()
# Process ids of the harnesses that this worker's tests ran.
HARNESSES = {os.getpid()}
_STARTED: list[subprocess.Popen[str]] = []


def harness(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "harness", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    HARNESSES.add(process.pid)
    _STARTED.append(process)
    return process


def end_harnesses() -> None:
    """Kills what a failed test has left running: it would take a core from those that follow."""
    while _STARTED:
        process = _STARTED.pop()
        if process.poll() is None:
            process.kill()
            process.wait()


def _changed_s(path: Path) -> float:
    """When a file changed last; 0 for one that is gone."""
    try:
        return path.stat().st_ctime
    except FileNotFoundError:
        return 0.0


def left_behind(tmp_path: Path) -> list[str]:
    """Processes that mention the run's folder, shared memory (what multiprocessing names, only if no process uses it),
    sockets and temporary files of ours, chunk files."""
    processes = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = cmdline.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(tmp_path) in text:
            processes.append(text)
    # Shared memory is named after its harness; another worker's tests have some, too.
    memory = [path for path in Path("/dev/shm").glob("kv-harness-*") if int(path.name.split("-")[2]) in HARNESSES]
    used = warden.shared_memory(pid for pid, _, _ in warden.living())
    psm = Path("/dev/shm").glob("psm_*")
    memory += [path for path in psm if path not in used and _changed_s(path) > STARTED_S]
    scratch = [*memory, *Path(tempfile.gettempdir()).glob("kv-harness-*")]
    return processes + list(map(str, scratch)) + [str(path) for path in tmp_path.glob("**/*.data")]


class Victim(NamedTuple):
    """command: an argument, or a program, that only its command line has; None: the harness itself. told: what the
    run's last line calls it. warden: the process above it is killed, instead of it."""

    told: str
    command: str | None = None
    warden: bool = False


HARNESS = Victim("harness")
Left = Callable[[Path], list[str]]


def killed_and_resumed(
    start: Sequence[str], folder: Path, victims: Sequence[Victim], rows: int, left: Left = left_behind
) -> None:
    """SIGKILL of each victim as soon as its run has written a row more, each in the run that resumes the one before.
    The last run is let finish, with so many rows measured and proven. No kept row changes, and nothing is left."""
    file, before = folder / "rows.jsonl", killed_in_turn(start, folder, victims, left)
    assert len(list(read_rows(folder))) < rows
    resumed = harness("run", "--resume", str(folder))
    _, errors = resumed.communicate(timeout=280)
    assert resumed.returncode == 0, errors
    assert file.read_bytes().startswith(before)
    found = measured(folder)
    assert len(found) == rows == len({(row.expected_tier, row.sample) for row in found})
    assert {row.attempt for row in found} == set(range(len(victims) + 1))
    assert {(row.verdict, row.error) for row in found} == {("proven", None)} and not left(folder.parent)


def killed_in_turn(start: Sequence[str], folder: Path, victims: Sequence[Victim], left: Left = left_behind) -> bytes:
    """SIGKILL of each victim as soon as its run has written a row more, each in the run that resumes the one before. No
    kept row changes, and nothing is left. Returns the rows that were kept."""
    file, before = folder / "rows.jsonl", b""
    for number, victim in enumerate(victims):
        process = harness("run", *(["--resume", str(folder)] if number else start))
        begun(process, file, len(before))
        (_kill if victim.command else _kill_harness)(process, folder, victim, left)
        kept = file.read_bytes()
        assert kept.startswith(before) and read_manifest(folder).status != "complete"
        before = kept
    return before


def begun(process: subprocess.Popen[str], rows: Path, had: int) -> None:
    """Returns once the run has written a row more than the `had` bytes."""
    until(process, lambda: rows.exists() and rows.stat().st_size > had)


def until(process: subprocess.Popen[str], happened: Callable[[], bool]) -> None:
    """Returns once it has happened in the run, which may start two engines before."""
    deadline = time.monotonic() + 480
    while process.poll() is None and time.monotonic() < deadline:
        if happened():
            return
        time.sleep(0.05)
    process.terminate()
    raise AssertionError(f"it never happened: {process.communicate(timeout=120)}")


def _kill_harness(process: subprocess.Popen[str], folder: Path, _victim: Victim, left: Left) -> None:
    assert left(folder.parent)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    deadline = time.monotonic() + 60
    while (rest := left(folder.parent)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not rest


def _kill(process: subprocess.Popen[str], folder: Path, victim: Victim, left: Left) -> None:
    """The run ends in one line that names the victim, its log and its error."""
    children = psutil.Process(process.pid).children(recursive=True)
    below = [child for child in children if "warden.py" not in " ".join(child.cmdline())]
    [one] = [child for child in below if victim.command in {Path(part).name for part in child.cmdline()}]
    os.kill(one.ppid() if victim.warden else one.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(below, timeout=30)
    assert not alive
    _, errors = process.communicate(timeout=60)
    last = errors.splitlines()[-1]
    assert process.returncode == 1 and "Traceback" not in errors
    assert last.startswith(f"harness: {victim.told} ended during the run (")
    assert f"{folder / 'logs'}" in last and ".log" in last
    assert read_manifest(folder).status == "failed" and not left(folder.parent)


class Served:
    """A program of our own that starts two servers, prints their process ids, and waits. Ended at the latest with the
    block, if the test fails before."""

    def __init__(self, program: str, *arguments: str) -> None:
        command = [sys.executable, "-c", program, *arguments]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.servers = [psutil.Process(int(pid)) for pid in self._process.stdout.readline().split()]
        assert len(self.servers) == 2

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def kill(self, number: int | None, folder: Path) -> str:
        """Kills a server, by its place, or the program (None). All have to end, and in the folder only logs stay.

        Returns what the program said on stderr.
        """
        os.kill(self._process.pid if number is None else self.servers[number].pid, signal.SIGKILL)
        _, errors = self._process.communicate(timeout=60)
        _, left = psutil.wait_procs(self.servers, timeout=30)
        assert not left
        deadline = time.monotonic() + 10
        while any(folder.glob("kv-harness-*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [path.name for path in folder.iterdir()] == ["logs"]
        return errors
