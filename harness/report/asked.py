"""What the report says of what was asked for: whether the engine kept up, and what the end or the model cut."""

from __future__ import annotations

from collections.abc import Mapping

from harness.report.words import digits, duration, percent, plural
from harness.results.asked import AskedLoad
from harness.results.summary import Summary

# So many points that an engine cannot keep up at have a sentence each.
NAMED = 3


def asked_lines(summary: Summary, labels: Mapping[str, str]) -> list[str]:
    """Sentences on free loads that were not sent whole, and on those that had a duration."""
    loads = {labels[cell.key]: cell.asked for cell in summary.cells if cell.asked is not None}
    longest = _beyond_model(summary)
    if not loads:
        return longest
    if len(summary.cells) == 1:
        [load] = loads.values()
        return [*_pace(load), *_unsent([load]), *_unfinished([load]), *longest]
    behind = {label: load for label, load in loads.items() if not load.keeps_up}
    lines = [_behind(load, f" at {label}") for label, load in list(behind.items())[:NAMED]]
    if len(behind) > NAMED:
        lines.append(f"It cannot keep up at {plural(len(behind) - NAMED, 'further point')} either.")
    shares = [load.share for load in loads.values() if load.keeps_up and load.share is not None]
    if shares:
        points = plural(len(shares) + len(behind), "point")
        least = f"users sent at least {percent(min(shares))} of the requests/s asked for"
        lines.append(f"The engine keeps up at {len(shares)} of {points}: {least}.")
    return [*lines, *_unsent(list(loads.values())), *_unfinished(list(loads.values())), *longest]


def _beyond_model(summary: Summary) -> list[str]:
    turns = sum(cell.beyond_model for cell in summary.cells)
    if not turns:
        return []
    return [f"{plural(turns, 'turn')} not asked: the sessions ended before them, at the model's length."]


def _pace(load: AskedLoad) -> list[str]:
    if load.asked_per_s is None:
        return []
    if not load.keeps_up:
        return [_behind(load, "")]
    sent, asked = digits(load.sent_per_s), digits(load.asked_per_s)
    return [f"The engine keeps up: users sent {sent} requests/s, and the load asks for {asked}."]


def _behind(load: AskedLoad, where: str) -> str:
    assert load.share is not None and load.asked_per_s is not None, "a load without a pace is kept up with"
    less = percent(1 - load.share)
    return (
        f"The engine cannot keep up{where}: users sent {digits(load.sent_per_s)} requests/s, {less} fewer than the"
        f" {digits(load.asked_per_s)} asked for, because they wait for late answers."
    )


def _unsent(loads: list[AskedLoad]) -> list[str]:
    """Of loads without a pace: users who wait for late answers are no cut."""
    cut = [load for load in loads if load.asked_per_s is None and load.sent < load.requests]
    if not cut:
        return []
    unsent, all_of_them = sum(load.requests - load.sent for load in cut), sum(load.requests for load in cut)
    over = ", ".join(dict.fromkeys(duration(load.duration_s) for load in cut))
    return [f"{plural(unsent, 'request')} of {all_of_them:,} were not sent: the time of {over} was over."]


def _unfinished(loads: list[AskedLoad]) -> list[str]:
    lines = []
    for drain, end in ((True, "ended in their own time"), (False, "were ended there, and are in no figure")):
        if number := sum(load.unfinished for load in loads if load.drain is drain):
            lines.append(f"{plural(number, 'request')} unfinished when the time was over: they {end}.")
    return lines
