"""The eviction policies against libcachesim, the published reference implementation, use by use."""

from __future__ import annotations

import random

import pytest

from simulator.policies import EVICTIONS, cache_hits
from tests.support.exact_hits import conversation_keys, stack_distances, tier_hits

libcachesim = pytest.importorskip("libcachesim", reason="libcachesim has no build for this Python")
REFERENCES = {
    "lru": libcachesim.LRU,
    "fifo": libcachesim.FIFO,
    "lfu": libcachesim.LFU,
    "s3-fifo": libcachesim.S3FIFO,
    "arc": libcachesim.ARC,
}


def reference_hits(eviction: str, capacity: int, keys: list[int]) -> list[bool]:
    cache = REFERENCES[eviction](cache_size=capacity, hashpower=16)
    request, hits = libcachesim.Request(), []
    request.obj_size = 1
    for key in keys:
        request.obj_id = key + 1
        hits.append(cache.get(request))
    return hits


def random_keys(seed: int) -> list[int]:
    """A few keys are used often; which ones those are changes, and scans of new keys come in between."""
    chance = random.Random(seed)
    keys: list[int] = []
    while len(keys) < 3000:
        if chance.random() < 0.02:
            start = chance.randrange(10_000, 1_000_000)
            keys += range(start, start + chance.randrange(1, 120))
        hot = len(keys) // 1000 * 150
        keys.append(hot + int(chance.paretovariate(0.6)) % 700)
    return keys


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_random_uses_hit_as_in_the_reference(eviction: str) -> None:
    for seed in range(40):
        keys = random_keys(seed)
        for capacity in (20, 33, 70, 150):
            mine = cache_hits(eviction, capacity, keys)
            assert mine == reference_hits(eviction, capacity, keys), f"seed {seed}, {capacity} chunks"
            assert 0 < sum(mine) < len(mine)


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("capacity", [20, 300, 3_000, 30_000])
def test_the_conversation_trace_hits_as_in_the_reference(eviction: str, capacity: int) -> None:
    keys = conversation_keys(1_000_000)
    mine = cache_hits(eviction, capacity, keys)
    assert mine == reference_hits(eviction, capacity, keys)
    print(f"{eviction}, {capacity} chunks: {sum(mine)} of {len(mine)} uses hit")


def test_no_two_policies_are_the_same() -> None:
    hits = {eviction: tuple(cache_hits(eviction, 70, random_keys(1))) for eviction in EVICTIONS}
    assert len(set(hits.values())) == len(EVICTIONS)


@pytest.mark.parametrize("capacity", [1, 7, 500, 20_000])
def test_lru_hits_are_those_of_stack_distances(capacity: int) -> None:
    keys = conversation_keys(60_000)
    exact = [distance is not None and distance < capacity for distance in stack_distances(keys)]
    assert cache_hits("lru", capacity, keys) == exact


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_tiny_cache_takes_chunks_too(eviction: str) -> None:
    assert cache_hits(eviction, 0, [1, 1, 1]) == [False] * 3
    assert cache_hits(eviction, 1, [1, 1, 2, 2, 1]) == [False, True, False, True, False]
    assert sum(cache_hits(eviction, 3, [1, 2, 1, 2, 1, 2])) == 4


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("capacity", [20, 200])
def test_a_tier_of_the_pack_hits_as_in_the_reference(eviction: str, capacity: int) -> None:
    keys = conversation_keys(12_000)
    assert tier_hits(eviction, capacity, keys) == reference_hits(eviction, capacity, keys)
