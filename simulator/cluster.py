"""Several instances of one engine on one clock, with a router in front of them and tiers that they share.

    cluster = Cluster(Simulator(...), instances=8, routing="prefix-aware", shared=("cpu", "disk"))
    cluster.submit(request, at_s=0.0)
    completions = cluster.advance()

Routings, each decided at the moment at which a request is sent:
  round-robin   the n-th request that is sent goes to instance n modulo their number.
  least-loaded  the instance with the fewest unfinished requests; of those, the one of the lowest number.
  prefix-aware  the instance that holds the longest prefix of the prompt at that moment: whole blocks in its GPU's cache
                or whole chunks in the tiers that it can load from, whichever reaches further; of equal ones, the least
                loaded. It looks at all instances, so a request costs time in proportion to their number.
A request's own `instance` goes before every routing, and counts as a request sent.

Of the events of one moment, transfers end and requests arrive first; then the router routes the requests sent; then
steps end; then steps begin. The instances act in the order of their numbers. A cluster of one gives what its simulator
gives, to the last bit. The same calls give the same answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from simulator import _core
from simulator.simulate import (
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

Routing = Literal["round-robin", "least-loaded", "prefix-aware"]
SharedTier = Literal["cpu", "disk"]


class Cluster(Driver[_core.Cluster]):
    """`instances` engines with the settings of `like`, which itself stays as it is.

    shared: 'cpu' and 'disk': all instances have one cache server (as several vLLMs on one LMCache server). 'disk'
    alone: each has its own CPU tier in front of one store (instances on one host and its NVMe or, with odirect, a store
    that all reach). A shared tier is one tier of the stated size on one device, whose bandwidth the instances share.
    Each instance has its own copy of a tier that is not shared. Ids are unique among all instances, `advance` returns
    completions by instance, and `reset` empties the tiers of all. ValueError, one line: no instances, or a tier that is
    not there.
    """

    def __init__(
        self, like: Simulator, *, instances: int, routing: Routing = "round-robin", shared: Iterable[SharedTier] = ()
    ) -> None:
        self.like, self.instances, self.routing, self.shared = like, instances, routing, tuple(shared)
        if routing not in get_args(Routing):
            raise ValueError(f"no routing {routing!r}: use one of {', '.join(get_args(Routing))}")
        for tier in self.shared:
            if tier not in get_args(SharedTier):
                raise ValueError(f"shared: {tier!r} is not one of {', '.join(get_args(SharedTier))}")
            if (like.cpu_bytes if tier == "cpu" else like.disk_bytes) is None:
                raise ValueError(f"shared: there is no {tier} tier to share; give it a size, or leave it out")
        if self.shared == ("cpu",) and like.disk_bytes is not None:
            raise ValueError("shared: a disk behind a shared CPU tier is shared too; name both, or disk alone")
        sharing = "all" if "cpu" in self.shared else "lower" if self.shared else "nothing"
        self._core = checked(lambda: _core.Cluster(like.config, instances, routing, sharing))

    @property
    def queues(self) -> list[Queues]:
        """By instance."""
        return [queues_of(queues) for queues in self._core.queues]

    def totals(self) -> Totals:
        """Over all instances."""
        return totals_of(self._core.totals(), self.like.chunk_tokens)

    def counters(self) -> SimCounters:
        """Over all instances."""
        return counters_of(self.totals())
