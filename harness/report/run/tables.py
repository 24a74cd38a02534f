"""The tables of a report as rows of text: the same ones for HTML and for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from harness.experiment.units import format_bytes
from harness.records import Resolved
from harness.report.axes import cell_labels
from harness.report.words import (
    NOT_REPORTED,
    UNKNOWN,
    digits,
    duration,
    mean_with_interval,
    percent,
    tier_order,
    too_few,
)
from harness.results.manifest import CellEntry
from harness.results.summary import Summary, TierFigures
from traces.tiers import sources

LAG_LIMIT = 0.05
_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Percentile(msgspec.Struct, frozen=True):
    """thin: fewer than one value lies beyond it, so that it says no more than the largest one."""

    text: str
    thin: bool


class FigureRow(msgspec.Struct, frozen=True):
    """One tier of one cell. samples: how many would give ±5 %. reasons: why rows were left out, and how many."""

    cell: str
    tier: str
    n: int
    mean: str
    percentiles: tuple[Percentile, ...]
    cv: str
    samples: str
    hit_tokens: str
    verdicts: str
    left_out: int
    reasons: tuple[tuple[str, int], ...]


class LagRow(msgspec.Struct, frozen=True):
    """How late requests were sent. late: the 99th percentile is more than 5 % of the median TTFT."""

    cell: str
    tier: str
    p50: str
    p99: str
    share: str
    late: bool


class FlowRow(msgspec.Struct, frozen=True):
    cell: str
    requests: str
    prompt_tokens: str
    output_tokens: str
    hit_rate: str
    preemptions: str


class SourceRow(msgspec.Struct, frozen=True):
    """Prompt tokens of the rows that count: in all, and by source in the order of tiers.sources."""

    cell: str
    tier: str
    prompt: str
    sources: tuple[str, ...]


def figure_rows(summary: Summary, metric: str = "ttft_s") -> list[FigureRow]:
    return [_figure_row(cell, tier, group, metric) for cell, tier, group in _groups(summary)]


def _groups(summary: Summary) -> Iterator[tuple[str, str, TierFigures]]:
    labels = cell_labels(summary.cells)
    for cell in summary.cells:
        for tier in tier_order(cell.tiers):
            yield labels[cell.key], tier, cell.tiers[tier]


def _figure_row(cell: str, tier: str, group: TierFigures, metric: str) -> FigureRow:
    figures, rows = group.metrics[metric], group.rows
    n = figures.n if figures else 0
    needed = figures.samples_for_5_percent if figures else None
    errors = "error" if rows.errors == 1 else "errors"
    verdicts = [
        ("proven", rows.proven),
        ("contradicted", rows.contradicted),
        ("unproven", rows.unproven),
        (errors, rows.errors),
    ]
    return FigureRow(
        cell=cell,
        tier=tier,
        n=n,
        mean=mean_with_interval(figures),
        percentiles=tuple(
            Percentile(duration(getattr(figures, name) if figures else None), bool(n) and too_few(n, share))
            for name, share in _PERCENTILES.items()
        ),
        cv=percent(figures.cv if figures else None),
        samples=UNKNOWN if needed is None else f"{needed:,}",
        hit_tokens=_tokens(group.tokens.cached),
        verdicts=", ".join(f"{number:,} {word}" for word, number in verdicts if number) or UNKNOWN,
        left_out=rows.measured - rows.counted,
        reasons=tuple(group.left_out_reasons.items()),
    )


def lag_rows(summary: Summary) -> list[LagRow]:
    found = []
    for cell, tier, group in _groups(summary):
        lag, ttft = group.metrics["send_lag_s"], group.metrics["ttft_s"]
        if lag is None or ttft is None:
            continue
        share = lag.p99 / ttft.p50 if ttft.p50 > 0 else None
        late = share is not None and share > LAG_LIMIT
        found.append(LagRow(cell, tier, duration(lag.p50), duration(lag.p99), percent(share), late))
    return found


def flow_rows(summary: Summary) -> list[FlowRow]:
    found = []
    for cell, _, group in _groups(summary):
        if flow := group.throughput:
            output = flow.output_tokens_per_s
            found.append(
                FlowRow(
                    cell,
                    f"{digits(flow.requests_per_s)}/s",
                    f"{digits(flow.prompt_tokens_per_s)}/s",
                    NOT_REPORTED if output is None else f"{digits(output)}/s",
                    NOT_REPORTED if group.tokens.hit_rate is None else percent(group.tokens.hit_rate),
                    NOT_REPORTED if group.preemptions is None else f"{group.preemptions:,}",
                )
            )
    return found


def source_rows(summary: Summary) -> list[SourceRow]:
    return [
        SourceRow(
            cell,
            tier,
            f"{group.tokens.prompt:,}",
            tuple(_tokens(group.tokens.by_source.get(source)) for source in sources()),
        )
        for cell, tier, group in _groups(summary)
        if group.rows.counted
    ]


def _tokens(value: int | None) -> str:
    return NOT_REPORTED if value is None else f"{value:,}"


def cache_sizes(cell: CellEntry) -> list[tuple[str, str, str]]:
    """(tier, configured, resolved by the engine): an unmatched size is the commonest reason for unlike figures."""
    cache, found = cell.cache, cell.resolved or Resolved()
    disk_bytes = cache.disk.capacity if cache and cache.disk else None
    bytes_of = [
        ("gpu", cache.gpu if cache else None, found.gpu_bytes),
        ("cpu", cache.cpu if cache else None, found.cpu_bytes),
        ("disk", disk_bytes, found.disk_bytes),
    ]
    sizes = [(tier, _size(wanted, "not set"), _size(size)) for tier, wanted, size in bytes_of]
    grain = [
        ("block_tokens", cache.block_tokens if cache else None, found.block_tokens),
        ("chunk_tokens", cache.chunk_tokens if cache else None, found.chunk_tokens),
    ]
    sizes += [(name, text_of(wanted, "not set"), text_of(tokens)) for name, wanted, tokens in grain]
    known = [
        ("gpu_blocks", found.gpu_blocks),
        ("kv_bytes_per_token", found.kv_bytes_per_token),
        ("max_prompt_tokens", found.max_prompt_tokens),
    ]
    return sizes + [(name, UNKNOWN, text_of(value)) for name, value in known if value is not None]


def _size(size: float | None, missing: str = NOT_REPORTED) -> str:
    return missing if size is None else format_bytes(size)


def text_of(value: int | str | None, missing: str = NOT_REPORTED) -> str:
    if value is None:
        return missing
    return f"{value:,}" if isinstance(value, int) else value


def shown(name: str, value: Any) -> str:
    """A manifest's value for people: sizes in bytes get a unit, numbers of other names stay as they are."""
    return format_bytes(value) if "bytes" in name and isinstance(value, int | float) else str(value)
