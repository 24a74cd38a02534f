"""The seam of what measures cells elsewhere: batches of bytes go out, answers of bytes come back (task.py has both)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

# By load_key, what encodes a load, for workers that may lack the file that it is made from.
Loadable = Mapping[str, Callable[[], bytes]]


class WorkerDiedError(Exception):
    """A worker has ended in the middle of its batch. The text says how."""


class Executor(Protocol):
    """Workers, numbered from 0. `start` comes first; `stop` is safe at any time, and nothing stays running after it.

    name: as in --on.
    """

    name: str

    async def start(self) -> int:
        """Starts the workers; returns how many there are. Raises EngineError."""

    async def work(self, worker: int, batch: bytes, loads: Loadable, /) -> bytes:
        """What task.work gives for a batch. Raises WorkerDiedError; the worker can take another batch then."""

    async def stop(self) -> None: ...
