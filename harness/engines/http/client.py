"""One client process: sends the requests that it is told to, when it is told to, and tells what came of each.

    python -m harness.engines.http.client       its standard input is the socket to the load loop (wire.py)

It ends with that socket.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import pickle
import socket
import time
from functools import partial

import uvloop

from harness.engines.http.sender import HttpSender, RequestOutcome
from harness.engines.http.wire import Begin, ClientLink, ClientSetup, GiveUp, Idle, Ready, SendNow, ToClient, Told
from traces.request import Request


class _Client:
    """over: is set when the load loop is gone, or a bug has ended this (failure)."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.link = ClientLink(ToClient, self._took, self.over.set)
        self.failure: BaseException | None = None
        self.sender: HttpSender | None = None
        self._requests: tuple[Request, ...] = ()
        self._beginning: asyncio.Task[None] | None = None
        self._origin_s, self._idle_until_s, self._preparing = 0.0, -math.inf, False

    def _now_s(self) -> float:
        return time.perf_counter() - self._origin_s

    def _took(self, message: ToClient) -> None:
        self._idle_until_s = -math.inf
        if isinstance(message, ClientSetup):
            self._origin_s = message.origin_s
            self.sender = HttpSender(pickle.loads(message.target), self._now_s)
            return
        assert self.sender is not None, "ClientSetup comes first"
        if isinstance(message, SendNow):
            self.sender.ask(self._requests[message.place], message.instance, partial(self._ended, message.place))
        elif isinstance(message, Idle):
            self._idle_until_s = message.until_s
            if not self._preparing:
                self._prepare(self.sender)
        elif isinstance(message, GiveUp):
            self.sender.give_up(message.reason)
        else:
            work = self._begin(self.sender, message, self._beginning)
            self._beginning = asyncio.get_running_loop().create_task(work)
            self._beginning.add_done_callback(self._begun)

    async def _begin(self, sender: HttpSender, message: Begin, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            before.cancel()
            await asyncio.wait([before])
        await sender.drop()
        gc.unfreeze()
        self._requests = message.requests
        sender.take(message.requests, quotes=message.quotes, room_bytes=message.room_bytes)
        gc.freeze()  # see HttpReplay.replay
        if message.requests:
            await sender.open()
            await sender.ready()
        self.link.send(Ready(message.number, sender.prepared))

    def _begun(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _ended(self, place: int, outcome: RequestOutcome | BaseException) -> None:
        if isinstance(outcome, BaseException):
            self._fail(outcome)
        else:
            self.link.send(Told(place, outcome))

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.over.set()

    def _prepare(self, sender: HttpSender) -> None:
        """Makes a body after another until a message comes, or the pause is too short for one."""
        self._preparing = sender.prepare(self._idle_until_s - self._now_s())
        if self._preparing:
            asyncio.get_running_loop().call_soon(self._prepare, sender)


async def main() -> None:
    client = _Client()
    await asyncio.get_running_loop().create_unix_connection(lambda: client.link, sock=socket.socket(fileno=os.dup(0)))
    await client.over.wait()
    if client.failure is not None:
        raise client.failure
    if client.sender is not None:
        await client.sender.drop()
        await client.sender.close()


if __name__ == "__main__":
    uvloop.run(main())
