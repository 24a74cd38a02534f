"""Several instances of one engine on one clock, with a router in front of them and tiers that they share.

    cluster = Cluster(Simulator(...), instances=8, routing="prefix-aware", shared=("cpu", "disk"))
    cluster.submit(request, at_s=0.0)
    completions = cluster.advance()

Routings, each decided at the moment at which a request is sent:
  round-robin   the n-th request that is sent goes to instance n modulo their number.
  least-loaded  the instance with the fewest unfinished requests; of those, the one of the lowest number.
  session       the instance that got the session's first request; that one goes to the least loaded, and of those to
                the one with the fewest sessions.
  prefix-aware  the instance that holds the longest prefix of the prompt at that moment: whole blocks in its GPU's cache
                or whole chunks in the tiers that it can load from, whichever reaches further; of equal ones, the least
                loaded. It looks at all instances, so a request costs time in proportion to their number.
A request's own `instance` goes before every routing, and counts as a request sent.

Of the events of one moment, transfers end and requests arrive first; then the router routes the requests sent; then
steps end; then steps begin. The instances act in the order of their numbers. A cluster of one gives what its simulator
gives, to the last bit. The same calls give the same answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from types import SimpleNamespace
from typing import Literal, get_args

import msgspec

from simulator import _core
from simulator.columns import RequestColumns
from simulator.levels import private_levels
from simulator.simulate import (
    Completion,
    Driver,
    Queues,
    SimCounters,
    Simulator,
    Totals,
    checked,
    counters_of,
    queues_of,
    totals_of,
)
from traces.errors import SpecError
from traces.request import Request
from traces.routing import Router

Routing = Literal["round-robin", "least-loaded", "session", "prefix-aware"]
# What a router of ours decides, which knows sessions; the core then has a pin.
_BY_PIN = {"session"}
SharedTier = Literal["cpu", "pool", "disk", "remote"]


class Cluster(Driver[_core.Cluster]):
    """`instances` engines with the settings of `like`, which itself stays as it is.

    shared: 'cpu' and what is below it: all instances have one cache server (as several vLLMs on one LMCache server).
    'disk', 'remote' or 'pool' and what is below alone: each has its own tiers in front of one store (instances on one
    host and its NVMe or, with odirect, a store that all reach), or in front of a pool. Levels that say so themselves
    are shared, too. A shared tier is one tier of the stated size on one device, whose bandwidth the instances share; to
    a remote device each has a link. Each instance has its own copy of a tier that is not shared. Ids are unique among
    all instances, `advance` returns completions by instance, and `reset` empties the tiers of all. ValueError, one
    line: no instances, or a tier that is not there.
    """

    def __init__(
        self, like: Simulator, *, instances: int, routing: Routing = "round-robin", shared: Iterable[SharedTier] = ()
    ) -> None:
        self.like, self.instances, self.routing, asked = like, instances, routing, tuple(shared)
        if routing not in get_args(Routing):
            raise ValueError(f"no routing {routing!r}: use one of {', '.join(get_args(Routing))}")
        for tier in asked:
            if tier not in get_args(SharedTier):
                raise ValueError(f"shared: {tier!r} is not one of {', '.join(get_args(SharedTier))}")
            if like.bytes_of(tier) is None:
                raise ValueError(f"shared: there is no {tier} tier to share; give it a size, or leave it out")
        levels = [msgspec.structs.replace(one, shared=one.shared or one.name in asked) for one in like.levels]
        names = {level.name for level in levels if level.shared}
        self.shared: tuple[SharedTier, ...] = tuple(tier for tier in get_args(SharedTier) if tier in names)
        if any(not below.shared for above, below in pairwise(levels) if above.shared):
            raise ValueError(f"shared: what is behind a shared tier is shared too; name {levels[-1].name} as well")
        config = SimpleNamespace(**vars(like.config))
        if self.shared:
            config.tiers = SimpleNamespace(**vars(like.config.tiers))
            config.tiers.private_levels = private_levels(levels)
        sharing = "nothing" if not self.shared else "all" if levels[0].shared else "lower"
        self._router = Router(routing, instances) if routing in _BY_PIN else None
        self._routed: dict[str, tuple[Request, int]] = {}
        self._core = checked(
            lambda: _core.Cluster(config, instances, "round-robin" if self._router else routing, sharing)
        )

    def submit(self, request: Request, at_s: float) -> None:
        """As every engine's. ValueError also: routing session, which chooses as it sends, and a later moment."""
        if self._router is None:
            super().submit(request, at_s)
            return
        if at_s > self.now_s:
            raise ValueError(f"request {request.id}: routing {self.routing} chooses when it is sent; submit it then")
        try:
            chosen = self._router.choose(request)
        except SpecError as error:
            raise ValueError(str(error)) from None
        super().submit(msgspec.structs.replace(request, instance=chosen), at_s)
        self._router.sent(request, chosen)
        self._routed[request.id] = request, chosen

    def submit_many(self, requests: RequestColumns) -> None:
        if self._router is not None:
            raise ValueError(f"routing {self.routing}: columns of requests have no sessions; submit them one by one")
        super().submit_many(requests)

    def advance(self, until_s: float = math.inf) -> list[Completion]:
        completions = super().advance(until_s)
        if self._router is not None:
            for done in completions:
                self._router.ended(*self._routed.pop(done.id), answered=done.error is None)
        return completions

    @property
    def queues(self) -> list[Queues]:
        """By instance."""
        return [queues_of(queues) for queues in self._core.queues]

    def totals(self) -> Totals:
        """Over all instances."""
        return totals_of(self._core.totals(), self.like)

    def counters(self) -> SimCounters:
        """Over all instances."""
        return counters_of(self.totals())

    def counters_by_instance(self) -> list[SimCounters]:
        """Without what a cache server counts that all instances share: it does not tell them apart."""
        found = []
        for instance in range(self.instances):
            totals = totals_of(self._core.totals_of(instance), self.like)
            if self.shares_server:
                own = {"gpu": totals.hit_tokens["gpu"]}
                totals = msgspec.structs.replace(totals, hit_tokens=own, loaded_chunks={}, read_bytes={})
            found.append(counters_of(totals))
        return found

    @property
    def shares_server(self) -> bool:
        """Whether all instances have one cache server."""
        return bool(self.shared) and self.like.levels[0].name in self.shared
