"""HiCache between two pools that are both host memory: what SGLang has as CUDA code alone.

Copies run beside the scheduler and the model (streams.py), and the model waits for a loaded prefix layer by layer.
With a paced link each copy takes the link's time and moves nothing: the host pool holds random bytes from the start,
and each 4 KiB of a stored page is marked with a number that no other has. Without one, torch copies.

Only the direct I/O backend with the layout page_first_direct, and attention with heads (MHA), are covered.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import sglang.srt.managers.cache_controller as controller
import sglang.srt.mem_cache.l2_transfer as l2_transfer
import sglang.srt.mem_cache.pool_host.base as base
import sglang.srt.mem_cache.pool_host.mha as mha
import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ..noise import Marks, fill_with_noise
from ..pace import wait_until
from ..settings import pacing
from .streams import Streams

_HOST_POOL = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost.__init__"
_FLAT_PAGE = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost.get_dummy_flat_data_page"
# Of RAM, what HiCache leaves to others; the harness has checked before the start that there is enough.
_RESERVE_BYTES = 1 << 30

_marks = Marks()
# Memory of pages that storage was read into before, by size.
_read_into = defaultdict[int, list[np.ndarray[Any, np.dtype[np.uint8]]]](list)


def replace_copies() -> None:
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = _RESERVE_BYTES
    HookRegistry.register(_HOST_POOL, without_page_lock, HookType.BEFORE)
    HookRegistry.register(_HOST_POOL, with_noise, HookType.AFTER)
    HookRegistry.register(_FLAT_PAGE, kept_page, HookType.REPLACE)
    l2_transfer.device_module = controller.device_module = Streams
    mha.transfer_kv_per_layer_direct_pf_lf = load_layer
    mha.transfer_kv_all_layer_direct_lf_pf = store_pages


def without_page_lock(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """CUDA locks pages, and there is none."""
    return args, {**kwargs, "pin_memory": False}


def with_noise(_result: Any, pool: Any, *_args: Any, **_kwargs: Any) -> None:
    if pacing().stores is not None:
        fill_with_noise(pool.kv_buffer.view(-1).view(torch.uint8).numpy().data)


def kept_page(pool: Any) -> torch.Tensor:
    """Where a page of storage is read into before it is copied to the pool: zeros, in memory that earlier pages had.

    It is page-locked on a GPU, and torch keeps such memory for the next ones. Memory that the kernel gives anew for
    each page takes as long as the read.
    """
    shape = (2, pool.layer_num, pool.page_size, pool.head_num, pool.head_dim)
    nbytes = math.prod(shape) * pool.dtype.itemsize
    try:
        memory = _read_into[nbytes].pop()
    except IndexError:
        memory = np.empty(nbytes, dtype=np.uint8)
    used = memory[:]
    weakref.finalize(used, _read_into[nbytes].append, memory).atexit = False
    return torch.from_numpy(used).view(pool.dtype).zero_()


class _Loading:
    """The transfer whose layers are submitted one after another. ready_s: when the first one was."""

    ready_s = 0.0


def load_layer(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Host [page, layer, slot, head, dim], keys and values, to one layer of the device [slot, head, dim]."""
    if layer_id == 0:
        _Loading.ready_s = time.perf_counter()
    ready_s, layers, link = _Loading.ready_s, src_ptrs[0].shape[1], pacing().loads
    if link is None:
        _submit(lambda: _copy_layer(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size))
        return
    nbytes = len(src_indices) * sum(layer[0].nbytes for layer in dst_ptrs)
    due_s = link.reserve(ready_s, len(src_indices) / page_size / layers, nbytes)
    last = layer_id == layers - 1
    _submit(lambda: _wait("loads" if last else None, ready_s, due_s))


def _copy_layer(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    for host, slot in zip(src_indices[::page_size].tolist(), dst_indices[::page_size].tolist(), strict=True):
        for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
            dst[slot : slot + page_size].copy_(src[host // page_size, layer_id])


def store_pages(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """All layers of the device, keys and then values, to host pages."""
    ready_s, link = time.perf_counter(), pacing().stores
    if link is None:
        _submit(lambda: _copy_pages(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size))
        return
    nbytes = len(src_indices) * sum(layer[0].nbytes for layer in src_ptrs)
    due_s = link.reserve(ready_s, len(src_indices) / page_size, nbytes)

    def mark_and_wait() -> None:
        for host in dst_indices[::page_size].tolist():
            for dst in dst_ptrs:
                _marks.on(dst[host // page_size])
        _wait("stores", ready_s, due_s)

    _submit(mark_and_wait)


def _copy_pages(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    layers = len(src_ptrs) // len(dst_ptrs)
    for slot, host in zip(src_indices[::page_size].tolist(), dst_indices[::page_size].tolist(), strict=True):
        for index, src in enumerate(src_ptrs):
            dst_ptrs[index // layers][host // page_size, index % layers].copy_(src[slot : slot + page_size])


def _wait(counted: str | None, ready_s: float, due_s: float) -> None:
    overrun_s = wait_until(due_s)
    if counted is not None:
        pacing().report.add(counted, due_s - ready_s, overrun_s)


def _submit(job: Callable[[], None]) -> None:
    Streams.current_stream().submit(job)
