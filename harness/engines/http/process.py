"""One server of an engine: a child process that we start, or a server that runs already.

An engine's own module has its flags, its environment, and the questions that only its servers answer.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

import httpx

from harness.caches.base import Connection, numbered
from harness.collectors.prometheus import Metrics, scrape
from harness.engines.accelerator import Accelerator, read_report
from harness.engines.random_model import write_random_model
from harness.errors import EngineError
from harness.experiment.fields import Cores
from harness.experiment.model import Experiment
from harness.processes.child import Child, child_environment, control_client, free_port
from simulator.models import ModelSpec


class Program(NamedTuple):
    """What runs as a server. title: in messages. section: its settings are engines.SECTION. module: what its Python
    runs. paced_model: the architecture that stands for the GPU. scratch: variables of the environment that name the
    folder of its sockets and other remains. reports: how a server that runs already is made to report its metrics."""

    title: str
    section: str
    module: str
    paced_model: str
    scratch: tuple[str, ...] = ("TMPDIR",)
    reports: str = ""


class _Attach(Protocol):
    @property
    def url(self) -> str: ...


class _Settings(Protocol):
    """What the sections of such engines have in common."""

    @property
    def python(self) -> str: ...
    @property
    def args(self) -> tuple[str, ...]: ...
    @property
    def env(self) -> dict[str, str]: ...
    @property
    def start_timeout(self) -> float: ...
    @property
    def cores(self) -> Cores: ...
    @property
    def attach(self) -> _Attach | None: ...


class ServerProcess(ABC):
    """Lifecycle: start, ready, then any of the others, stop. folder: the run's. number: which of several it is, for
    the name of its log. model: of which the KV is; accelerator: what takes the place of its arithmetic."""

    program: ClassVar[Program]

    def __init__(
        self,
        experiment: Experiment,
        settings: _Settings,
        model: ModelSpec,
        folder: Path,
        accelerator: Accelerator | None = None,
        number: int = 0,
    ) -> None:
        self._experiment, self._started_as, self._model, self._folder = experiment, settings, model, folder
        self._accelerator, self._number = accelerator, number
        self._report, self._scratch = Path(), Path()
        self.attached = settings.attach is not None
        self.url = settings.attach.url.rstrip("/") if settings.attach else ""
        self.child: Child | None = None
        self._http = control_client(60)

    @abstractmethod
    def _flags(self, port: int) -> list[str]:
        """The server's arguments."""

    @abstractmethod
    def _environment(self) -> dict[str, str]:
        """Its environment beyond ours."""

    def start(self, connection: Connection) -> None:
        """connection: how it reaches its cache server. Raises EngineError."""
        if self.attached:
            return
        settings, program = self._started_as, self.program
        python = Path(settings.python)
        if not python.exists():
            raise EngineError(
                f"{python}: no such Python; run scripts/engine_env {program.section}, or set"
                f" engines.{program.section}.python"
            )
        port = free_port()
        # In memory: on a disk, a write could wait for a journal that is busy with the cache server's writes.
        self._report = Path("/dev/shm") / f"kv-harness-{os.getpid()}-{port}-pace"
        self.url = f"http://127.0.0.1:{port}"
        # Servers leave their sockets behind; a short path, because those are limited to 107 characters.
        self._scratch = Path(tempfile.mkdtemp(prefix="kv-harness-"))
        named = dict.fromkeys(program.scratch, str(self._scratch))
        env = child_environment(self._environment() | connection.environment | settings.env | named)
        argv = [str(python), "-m", program.module, *self._flags(port), *connection.arguments, *settings.args]
        remains = [self._scratch, *([self._report] if self._accelerator else [])]
        name, stored = numbered(program.title, self._number), connection.stored
        self.child = Child(name, argv, log=self._log, env=env, cores=self._cores, scratch=remains, stored=stored)
        self.child.start()

    @property
    def _cores(self) -> tuple[int, ...] | None:
        return self._started_as.cores.of_instance(self._number)

    @property
    def _log(self) -> Path:
        return self._folder / "logs" / f"{numbered(self.program.section, self._number)}.log"

    def _see(self) -> str:
        return f"see {self._log}" if self.child else "see its log"

    def _write_model(self) -> Path:
        folder = self._folder / "model"
        if self._accelerator is None:
            return write_random_model(self._model, folder)
        return write_random_model(self._accelerator.shape, folder, self.program.paced_model)

    async def ready(self) -> None:
        """Waits until it answers. Raises EngineError with the log's last lines."""
        cure = f"if memory or a flag is the reason, change cache or engines.{self.program.section}"
        if self.child is not None:
            await self.child.wait_until(self._healthy, self._started_as.start_timeout, cure)
        elif not await self._healthy():
            raise EngineError(f"no server answers at {self.url}/health; start it, or correct attach.url")

    async def _healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return (await self._http.get(f"{self.url}/health")).status_code == 200
        return False

    async def metrics(self) -> Metrics:
        try:
            return await scrape(self._http, f"{self.url}/metrics")
        except httpx.HTTPError as error:
            raise EngineError(
                f"{self.program.title} at {self.url} no longer reports its metrics ({error!r});"
                f" {self.program.reports}{self._see()}"
            ) from None

    def pace(self, origin_s: float) -> dict[str, int | None]:
        """What the accelerator has paced so far; empty without one. origin_s: the run's beginning, by perf_counter."""
        return read_report(self._report, origin_s) if self._accelerator else {}

    def read_bytes(self) -> int | None:
        """Bytes that it got from storage devices; None for a process that is not known."""
        return self.child.storage_read_bytes() if self.child else None

    async def stop(self, *, keep: bool = False) -> None:
        """keep: what a cache server within it has stored stays, and it may be started again."""
        if self.child is not None:
            await self.child.stop(keep=keep)
        if not keep:
            await self._http.aclose()
