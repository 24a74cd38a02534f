"""Which tier holds what, against the same rules written down plainly; and bytes that move only where they may."""

import random
from typing import Any

import pytest

from harness.engines.sim.placement import Move, Placement, Rule


class Plain:
    """The rules on lists of (key, units), the one used longest ago first. Slots are left out."""

    def __init__(self, sizes: list[int], rule: str, share: float) -> None:
        self.budgets = [int(share * size) for size in sizes[:-1]] + sizes[-1:]
        self.tiers: list[list[tuple[int, int]]] = [[] for _ in sizes]
        self.rule = rule

    def used(self, tier: int) -> int:
        return sum(units for _, units in self.tiers[tier])

    def use(self, key: int) -> None:
        for tier in self.tiers:
            for one in [each for each in tier if each[0] == key]:
                tier.remove(one)
                tier.append(one)

    def store(self, key: int, units: int, tier: int = 0) -> list[tuple[int, int, int | None]]:
        """(key, from, to) of all that moves, in the order in which it has to; the key itself ends in some tier."""
        last = len(self.tiers) - 1
        while tier < last and (
            units > self.budgets[tier] or (self.rule == "spillover" and self.used(tier) + units > self.budgets[tier])
        ):
            tier += 1
        moved: list[tuple[int, int, int | None]] = []
        while self.used(tier) + units > self.budgets[tier]:
            victim, its_units = self.tiers[tier].pop(0)
            if any(self.budgets[below] >= its_units for below in range(tier + 1, last + 1)):
                moved += self.store(victim, its_units, tier + 1)
                to: int | None = next(n for n, held in enumerate(self.tiers) if (victim, its_units) in held)
            else:
                to = None
            moved.append((victim, tier, to))
        self.tiers[tier].append((key, units))
        return moved


@pytest.mark.parametrize("rule", ["waterfall", "spillover"])
@pytest.mark.parametrize("sizes", [[12], [5, 30], [4, 9, 40], [0, 2, 25]], ids=str)
def test_it_moves_and_drops_what_the_rules_say(rule: Rule, sizes: list[int]) -> None:
    chance = random.Random(f"{rule}{sizes}")
    for _ in range(20):
        plain, placement = Plain(sizes, rule, 0.8), Placement(sizes, rule=rule, share=0.8)
        slots: dict[tuple[int, int], int] = {}
        dropped = 0
        for key in range(300):
            held = [each for tier in plain.tiers for each, _ in tier]
            if held and chance.random() < 0.4:
                used = chance.choice(held)
                plain.use(used)
                placement.use(used)
            units = chance.randint(1, 6)
            place, moves = placement.store(key, units)
            assert [(m.key, m.source.tier, None if m.target is None else m.target.tier) for m in moves] == (
                plain.store(key, units)
            )
            check_slots(slots, [*moves, Move(key, place, place)], sizes)
            dropped += sum(move.target is None for move in moves)
            for tier, size in enumerate(sizes):
                assert placement.held(tier) == (len(plain.tiers[tier]), plain.used(tier)) and plain.used(tier) <= size
        assert dropped > 0


def check_slots(slots: dict[tuple[int, int], int], moves: list[Move], sizes: list[int]) -> None:
    """Every place is made of slots of its tier that nothing else has."""
    for move in moves:
        for place, leaves in ((move.source, True), (move.target, False)):
            if place is None or (leaves and place is move.target):
                continue
            for slot in place.slots:
                assert 0 <= slot < sizes[place.tier]
                if leaves:
                    assert slots.pop((place.tier, slot)) == move.key
                else:
                    assert slots.setdefault((place.tier, slot), move.key) == move.key


def test_an_entry_that_fits_no_tier_is_refused_and_a_lost_one_leaves_room() -> None:
    placement = Placement([4, 6], rule="waterfall", share=0.5)
    with pytest.raises(ValueError, match="fits no tier"):
        placement.store(1, 7)
    placement.store(1, 6)
    placement.forget(1)
    placement.forget(1)
    _, moves = placement.store(2, 6)
    assert moves == [] and 1 not in placement and 2 in placement and placement.held(1) == (1, 6)


def test_the_same_calls_give_the_same_places() -> None:
    def history() -> list[Any]:
        placement = Placement([8, 20], rule="waterfall", share=0.8)
        return [placement.store(key, 1 + key % 3) for key in range(40)]

    assert history() == history()
