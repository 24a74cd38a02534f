"""The toy cache server: without a process, or with one that keeps chunks as files."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

from harness.caches.base import CachePlan, CacheResolved, Connection, EngineSide, Reading
from harness.caches.files import FilesBackend
from harness.errors import EngineError
from harness.processes.child import Child, child_environment, free_port

# The plan's argument that asks for the process; it is followed by the bytes of a chunk.
STORE = "--store"


class ToyCache:
    """A CacheServer. With STORE among the plan's arguments it starts a process for the disk tier's files."""

    precedes = True

    def __init__(self, plan: CachePlan) -> None:
        self.backend: FilesBackend | None = None
        self.children: tuple[Child, ...] = ()
        self._plan, self._port, self.running = plan, 0, False
        if plan.args and plan.cache.disk is not None:
            self.backend = FilesBackend(plan.disk_folder, "toy")

    def start(self) -> None:
        self.running = True
        if self.backend is None:
            return
        self.backend.prepare()
        self._port = free_port()
        program = str(Path(__file__).with_name("store.py"))
        argv = [sys.executable, program, str(self.backend.folder), str(self._port), self._plan.args[1]]
        log, scratch = self._plan.folder / "logs" / "toy-store.log", self.backend.scratch
        child = Child(
            "toy store", argv, log=log, env=child_environment({}), cores=self._plan.cores, scratch=scratch, grace_s=5
        )
        child.start()
        self.children = (child,)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(pid for child in self.children for pid in child.pids)

    async def ready(self) -> None:
        async def speaks() -> bool:
            return any("runs on cores" in line for line in child.last_lines())

        for child in self.children:
            await child.wait_until(speaks, 30, "run store.py by hand")

    def connection(self) -> Connection:
        return Connection(arguments=(STORE, str(self._port)) if self.backend else ())

    async def resolved(self) -> CacheResolved:
        return CacheResolved(versions={"toy-cache": "2"})

    async def settle(self, _engine: EngineSide) -> Reading:
        if self.backend is None:
            return Reading()
        read_bytes = self.backend.read_bytes(self.children[0].storage_read_bytes())
        return Reading(counters={"disk_device_read_bytes": read_bytes})

    async def clear(self, tier: str) -> None:
        if self.backend is None:
            raise EngineError(f"the toy cache cannot empty {tier}; leave it")
        if tier == "disk":
            await asyncio.to_thread(self.backend.clear)
        else:
            await asyncio.to_thread(self.backend.make_cold)

    async def stop(self, *, keep: bool = False) -> None:
        self.running = False
        for child in self.children:
            await child.stop(keep=keep)


class StoreClient:
    """What the engine has of the process: it moves chunks, and waits until they are moved."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._lines = self._socket.makefile("rw")

    def move(self, verb: str, name: str, chunks: int) -> int:
        """verb: write or read. Returns the bytes that were moved."""
        self._lines.write(f"{verb} {name} {chunks}\n")
        self._lines.flush()
        return int(self._lines.readline())

    def close(self) -> None:
        self._lines.close()
        self._socket.close()
