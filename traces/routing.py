"""Which instance gets a request: the router before several real engines. Pure; the simulator's core has the same rules.

instance = route("least-loaded", request, loads=[3, 1], sent=7)
"""

from __future__ import annotations

from collections.abc import Sequence

from traces.errors import SpecError
from traces.request import Request

ROUTINGS = ("round-robin", "least-loaded")


def route(routing: str, request: Request, loads: Sequence[int], sent: int) -> int:
    """The instance, from 0, decided at the moment of sending.

    loads: unfinished requests by instance. sent: how many requests the router has sent before.
    A request's own `instance` goes before every routing. round-robin: `sent` modulo the number of instances.
    least-loaded: the fewest unfinished requests, and of those the lowest number. Raises SpecError.
    """
    if request.instance is not None:
        if not 0 <= request.instance < len(loads):
            last = len(loads) - 1
            raise SpecError(f"request {request.id}: is pinned to instance {request.instance}; there are 0 to {last}")
        return request.instance
    if routing == "round-robin":
        return sent % len(loads)
    if routing == "least-loaded":
        return min(range(len(loads)), key=loads.__getitem__)
    if routing == "prefix-aware":
        raise SpecError("routing prefix-aware: a real engine does not tell which prefixes it holds; use least-loaded")
    raise SpecError(f"routing {routing!r}: is unknown; use one of {', '.join(ROUTINGS)}")
