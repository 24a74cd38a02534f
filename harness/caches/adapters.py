"""How LMCache's storage adapters read a folder of chunk files (LMCache 0.5.6), by the name in cache.disk.adapter."""

from __future__ import annotations

from typing import NamedTuple


class Adapter(NamedTuple):
    """depth: reads in flight for one request. serial_chunks: each chunk takes an interpreter's time, one at a time."""

    depth: int
    serial_chunks: bool


ADAPTERS = {
    "fs": Adapter(depth=1, serial_chunks=True),
    "fs_native": Adapter(depth=4, serial_chunks=False),
}
