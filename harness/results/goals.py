"""Which goals a tier's rows meet, and goodput: the share of requests that keep every goal's bound themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from harness.experiment.goals import Goal, parse_goal
from harness.stats import FEWEST_SAMPLES, percentile
from traces.request import RequestRecord

GoalVerdict = Literal["met", "missed", "too few", "not reported"]


class JudgedGoal(msgspec.Struct, frozen=True, kw_only=True):
    """value: seconds, or per second. verdict: 'too few' values carry no such percentile or mean; it is not met."""

    goal: str
    value: float | None
    verdict: GoalVerdict


class TierGoals(msgspec.Struct, frozen=True, kw_only=True):
    """The goals of one tier, or of one class of service, of one cell. kept of requests: those whose own times are
    within every bound.

    requests: rows in the figures and failed ones; 0 where no goal is about single requests.
    """

    tier: str
    judged: tuple[JudgedGoal, ...]
    kept: int
    requests: int

    @property
    def goodput(self) -> float | None:
        return self.kept / self.requests if self.requests else None


def goals_of(config: Mapping[str, Any]) -> list[Goal]:
    """The goals of a cell's config, also of one that is kept only in part."""
    measure = config.get("measure") or {}
    return [parse_goal(text) for text in measure.get("goals") or ()]


def classes_of(config: Mapping[str, Any]) -> dict[str, list[Goal]]:
    """The classes of service of a cell's config, and the goals of each."""
    workload = config.get("workload") or {}
    return {each["name"]: [parse_goal(text) for text in each["goals"]] for each in workload.get("classes") or ()}


def judge_goals(
    goals: Sequence[Goal], tier: str, rows: Sequence[RequestRecord], failed: int, rates: Mapping[str, float | None]
) -> TierGoals | None:
    """None where no goal is for this tier. rows: those in the figures; rates: by metric, of a free load."""
    own = [goal for goal in goals if goal.state in (None, tier)]
    if not own:
        return None
    single = [goal for goal in own if goal.each_request]
    return TierGoals(
        tier=tier,
        judged=tuple(_judged(goal, rows, rates) for goal in own),
        kept=sum(all(_keeps(row, goal) for goal in single) for row in rows) if single else 0,
        requests=len(rows) + failed if single else 0,
    )


def _judged(goal: Goal, rows: Sequence[RequestRecord], rates: Mapping[str, float | None]) -> JudgedGoal:
    if goal.statistic is None:
        rate = rates.get(goal.metric)
        verdict: GoalVerdict = "not reported" if rate is None else "met" if rate >= goal.bound else "missed"
        return JudgedGoal(goal=goal.text, value=rate, verdict=verdict)
    values = [value for row in rows if (value := getattr(row, goal.metric)) is not None]
    if not values:
        return JudgedGoal(goal=goal.text, value=None, verdict="not reported")
    share = None if goal.statistic == "mean" else int(goal.statistic[1:]) / 100
    value = sum(values) / len(values) if share is None else percentile(values, share)
    assert value is not None
    # A percentile that no value lies beyond is no more than the largest one.
    supported = len(values) >= FEWEST_SAMPLES and (share is None or len(values) * (1 - share) >= 1 - 1e-9)
    return JudgedGoal(
        goal=goal.text,
        value=value,
        verdict="too few" if not supported else "met" if value <= goal.bound else "missed",
    )


def _keeps(row: RequestRecord, goal: Goal) -> bool:
    """A request without that time, as one output token has no time per further token, breaks no bound on it."""
    value = getattr(row, goal.metric)
    return value is None or value <= goal.bound
