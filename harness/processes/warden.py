"""Runs one command and ends it, with everything that it started, when the harness ends, however it ends.

    python -I -S warden.py PIPE_FD GRACE_S CORES SCRATCH -- COMMAND…

CORES: '0,1', or '-' for any. SCRATCH: files and folders to delete at the end, with ':' between them, or '-'.

The harness holds the pipe's other end and never writes: end-of-file means that it is gone, even by SIGKILL. Engines
start workers, and workers that outlive their parent are adopted here (subreaper), so none is lost. Needs the
standard library only: it is run as a file, without site-packages, and starts in 20 ms.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> int:
    pipe, grace_s, cores = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    scratch, command = sys.argv[4], sys.argv[6:]
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    child = os.fork()
    if child == 0:
        os.close(pipe)
        # Should the warden itself be killed, its command goes too.
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(127)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = watch(child, pipe)
    end_all(grace_s)
    for path in scratch.split(":") if scratch != "-" else ():
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            Path(path).unlink()
    return code


def watch(child: int, pipe: int) -> int:
    """Until the command ends (its exit code) or the harness is gone (143)."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == child:
            return os.waitstatus_to_exitcode(status) & 0xFF
        if select.select([pipe], [], [], 0.1)[0]:
            return 143


def end_all(grace_s: float) -> None:
    """SIGTERM to all descendants, SIGKILL to those left after grace_s."""
    deadline = time.monotonic() + grace_s
    tell(signal.SIGTERM)
    while descendants():
        reap()
        if time.monotonic() > deadline:
            tell(signal.SIGKILL)
        time.sleep(0.02)
    reap()


def tell(what: signal.Signals) -> None:
    for pid in descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


def reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def descendants() -> list[int]:
    """All living processes below this one, by their parents' ids."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                stat = Path(entry.path, "stat").read_text()
            except OSError:
                continue
            state, parent = stat.rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    found, queue = [], [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


if __name__ == "__main__":
    sys.exit(main())
