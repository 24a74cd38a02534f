"""Child processes that never outlive a run: each in its own session under a warden, its words kept in a log."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from harness.errors import EngineError

if TYPE_CHECKING:
    import httpx

_WARDEN = Path(__file__).with_name("warden.py")
_GRACE_S = 15.0
_IDLE_S = 2.0


def control_client(timeout_s: float) -> httpx.AsyncClient:
    """For control calls to an engine or cache server, seconds for each.

    uvicorn closes a connection that has been idle for 5 s, and httpx keeps it as long: a call that met that moment
    would fail, so an idle connection is let go before.
    """
    import httpx

    return httpx.AsyncClient(timeout=timeout_s, limits=httpx.Limits(keepalive_expiry=_IDLE_S))


class Child:
    """One child process and all of its descendants.

    argv: the command; env: its whole environment; log: where both of its streams go; cores: CPU cores, None for any;
    scratch: files and folders that are deleted when the child has ended, however that came about; grace_s: between
    SIGTERM and SIGKILL, 15 s unless told.
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
        grace_s: float | None = None,
    ) -> None:
        self.name, self._argv, self._log, self._env = name, list(argv), log, dict(env)
        self._cores, self._scratch, self._grace_s = cores, scratch, grace_s
        self._warden: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None

    def start(self) -> None:
        """Raises EngineError where the log cannot be written; a missing command shows in `wait_until`."""
        read_end, self._pipe = os.pipe2(os.O_CLOEXEC)
        cores = ",".join(map(str, self._cores)) if self._cores else "-"
        scratch = ":".join(str(path.absolute()) for path in self._scratch) or "-"
        argv = [
            sys.executable,
            "-I",
            "-S",
            str(_WARDEN),
            str(read_end),
            str(self._grace_s or _GRACE_S),
            cores,
            scratch,
            "--",
            *self._argv,
        ]
        with self._log.open("ab") as log:
            self._warden = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env, pass_fds=[read_end]
            )
        os.close(read_end)

    @property
    def running(self) -> bool:
        return self._warden is not None and self._warden.poll() is None

    @property
    def pid(self) -> int | None:
        """The command's own process id, not the warden's; None when it does not run."""
        if not self.running or self._warden is None:
            return None
        children = Path(f"/proc/{self._warden.pid}/task/{self._warden.pid}/children").read_text().split()
        return int(children[0]) if children else None

    @property
    def pids(self) -> tuple[int, ...]:
        """The command's process and its descendants."""
        return () if (pid := self.pid) is None else (pid, *_descendants(pid))

    def storage_read_bytes(self) -> int | None:
        """Bytes that the command and its descendants have fetched from storage devices; None when it does not run."""
        pid = self.pid
        return None if pid is None else sum(storage_read_bytes(one) or 0 for one in [pid, *_descendants(pid)])

    async def wait_until(self, check: Callable[[], Awaitable[bool]], timeout_s: float, cure: str) -> None:
        """Polls `check` until it holds. Raises EngineError with the log's end when the child dies or time is up."""
        deadline = time.monotonic() + timeout_s
        while not await check():
            if not self.running:
                code = self._warden.returncode if self._warden else None
                raise EngineError(f"{self.name} ended with exit code {code} before it was ready; {self._tail(cure)}")
            if time.monotonic() > deadline:
                raise EngineError(f"{self.name} was not ready within {timeout_s:g} s; {self._tail(cure)}")
            await asyncio.sleep(0.2)

    def _tail(self, cure: str) -> str:
        lines = self.last_lines()
        shown = "\n".join(f"    {line}" for line in lines)
        return f"{cure}. The end of {self._log}:\n{shown}"

    def last_lines(self, count: int = 15) -> list[str]:
        """The log's last lines, without the blank ones."""
        try:
            text = self._log.read_bytes()[-64 * 1024 :].decode(errors="replace")
        except OSError:
            return []
        return [line.rstrip()[:300] for line in text.splitlines() if line.strip()][-count:]

    async def stop(self) -> None:
        """Ends the command and its descendants: SIGTERM, then SIGKILL after the grace. Safe to call twice."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        if self._warden is not None:
            while self._warden.poll() is None:
                await asyncio.sleep(0.02)


def storage_read_bytes(pid: int) -> int | None:
    """Bytes that one process has fetched from storage devices (a read that the page cache answers adds none).

    None where the process is gone or the kernel does not say.
    """
    try:
        text = Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("read_bytes:"))


def _descendants(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)] if psutil.pid_exists(pid) else []


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Our environment for an engine's process: byte code allowed, our own virtual environment out of the way."""
    dropped = {"PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT"}
    kept = {key: value for key, value in os.environ.items() if key not in dropped}
    return kept | dict(extra)
