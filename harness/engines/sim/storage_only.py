"""All KV on storage, without an engine or another tier: a request costs what the device has to do for it.

A request first reads the chunks of its prompt that the device holds, then writes the others (prefill); that gives its
first token. It then reads its whole context again for every `decode_read_tokens` output tokens (decode). A request
waits for nothing but the device.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque

import msgspec

from harness.engines.base import Emit
from harness.engines.sim.settings import SimSettings
from harness.engines.sim.storage import StorageDevice, store_facts
from harness.engines.sim.transfers import Transfers
from harness.errors import EngineError
from harness.experiment.model import Experiment
from harness.records import Capabilities, CellRecord, Counters, Resolved, StorageFigures, Throughput, singly
from simulator.models import ModelSpec
from traces.load import Blocked, Done, Load, Send, WaitUntil
from traces.request import Request, RequestRecord, TokensByTier, stable_id
from traces.tiers import PAGE_CACHE

_SLICE_S = 0.02
CUT_OFF = "not finished when the time (measure.budget) was over"


def chunk_keys(request: Request, chunk_tokens: int) -> list[int]:
    """Names of the prompt's whole chunks: two names are equal if all tokens up to the chunks' ends are."""
    keys: list[int] = []
    part: list[object] = []
    filled = 0
    for segment in request.prompt:
        start = 0
        while start < segment.tokens:
            taken = min(segment.tokens - start, chunk_tokens - filled)
            part += [segment.hash_id, start, taken]
            start, filled = start + taken, filled + taken
            if filled == chunk_tokens:
                keys.append(stable_id(keys[-1] if keys else "chunk", *part))
                part, filled = [], 0
    return keys


class _Served:
    """A request in flight. stages: the transfers that it still has to make, one after another."""

    def __init__(self, send: Send, sent_s: float, keys: list[int], hits: int, decode_reads: int) -> None:
        self.send, self.sent_s, self.hits = send, sent_s, hits
        stages = [("load", keys[:hits]), ("prefill", keys[hits:]), *[("decode", keys)] * decode_reads]
        self.stages = deque(stages)
        self.writing: list[int] = []
        self.first_token_s: float | None = None


class StorageOnlyEngine:
    """A load on a device. Nothing is evicted: the capacity has to hold all of the load's KV."""

    name = "sim"
    capabilities = Capabilities(tiers=frozenset({"disk"}), resets=singly(("disk", PAGE_CACHE)))

    def __init__(self, experiment: Experiment, model: ModelSpec, device: StorageDevice) -> None:
        self.device, self.settings, self._model = device, device.settings, model
        self.chunk_tokens = experiment.cache.chunk_tokens
        self.decode_tokens = experiment.engines.of(SimSettings).storage.decode_read_tokens
        self.budget_s = experiment.measure.budget
        self.slots: dict[int, int] = {}
        self.held: set[int] = set()
        self._replay: _Replay | None = None

    async def start(self) -> None:
        self.device.start()

    async def ready(self) -> Resolved:
        return Resolved(
            gpu_bytes=0,
            cpu_bytes=0,
            disk_bytes=self.settings.slots * self.settings.chunk_bytes,
            chunk_tokens=self.chunk_tokens,
            kv_bytes_per_token=self._model.kv_bytes_per_token,
            max_prompt_tokens=self._model.max_position - 1,
            vocab_size=self._model.vocab_size,
            io_pids=(os.getpid(),),
            store=store_facts(self.transfers.store),
        )

    async def reset(self, what: frozenset[str]) -> None:
        if "disk" in what:
            self.transfers.store.forget(list(self.slots))
            self.slots.clear()
            self.held.clear()
        if "page_cache" in what:
            await self.device.drop_page_cache()

    async def replay(self, load: Load, emit: Emit) -> None:
        self.transfers.begin_record()
        self._replay = _Replay(self, load, emit)
        await self._replay.run()

    def record(self) -> CellRecord:
        """The load's figures: bytes moved, elapsed time, and three throughputs."""
        return CellRecord(storage=None if self._replay is None else self._replay.figures())

    def now_s(self) -> float:
        return self.device.now_s()

    async def metrics(self) -> Counters:
        """Counters between loads, when nothing is in flight."""
        return Counters.of({"disk_device_read_bytes": self.device.read_bytes()})

    async def stop(self) -> None:
        await self.device.stop()

    @property
    def transfers(self) -> Transfers:
        return self.device.transfers


class _Replay:
    """One load. The replay waits for transfers that end after the deadline, and counts none of them."""

    def __init__(self, engine: StorageOnlyEngine, load: Load, emit: Emit) -> None:
        self._engine, self._load, self._emit = engine, load, emit
        self._transfers = engine.transfers
        self._start_s = time.monotonic()
        self._deadline_s = None if engine.budget_s is None else self._start_s + engine.budget_s
        self._served: dict[int, _Served] = {}
        self._next_transfer = 0
        self._end_s = self._start_s
        self._finished = self._output_tokens = self._cut_off = 0
        self._complete = True

    async def run(self) -> None:
        try:
            while not self._over() and (
                not isinstance(action := self._load.next(time.monotonic() - self._start_s), Done) or self._served
            ):
                if isinstance(action, Send):
                    self._send(action)
                else:
                    self._wait(action)
                    await asyncio.sleep(0)
        finally:
            self._transfers.end_record()
            while self._transfers.pending:
                self._transfers.poll(_SLICE_S)
        for served in self._served.values():
            self._cut_off += 1
            self._emit(self._row(served, None, CUT_OFF))

    def figures(self) -> StorageFigures:
        """The figures of the work that ended by the deadline."""
        record = self._transfers.record(self._end_s)
        kv_tokens = (record.read.operations + record.write.operations) * self._engine.chunk_tokens
        elapsed_s, io_s, output = self._end_s - self._start_s, record.cumulative_io_s, self._output_tokens
        throughput = {
            "wall_clock": (output, elapsed_s, "output tokens of finished requests / elapsed time"),
            "per_io_time": (output, io_s, "output tokens of finished requests / sum of all transfers' times"),
            "storage": (kv_tokens, elapsed_s, "tokens whose KV was read or written / elapsed time"),
        }
        return msgspec.structs.replace(
            record,
            complete=self._complete,
            elapsed_s=elapsed_s,
            requests_finished=self._finished,
            requests_cut_off=self._cut_off,
            output_tokens=output,
            kv_tokens=kv_tokens,
            throughput={
                name: Throughput(tokens_per_s=tokens / over_s if over_s > 0 else None, formula=formula)
                for name, (tokens, over_s, formula) in throughput.items()
            },
        )

    def _over(self) -> bool:
        if self._deadline_s is None or time.monotonic() < self._deadline_s:
            return False
        self._end_s, self._complete = self._deadline_s, False
        return True

    def _send(self, send: Send) -> None:
        engine = self._engine
        keys = chunk_keys(send.request, engine.chunk_tokens)
        hits = next((i for i, key in enumerate(keys) if key not in engine.held), len(keys))
        every = engine.decode_tokens
        decode_reads = -(-send.request.output_tokens // every) if every else 0
        served = _Served(send, engine.now_s(), keys, hits, decode_reads)
        if any(self._slot(key) is None for key in keys):
            return self._end(served, engine.now_s(), "the device is full: enlarge cache.disk.capacity")
        return self._go_on(served, time.monotonic())

    def _slot(self, key: int) -> int | None:
        """The chunk's place on the device, a new one if it has none; None: all are taken."""
        slots = self._engine.slots
        if key not in slots and len(slots) < self._engine.settings.slots:
            slots[key] = len(slots)
        return slots.get(key)

    def _go_on(self, served: _Served, now_s: float) -> None:
        """Begins the next transfer that moves bytes; the request ends when none is left."""
        while served.stages:
            kind, keys = served.stages.popleft()
            if kind == "decode" and served.first_token_s is None:
                served.first_token_s = now_s
            if keys:
                served.writing = keys if kind == "prefill" else []
                self._served[self._next_transfer] = served
                chunks = [(key, self._engine.slots[key]) for key in keys]
                owner = served.send.request.id
                self._transfers.begin(self._next_transfer, owner, kind == "prefill", chunks, time.monotonic())
                self._next_transfer += 1
                return
        served.first_token_s = served.first_token_s or now_s
        self._end(served, now_s, None)

    def _end(self, served: _Served, now_s: float, error: str | None) -> None:
        self._emit(self._row(served, now_s, error))
        self._load.completed(served.send.request.id, time.monotonic() - self._start_s)
        if error is None:
            self._finished += 1
            self._output_tokens += served.send.request.output_tokens
        self._end_s = max(self._end_s, self._engine.device.began_s + now_s)

    def _wait(self, action: WaitUntil | Blocked | Done) -> None:
        """Waits until a transfer ends, a request is due, or a slice of time is over."""
        now_s = time.monotonic()
        until_s = now_s + _SLICE_S
        if isinstance(action, WaitUntil):
            until_s = min(until_s, self._start_s + action.at_s)
        elif not self._served:
            raise EngineError("the load waits for a completion and nothing is in flight: check its sessions")
        if self._deadline_s is not None:
            until_s = min(until_s, self._deadline_s)
        if not self._transfers.pending:
            time.sleep(max(0.0, until_s - now_s))
            return
        for ended in self._transfers.poll(until_s - now_s):
            if self._deadline_s is not None and ended.ended_s > self._deadline_s:
                return
            served, at_s = self._served.pop(ended.id), ended.ended_s - self._engine.device.began_s
            if ended.error is not None:
                self._end(served, at_s, ended.error)
            else:
                self._engine.held.update(served.writing)
                self._go_on(served, at_s)

    def _row(self, served: _Served, last_s: float | None, error: str | None) -> RequestRecord:
        request, hit_tokens = served.send.request, served.hits * self._engine.chunk_tokens
        sources: TokensByTier = {"computed": request.prompt_tokens - hit_tokens, "disk": hit_tokens}
        first_s = None if error else served.first_token_s
        return RequestRecord(
            id=request.id,
            scheduled_s=self._start_s - self._engine.device.began_s + served.send.scheduled_s,
            sent_s=served.sent_s,
            first_chunk_s=first_s,
            first_token_s=first_s,
            last_token_s=None if error else last_s,
            prompt_tokens=request.prompt_tokens,
            output_tokens=None if error else request.output_tokens,
            cached_tokens=None if error else hit_tokens,
            tokens_by_tier={} if error else sources,
            session=request.session,
            turn=request.turn,
            error=error,
        )
