"""Which tier holds which KV entry: decisions only, without a clock, a device or a byte.

    placement = Placement([80, 1000], rule="waterfall", share=0.8)
    place, moves = placement.store(key=7, units=3)

The same calls in the same order give the same places and moves, whatever the devices' speed.

waterfall: a new entry goes to the nearest tier. What was used longest ago makes room: it moves one tier down, and the
last tier drops it. spillover: a new entry goes to the nearest tier with room, and stays there; the last tier drops what
was used longest ago. An entry that a tier never holds goes to the next one. A use never moves an entry up.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

Rule = Literal["waterfall", "spillover"]


class Place(NamedTuple):
    """Slots of a tier; tier 0 is the nearest."""

    tier: int
    slots: tuple[int, ...]


class Move(NamedTuple):
    """An entry leaves its place for another one; target None: it is dropped."""

    key: int
    source: Place
    target: Place | None


class _Level:
    """A tier's entries, the one used longest ago first, and its free slots: never used ones before vacated ones."""

    def __init__(self, slots: int, budget: int) -> None:
        self.slots, self.budget, self.used = slots, budget, 0
        self.held: OrderedDict[int, Place] = OrderedDict()
        self._fresh, self._vacated = 0, deque[int]()

    def take(self, units: int) -> tuple[int, ...]:
        fresh = range(self._fresh, min(self._fresh + units, self.slots))
        self._fresh, self.used = fresh.stop, self.used + units
        return (*fresh, *(self._vacated.popleft() for _ in range(units - len(fresh))))

    def vacate(self, slots: tuple[int, ...]) -> None:
        self._vacated.extend(slots)
        self.used -= len(slots)


class Placement:
    """slots: of each tier, the nearest first. share: how much of a tier above another is used; the last is used whole.

    An entry's `units` are the slots that it takes."""

    def __init__(self, slots: Sequence[int], *, rule: Rule, share: float) -> None:
        last = len(slots) - 1
        self._levels = [_Level(n, n if tier == last else int(share * n)) for tier, n in enumerate(slots)]
        self._rule = rule
        self._tier_of: dict[int, int] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._tier_of

    def held(self, tier: int) -> tuple[int, int]:
        """Entries in a tier, and the slots that they take."""
        return len(self._levels[tier].held), self._levels[tier].used

    def use(self, key: int) -> None:
        """The entry is the last one of its tier to be dropped now."""
        self._levels[self._tier_of[key]].held.move_to_end(key)

    def store(self, key: int, units: int) -> tuple[Place, list[Move]]:
        """The place of a new entry, and what moves first to make room, in that order.

        ValueError: no tier is as large as the entry."""
        moves: list[Move] = []
        return self._enter(self._tier_for(units), key, units, moves), moves

    def forget(self, key: int) -> None:
        """The entry is gone: its bytes were lost. Nothing happens where it was dropped before."""
        if key in self._tier_of:
            self._leave(key)

    def _tier_for(self, units: int) -> int:
        for tier, level in enumerate(self._levels):
            if units + (level.used if self._rule == "spillover" else 0) <= level.budget:
                return tier
        if units > self._levels[-1].budget:
            raise ValueError(f"an entry of {units} slots fits no tier")
        return len(self._levels) - 1

    def _enter(self, tier: int, key: int, units: int, moves: list[Move]) -> Place:
        level = self._levels[tier]
        while level.used + units > level.budget:
            victim = next(iter(level.held))
            source = self._leave(victim)
            below = self._below(tier, len(source.slots))
            target = None if below is None else self._enter(below, victim, len(source.slots), moves)
            moves.append(Move(victim, source, target))
        place = Place(tier, level.take(units))
        level.held[key], self._tier_of[key] = place, tier
        return place

    def _leave(self, key: int) -> Place:
        level = self._levels[self._tier_of.pop(key)]
        place = level.held.pop(key)
        level.vacate(place.slots)
        return place

    def _below(self, tier: int, units: int) -> int | None:
        """The next tier down that ever holds so many units; None: there is none."""
        lower = range(tier + 1, len(self._levels))
        return next((each for each in lower if self._levels[each].budget >= units), None)
