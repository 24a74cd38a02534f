"""The tiers of mode tiers, on real devices: what they hold, and what moves in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.engines.sim.entries import WantedEntry
from harness.engines.sim.moves import Moves
from harness.engines.sim.placement import Placement
from harness.engines.sim.settings import TiersSettings
from harness.engines.sim.storage import StorageDevice


class RealLevel(NamedTuple):
    """A tier by name, and the device that has its slots."""

    name: str
    device: StorageDevice


class RealTiers:
    """The levels, the nearest first. `moves` is there from `start` on."""

    def __init__(self, levels: Sequence[RealLevel], settings: TiersSettings, chunk_tokens: int) -> None:
        self.levels, self.settings, self.chunk_tokens = tuple(levels), settings, chunk_tokens
        self.placement = self._placement()
        self.moves = Moves((), None, self.placement.forget)

    def start(self) -> None:
        """Raises EngineError."""
        for number, level in enumerate(self.levels):
            level.device.start()
            for above, other in enumerate(self.levels[:number]):
                level.device.transfers.take_from(above, other.device.transfers.store)
        self._begin()

    def empty(self) -> None:
        """Forgets all entries. Nothing may be in flight."""
        for level, keys in zip(self.levels, self.moves.slot_keys_by_tier(), strict=True):
            level.device.transfers.store.forget(keys)
        self._begin()

    def fits(self, wanted: Sequence[WantedEntry]) -> bool:
        """Whether the last tier has room for all entries of a request at once."""
        return sum(one.units for one in wanted) <= self.last.settings.slots

    @property
    def last(self) -> StorageDevice:
        return self.levels[-1].device

    @property
    def slot_bytes(self) -> int:
        return self.last.transfers.store.slot_bytes

    @property
    def began_s(self) -> float:
        """When the run's clock was 0, by time.monotonic()."""
        return self.last.began_s

    def _begin(self) -> None:
        self.placement = self._placement()
        transfers = [level.device.transfers for level in self.levels]
        self.moves = Moves(transfers, self.settings.max_writes or None, self.placement.forget)

    def _placement(self) -> Placement:
        slots = [level.device.settings.slots for level in self.levels]
        return Placement(slots, rule=self.settings.placement, share=self.settings.tier_share)
