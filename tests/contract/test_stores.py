"""Every store of mode storage: what was written is read, each operation ends once, and close gives everything back."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simulator.gpu_memory import GpuStore
from simulator.storage import CoreStore, Operation, Store, StoreSettings


def core(**changes: Any) -> Callable[[Path], Store]:
    shared: dict[str, Any] = {"chunk_bytes": 1 << 16, "slots": 8, "depth": 4, "reserve_bytes": 0, "verify": True}
    return lambda folder: CoreStore(StoreSettings(**{**shared, "folder": folder, **changes}))


def gpu(_folder: Path) -> Store:
    return GpuStore(StoreSettings(device="gpu", chunk_bytes=1 << 16, slots=8, depth=4, reserve_bytes=0, verify=True))


no_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: no GPU store")
every_store = pytest.mark.parametrize(
    "make",
    [
        pytest.param(core(io="threads"), id="slab-threads"),
        pytest.param(core(direct=False), id="slab-buffered"),
        pytest.param(lambda folder: core(folder=folder / "files", layout="files", direct=False)(folder), id="files"),
        pytest.param(core(device="ram"), id="ram"),
        pytest.param(core(device="null", verify=False), id="null"),
        pytest.param(gpu, id="gpu", marks=no_torch),
    ],
)


def drained(store: Store, count: int) -> list[Any]:
    ended: list[Any] = []
    while len(ended) < count:
        ended += store.poll(1, 10.0)
    return ended


@every_store
def test_each_operation_ends_once_with_its_bytes(make: Callable[[Path], Store], tmp_path: Path) -> None:
    store = make(tmp_path)
    try:
        for write in (True, False):
            store.submit([Operation(number, write, number, number) for number in range(8)])
            ended = drained(store, 8)
            assert sorted(one.id for one in ended) == list(range(8)) and store.pending == 0
            assert all(one.error is None and one.write is write and one.bytes == store.slot_bytes for one in ended)
            assert all(one.queued_s <= one.began_s <= one.ended_s for one in ended)
        assert store.poll(1, 0.0) == []
    finally:
        store.close()


@every_store
def test_a_write_takes_what_lies_in_memory(make: Callable[[Path], Store], tmp_path: Path) -> None:
    """Its key is that of the source's content: with `verify`, a read under another one fails."""
    store, memory = make(tmp_path), core(device="ram")(tmp_path)
    try:
        memory.submit([Operation(0, True, 5, 77)])
        drained(memory, 1)
        number = store.take_from(memory)
        if number is None:
            assert store.core is None, "every store of the core takes bytes from memory"
            return
        store.submit([Operation(0, True, 2, 77, (number, 5)), Operation(1, True, 3, 78, (number, 5))])
        assert [one.error for one in drained(store, 2)] == [None, None]
        store.submit([Operation(2, False, 2, 77), Operation(3, False, 3, 78)])
        right, wrong = sorted(drained(store, 2))
        nothing_moves = store.io == "nothing"
        assert right.error is None and (nothing_moves or "content differs" in wrong.error)
        for source in ((number + 1, 5), (number, 8)):
            with pytest.raises(ValueError, match="source"):
                store.submit([Operation(4, True, 0, 0, source)])
        with pytest.raises(ValueError, match="do not fit"):
            store.take_from(core(device="ram", chunk_bytes=1 << 17)(tmp_path))
        assert store.io == "memory" or memory.take_from(store) is None
    finally:
        store.close()
        memory.close()


@every_store
def test_close_is_safe_twice_and_leaves_nothing(make: Callable[[Path], Store], tmp_path: Path) -> None:
    store = make(tmp_path)
    store.submit([Operation(0, True, 0, 0)])
    drained(store, 1)
    store.forget([0])
    store.close()
    store.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
