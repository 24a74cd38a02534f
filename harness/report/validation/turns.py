"""Conversations on two sides, in words: hit rate by turn, and how many requests hit the same tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.markup import escape
from rich.table import Table

from harness.report.words import NOT_REPORTED, UNKNOWN, percent, plural
from harness.validation.equivalence import PointResult
from harness.validation.turns import HitTokens, TurnPair
from traces.tiers import tier_named


class TurnLine(msgspec.Struct, frozen=True):
    """One turn of one point as text. own: the reference's hit rate from its lowest pass to its highest."""

    point: str
    turn: int
    reference: str
    candidate: str
    error: str
    own: str
    by_tier: str
    equal: str


def turn_lines(points: Sequence[PointResult], labels: Sequence[str]) -> list[TurnLine]:
    """Of the points that are conversations."""
    return [_line(label, turn) for label, point in zip(labels, points, strict=True) for turn in point.turns]


def _line(label: str, turn: TurnPair) -> TurnLine:
    hits = turn.hits
    return TurnLine(
        point=label,
        turn=turn.turn,
        reference=_share(hits.reference if hits else None, turn),
        candidate=_share(hits.candidate if hits else None, turn),
        error=_signed(hits),
        own=UNKNOWN
        if hits is None or hits.least == hits.most
        else f"{_share(hits.least, turn)} … {_share(hits.most, turn)}",
        by_tier="; ".join(
            f"{tier_named(tier).label} {each.reference:,.0f}, {each.candidate:,.0f}"
            for tier, each in turn.by_tier.items()
            if each.reference or each.candidate
        )
        or UNKNOWN,
        equal=f"{turn.equal:,} of {turn.requests:,}",
    )


def _share(tokens: float | None, turn: TurnPair) -> str:
    return NOT_REPORTED if tokens is None or not turn.prompt_tokens else percent(tokens / turn.prompt_tokens)


def _signed(hits: HitTokens | None) -> str:
    error = hits.error if hits else None
    return UNKNOWN if error is None else f"{round(error * 100, 2) + 0.0:+.1f} %"


def turn_table(points: Sequence[PointResult], labels: Sequence[str], names: tuple[str, str]) -> Table | None:
    """For a terminal; None without conversations."""
    if not (lines := turn_lines(points, labels)):
        return None
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for number, head in enumerate(("hit rate by turn", "turn", *names, "hit tokens", "requests equal")):
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    for line in lines:
        cells = (line.point, str(line.turn), line.reference, line.candidate, line.error, line.equal)
        table.add_row(*map(escape, cells))
    return table


def turn_findings(points: Sequence[PointResult], labels: Sequence[str]) -> list[str]:
    """One sentence a conversation: the turn whose hits differ most, and how many requests hit the same."""
    return [_finding(label, point.turns) for label, point in zip(labels, points, strict=True) if point.turns]


def _finding(label: str, turns: Sequence[TurnPair]) -> str:
    requests, equal = sum(turn.requests for turn in turns), sum(turn.equal for turn in turns)
    told = [(turn, turn.hits) for turn in turns if turn.hits]
    if equal == requests and len(told) == len(turns):
        return f"{label}: all {plural(requests, 'request')} hit the same tokens in every tier."
    said = f"{label}: {equal:,} of {plural(requests, 'request')} hit the same tokens in every tier"
    far = [(abs(hits.error), turn, hits) for turn, hits in told if hits.error is not None]
    if not far:
        return f"{said}."
    _, turn, hits = max(far, key=lambda each: each[0])
    return f"{said}; by turn, hits differ at most by {_signed(hits)} (turn {turn.turn})."
