"""Figures of a conversation load by turn: how TTFT and hits change as the prompts grow.

    cell.turns[3].ttft.mean, cell.turns[3].hit_rate       # of the fourth question of every session

Turns count from 0, as rows have them. A round of `kind: rounds` is a turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from harness.results.rows import Latency, latency_figures, sample_values, sum_or_none
from traces.request import RequestRecord
from traces.tiers import sources


class TurnFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One turn over all sessions of a free load, from the n rows that count.

    left_out: rows of this turn that are in no figure (errors, and requests that did not finish).
    hit_rate: cached over prompt tokens, in sum; None where the engine does not report them. shares: of the prompt
    tokens, by where their KV came from; None where it is not reported.
    """

    turn: int
    n: int
    left_out: int
    ttft_s: Latency | None
    prompt_tokens: int
    cached_tokens: int | None
    hit_rate: float | None
    shares: dict[str, float | None]


def turn_figures(rows: Sequence[RequestRecord], left_out: Sequence[RequestRecord] = ()) -> tuple[TurnFigures, ...]:
    """By turn, of a load's rows that count; (): no session has a second turn. left_out: its other rows."""
    if not any(row.turn for row in (*rows, *left_out)):
        return ()
    good: dict[int, list[RequestRecord]] = {}
    bad: dict[int, int] = {}
    for row in rows:
        good.setdefault(row.turn, []).append(row)
    for row in left_out:
        bad[row.turn] = bad.get(row.turn, 0) + 1
    return tuple(_one_turn(turn, good.get(turn, []), bad.get(turn, 0)) for turn in sorted({*good, *bad}))


def _one_turn(turn: int, rows: Sequence[RequestRecord], left_out: int) -> TurnFigures:
    prompt, cached = sum(row.prompt_tokens for row in rows), sum_or_none([row.cached_tokens for row in rows])
    by_source = {source: sum_or_none([row.tokens_by_tier.get(source) for row in rows]) for source in sources()}
    return TurnFigures(
        turn=turn,
        n=len(rows),
        left_out=left_out,
        ttft_s=latency_figures(sample_values(rows, "ttft_s")),
        prompt_tokens=prompt,
        cached_tokens=cached,
        hit_rate=_share(cached, prompt),
        shares={source: _share(tokens, prompt) for source, tokens in by_source.items()},
    )


def _share(tokens: int | None, of: int) -> float | None:
    return None if tokens is None or not of else tokens / of
