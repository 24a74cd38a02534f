"""Runs LMCache's server with all of its RAM mapped from the start, as CUDA's page-locking maps it.

    python -m kv_accelerator.page_locked lmcache.cli.main server …

The server asks for its RAM to be locked (LMCache 0.5.6, v1/platform/torch_ops/mem_alloc.py, alloc_shm_pinned_ptr).
Without CUDA nothing locks it. Then the kernel maps each page when the server first reads storage into it: a read of
8 MiB takes 2,048 faults more, once for each part of the RAM.
"""

from __future__ import annotations

import ctypes
import mmap
import runpy
import sys
from typing import Any

import numpy as np


def map_whole(_backend: Any, ptr: int, size: int, _flags: int = 0) -> bool:
    """In place of PinMemoryBackend.pin_memory; the bytes stay. False: nothing is locked that would be unlocked."""
    pages = np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(ptr))
    pages[:: mmap.PAGESIZE] |= 0
    return False


def main() -> None:
    from lmcache.v1.platform.base.pin_memory import PinMemoryBackend

    PinMemoryBackend.pin_memory = map_whole
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
