"""The seam of a store behind a network: a server that we start, or one that runs already, and the network before it."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from harness.errors import EngineError, PreflightError
from harness.experiment.cache import Remote
from harness.processes.child import Child

LOOPBACK = "127.0.0.1"


class StorePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a cache server asks for. folder: the run's. python: of the cache server's environment. cores: of the store's
    own processes; None: any. args: more arguments for the store's server, where it takes any."""

    remote: Remote
    folder: Path
    python: Path = Path(sys.executable)
    cores: tuple[int, ...] | None = None
    start_timeout_s: float = 60.0
    args: tuple[str, ...] = ()

    @property
    def scratch(self) -> Path:
        """A folder of our own for the store's files: it is deleted at the end."""
        return self.folder / f"kv-harness-{self.folder.name}-store"


class StoreAccount(msgspec.Struct, frozen=True, kw_only=True):
    """What the store itself says, in total: bytes that left it, and reads of chunks that it answered. device_bytes:
    what its process read from devices; None: its process is not ours."""

    sent_bytes: int
    reads: int
    device_bytes: int | None


# Removes every chunk that the cache server lists in its store.
Forget = Callable[[], Awaitable[None]]


class RemoteStore(Protocol):
    """Lifecycle: start, ready, then any of the others, stop. stop is safe at any time, twice too."""

    @property
    def children(self) -> tuple[Child, ...]:
        """Processes that we started, without which a run cannot go on."""

    @property
    def names(self) -> dict[str, str]:
        """Addresses by host names that the cache server needs and this machine does not resolve."""

    def start(self) -> None:
        """Starts child processes, if any. Raises EngineError."""

    async def ready(self) -> str:
        """Waits until it answers; returns its name and version. Raises EngineError with the cure."""

    def spec(self) -> dict[str, Any]:
        """How LMCache's server names it; no secret is in it."""

    def environment(self) -> dict[str, str]:
        """What LMCache's server needs in its environment to reach it: secrets, and code of ours."""

    async def clear(self, forget: Forget) -> None:
        """Removes every chunk. The cache server is idle."""

    def make_cold(self) -> None:
        """The store's next read of any chunk reaches its device. The cache server is idle."""

    async def account(self, reads: int) -> StoreAccount:
        """Totals. reads: chunks that the cache server says it has loaded, for a store that tells of them later. Raises
        EngineError where the store no longer answers."""

    async def stop(self) -> None:
        """Ends what start began; of a store that runs already, removes what the run has put there."""


def secret(remote: Remote, what: str) -> str:
    """The value of the variable that `credentials` names for 'user' or 'secret'; "" where it names none.

    Raises PreflightError where it is not set.
    """
    name = getattr(remote.credentials, what) if remote.credentials else None
    if name is None:
        return ""
    if not (value := os.environ.get(name)):
        raise PreflightError(f"cache.remote.credentials.{what}: the environment variable {name} is not set; export it")
    return value


def address(remote: Remote) -> tuple[str, int]:
    """Host and port of a store that runs already."""
    assert remote.endpoint is not None
    host, _, port = remote.endpoint.rpartition(":")
    return host, int(port)


def gone(store: str, error: Exception) -> EngineError:
    return EngineError(f"the store ({store}) no longer answers: {' '.join(str(error).split())[:200]}; is it running?")
