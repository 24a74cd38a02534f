"""LMCache's transfers between 'GPU' and CPU RAM at a link's pace, beside the engine's steps, with nothing copied.

LMCache 0.5.6 reserves slots in shared memory, lets the engine copy, and is told when the copy is done
(v1/multiprocess/transfer_context/worker_transfer.py, EngineDrivenTransferContext). Here a thread takes the copy's time
in place of the copy. All messages to the server are LMCache's own, so its locks, counters, evictions and stores to
storage are too.

The slots hold random bytes from the start, and each 4 KiB of a stored chunk is marked with a number that no other has:
what reaches the device neither compresses nor deduplicates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from lmcache.v1.multiprocess.futures import MessagingFuture
from lmcache.v1.multiprocess.transfer_context import worker_transfer
from lmcache.v1.multiprocess.transfer_context.shm import EngineDrivenContextShm
from lmcache.v1.multiprocess.transfer_context.worker_transfer import EngineDrivenTransferContext

from .noise import Marks, fill_with_noise
from .pace import share_interpreter, wait_until, wake_precisely
from .settings import pacing

# Transfers of one direction that can be under way at once; LMCache's own asynchronous context has as many threads.
_THREADS = 4


def install() -> None:
    """Has LMCache make a paced context where it would choose between its own two. Without a paced link, it copies."""
    here = pacing()
    if here.loads is not None and here.stores is not None:
        worker_transfer._build_engine_driven_context = PacedTransferContext


class PacedTransferContext(EngineDrivenTransferContext):
    """Each transfer ends when the link says so; its future resolves then."""

    def __init__(self, instance_id: int, req_client: Any) -> None:
        super().__init__(instance_id, req_client)
        here = pacing()
        assert here.loads is not None and here.stores is not None, "made without a paced link"
        self._loads, self._stores, self._steps, self._report = here.loads, here.stores, here.steps, here.report
        share_interpreter()
        self._threads = {kind: ThreadPoolExecutor(_THREADS, kind, wake_precisely) for kind in ("loads", "stores")}
        self._storing: set[MessagingFuture[bool]] = set()
        self._marks = Marks()

    def register(self, *args: Any, **kwargs: Any) -> None:
        super().register(*args, **kwargs)
        if self._is_closed():
            return
        slots = self.engine_driven_context
        if not isinstance(slots, EngineDrivenContextShm) or slots._shm_buffer is None:
            raise RuntimeError("the reference accelerator needs LMCache's shared memory; see the LMCache server's log")
        fill_with_noise(slots._shm_buffer)

    def submit_store(
        self, _request_id: str, key: Any, _kv: Any, _block_ids: Any, _event: Any, _blocks_in_chunk: int
    ) -> MessagingFuture[bool]:
        # The KV exists once the step that computes it has ended.
        ready_s = self._steps.due_s or time.perf_counter()
        future: MessagingFuture[bool] = MessagingFuture()
        self._storing = {store for store in self._storing if not store.query()} | {future}
        self._threads["stores"].submit(_resolving, future, lambda: self._store(key, ready_s))
        return future

    def _store(self, key: Any, ready_s: float) -> bool:
        slots = self.engine_driven_context
        prepared = slots.prepare_store(key, self._instance_id)
        if prepared is None:
            raise RuntimeError("LMCache named no slots in shared memory for a store")
        buffers, indices = prepared
        if not indices:
            return True  # all of it is stored already
        due_s = self._stores.reserve(ready_s, len(buffers), _bytes_of(buffers))
        for buffer in buffers:
            self._marks.on(buffer)
        self._wait("stores", ready_s, due_s)
        return bool(slots.commit_store(key, self._instance_id, buffers))

    def submit_retrieve(
        self,
        _request_id: str,
        key: Any,
        _kv: Any,
        _block_ids: Any,
        _event: Any,
        _blocks_in_chunk: int,
        skip_first_n_tokens: int = 0,
    ) -> MessagingFuture[bool]:
        ready_s = time.perf_counter()
        skipped = skip_first_n_tokens / (key.end - key.start)
        future: MessagingFuture[bool] = MessagingFuture()
        self._threads["loads"].submit(_resolving, future, lambda: self._load(key, ready_s, skipped))
        return future

    def _load(self, key: Any, ready_s: float, skipped: float) -> bool:
        """skipped: the share of the tokens that the GPU holds already."""
        slots = self.engine_driven_context
        buffers = slots.prepare_retrieve(key, self._instance_id)
        if buffers is not None:
            nbytes = round(_bytes_of(buffers) * (1 - skipped))
            self._wait("loads", ready_s, self._loads.reserve(ready_s, len(buffers), nbytes))
        slots.commit_retrieve(key, self._instance_id)
        return buffers is not None

    def _wait(self, kind: str, ready_s: float, due_s: float) -> None:
        self._report.add(kind, due_s - ready_s, wait_until(due_s))

    def flush_inflight_stores(self) -> None:
        """Before the engine gives blocks of a preempted request to others: their stores have ended."""
        for future in self._storing:
            future.wait()

    def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown(wait=True)
        super().close()


def _resolving(future: MessagingFuture[bool], transfer: Callable[[], bool]) -> None:
    """Resolves the future whatever happens: the engine waits for it, and then computes what was not loaded."""
    ok = False
    try:
        ok = transfer()
    except Exception:
        worker_transfer.logger.exception("A paced transfer failed")
    finally:
        future.set_result(ok)


def _bytes_of(buffers: Sequence[torch.Tensor]) -> int:
    return sum(buffer.nbytes for buffer in buffers)
