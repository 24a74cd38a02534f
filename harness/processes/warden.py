"""Runs one command and ends it, with everything that it started, when the harness ends, however it ends.

    python -I -S warden.py ALIVE_FD STATE_FD GRACE_S CORES SCRATCH STORED -- COMMAND…

CORES: '0,1', or '-' for any. SCRATCH: files and folders to delete at the end, with ':' between them, or '-'. What else
a folder's file ALSO lists, as also_delete writes it, is deleted with the folder. STORED: the same, of what is left
where the harness has said so.

Two processes, so that a SIGKILL of either leaves nothing: the guard is the parent of the warden, and the warden is the
parent of the command. Both adopt orphans (subreaper): workers that outlive the engine stay below the warden, and below
the guard when the warden is gone. The one that survives ends everything and deletes SCRATCH, with the shared memory of
Python's multiprocessing that the ended processes had: what cleans up after a worker is killed with it.

The harness holds ALIVE_FD's other end: end-of-file means that the harness is gone, even by SIGKILL. It writes there
only to say that STORED is another's now; guard and warden look at it without reading it.
The warden writes to STATE_FD, one a line: the command's process id, and how the command ended (an exit code, or a
signal's number below 0). End-of-file without the second line means that the warden was killed.

Needs the standard library only: it runs as a file, without site-packages, and starts in 20 ms.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
# Workers whose engine has ended have nothing to finish.
ORPHAN_GRACE_S = 3.0
# How multiprocessing.shared_memory begins the names that it draws; and what proc(5) adds to one that is deleted.
SHARED_MEMORY, GONE = "/dev/shm/psm_", " (deleted)"
ALSO = "also-delete"
_prctl = ctypes.CDLL(None).prctl


def main() -> int:
    alive, state, grace_s, cores = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    scratch, stored, command = sys.argv[5], sys.argv[6], sys.argv[8:]
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    guard = os.getpid()
    adopt_orphans()
    warden = os.fork()
    if warden:
        os.close(state)
        _, status = os.waitpid(warden, 0)
        end_all(descendants, grace_s)
        code = os.waitstatus_to_exitcode(status)
    else:
        woken = wake_on(signal.SIGCHLD, signal.SIGHUP)
        die_with_parent(guard, signal.SIGHUP)
        adopt_orphans()
        child = start(command, alive, state)
        how = watch(child, alive, state, woken, guard)
        end_all(descendants, grace_s if how is None else ORPHAN_GRACE_S)
        code = 143 if how is None else how
    reap()
    delete(named(scratch))
    delete([] if handed_over(alive) else named(stored))
    return code & 0xFF


def named(paths: str) -> list[Path]:
    return [] if paths == "-" else list(map(Path, paths.split(":")))


def handed_over(alive: int) -> bool:
    """Whether the harness has written anything."""
    waiting = fcntl.ioctl(alive, termios.FIONREAD, bytes(4))
    return int.from_bytes(waiting, sys.byteorder) > 0


def adopt_orphans() -> None:
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int, by: signal.Signals) -> None:
    """`by` is sent to this process when `parent`, which started it, ends."""
    _prctl(PR_SET_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), by)


def wake_on(*numbers: signal.Signals) -> int:
    """A descriptor that becomes readable when one of these signals arrives."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write_end)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return read_end


def start(command: list[str], alive: int, state: int) -> int:
    """Starts the command, tells its process id on `state`, and returns it."""
    warden = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(alive)
        os.close(state)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        # Without a warden the command ends by itself: by SIGTERM, so that it can end its own workers.
        die_with_parent(warden, signal.SIGTERM)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(127)
    tell_harness(state, child)
    return child


def tell_harness(state: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.write(state, f"{number}\n".encode())


def watch(child: int, alive: int, state: int, woken: int, guard: int) -> int | None:
    """Until the command ends (how, also told on `state`), or the harness or the guard is gone (None)."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            tell_harness(state, code)
            return code
        if os.getppid() != guard:
            return None
        if not ended:
            ready = select.select([alive, woken], [], [], 1.0)[0]
            if alive in ready:
                return None
            if woken in ready:
                os.read(woken, 4096)


def end_all(members: Callable[[], list[int]], grace_s: float) -> None:
    """SIGTERM to all members, SIGKILL to those left after grace_s. Returns when none is left, and nothing of the shared
    memory that they alone had."""
    deadline = time.monotonic() + grace_s
    shared = shared_memory(ending := members())
    tell(ending, signal.SIGTERM)
    while left := members():
        shared |= shared_memory(left)
        if time.monotonic() > deadline:
            tell(left, signal.SIGKILL)
        time.sleep(0.02)
    if shared:
        delete(shared - shared_memory(pid for pid, _, _ in living()))


def reap() -> None:
    """Takes leave of every child that has ended: in a container, no other process may do so for us."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def shared_memory(pids: Iterable[int], prefix: str = SHARED_MEMORY) -> set[Path]:
    """Files of shared memory, Python's by default, that the processes have mapped. Others' files are never listed, so
    never ours to delete."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError), Path(f"/proc/{pid}/maps").open(errors="replace") as maps:
            mapped = {line.rstrip("\n").partition(prefix)[2] for line in maps}
            found |= {Path(prefix + name) for name in mapped if name and not name.endswith(GONE)}
    return found


def tell(pids: list[int], what: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


def also_delete(folder: Path, paths: Iterable[Path]) -> None:
    """What is deleted with a folder of SCRATCH: names that a command draws, and that are known only once it runs."""
    if not (known := set(listed(folder))) >= (wanted := set(paths)):
        with contextlib.suppress(OSError):
            folder.joinpath(ALSO).write_text("".join(f"{path}\n" for path in sorted(known | wanted)))


def listed(folder: Path) -> list[Path]:
    try:
        return [Path(line) for line in folder.joinpath(ALSO).read_text().splitlines()]
    except OSError:
        return []


def delete(paths: Iterable[Path]) -> None:
    for path in paths:
        delete(listed(path))
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            path.unlink()


def living() -> Iterator[tuple[int, int, int]]:
    """Process id, parent and session of every process that has not ended."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                stat = Path(entry.path, "stat").read_text()
            except OSError:
                continue
            state, parent, _, session = stat.rpartition(")")[2].split()[:4]
            if state != "Z":
                yield int(entry.name), int(parent), int(session)


def descendants() -> list[int]:
    """All living processes below this one, by their parents' ids."""
    children: dict[int, list[int]] = {}
    for pid, parent, _ in living():
        children.setdefault(parent, []).append(pid)
    found, queue = [], [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def marked(session: int, mark: str) -> list[int]:
    """All living processes of the session, and those whose environment has the mark ('NAME=value').

    For use where both parents were killed: a worker keeps one or the other unless it drops both.
    """
    return [pid for pid, _, its_session in living() if its_session == session or _has(pid, mark.encode())]


def _has(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
