"""The simulator against exact computations that need no engine: stack distances, and its own single steps."""

from __future__ import annotations

import pytest

from tests.support.exact_hits import conversation_keys, stack_distances, tier_hits
from tests.support.oracle_cases import random_batching, random_tiers, simulate


def test_stack_distances_of_a_small_stream() -> None:
    assert stack_distances([1, 2, 1, 3, 2, 2, 1]) == [None, None, 1, None, 2, 0, 2]


@pytest.mark.parametrize("capacity", [1, 20, 1_000, 3_000])
def test_lru_hits_are_those_of_stack_distances(capacity: int) -> None:
    keys = conversation_keys(100_000)
    exact = [distance is not None and distance < capacity for distance in stack_distances(keys)]
    assert tier_hits("lru", capacity, keys) == exact
    assert 0 < sum(exact) < len(exact) or capacity == 1


@pytest.mark.parametrize("seed", [70, 132, 169])
def test_macro_steps_admit_in_the_step_that_makes_the_hit(seed: int) -> None:
    case = random_batching(seed)
    assert simulate(case) == simulate(case, macro_steps=False)


@pytest.mark.parametrize("seed", [53, 64, 69, 77, 82, 92])
def test_macro_steps_that_pass_the_ends_of_stores_change_nothing_in_the_tiers(seed: int) -> None:
    case = random_tiers(seed)
    (rows, blocks, tiers), (one_rows, one_blocks, one_tiers) = simulate(case), simulate(case, macro_steps=False)
    assert (rows, blocks) == (one_rows, one_blocks)
    # Ticks are noted where something looks at the tiers, which single steps do more often.
    assert [note for note in tiers if note[0] != "tick"] == [note for note in one_tiers if note[0] != "tick"]
    dropped = [[key for note in notes if note[0] == "tick" for key in note[2][1:]] for notes in (tiers, one_tiers)]
    assert dropped[0] == dropped[1]
