"""Eviction policies on their own."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from simulator import _core

EVICTIONS = ("lru", "fifo", "lfu", "s3-fifo", "arc")


def cache_hits(eviction: str, capacity: int, keys: Iterable[int]) -> list[bool]:
    """Which of these uses hit a cache of `capacity` chunks that starts empty and takes each chunk that it lacks.

    The code is the tiers' own. ValueError names the known policies.
    """
    return [flag == 1 for flag in _core.cache_hits(eviction, capacity, array("q", keys))]
