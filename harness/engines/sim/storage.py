"""The simulator on the wall clock with a real disk: its rules decide, its GPU is a model, its disk moves real bytes.

The engine makes every read and write of the disk tier on a real device, and the request waits as long as that takes.
CPU RAM and its copies are modelled unless the device is memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from harness.collectors.host import device_name, file_system
from harness.engines.base import Emit
from harness.engines.sim.engine import SimEngine, cut_record, record_of
from harness.engines.sim.transfers import Transfers
from harness.errors import EngineError
from harness.processes import keeper
from harness.processes.child import storage_read_bytes
from harness.records import Capabilities, CellRecord, Counters, Resolved, StoreFacts
from simulator.errors import StoreError
from simulator.gpu_memory import GpuStore
from simulator.simulate import Completion, Simulator
from simulator.storage import CoreStore, Ended, Operation, Store, StoreSettings
from traces.load import Done, Load, Send, WaitUntil
from traces.request import reply_stream
from traces.tiers import state_named

# The longest wait at a stretch, so that signals and the progress bar get a turn.
_SLICE_S = 0.02


# Bytes that memory copies in one poll: other devices wait so long for their next operations.
_SLICE_BYTES = 4 << 20


class Slices:
    """A store in memory, which copies all that it has been given in one poll: it gets a few operations at a time."""

    def __init__(self, store: Store) -> None:
        self._store, self.slot_bytes, self.io = store, store.slot_bytes, store.io
        self.buffered_because = store.buffered_because
        self._at_once = max(1, _SLICE_BYTES // store.slot_bytes)
        self._waiting = deque[tuple[Operation, float]]()
        self.forget, self.close = store.forget, store.close
        self.core, self.take_from = store.core, store.take_from

    @property
    def pending(self) -> int:
        return len(self._waiting) + self._store.pending

    def submit(self, operations: Sequence[Operation]) -> None:
        now_s = time.monotonic()
        self._waiting.extend((operation, now_s) for operation in operations)

    def poll(self, least: int, timeout_s: float) -> list[Ended]:
        taken = [self._waiting.popleft() for _ in range(min(self._at_once, len(self._waiting)))]
        self._store.submit([operation for operation, _ in taken])
        queued_s = {operation.id: at_s for operation, at_s in taken}
        return [one._replace(queued_s=queued_s[one.id]) for one in self._store.poll(max(least, len(taken)), timeout_s)]


class StorageDevice:
    """A store's transfers, and the seconds since `start`. Memory copies while it is polled, some slots at a time.

    Where each chunk has a file, `stop` removes their folder; so does the end of this process."""

    def __init__(self, settings: StoreSettings) -> None:
        self.settings = settings
        self.has_files = settings.device == "file" and settings.layout == "files"
        self._keeper: subprocess.Popen[str] | None = None
        self._transfers: Transfers | None = None
        self.began_s = 0.0

    @property
    def transfers(self) -> Transfers:
        """Raises EngineError before `start` and after `stop`."""
        if self._transfers is None:
            raise EngineError("the storage device has not been started: call start first")
        return self._transfers

    def now_s(self) -> float:
        return time.monotonic() - self.began_s if self._transfers is not None else 0.0

    def start(self) -> None:
        """Raises EngineError in one line."""
        settings = self.settings
        try:
            store: Store = GpuStore(settings) if settings.device == "gpu" else CoreStore(settings)
        except StoreError as error:
            raise EngineError(f"the storage device does not start: {error}") from None
        if settings.device == "ram":
            store = Slices(store)
        folder = settings.folder.parent if self.has_files else settings.folder
        self._transfers = Transfers(store, settings.chunk_bytes, folder if settings.device == "file" else None)
        if self.has_files:
            words = [str(settings.folder.absolute()), "keep" if settings.keep_files else "delete"]
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, *words],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
        self.began_s = time.monotonic()

    def place(self) -> dict[str, Any]:
        """Resolved's fields on where the bytes go: nothing where that is no file."""
        if self.settings.device != "file":
            return {}
        folder = self.settings.folder.parent if self.has_files else self.settings.folder
        return {"disk_file_system": file_system(folder), "disk_device": device_name(folder)}

    async def drop_page_cache(self) -> None:
        """Empties the page cache, so that the next reads come from the device. Raises EngineError."""
        if self._keeper is not None and not await asyncio.to_thread(self._dropped, self._keeper):
            raise EngineError("the chunk files cannot be dropped from the page cache: what failed is said above")

    @staticmethod
    def _dropped(helper: subprocess.Popen[str]) -> bool:
        assert helper.stdin is not None and helper.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            helper.stdin.write("\n")
            helper.stdin.flush()
        return bool(helper.stdout.readline())

    def read_bytes(self) -> int | None:
        """Bytes that the device delivered; None: the page cache may have answered, and no counter tells."""
        if self.has_files:
            return storage_read_bytes(os.getpid())
        return self.transfers.read_bytes if self.transfers.store.buffered_because is None else None

    async def stop(self) -> None:
        if self._transfers is not None:
            self._transfers.store.close()
        if self._keeper is not None:
            with contextlib.suppress(BrokenPipeError):
                await asyncio.to_thread(self._keeper.communicate)
        self._transfers = self._keeper = None


class StorageEngine:
    """The simulator with the disk tier's transfers on a store."""

    name = "sim"

    def __init__(self, make: Callable[[], Simulator], device: StorageDevice, tiers: Collection[str]) -> None:
        self._device = device
        self._make = make
        self._model = SimEngine(self._made, tiers=tiers)
        model, direct = self._model.capabilities, device.settings.direct
        # The page cache can answer only for files that are opened without O_DIRECT.
        told = {None, True} if direct else {None, True, False} if device.has_files else {None}
        evidence = {name: needed for name, needed in model.evidence.items() if state_named(name).from_device in told}
        self.capabilities = Capabilities(
            tiers=model.tiers,
            resets=model.resets,
            evidence=evidence,
            quotes=True,
            keeps=model.keeps,
            no_restart=model.no_restart,
        )
        self._names: dict[int, str] = {}
        # Transfers that requests wait for, and requests whose transfer failed.
        self._reading: dict[int, str] = {}
        self._failed: dict[str, str] = {}

    def _made(self) -> Simulator:
        self._simulator = self._make()
        return self._simulator

    async def start(self) -> None:
        await self._model.start()
        self._device.start()

    async def ready(self) -> Resolved:
        resolved = await self._model.ready()
        return msgspec.structs.replace(
            resolved, store=store_facts(self._store), io_pids=(os.getpid(),), **self._device.place()
        )

    async def reset(self, what: frozenset[str]) -> None:
        await self._settle()
        self._simulator.reset(what)
        self._store.forget(self._simulator.take_dropped())
        if "page_cache" in what:
            await self._device.drop_page_cache()

    async def restart(self) -> Resolved:
        """As the model's: see there. The disk's files are not touched."""
        await self.reset(self.capabilities.tiers - self.capabilities.keeps)
        return await self.ready()

    async def replay(self, load: Load, emit: Emit) -> None:
        start_s, sent = self.now_s(), {}  # type: float, dict[str, tuple[Send, float]]
        cut_s, unseen = math.inf if load.cut_s is None else start_s + load.cut_s, set[str]()
        while not isinstance(action := load.next(self.now_s() - start_s), Done) or sent or unseen:
            now_s = self.now_s()
            if sent and now_s >= cut_s:
                for send, sent_s in sent.values():
                    emit(cut_record(send, sent_s, start_s))
                    load.completed(send.request.id, now_s - start_s)
                unseen.update(sent)
                sent.clear()
            if isinstance(action, Send):
                self._simulator.submit(action.request, max(now_s, self._simulator.now_s))
                self._names[reply_stream(action.request.id)] = action.request.id
                sent[action.request.id] = (action, now_s)
                continue
            completions = self._advance(now_s)
            for completion in completions:
                if completion.id in unseen:
                    unseen.remove(completion.id)
                    continue
                send, sent_s = sent.pop(completion.id)
                row = record_of(completion, send, sent_s, start_s)
                emit(msgspec.structs.replace(row, error=row.error or self._failed.pop(completion.id, None)))
                load.completed(completion.id, self.now_s() - start_s)
            if not completions:
                await self._wait(start_s + action.at_s if isinstance(action, WaitUntil) else None)

    def now_s(self) -> float:
        return self._device.now_s()

    async def metrics(self) -> Counters:
        await self._settle()
        counters = await self._model.metrics()
        return Counters.of({**counters.named(), "disk_device_read_bytes": self._device.read_bytes()})

    def record(self) -> CellRecord:
        """The device's work since the last call."""
        record = self._device.transfers.record()
        self._device.transfers.begin_record()
        return CellRecord(storage=record)

    async def stop(self) -> None:
        await self._device.stop()
        await self._model.stop()

    @property
    def _store(self) -> Store:
        return self._device.transfers.store

    async def _settle(self) -> None:
        """Waits until all stores have ended."""
        self._advance(self.now_s())
        while not self._simulator.idle:
            await self._wait(None)
            self._advance(self.now_s())

    def _advance(self, now_s: float) -> list[Completion]:
        """Brings the simulator to this moment, and hands its disk transfers to the device."""
        simulator, transfers = self._simulator, self._device.transfers
        completions = []
        try:
            while some := simulator.advance(max(now_s, simulator.now_s)):
                completions += some
        except RuntimeError as error:
            raise EngineError(f"the simulator cannot go on: {error}") from error
        transfers.store.forget(simulator.take_dropped())
        for issued in simulator.take_issued():
            owner = self._names.get(issued.owner, str(issued.owner))
            transfers.begin(issued.id, owner, issued.write, issued.chunks, time.monotonic())
            if not issued.write:
                self._reading[issued.id] = owner
        return completions

    async def _wait(self, until_s: float | None) -> None:
        """Waits until the device answers, a simulator event is due, until_s, or a slice of time is over."""
        transfers = self._device.transfers
        moments = [moment for moment in (until_s, self._simulator.next_event_s) if moment is not None]
        if not moments and not transfers.pending:
            raise EngineError("the load waits for a completion and nothing is in flight: check its sessions")
        left_s = min([*moments, self.now_s() + _SLICE_S]) - self.now_s()
        if transfers.pending:
            for ended in transfers.poll(left_s):
                self._simulator.complete_io(ended.id, max(0.0, ended.ended_s - self._device.began_s), ended.failed)
                owner = self._reading.pop(ended.id, None)
                if owner is not None and ended.error is not None:
                    self._failed[owner] = ended.error
        elif left_s > 0:
            time.sleep(left_s)
        await asyncio.sleep(0)


def store_facts(store: Store) -> StoreFacts:
    """What the manifest tells about a store."""
    return StoreFacts(io=store.io, page_cache=store.buffered_because, slot_bytes=store.slot_bytes)
