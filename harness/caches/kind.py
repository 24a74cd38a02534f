"""What the harness knows of a cache server before it makes one, as data: one CacheKind a server, in CACHES."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.caches.base import CachePlan, CacheServer
    from harness.experiment.cache import Cache


@dataclass(frozen=True, kw_only=True)
class CacheKind:
    """engines: which engines can have it. tiers: which tiers it can hold. make: the server, nothing of it started.

    empties_with: tiers that leave as well, by the tier that is emptied. uncounted: counters (Counters.named) that it
    does not report, and that are no evidence therefore.

    check: refuses what it cannot be (PreflightError with the cure). tier_policy: the simulator's pack that stands for
    it (simulator/policies/). attaches: it can be one that runs already.

    shares: tiers that several instances of an engine can have in common. within_engine: it lives in the engine's
    process, so that each instance has one, over one folder where they share that.
    lease_s: of one that keeps what was asked for, for how long, by its server's arguments; None: it has no leases.
    keeps: tiers in which it finds after a restart what it had stored there. no_restart: why there is none, and the
    cure, as a clause.
    """

    engines: frozenset[str]
    tiers: frozenset[str]
    make: Callable[[CachePlan], CacheServer]
    check: Callable[[Cache], None]
    tier_policy: str
    attaches: bool = False
    shares: frozenset[str] = frozenset()
    within_engine: bool = False
    empties_with: Mapping[str, frozenset[str]] = field(default_factory=dict)
    uncounted: frozenset[str] = frozenset()
    lease_s: Callable[[Sequence[str]], float] | None = None
    keeps: frozenset[str] = frozenset()
    no_restart: str = ""

    def resets(self, tiers: Collection[str]) -> frozenset[frozenset[str]]:
        """What it empties of these tiers, with what is emptied together."""
        held = self.tiers & set(tiers)
        return frozenset(frozenset({tier}) | (self.empties_with.get(tier, frozenset()) & held) for tier in held)
