"""Tiers without an engine: every byte of KV moves on a real device, and a request costs what the devices have to do.

A request first reads the entries of its prompt that a tier holds, then writes the others (prefill); that gives its
first token. It then reads entries again as it generates tokens (decode). It waits for devices, and for its generation
where that takes time.

In chunks, what counts as held are the prompt's leading ones, as in an engine; of turns, each that a tier has, as in the
MLPerf Storage KV-cache benchmark.
"""

from __future__ import annotations

import os

import msgspec

from harness.engines.base import Emit
from harness.engines.sim.real_tiers import RealTiers
from harness.engines.sim.storage import store_facts
from harness.engines.sim.tiers_replay import TiersReplay
from harness.experiment.model import Experiment
from harness.records import Capabilities, CellRecord, Counters, Resolved
from simulator.models import ModelSpec
from traces.load import Load
from traces.tiers import PAGE_CACHE


class TiersOnlyEngine:
    """A load on tiers, the nearest first. The last one drops what was used longest ago: a load may be larger."""

    name = "sim"

    def __init__(self, experiment: Experiment, model: ModelSpec, tiers: RealTiers) -> None:
        self.tiers, self._model = tiers, model
        self._budget_s = experiment.measure.budget
        self._files = [level for level in tiers.levels if level.device.settings.device == "file"]
        names = frozenset(level.name for level in tiers.levels)
        cached = {frozenset({PAGE_CACHE})} if self._files else set()
        self.capabilities = Capabilities(tiers=names, resets=frozenset({names}) | cached)
        self._replay: TiersReplay | None = None

    async def start(self) -> None:
        self.tiers.start()

    async def ready(self) -> Resolved:
        last = self.tiers.last
        held = {level.name: level.device.settings.slots for level in self.tiers.levels}
        sizes = {f"{name}_bytes": slots * last.settings.chunk_bytes for name, slots in held.items()}
        known = Resolved(
            gpu_bytes=0,
            cpu_bytes=0,
            chunk_tokens=self.tiers.chunk_tokens,
            kv_bytes_per_token=self._model.kv_bytes_per_token,
            max_prompt_tokens=self._model.max_position - 1,
            vocab_size=self._model.vocab_size,
            io_pids=(os.getpid(),),
            store=store_facts(last.transfers.store),
            **last.place(),
        )
        return msgspec.structs.replace(known, **sizes)

    async def reset(self, what: frozenset[str]) -> None:
        if self.capabilities.tiers & what:
            self.tiers.empty()
        if PAGE_CACHE in what:
            for level in self._files:
                await level.device.drop_page_cache()

    async def replay(self, load: Load, emit: Emit) -> None:
        self._replay = TiersReplay(self.tiers, self._budget_s, load, emit)
        await self._replay.run()

    def record(self) -> CellRecord:
        """The load's figures: what every tier moved, elapsed time, and three throughputs."""
        return CellRecord(storage=None if self._replay is None else self._replay.figures())

    def now_s(self) -> float:
        return self.tiers.last.now_s()

    async def metrics(self) -> Counters:
        """Counters between loads, when nothing is in flight."""
        return Counters.of({f"{level.name}_device_read_bytes": level.device.read_bytes() for level in self._files})

    async def stop(self) -> None:
        for level in self.tiers.levels:
            await level.device.stop()
