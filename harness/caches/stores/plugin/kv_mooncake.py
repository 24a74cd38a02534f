"""Mooncake's store below LMCache 0.5.6's server: the client that its adapter `native_plugin` drives.

LMCache's own adapter, `mooncake_store`, drives a C++ client that its wheel has not (lmcache.lmcache_mooncake;
mooncake_store_l2_adapter.py, line 160). What that client asks of Mooncake, this one asks by Mooncake's Python module:
one put_from, get_into or is_exist a chunk, from and into LMCache's own memory, on so many threads. Look-ups and their
locks are LMCache's, as there (native_connector_l2_adapter.py).

Runs in LMCache's server, on whose PYTHONPATH the harness puts this folder, and imports nothing of the harness.
"""

import ctypes
import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from mooncake.store import MooncakeDistributedStore

# The batch's number, whether none of it failed, why it did, and of each chunk whether it is there or was moved.
EndedBatch = tuple[int, bool, str, list[bool]]


class MooncakeClient:
    """setup: Mooncake's settings, by its own names. num_workers: threads, each with one chunk at a time; LMCache's own
    adapter has four, too. Raises RuntimeError where no master answers."""

    def __init__(self, setup: dict[str, str], num_workers: int = 4) -> None:
        self._store = MooncakeDistributedStore()
        if code := self._store.setup(setup):
            raise RuntimeError(f"Mooncake's client does not start (code {code}): {setup}")
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="kv-mooncake")
        self._numbers = itertools.count()
        self._ended: deque[EndedBatch] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def event_fd(self) -> int:
        """Readable when a batch has ended."""
        return self._event

    def submit_batch_set(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """The batch's number. A key that is there already keeps its value, which has not failed."""
        return self._submit("put_from", [(self._put, key, view) for key, view in zip(keys, views, strict=True)])

    def submit_batch_get(self, keys: Sequence[str], views: Sequence[memoryview]) -> int:
        """The batch's number."""
        return self._submit("get_into", [(self._get, key, view) for key, view in zip(keys, views, strict=True)])

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """The batch's number. What is there stays, as Mooncake evicts nothing within its lease."""
        return self._submit("is_exist", [(self._exists, key) for key in keys])

    def drain_completions(self) -> list[EndedBatch]:
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return []
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def close(self) -> None:
        self._workers.shutdown(wait=True)
        self._store.close()
        os.close(self._event)

    def _put(self, key: str, view: memoryview) -> bool:
        if code := self._store.put_from(key, _address(view), view.nbytes):
            raise OSError(f"code {code}")
        return True

    def _get(self, key: str, view: memoryview) -> bool:
        size = self._store.get_into(key, _address(view), view.nbytes)
        if size != view.nbytes:
            raise OSError(f"code {size}" if size < 0 else f"{size} of {view.nbytes} bytes")
        return True

    def _exists(self, key: str) -> bool:
        code = self._store.is_exist(key)
        if code < 0:
            raise OSError(f"code {code}")
        return bool(code)

    def _submit(self, name: str, calls: Sequence[tuple[Callable[..., bool], *tuple[object, ...]]]) -> int:
        number, lock = next(self._numbers), threading.Lock()
        done, errors, left = [False] * len(calls), set[str](), len(calls)

        def one(place: int) -> None:
            nonlocal left
            call, *given = calls[place]
            try:
                done[place] = call(*given)
            except Exception as error:
                with lock:
                    errors.add(str(error))
            with lock:
                left -= 1
                last = not left
            if last:
                self._end(number, name, done, errors)

        for place in range(len(calls)):
            self._workers.submit(one, place)
        if not calls:
            self._end(number, name, done, errors)
        return number

    def _end(self, number: int, name: str, done: list[bool], errors: set[str]) -> None:
        told = f"Mooncake's {name} failed: {', '.join(sorted(errors))}" if errors else ""
        if told:
            print(f"error: {told}", file=sys.stderr, flush=True)
        self._ended.append((number, not errors, told, done))
        os.eventfd_write(self._event, 1)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))
