"""Streams and events for copies between two host memories: a stream is a thread that runs its copies in order.

SGLang names what has them, `device_module`, in two places. torch.cpu, which it finds without a GPU, would run each copy
where it is submitted, so that the scheduler would wait for every copy.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from ..pace import share_interpreter, wake_precisely
from ..settings import pacing

_here = threading.local()
_log = logging.getLogger(__name__)


class _Stream:
    def __init__(self, **_kwargs: Any) -> None:
        share_interpreter()
        paced = pacing().loads is not None
        self._thread = ThreadPoolExecutor(1, "copies", wake_precisely if paced else None)

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        return self._thread.submit(_or_abort, job)

    def wait_event(self, event: _Event) -> None:
        event.wait(self)

    def wait_stream(self, other: _Stream) -> None:
        """Work of the model and the scheduler is done when this is called."""

    def synchronize(self) -> None:
        self.submit(time.perf_counter).result()


class _Caller(_Stream):
    """The stream of the thread that asks: it runs a job at once, and waits in person."""

    def __init__(self) -> None:
        """Without a thread."""

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(job())
        return done


class _Event:
    def __init__(self, **_kwargs: Any) -> None:
        self._reached: Future[float] | None = None

    def record(self, stream: _Stream | None = None) -> None:
        self._reached = (stream or Streams.current_stream()).submit(time.perf_counter)

    def query(self) -> bool:
        return self._reached is None or self._reached.done()

    def synchronize(self) -> None:
        if self._reached is not None:
            self._reached.result()

    def wait(self, stream: _Stream | None = None) -> None:
        if self._reached is not None:
            (stream or Streams.current_stream()).submit(self._reached.result)

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds between two recorded events."""
        assert self._reached is not None and end._reached is not None, "not recorded"
        return 1000 * (end._reached.result() - self._reached.result())


class Streams:
    """What SGLang takes for torch.cuda here."""

    Stream, Event = _Stream, _Event

    @staticmethod
    def current_stream() -> _Stream:
        return getattr(_here, "stream", None) or _Caller()

    @staticmethod
    @contextmanager
    def stream(chosen: _Stream) -> Iterator[None]:
        before, _here.stream = getattr(_here, "stream", None), chosen
        try:
            yield
        finally:
            _here.stream = before


def _or_abort(job: Callable[[], Any]) -> Any:
    """A copy that failed leaves KV that is not the prompt's: the engine ends, as it would after a CUDA error."""
    try:
        return job()
    except BaseException:
        _log.exception("ERROR a copy between GPU and CPU RAM failed")
        os.abort()
