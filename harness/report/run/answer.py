"""The top of a run's page: how its numbers came to be, and the few that matter most."""

from __future__ import annotations

import msgspec

from harness.report.simulated import how_made, in_figures
from harness.report.words import (
    ceiling_words,
    digits,
    duration,
    mean_with_interval,
    percent,
    percentile_text,
    plural,
    tier_order,
)
from harness.results.manifest import Manifest
from harness.results.summary import FREE_LOAD, Summary, TierFigures
from traces.tiers import all_states

_MAX_TILES = 6


class Badge(msgspec.Struct, frozen=True):
    """word: how the figures came to be. level: the page's class for it."""

    word: str
    level: str


class Tile(msgspec.Struct, frozen=True):
    """One number. mark: the state whose colour it has."""

    name: str
    value: str
    note: str
    mark: str = ""


def badge(manifest: Manifest, summary: Summary) -> Badge:
    """A run that has not ended says so before anything else."""
    made = how_made(summary)
    if manifest.status != "complete":
        return Badge("PARTIAL" if made == "measured" else f"PARTIAL, {made.upper()}", "warn")
    return Badge(made.upper(), "good" if made == "measured" else "simulated")


def tiles(summary: Summary) -> list[Tile]:
    """A number a tier of a run with one cell, or a load's own; none for a sweep, whose figure follows at once."""
    if len(summary.cells) != 1:
        return []
    (cell,) = summary.cells
    if group := cell.tiers.get(FREE_LOAD):
        return _load_tiles(group, ceiling_words(cell.ceiling))
    labels = {state.name: state.label for state in all_states()}
    found = []
    for tier in tier_order(cell.tiers):
        figures = cell.tiers[tier].metrics["ttft_s"]
        if figures:
            about = f"{plural(figures.n, 'row')}, p90 {percentile_text(figures.p90, figures.n, 0.9)}"
            name = f"{in_figures(summary)}mean TTFT"
            # A computed time has no noise: '± 0' would claim a certainty that no sample has shown.
            value = mean_with_interval(figures) if round(figures.cv or 0.0, 4) else duration(figures.mean)
            found.append(Tile(labels.get(tier, tier), value, f"{name}, {about}", tier))
    return found[:_MAX_TILES]


def _load_tiles(group: TierFigures, ceiling: str) -> list[Tile]:
    ttft, flow, rate = group.metrics["ttft_s"], group.throughput, group.tokens.hit_rate
    found = []
    if ttft:
        found = [Tile("median TTFT", duration(ttft.p50), f"of {plural(ttft.n, 'request')}", FREE_LOAD)]
        found.append(Tile("p90 TTFT", duration(ttft.p90), f"slowest {duration(ttft.max)}", FREE_LOAD))
    if flow:
        found.append(Tile("throughput", f"{digits(flow.requests_per_s)} requests/s", "completed"))
    if rate is not None:
        found.append(Tile("hit rate", percent(rate), f"of prompt tokens came from a cache{ceiling and ', '}{ceiling}"))
    return found
