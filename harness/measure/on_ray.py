"""Workers on a Ray cluster: one on this machine for the length of the run, or one that runs already.

Ray is the extra `ray` of the package, and is imported only here. Its tasks carry batches of cells, seconds each.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.errors import EngineError
from harness.measure.task import work
from harness.measure.workers import Loadable, WorkerDiedError

# Of the cluster that is made for a run: a few batches' rows, and a few loads.
_STORE_BYTES = 2**30
_KEPT_LOADS = 4
_ANSWER_S = 10.0


class OnRay:
    """A task a batch, on as many workers as the cluster has CPUs. address: of a cluster; None: it makes its own."""

    def __init__(self, name: str, address: str | None) -> None:
        self.name, self._address = name, address
        self._scratch: str | None = None
        self._loads: dict[str, Any] = {}

    async def start(self) -> int:
        # Ray reports its use to its makers unless it is told not to.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Its own 30 s are short on a machine that is busy.
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
        import ray

        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._knock()
            ray.init(**self._where(), log_to_driver=False, logging_level=logging.ERROR)
            resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call, unused-ignore]
            workers = int(resources.get("CPU", 0))
        except Exception as error:  # Ray's own and Python's, whatever the address is
            first = str(error).strip().partition("\n")[0]
            raise EngineError(
                f"--on {self.name}: no Ray cluster could be reached ({first}); start one with `ray start --head`, or"
                " use local:N"
            ) from None
        finally:
            # A Ctrl-C and a SIGTERM are the run's to handle.
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if not workers:
            raise EngineError(f"--on {self.name}: the Ray cluster has no CPU to offer; give it one, or use local:N")
        self._task = ray.remote(max_retries=0, num_cpus=1)(_work)
        return workers

    def _knock(self) -> None:
        """Raises OSError where no process listens at the address: Ray itself would try for minutes."""
        host, _, port = (self._address or "").removeprefix("ray://").rpartition(":")
        if host and port.isdecimal():
            socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()

    def _where(self) -> dict[str, Any]:
        if self._address is not None:
            return {"address": self._address}
        self._scratch = tempfile.mkdtemp(prefix="kv-ray-")
        return {
            "address": "local",
            "include_dashboard": False,
            "object_store_memory": _STORE_BYTES,
            "_node_ip_address": "127.0.0.1",
            "_temp_dir": self._scratch,
        }

    async def work(self, _worker: int, batch: bytes, loads: Loadable, /) -> bytes:
        import ray
        from ray.exceptions import RayError, RayTaskError

        for key in loads:
            self._loads[key] = self._loads.pop(key, None) or ray.put(loads[key]())
        given = [self._loads[key] for key in loads]
        for oldest in list(self._loads)[:-_KEPT_LOADS]:
            del self._loads[oldest]
        answer = self._task.remote(str(Path.cwd()), batch, [*loads], *given)
        try:
            found: bytes = await asyncio.wrap_future(answer.future())
        except RayTaskError:
            raise
        except RayError as error:
            raise WorkerDiedError(str(error).strip().partition("\n")[0]) from None
        return found

    async def stop(self) -> None:
        import ray

        self._loads.clear()
        ray.shutdown()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _work(folder: str, batch: bytes, keys: Sequence[str], *loads: bytes) -> bytes:
    """On a worker. folder: where the run's own process stands, from which an experiment may name files."""
    with contextlib.suppress(OSError):
        os.chdir(folder)
    return work(batch, dict(zip(keys, loads, strict=True)))
