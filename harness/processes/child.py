"""Child processes that never outlive a run: each has its own session, two wardens, and a log of its output."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import psutil

from harness.errors import EngineError
from harness.processes import warden

if TYPE_CHECKING:
    import httpx

_WARDEN = Path(warden.__file__)
_MARK = "KV_HARNESS_CHILD"
_GRACE_S = 15.0
_IDLE_S = 2.0
# How long a failed call waits for its server's end: a socket closes before its process ends.
_NEWS_S = 0.5
_ERROR = re.compile(r"\b(ERROR|CRITICAL|FATAL)\b|\b\w*(Error|Exception)\b|^error:|panicked|[Oo]ut of memory")
# Levels of a line that reports no error of its own, whatever it quotes: a warning may name an exception.
_QUIET_LEVEL = re.compile(r"\b(TRACE|DEBUG|INFO|NOTICE|WARN|WARNING)\b")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
T = TypeVar("T")


def control_client(timeout_s: float) -> httpx.AsyncClient:
    """For control calls to an engine or cache server, seconds for each.

    uvicorn closes a connection that has been idle for 5 s, and httpx keeps it as long. A call at that moment would
    fail, so the client drops an idle connection earlier.
    """
    import httpx

    return httpx.AsyncClient(timeout=timeout_s, limits=httpx.Limits(keepalive_expiry=_IDLE_S))


class Child:
    """One child process and all of its descendants.

    argv: the command; env: its whole environment; log: the file of both output streams; cores: CPU cores, None for any;
    scratch: files and folders that the wardens delete when the child has ended, for whatever reason; stored: those that
    they delete unless `stop` keeps them; grace_s: the time between SIGTERM and SIGKILL, by default 15 s. stdin: a
    descriptor that the caller closes once the child has started; None: it reads nothing.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str],
        cores: Sequence[int] | None = None,
        scratch: Sequence[Path] = (),
        stored: Sequence[Path] = (),
        grace_s: float | None = None,
        stdin: int | None = None,
    ) -> None:
        self.name, self._argv, self._log = name, list(argv), log
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._env = {**env, _MARK: self._mark}
        self._cores, self._grace_s = cores, grace_s
        self._scratch, self._stored = scratch, stored
        self._stdin = subprocess.DEVNULL if stdin is None else stdin
        self._guard: subprocess.Popen[bytes] | None = None
        self._alive: int | None = None
        self._state: int | None = None
        self._told = b""
        self._wardens_gone = False

    def start(self) -> None:
        """Raises EngineError where the log cannot be written; a missing command shows in `wait_until`."""
        alive, self._alive = os.pipe2(os.O_CLOEXEC)
        self._state, state = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._state, False)
        cores = ",".join(map(str, self._cores)) if self._cores else "-"
        scratch, stored = map(_listed, (self._scratch, self._stored))
        argv = [sys.executable, "-I", "-S", str(_WARDEN), str(alive), str(state), str(self._grace_s or _GRACE_S)]
        argv += [cores, scratch, stored, "--", *self._argv]
        try:
            with self._log.open("ab") as log:
                self._guard = subprocess.Popen(
                    argv, stdin=self._stdin, stdout=log, stderr=log, env=self._env, pass_fds=[alive, state]
                )
        except OSError as error:
            raise EngineError(f"{self.name}: {error}; is the disk full, or the folder gone?") from None
        finally:
            os.close(alive)
            os.close(state)

    def _listen(self) -> list[int]:
        """Reads the warden's lines: the command's process id, then how it ended."""
        while self._state is not None and not self._wardens_gone:
            try:
                told = os.read(self._state, 64)
            except BlockingIOError:
                break
            self._told += told
            self._wardens_gone = not told
        return [int(line) for line in self._told.split()]

    @property
    def running(self) -> bool:
        told = self._listen()
        return self._guard is not None and len(told) < 2 and not self._wardens_gone

    @property
    def pid(self) -> int | None:
        """The command's own process id; None when it does not run."""
        return told[0] if self.running and (told := self._listen()) else None

    @property
    def pids(self) -> tuple[int, ...]:
        """The command's process and its descendants."""
        return () if (pid := self.pid) is None else family(pid)

    def storage_read_bytes(self) -> int | None:
        """Bytes that the command and its descendants have fetched from storage devices; None when it does not run."""
        return None if (pid := self.pid) is None else tree_read_bytes(pid)

    async def ended(self) -> None:
        """Returns when the command or its warden has ended."""
        loop = asyncio.get_running_loop()
        while self.running:
            assert self._state is not None
            news = asyncio.Event()
            loop.add_reader(self._state, news.set)
            try:
                await news.wait()
            finally:
                loop.remove_reader(self._state)

    def how_it_ended(self) -> str:
        told = self._listen()
        if len(told) < 2:
            return "its warden was killed"
        return f"killed by {signal.Signals(-told[1]).name}" if told[1] < 0 else f"exit code {told[1]}"

    def obituary(self) -> str:
        """One line: which process ended, how, its log, and the last line there that reports an error."""
        error = self.last_error()
        last = f"ends with the error: {error}" if error else "tells of no error; was memory short?"
        return f"{self.name} ended during the run ({self.how_it_ended()}); {self._log} {last}"

    def last_error(self) -> str | None:
        """The last line of the log that reports an error; None: none does."""
        return next((line.strip() for line in reversed(self.last_lines(500)) if _reports_error(line)), None)

    async def wait_until(self, check: Callable[[], Awaitable[bool]], timeout_s: float, cure: str) -> None:
        """Polls `check` until it holds. Raises EngineError with the log's end when the child dies or time is up."""
        deadline = time.monotonic() + timeout_s
        while not await check():
            if not self.running:
                raise EngineError(f"{self.name} ended before it was ready ({self.how_it_ended()}); {self._tail(cure)}")
            if time.monotonic() > deadline:
                raise EngineError(f"{self.name} was not ready within {timeout_s:g} s; {self._tail(cure)}")
            await asyncio.sleep(0.2)

    def _tail(self, cure: str) -> str:
        lines = self.last_lines()
        shown = "\n".join(f"    {line}" for line in lines)
        return f"{cure}. The end of {self._log}:\n{shown}"

    def last_lines(self, count: int = 15) -> list[str]:
        """The log's last lines, without the blank ones and without colours."""
        try:
            text = _COLOUR.sub("", self._log.read_bytes()[-64 * 1024 :].decode(errors="replace"))
        except OSError:
            return []
        return [line.rstrip()[:300] for line in text.splitlines() if line.strip()][-count:]

    async def stop(self, *, keep: bool = False) -> None:
        """Ends the command and its descendants: SIGTERM, then SIGKILL after the grace. Safe to call twice.

        keep: what is `stored` stays, and another child deletes it.
        """
        if keep:
            self._stored = ()
        if self._alive is not None:
            if keep:
                with contextlib.suppress(BrokenPipeError):
                    os.write(self._alive, b"k")
            os.close(self._alive)
            self._alive = None
        if self._guard is None:
            return
        while self._guard.returncode is None and not self._wardens_ended():
            await asyncio.sleep(0.02)
        if self._guard.returncode is None:
            await asyncio.to_thread(self._sweep, self._guard.pid)
            self._guard.wait()
        if self._state is not None:
            os.close(self._state)
            self._state = None

    def _wardens_ended(self) -> bool:
        """The guard stays a zombie until the sweep, so that no other process gets its id, which names the session."""
        assert self._guard is not None
        self._listen()
        ended = os.waitid(os.P_PID, self._guard.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return self._wardens_gone and ended is not None

    def _sweep(self, session: int) -> None:
        """Ends what a killed guard and a killed warden left behind; usually nothing."""
        warden.end_all(lambda: warden.marked(session, f"{_MARK}={self._mark}"), warden.ORPHAN_GRACE_S)
        warden.delete([*self._scratch, *self._stored])


def _listed(paths: Iterable[Path]) -> str:
    return ":".join(str(path.absolute()) for path in paths) or "-"


def _reports_error(line: str) -> bool:
    """Whether a log line is an error: the first of its words that is a level or an error decides."""
    error, level = _ERROR.search(line), _QUIET_LEVEL.search(line)
    return error is not None and (level is None or error.start() < level.start())


async def outlive(
    children: Sequence[Child], work: Coroutine[Any, Any, T], give_up: Callable[[str], None] | None = None
) -> T:
    """Returns the result of `work`, which needs all of the children.

    Raises EngineError that names the child that ended first, whether `work` has failed or still waits for an answer.
    give_up: gets that message, so that `work` ends by itself; without it, `outlive` cancels `work`.
    """
    working = asyncio.ensure_future(work)
    watching = {asyncio.ensure_future(child.ended()): child for child in children}
    try:
        await asyncio.wait({working, *watching}, return_when=asyncio.FIRST_COMPLETED)
        failed = working.done() and not working.cancelled() and working.exception() is not None
        if failed and watching:
            await asyncio.wait(watching, timeout=_NEWS_S, return_when=asyncio.FIRST_COMPLETED)
        ended = next((child for watch, child in watching.items() if watch.done()), None)
        if ended is None:
            return await working
        told = ended.obituary()
        if give_up is not None and not working.done():
            give_up(told)
            await working
        raise EngineError(told)
    finally:
        for task in (working, *watching):
            task.cancel()
        await asyncio.gather(working, *watching, return_exceptions=True)


def storage_read_bytes(pid: int) -> int | None:
    """Bytes that one process has fetched from storage devices (a read that the page cache answers adds none).

    None where the process is gone or the kernel does not say.
    """
    try:
        text = Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("read_bytes:"))


def tree_read_bytes(pid: int) -> int | None:
    """That of a process and its descendants; None where the process is gone or the kernel does not say."""
    own = storage_read_bytes(pid)
    return None if own is None else own + sum(storage_read_bytes(one) or 0 for one in _descendants(pid))


def family(pid: int) -> tuple[int, ...]:
    """A process and its descendants."""
    return (pid, *_descendants(pid))


def listener(url: str) -> int | None:
    """The process of this machine that listens on the URL's port; None where it cannot be seen."""
    address = urlsplit(url)
    if address.hostname not in ("127.0.0.1", "localhost", "::1", "0.0.0.0"):
        return None
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status != psutil.CONN_LISTEN or not connection.laddr or not connection.pid:
                continue
            if connection.laddr.port == address.port:
                return int(connection.pid)
    return None


def open_to_all(children: Iterable[Child]) -> tuple[str, ...]:
    """'PROGRAM PORT' of each socket of the children that listens beyond this machine's loopback."""
    found = set()
    for pid in (pid for child in children for pid in child.pids):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for socket_ in process.net_connections(kind="inet"):
                if socket_.status == psutil.CONN_LISTEN and not ipaddress.ip_address(socket_.laddr.ip).is_loopback:
                    found.add(f"{process.name()} {socket_.laddr.port}")
    return tuple(sorted(found))


def _descendants(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)] if psutil.pid_exists(pid) else []


def free_port(host: str = "127.0.0.1") -> int:
    """A port that no process listens on right now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for an engine: byte code allowed, without our own virtual environment."""
    dropped = {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT"}
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return kept | dict(extra)
