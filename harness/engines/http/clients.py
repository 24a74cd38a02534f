"""Several processes that send one load: the schedule stays here, and bodies, sockets and stamps are the processes'.

A session's requests are all one client's, because a prompt that quotes answers is made where these came. Sessions go to
the clients in turn, in the order in which the load names them, and so do requests without a session.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from harness.engines.http.bodies import PREPARE_S, PREPARED_BYTES
from harness.engines.http.sender import RequestOutcome, Target, WhenEnded
from harness.engines.http.wire import Begin, ClientLink, ClientSetup, FromClient, GiveUp, Idle, Ready, SendNow
from harness.processes.child import Child
from traces.request import Request

# A client that was told to end its requests has done so by then, or is ended itself.
PATIENCE_S = 5.0
_GRACE_S = 2.0


class Clients(NamedTuple):
    """number: how many. logs: a folder that is there, for client-K.log. cores: that they are pinned to; None: any."""

    number: int
    logs: Path
    cores: tuple[int, ...] | None = None

    @classmethod
    def if_several(cls, number: int, folder: Path, cores: tuple[int, ...] | None = None) -> Clients | None:
        """None for one, which needs no process of its own. folder: the run's."""
        return None if number == 1 else cls(number, folder / "logs", cores)


def deal(requests: Iterable[Request], clients: int) -> list[int]:
    """By request, in the order given, its client."""
    homes, found, lone = dict[str, int](), [], 0
    for request in requests:
        if request.session is None:
            found.append(lone % clients)
            lone += 1
        else:
            found.append(homes.setdefault(request.session, len(homes) % clients))
    return found


class _Client:
    """One process. waiting: by place in its part of the load, when a request was told to it and who wants to know."""

    def __init__(self, number: int, clients: Clients, told: Callable[[_Client, FromClient], None]) -> None:
        self.number, self.waiting = number, dict[int, tuple[float, WhenEnded]]()
        self.ready = self.begun = 0
        self.prepared = True
        self.link = ClientLink(FromClient, partial(told, self), lambda: None)
        self._ours, self._theirs = socket.socketpair()
        self.child = Child(
            f"load client {number}",
            [sys.executable, "-m", "harness.engines.http.client"],
            log=clients.logs / f"client-{number}.log",
            env=os.environ,
            cores=clients.cores,
            grace_s=_GRACE_S,
            stdin=self._theirs.fileno(),
        )

    async def start(self, setup: ClientSetup) -> None:
        try:
            self.child.start()
        except BaseException:
            self._ours.close()
            raise
        finally:
            self._theirs.close()
        await asyncio.get_running_loop().create_unix_connection(lambda: self.link, sock=self._ours)
        self.link.send(setup)

    def begin(self, number: int, requests: tuple[Request, ...], *, quotes: bool, room_bytes: int) -> None:
        self.begun = number
        self.link.send(Begin(number, requests, quotes, room_bytes))

    def end_waiting(self, reason: str) -> None:
        """What the client has not told of, and will not."""
        waiting, self.waiting = self.waiting, {}
        for sent_s, ended in waiting.values():
            ended(RequestOutcome(sent_s=sent_s, error=reason, client=self.number))


class ClientProcesses:
    """A Sender. clock: the run's, of time.perf_counter, which is one clock in all processes of a machine."""

    def __init__(self, target: Target, clients: Clients, clock: Callable[[], float]) -> None:
        self._target, self._asked, self._clock = target, clients, clock
        self._clients: list[_Client] = []
        self._places: dict[int, tuple[_Client, int]] = {}
        self._number = 0
        self._news = asyncio.Event()
        self._late: asyncio.TimerHandle | None = None

    @property
    def children(self) -> tuple[Child, ...]:
        return tuple(client.child for client in self._clients)

    async def open(self) -> None:
        """Raises EngineError where a process cannot be started."""
        if self._clients:
            return
        setup = ClientSetup(pickle.dumps(self._target), _origin_s(self._clock))
        for number in range(self._asked.number):
            client = _Client(number, self._asked, self._told)
            self._clients.append(client)
            await client.start(setup)

    async def close(self) -> None:
        clients, self._clients = self._clients, []
        for client in clients:
            client.link.close()
        await asyncio.gather(*(client.child.stop() for client in clients))

    def take(self, requests: tuple[Request, ...]) -> None:
        count = len(self._clients)
        parts: list[list[Request]] = [[] for _ in range(count)]
        self._places = {}
        for request, number in zip(requests, deal(requests, count), strict=True):
            self._places[id(request)] = self._clients[number], len(parts[number])
            parts[number].append(request)
        self._number += 1
        quotes = any(request.quotes for request in requests)
        for client, part in zip(self._clients, parts, strict=True):
            client.begin(self._number, tuple(part), quotes=quotes, room_bytes=PREPARED_BYTES // count)

    async def ready(self) -> None:
        while any(client.ready != self._number for client in self._clients):
            self._news.clear()
            await self._news.wait()

    def prepare(self, within_s: float) -> bool:
        """Leaves the pause to the clients that have bodies to make."""
        for client in self._clients if within_s > PREPARE_S else ():
            if not client.prepared:
                client.link.send(Idle(self._clock() + within_s))
        return False

    def ask(self, request: Request, instance: int, ended: WhenEnded) -> None:
        client, place = self._places[id(request)]
        client.waiting[place] = self._clock(), ended
        client.link.send(SendNow(place, instance))

    def _told(self, client: _Client, message: FromClient) -> None:
        if isinstance(message, Ready):
            client.ready, client.prepared = message.number, message.prepared
            self._news.set()
        elif client.ready == client.begun and (waiting := client.waiting.pop(message.place, None)) is not None:
            message.outcome.client = client.number
            waiting[1](message.outcome)

    def give_up(self, reason: str) -> None:
        for client in self._clients:
            if client.child.running:
                client.link.send(GiveUp(reason))
            else:
                client.end_waiting(reason)
        self._late = asyncio.get_running_loop().call_later(PATIENCE_S, self._give_up_late, reason)

    def _give_up_late(self, reason: str) -> None:
        """A client that is stopped, say, tells nothing."""
        for client in self._clients:
            client.end_waiting(reason)

    async def drop(self) -> None:
        """Returns when the clients have dropped what was in flight, or after PATIENCE_S."""
        if self._late is not None:
            self._late.cancel()
            self._late = None
        in_flight = any(client.waiting for client in self._clients)
        for client in self._clients:
            client.waiting.clear()
        self.take(())
        if in_flight and all(client.child.running for client in self._clients):
            try:
                await asyncio.wait_for(self.ready(), PATIENCE_S)
            except TimeoutError:
                return


def _origin_s(clock: Callable[[], float]) -> float:
    """What time.perf_counter says at the clock's 0: between two looks at it as close to each other as can be had."""
    looks = []
    for _ in range(50):
        before_s = time.perf_counter()
        now_s = clock()
        after_s = time.perf_counter()
        looks.append((after_s - before_s, (before_s + after_s) / 2 - now_s))
    return min(looks)[1]
