"""The goals of a run as a table: the same rows for the terminal and the page."""

from __future__ import annotations

from typing import NamedTuple

from harness.experiment.goals import parse_goal
from harness.report.axes import cell_labels
from harness.report.simulated import how_made
from harness.report.words import NOT_REPORTED, UNKNOWN, digits, duration, percent, percentile_text, plural
from harness.results.goals import JudgedGoal
from harness.results.rows import Latency
from harness.results.summary import Summary

_MAX_LINES = 200
_WORDS = {"met": "met", "missed": "MISSED", "too few": "too few samples: not met", "not reported": "not met"}


class GoalRow(NamedTuple):
    """One goal at one tier of one cell. level: 'good' or 'bad'. goodput: of the tier's whole set of goals."""

    cell: str
    tier: str
    goal: str
    value: str
    verdict: str
    level: str
    goodput: str


def goal_rows(summary: Summary) -> list[GoalRow]:
    """Empty for a run without goals."""
    labels = cell_labels(summary.cells)
    return [
        GoalRow(
            labels[cell.key],
            tier.tier,
            judged.goal,
            _value(judged),
            _WORDS[judged.verdict],
            "good" if judged.verdict == "met" else "bad",
            UNKNOWN if tier.goodput is None else f"{percent(tier.goodput)} of {tier.requests:,}",
        )
        for cell in summary.cells
        for tier in cell.goals
        for judged in tier.judged
    ]


def goal_lines(summary: Summary) -> list[tuple[str, str]]:
    """(line, level) for the terminal: how many goals are met, then each one; empty for a run without goals."""
    rows = goal_rows(summary)
    if not rows:
        return []
    of_made = f" ({made})" if (made := how_made(summary)) != "measured" else ""
    met = sum(row.level == "good" for row in rows)
    head = (f"Goals{of_made}: {met:,} of {len(rows):,} met.", "good" if met == len(rows) else "bad")
    return [head, *((_line(row), row.level) for row in rows[:_MAX_LINES])]


def class_lines(summary: Summary) -> list[str]:
    """A sentence on each class of service of each load: its end to end times."""
    labels = cell_labels(summary.cells)
    return [
        f"{labels[cell.key]}: class {name}: {_times(found)}."
        for cell in summary.cells
        for name, found in cell.classes.items()
    ]


def _times(found: Latency | None) -> str:
    if found is None:
        return "no request ended"
    shares = {"p50": (found.p50, 0.5), "p95": (found.p95, 0.95), "p99": (found.p99, 0.99)}
    parts = [f"mean {duration(found.mean)}"]
    parts += [f"{name} {percentile_text(value, found.n, share)}" for name, (value, share) in shares.items()]
    return f"{plural(found.n, 'request')}, end to end {', '.join(parts)}, max {duration(found.max)}"


def all_goals_met(summary: Summary) -> bool:
    """Also without any goal."""
    return all(row.level == "good" for row in goal_rows(summary))


def _line(row: GoalRow) -> str:
    goodput = "" if row.goodput == UNKNOWN else f"; goodput {row.goodput}"
    return f"  {row.cell} {row.tier}: {row.goal}: {row.value}, {row.verdict}{goodput}"


def _value(judged: JudgedGoal) -> str:
    if judged.value is None:
        return NOT_REPORTED
    return duration(judged.value) if parse_goal(judged.goal).each_request else f"{digits(judged.value)}/s"
