"""How much of a free load was sent in the time that it had: what was asked for against what was done."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

import msgspec

from harness.records import LoadFacts

# An engine keeps up if users asked at least this share of what the load asks for.
KEEPS_UP = 0.98


class AskedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Loads with a duration. loads: how often the load was sent; the counts are sums over them, the rates means.

    asked_per_s: requests/s of the schedule, if every answer comes in time; None: the load has no pace of its own.
    sent_per_s: requests/s that were sent. unfinished: requests under way when the time was over; drain: those ended in
    their own time.
    """

    loads: int
    duration_s: float
    drain: bool
    requests: int
    sent: int
    unfinished: int
    asked_per_s: float | None
    sent_per_s: float

    @property
    def share(self) -> float | None:
        """What was sent, of what was asked for; None: the load has no pace of its own, or asks for nothing."""
        return self.sent_per_s / self.asked_per_s if self.asked_per_s else None

    @property
    def keeps_up(self) -> bool:
        """True as well for a load without a pace of its own, which no engine can miss."""
        return self.share is None or self.share >= KEEPS_UP


def asked_load(facts: Sequence[LoadFacts]) -> AskedLoad | None:
    """None: the load had no limit of time."""
    timed = [each for each in facts if each.duration_s is not None]
    if not timed:
        return None
    first = timed[0]
    assert first.duration_s is not None
    return AskedLoad(
        loads=len(timed),
        duration_s=first.duration_s,
        drain=first.drain,
        requests=sum(each.requests for each in timed),
        sent=sum(each.sent for each in timed),
        unfinished=sum(each.unfinished for each in timed),
        asked_per_s=first.asked_per_s,
        sent_per_s=mean(each.sent / first.duration_s for each in timed),
    )
