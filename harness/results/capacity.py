"""What a search for a capacity found: its steps and its answer, in capacity.json beside the rows of its loads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal

import msgspec

from harness.errors import ResultsError
from harness.experiment.goals import parse_goal
from harness.records import is_cut_off
from harness.results.folder import read_rows, read_samples, write_atomically
from harness.results.goals import judge_goals
from harness.results.rows import load_rates, metric_values
from harness.results.summary import FREE_LOAD, counted
from harness.results.trials import ended_trials
from harness.stats import percentile
from traces.request import RequestRecord

SearchAction = Literal["start", "more", "fewer", "between", "again"]
SearchMode = Literal["slo", "peak"]


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one measurement of a load.

    met: whether it kept every target; without targets it is True. strain: the largest of its figures over their
    targets, 1 at the target; None: some figure was not reported, or rests on too few values. rate: output tokens per
    second. requests: those that count; failed: those that do not.
    """

    met: bool
    strain: float | None
    rate: float | None
    ttft_p95_s: float | None = None
    e2e_p95_s: float | None = None
    requests: int = 0
    failed: int = 0


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement, and why this one. trial: of the load, from 0."""

    load: int
    trial: int
    action: SearchAction
    reason: str
    found: Found


class CapacityAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """load: the capacity; None: no load keeps the targets. low, high: as far as the measurements say for sure.

    Mode slo: every measurement up to low kept the targets, every one from high on missed one. Mode peak: the measured
    neighbours. None: there is no such load.
    """

    load: int | None
    low: int | None
    high: int | None


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """A search, whole or as far as it came. complete: whether it ended by itself."""

    mode: SearchMode
    key: str
    engine: str
    goals: tuple[str, ...]
    tolerance: float
    complete: bool
    answer: CapacityAnswer
    steps: tuple[Step, ...]

    def loads(self) -> list[int]:
        """Those that were measured, in order."""
        return sorted({step.load for step in self.steps})

    def of(self, load: int) -> list[Found]:
        """The measurements of one load."""
        return [step.found for step in self.steps if step.load == load]


def write_capacity(folder: Path, capacity: Capacity) -> None:
    write_atomically(folder / "capacity.json", msgspec.json.format(msgspec.json.encode(capacity), indent=1) + b"\n")


def read_capacity(folder: Path) -> Capacity | None:
    """None where the folder is of no search. Raises ResultsError where the file is damaged."""
    path = folder / "capacity.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Capacity)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ResultsError(f"{path}: is no search's answer ({error}); search again into a new folder") from None


def found_in(folder: Path, cell: str, trial: int, goals: Sequence[str]) -> Found:
    """What the rows of one measurement say. trial: from 0."""
    ended = ended_trials((each for each in read_samples(folder) if each.cell == cell), FREE_LOAD).get(cell, set())
    own = [
        row
        for row in read_rows(folder)
        if row.cell == cell and row.phase == "measure" and row.sample == trial and (trial, row.attempt) in ended
    ]
    return judged(own, goals)


def judged(rows: Sequence[RequestRecord], goals: Sequence[str]) -> Found:
    """Of the rows of one measurement. A request that failed misses every target."""
    good = [row for row in rows if counted(row)]
    failed = sum(not counted(row) and not is_cut_off(row.error) for row in rows)
    flow = load_rates(good)
    strains = list(_strains(good, goals, {} if flow is None else msgspec.structs.asdict(flow)))
    known = [strain for strain in strains if strain is not None]
    strain = max(known) if known and len(known) == len(strains) else None
    ttft, e2e = (percentile(metric_values(good, name), 0.95) for name in ("ttft_s", "e2e_s"))
    return Found(
        met=not failed and (not goals or (strain is not None and strain <= 1)),
        strain=strain,
        rate=flow.output_tokens_per_s if flow else None,
        ttft_p95_s=ttft,
        e2e_p95_s=e2e,
        requests=len(good),
        failed=failed,
    )


def _strains(
    rows: Sequence[RequestRecord], goals: Sequence[str], rates: dict[str, float | None]
) -> Iterator[float | None]:
    for goal in map(parse_goal, goals):
        verdict = judge_goals([goal], FREE_LOAD, rows, 0, rates)
        value = verdict.judged[0].value if verdict and verdict.judged[0].verdict in ("met", "missed") else None
        if value is None:
            yield None
        elif goal.statistic is None:
            yield goal.bound / value if value else math.inf
        else:
            yield value / goal.bound if goal.bound else math.inf


def mean_of(found: Sequence[Found], name: str) -> float | None:
    """A figure's mean over the measurements of a load; None where one lacks it."""
    values = [value for each in found if (value := getattr(each, name)) is not None]
    return fmean(values) if values and len(values) == len(found) else None


def search_agreement(own: Capacity, other: Capacity, share: float = 0.05) -> str:
    """Whether two searches agree on the load within the share; if not, what the measurements say of the reason."""
    ours, theirs = own.answer.load, other.answer.load
    name = f"{own.key} on {own.engine} and on {other.engine}"
    if ours is None or theirs is None:
        return f"{name}: {ours or 'none'} and {theirs or 'none'}: no load of one of them keeps the targets"
    apart = abs(ours - theirs) / max(ours, theirs)
    if apart <= share:
        return f"{name}: {ours} and {theirs}, {apart:.1%} apart: within {share:.0%}"
    return f"{name}: {ours} and {theirs}, {apart:.1%} apart: not within {share:.0%}; {_why(own, other)}"


def _why(own: Capacity, other: Capacity) -> str:
    ranges = [(each.answer.low or 0, each.answer.high or math.inf) for each in (own, other)]
    if ranges[0][0] < ranges[1][1] and ranges[1][0] < ranges[0][1]:
        return (
            f"not resolved: {_range(own)} and {_range(other)} are all that the measurements say; repeat more, or search"
            " to a smaller --tolerance"
        )
    common = sorted(set(own.loads()) & set(other.loads()))
    figures = [
        f"{words} {a:.3g} and {b:.3g}"
        for load in common[-1:]
        for words, name in (("TTFT p95 s", "ttft_p95_s"), ("E2E p95 s", "e2e_p95_s"), ("output tokens/s", "rate"))
        if (a := mean_of(own.of(load), name)) is not None and (b := mean_of(other.of(load), name)) is not None
    ]
    return f"at {common[-1]} both were measured: {', '.join(figures)}" if figures else "no load was measured on both"


def _range(one: Capacity) -> str:
    low, high = one.answer.low, one.answer.high
    return f"{'0' if low is None else low} to {'more' if high is None else high}"
