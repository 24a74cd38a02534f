"""A GPU's memory as a store, through torch with CUDA: copies from and to pinned memory."""

from __future__ import annotations

import importlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from simulator.errors import StoreError
from simulator.storage import Ended, Operation, Store, StoreSettings


def why_no_gpu() -> str | None:
    """What CUDA through torch lacks here; None: nothing."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return "GPU memory needs torch, which is not installed here"
    return None if torch.cuda.is_available() else "GPU memory needs CUDA, which torch does not see here"


class GpuStore:
    """Slots in the first GPU's memory; one copy at a time, which ends when the GPU says so."""

    io = "cuda"
    buffered_because: str | None = None
    core = None

    def __init__(self, settings: StoreSettings) -> None:
        """Raises StoreError without torch, without CUDA, or with too little memory."""
        if why := why_no_gpu():
            raise StoreError(f"device gpu: {why}; use file, ram or null")
        self._torch: Any = importlib.import_module("torch")
        self.slot_bytes = settings.chunk_bytes
        self._slots = settings.slots
        try:
            empty = self._torch.empty
            self._memory = empty((settings.slots, self.slot_bytes), dtype=self._torch.uint8, device="cuda")
            self._pinned = empty(self.slot_bytes, dtype=self._torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise StoreError(f"device gpu: {str(error).splitlines()[0]}; lower the capacity") from None
        self._waiting: deque[tuple[Operation, float]] = deque()

    @property
    def pending(self) -> int:
        return len(self._waiting)

    def take_from(self, _other: Store, /) -> int | None:
        """A GPU's copies go through pinned memory of its own."""
        return None

    def submit(self, operations: Sequence[Operation]) -> None:
        if odd := [operation.slot for operation in operations if not 0 <= operation.slot < self._slots]:
            raise ValueError(f"slot {odd[0]} is not one of the store's {self._slots}")
        now_s = time.monotonic()
        self._waiting.extend((operation, now_s) for operation in operations)

    def poll(self, least: int, timeout_s: float) -> list[Ended]:
        until_s, ended = time.monotonic() + timeout_s, list[Ended]()
        while self._waiting and (not ended or (len(ended) < least and time.monotonic() < until_s)):
            operation, queued_s = self._waiting.popleft()
            began_s = time.monotonic()
            slot = self._memory[operation.slot]
            (slot.copy_(self._pinned) if operation.write else self._pinned.copy_(slot))
            self._torch.cuda.synchronize()
            done_s = time.monotonic()
            ended.append(Ended(operation.id, operation.write, queued_s, began_s, done_s, self.slot_bytes, None))
        return ended

    def forget(self, keys: Sequence[int]) -> None:
        """A slot is written over."""

    def close(self) -> None:
        self._waiting.clear()
        self._memory = self._pinned = None
