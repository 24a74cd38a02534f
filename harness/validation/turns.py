"""A conversation load on two sides, turn by turn: how far the tokens hit differ, and of how many requests.

    turn_pairs(ours, theirs)[3].error          # of the fourth question of every session

Hits differ where the rules do, and where the order of requests does: those that run together take turns by their times.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from harness.results.rows import sum_or_none
from harness.validation.points import Point
from traces.request import RequestRecord
from traces.tiers import tier_names


class HitTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens hit by a turn in one pass over the load: the mean of a side's passes. least, most: of the reference's."""

    reference: float
    candidate: float
    least: int
    most: int

    @property
    def error(self) -> float | None:
        """None: the reference has none, and the candidate has some."""
        if not self.reference:
            return None if self.candidate else 0.0
        return self.candidate / self.reference - 1


class TurnPair(msgspec.Struct, frozen=True, kw_only=True):
    """One turn over all sessions, of the requests that each pass of both sides answered.

    prompt_tokens: their sum. equal: of how many requests every pass hit the same tokens in each tier that both sides
    tell. hits: the tokens hit; None where a side does not tell them. by_tier: those of each tier that both sides tell.
    """

    turn: int
    requests: int
    equal: int
    prompt_tokens: int
    hits: HitTokens | None
    by_tier: dict[str, HitTokens]


def turn_pairs(ours: Point, theirs: Point, names: Sequence[str]) -> tuple[TurnPair, ...]:
    """By turn, of the requests named; (): no session has a second turn."""
    sides = [[{row.id: row for row in repeat.rows} for repeat in point.repeats.values()] for point in (ours, theirs)]
    by_turn: dict[int, list[str]] = {}
    for name in names:
        by_turn.setdefault(sides[0][0][name].turn, []).append(name)
    if len(by_turn) < 2:
        return ()
    return tuple(
        _pair(turn, [[[rows[name] for name in by_turn[turn]] for rows in side] for side in sides])
        for turn in sorted(by_turn)
    )


def _pair(turn: int, sides: Sequence[Sequence[Sequence[RequestRecord]]]) -> TurnPair:
    """sides: of each side, of each pass, the same requests in the same order."""
    first = sides[0][0]
    by_tier = {
        tier: tokens
        for tier in tier_names()
        if (tokens := _tokens([[[row.tokens_by_tier.get(tier) for row in rows] for rows in side] for side in sides]))
    }
    together = zip(*(rows for side in sides for rows in side), strict=True)
    return TurnPair(
        turn=turn,
        requests=len(first),
        equal=sum(len({_hit(row, tuple(by_tier)) for row in rows}) == 1 for rows in together),
        prompt_tokens=sum(row.prompt_tokens for row in first),
        hits=_tokens([[[row.cached_tokens for row in rows] for rows in side] for side in sides]),
        by_tier=by_tier,
    )


def _hit(row: RequestRecord, tiers: Sequence[str]) -> tuple[int | None, ...]:
    return (row.cached_tokens, *(row.tokens_by_tier.get(tier) for tier in tiers))


def _tokens(sides: Sequence[Sequence[Sequence[int | None]]]) -> HitTokens | None:
    sums = [[total for rows in side if (total := sum_or_none(rows)) is not None] for side in sides]
    if any(len(known) < len(side) for known, side in zip(sums, sides, strict=True)):
        return None
    ours, theirs = sums
    return HitTokens(
        reference=sum(ours) / len(ours), candidate=sum(theirs) / len(theirs), least=min(ours), most=max(ours)
    )
