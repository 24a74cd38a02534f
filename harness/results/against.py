"""Every cell of a run against the one that `report.against` names: by what factor its load is served better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from harness.experiment.report import reference_cells
from harness.results.manifest import CellEntry
from harness.results.paired import Answered
from harness.results.rows import Latency, LoadRates, sum_or_none
from harness.results.trials import TrialFigures
from harness.stats import FEWEST_SAMPLES, Ratio, ratio_interval, ratio_of_means
from traces.request import RequestRecord

TOKEN_RATES = ("prompt_tokens_per_s", "output_tokens_per_s", "total_tokens_per_s")
RATES = (*TOKEN_RATES, "requests_per_s")


class Tokens(msgspec.Struct, frozen=True):
    """Of the rows that count. output None: not reported."""

    prompt: int
    output: int | None


class AgainstCell(msgspec.Struct, frozen=True, kw_only=True):
    """A free load against that of the cell named `cell`. All ratios are above 1 where this load is served better.

    ttft: the other's mean TTFT over this one's. rates: this load's rate over the other's, by its name in LoadRates; its
    reference_s and typical_s are seconds a token, or a request. An interval rests on trials, else on sessions or
    requests that both answered (ttft alone), or on nothing where both repeat exactly. unlike_tokens: prompt and output
    tokens of the other and of this one, where both were sent the same and the sums differ: no rate of tokens compares.
    """

    cell: str
    ttft: Ratio | None
    rates: dict[str, Ratio]
    unlike_tokens: tuple[Tokens, Tokens] | None = None


class Served(msgspec.Struct, frozen=True):
    """What is known of one cell's free load. timed: it ends by the clock, so that a slower cell is sent less."""

    answered: Answered
    ttft: Latency | None
    rates: LoadRates | None
    trials: TrialFigures | None
    repeats: bool
    timed: bool = False


def held_against(cells: Sequence[CellEntry], loads: Mapping[str, Served]) -> dict[str, AgainstCell]:
    """By cell. Empty where the run names no cell, or one that it does not have."""
    against = against_of(cells[0].config) if cells else None
    if against is None:
        return {}
    references = reference_cells({cell.key: cell.overrides for cell in cells}, against)
    known = [key for key, reference in references.items() if key in loads and reference in loads]
    return {key: compared(references[key], loads[references[key]], loads[key]) for key in known}


def against_of(config: Mapping[str, Any]) -> str | None:
    """report.against of a cell's config, also of one that is kept only in part."""
    report = config.get("report") or {}
    return report.get("against")


def compared(cell: str, theirs: Served, ours: Served) -> AgainstCell:
    """Our load against theirs, which is that of `cell`."""
    repeats = ours.repeats and theirs.repeats
    rates, unlike = {}, _unlike_tokens(theirs, ours)
    for name in RATES:
        if unlike and name in TOKEN_RATES:
            continue
        sides = [_seconds_each(side, name) for side in (theirs, ours)]
        if ratio := ratio_interval(sides[0], sides[1], repeats=repeats):
            rates[name] = ratio
    return AgainstCell(cell=cell, ttft=_ttft(theirs, ours, repeats), rates=rates, unlike_tokens=unlike)


def _unlike_tokens(theirs: Served, ours: Served) -> tuple[Tokens, Tokens] | None:
    if theirs.timed or ours.timed or theirs.answered.asked != ours.answered.asked:
        return None
    counts = [
        Tokens(sum(row.prompt_tokens for row in rows), sum_or_none([row.output_tokens for row in rows]))
        for rows in (_each_once(theirs), _each_once(ours))
    ]
    return None if counts[0] == counts[1] else (counts[0], counts[1])


def _each_once(side: Served) -> Sequence[RequestRecord]:
    """The rows of one trial: two cells may have counted unlike numbers of trials."""
    rows = side.answered.rows
    return [row for row in rows if row.sample == rows[0].sample and row.attempt == rows[0].attempt]


def _ttft(theirs: Served, ours: Served, repeats: bool) -> Ratio | None:
    if theirs.ttft is None or ours.ttft is None:
        return None
    by_sample = ratio_interval(theirs.ttft.samples, ours.ttft.samples, repeats=repeats)
    single = min(len(theirs.ttft.samples), len(ours.ttft.samples)) < FEWEST_SAMPLES
    if repeats or not single or theirs.answered.asked != ours.answered.asked:
        return by_sample
    return ratio_of_means(_paired_groups(theirs.answered.rows, ours.answered.rows)) or by_sample


def _seconds_each(side: Served, name: str) -> list[list[float]]:
    """Seconds a token or a request, of each trial: a rate's reciprocal is a time, as ratios take them."""
    spread = side.trials.figures.get(name) if side.trials else None
    values = spread.values if spread else (getattr(side.rates, name) if side.rates else None,)
    return [[1 / value] for value in values if value]


def _paired_groups(theirs: Sequence[RequestRecord], ours: Sequence[RequestRecord]) -> list[list[tuple[float, float]]]:
    """TTFTs of the requests that both answered, by conversation; those without one are a group."""
    by_id = {row.id: row.ttft_s for row in theirs if row.ttft_s is not None}
    sessions: dict[str, list[tuple[float, float]]] = {}
    single = []
    for row in sorted(ours, key=lambda row: (row.sent_s, row.id)):
        other = by_id.get(row.id)
        if other is None or row.ttft_s is None:
            continue
        if row.session is None:
            single.append((other, row.ttft_s))
        else:
            sessions.setdefault(row.session, []).append((other, row.ttft_s))
    return [*sessions.values(), single] if single else list(sessions.values())
