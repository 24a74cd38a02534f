"""What the harness knows of a cache server before it makes one, as data: one CacheKind a server, in CACHES."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.caches.base import CachePlan, CacheServer
    from harness.experiment.cache import Cache


@dataclass(frozen=True, kw_only=True)
class CacheKind:
    """engines: which engines can have it. make: the server, nothing of it started.

    check: refuses what it cannot be (PreflightError with the cure). tier_policy: the simulator's pack that stands for
    it (simulator/policies/). attaches: it can be one that runs already.
    """

    engines: frozenset[str]
    make: Callable[[CachePlan], CacheServer]
    check: Callable[[Cache], None]
    tier_policy: str
    attaches: bool = False
