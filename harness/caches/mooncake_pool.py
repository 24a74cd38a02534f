"""The processes of a Mooncake pool: a master, which knows every object, and a client, which lends RAM and, below
it, files on an SSD. Both are our children; clients reach them over TCP on this machine.

Flags, routes and metrics are those of Mooncake 0.3.13, seen with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx
import msgspec

from harness.caches.stores.base import LOOPBACK
from harness.collectors.prometheus import Metrics, scrape
from harness.errors import EngineError
from harness.processes.child import Child, child_environment, control_client, free_port

# Of every process that speaks with the pool.
CLIENT_SIDE = {"MC_TCP_BIND_ADDRESS": LOOPBACK}
MASTER_PROGRAM = "mooncake_master"
_CURE = "try its command by hand, or `harness doctor`"


class PoolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """engine: whose environment python is of. log: the file of a process, by its name. segment_bytes: RAM that the
    client lends. offload: the environment's settings of the SSD; none: there is none. stored: its folders."""

    engine: str
    python: Path
    log: Callable[[str], Path]
    segment_bytes: int
    cores: tuple[int, ...] | None = None
    master_args: tuple[str, ...] = ()
    start_timeout_s: float = 300.0
    offload: Mapping[str, str] = {}
    stored: tuple[Path, ...] = ()


class MooncakePool:
    """Lifecycle: start, ready, then any of the others, stop."""

    def __init__(self, plan: PoolPlan) -> None:
        self._plan = plan
        self._master: Child | None = None
        self.client: Child | None = None
        self._http = control_client(30)
        self._rpc = self._web = self._port = 0

    def start(self) -> None:
        """Raises EngineError."""
        self._rpc, self._web, self._port = free_port(), free_port(), free_port()
        self._master = self.child("Mooncake master", self._master_command(), self._plan.stored)
        self._master.start()

    def child(self, name: str, argv: Sequence[str], stored: Sequence[Path] = ()) -> Child:
        """A process that speaks with the pool, or is of it; not started."""
        env = child_environment({**CLIENT_SIDE, "GLOG_logtostderr": "1", **self._plan.offload})
        log = self._plan.log(name.replace(" ", "-").lower())
        return Child(name, argv, log=log, env=env, cores=self._plan.cores, stored=stored, grace_s=5.0)

    def _master_command(self) -> list[str]:
        argv = [self._program(MASTER_PROGRAM), f"--rpc_address={LOOPBACK}", f"--rpc_port={self._rpc}"]
        argv += [f"--metrics_host={LOOPBACK}", f"--metrics_port={self._web}"]
        argv += ["--enable_offload=true", "--offload_on_evict=true"] if self._plan.offload else []
        return [*argv, *self._plan.master_args]

    def _client_command(self) -> list[str]:
        argv = [self._program("mooncake_client"), f"--host={LOOPBACK}", f"--port={self._port}", "--protocol=tcp"]
        argv += [f"--master_server_address={self.master}", "--metadata_server=P2PHANDSHAKE"]
        argv += [f"--global_segment_size={self._plan.segment_bytes}"]
        return [*argv, *(["--enable_offload=true"] if self._plan.offload else [])]

    def _program(self, name: str) -> str:
        path = self._plan.python.parent / name
        if not path.exists():
            raise EngineError(f"{path}: no such program; {install_cure(self._plan.engine)}")
        return str(path)

    async def ready(self) -> None:
        """Starts the client once the master answers, and waits until its segment is there. Raises EngineError."""
        assert self._master is not None, "ready before start"
        await self._master.wait_until(self._answers, self._plan.start_timeout_s, _CURE)
        self.client = self.child("Mooncake client", self._client_command(), self._plan.stored)
        self.client.start()
        await self.client.wait_until(self._mounted, self._plan.start_timeout_s, _CURE)

    async def _answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return (await self._http.get(f"{self.url}/health")).status_code == 200
        return False

    async def _mounted(self) -> bool:
        return bool((await self.metrics()).total("master_total_capacity_bytes"))

    @property
    def master(self) -> str:
        """HOST:PORT of the master, for a client."""
        return f"{LOOPBACK}:{self._rpc}"

    @property
    def url(self) -> str:
        """Of the master's metrics and routes."""
        return f"http://{LOOPBACK}:{self._web}"

    @property
    def children(self) -> tuple[Child, ...]:
        return tuple(child for child in (self._master, self.client) if child is not None)

    async def metrics(self) -> Metrics:
        """The master's. Raises EngineError where it no longer reports them."""
        try:
            return await scrape(self._http, f"{self.url}/metrics")
        except httpx.HTTPError as error:
            log = self._plan.log("mooncake-master")
            raise EngineError(f"Mooncake at {self.url} no longer reports its metrics ({error!r}); see {log}") from None

    async def remove_all(self, files_gone: Callable[[], bool] = lambda: True) -> None:
        """The client drops its files with its next heartbeat: what is put before that could go with them. Raises
        EngineError where objects stay."""
        for _ in range(50):
            try:
                await self._http.post(f"{self.url}/api/v1/remove_all", params={"force": "true"})
            except httpx.HTTPError as error:
                raise EngineError(f"Mooncake at {self.url} no longer answers ({error!r})") from None
            if files_gone() and not (await self.metrics()).total("master_key_count"):
                return
            await asyncio.sleep(0.1)
        raise EngineError(f"Mooncake at {self.url} keeps objects after remove_all; is a request still running?")

    def version(self) -> str | None:
        """Of the package in the environment, by its folder's name."""
        folders = self._plan.python.parent.parent.glob("lib/python3*/site-packages/mooncake_transfer_engine*.dist-info")
        names = [folder.name.removesuffix(".dist-info") for folder in folders]
        return names[0].rpartition("-")[2] if names else None

    async def stop(self, *, keep: bool = False) -> None:
        for child in reversed(self.children):
            await child.stop(keep=keep)
        if not keep:
            await self._http.aclose()


def install_cure(engine: str) -> str:
    return f"install mooncake-transfer-engine-non-cuda there, or run scripts/engine_env {engine}"
