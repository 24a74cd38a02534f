"""The reference network before a store: its process, and what has passed."""

from __future__ import annotations

import errno
import socket
import sys
from pathlib import Path
from typing import NamedTuple

from harness.caches.stores import paced_link
from harness.caches.stores.base import LOOPBACK, StorePlan
from harness.errors import EngineError
from harness.experiment.cache import Network
from harness.processes.child import Child, child_environment, free_port

_LOOPBACKS = tuple(f"127.0.0.{number}" for number in range(2, 255))


class Passed(NamedTuple):
    """Totals. requests: turns from an answer to a question."""

    up_bytes: int
    down_bytes: int
    requests: int
    connections: int


class NetworkLink:
    """A proxy on this machine's loopback. network None: as fast as it can be, for its counts alone. port None: any."""

    def __init__(
        self, network: Network | None, store: tuple[str, int], plan: StorePlan, port: int | None = None
    ) -> None:
        self.host = LOOPBACK if port is None else _free_host(port)
        self.port = port or free_port()
        self._counts = plan.folder / f"kv-harness-{plan.folder.name}-link"
        pace = (network.bandwidth, network.latency) if network else (0, 0)
        argv = [sys.executable, "-I", "-S", str(Path(paced_link.__file__)), self.host, str(self.port)]
        argv += [store[0], str(store[1]), *map(str, pace), str(self._counts)]
        argv += [",".join(map(str, plan.cores)) if plan.cores else "-"]
        log = plan.folder / "logs" / "network.log"
        what = "reference network" if network else "relay to the store"
        self.child = Child(what, argv, log=log, env=child_environment({}), scratch=[self._counts])

    def start(self) -> None:
        self.child.start()

    async def ready(self) -> None:
        async def listens() -> bool:
            return paced_link.READY in self.child.last_lines()

        await self.child.wait_until(listens, 30, "is its port in use? See `harness doctor`")

    def passed(self) -> Passed:
        """What has passed so far. Raises EngineError where the link is gone."""
        try:
            return Passed(*paced_link.COUNTED.unpack_from(self._counts.read_bytes()))
        except OSError as error:
            raise EngineError(f"the network to the store no longer counts ({error})") from None


def _free_host(port: int) -> str:
    """A loopback address at which nothing listens at that port: the store itself may be at another one."""
    for host in _LOOPBACKS:
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise EngineError(f"the network to the store cannot listen at port {port}: {error}") from None
            return host
    raise EngineError(f"the network to the store finds no address to listen at with port {port}")
