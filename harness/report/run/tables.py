"""The tables of a report as rows of text: the same ones for HTML and for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from harness.experiment.units import format_bytes
from harness.records import Resolved
from harness.report.axes import cell_labels
from harness.report.simulated import flat_cells, how_made
from harness.report.words import (
    NOT_REPORTED,
    UNKNOWN,
    ceiling_words,
    digits,
    duration,
    mean_with_interval,
    percent,
    percentile_text,
    tier_order,
    too_few,
)
from harness.results.manifest import CellEntry, Manifest
from harness.results.rows import ClientLag, Latency
from harness.results.summary import FREE_LOAD, RowCounts, Summary, TierFigures
from traces.request import RequestRecord
from traces.tiers import COMPUTED, sources, tier_names

LAG_LIMIT, LAG_TOLD = 0.05, 0.01
_MOST_CLIENTS = 8  # in a line of the terminal
_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


class Percentile(msgspec.Struct, frozen=True):
    """thin: fewer than one value lies beyond it, so that it says no more than the largest one."""

    name: str
    text: str
    thin: bool


class FigureRow(msgspec.Struct, frozen=True):
    """One tier of one cell. samples: how many would give ±5 %. reasons: why rows were left out, and how many.

    repeats: the label of the cell whose figures these are by construction, along a flat axis; '' for its own figures.
    """

    cell: str
    tier: str
    n: int
    mean: str
    percentiles: tuple[Percentile, ...]
    slowest: str
    cv: str
    samples: str
    hit_tokens: str
    verdicts: str
    left_out: int
    reasons: tuple[tuple[str, int], ...]
    repeats: str = ""


class LagRow(msgspec.Struct, frozen=True):
    """How late requests were sent, all of a tier or those of one of several client processes ('' for all). late: the
    99th percentile is more than 5 % of the median TTFT. worth_telling: it is more than 1 %, or there are clients."""

    cell: str
    tier: str
    p50: str
    p99: str
    share: str
    late: bool
    worth_telling: bool
    client: str = ""


class FlowRow(msgspec.Struct, frozen=True):
    cell: str
    requests: str
    prompt_tokens: str
    output_tokens: str
    all_tokens: str
    hit_rate: str
    ceiling: str
    preemptions: str


class SourceRow(msgspec.Struct, frozen=True):
    """Prompt tokens of the rows that count: in all, and by source in the order of told_sources. device_read: what the
    cache server got from its device meanwhile."""

    cell: str
    tier: str
    verdicts: str
    prompt: str
    sources: tuple[str, ...]
    device_read: str


class SlowRow(msgspec.Struct, frozen=True):
    """One of the slowest requests. cached: prompt tokens that some cache served, by the engine's own usage."""

    id: str
    cell: str
    tier: str
    verdict: str
    sent_s: str
    ttft: str
    e2e: str
    prompt_tokens: str
    cached: str


def proven_word(summary: Summary) -> str:
    """What rows that count are called: a simulator's counters prove nothing of a machine."""
    return "simulated" if how_made(summary) == "simulated" else "proven"


def figure_rows(summary: Summary, metric: str = "ttft_s") -> list[FigureRow]:
    proven, labels = proven_word(summary), cell_labels(summary.cells)
    repeats = {labels[key]: labels[origin] for key, origin in flat_cells(summary).items()}
    rows = [_figure_row(cell, tier, group, metric, proven) for cell, tier, group in _groups(summary)]
    return [msgspec.structs.replace(row, repeats=repeats.get(row.cell, "")) for row in rows] if repeats else rows


def _groups(summary: Summary) -> Iterator[tuple[str, str, TierFigures]]:
    labels = cell_labels(summary.cells)
    for cell in summary.cells:
        for tier in tier_order(cell.tiers):
            yield labels[cell.key], tier, cell.tiers[tier]


def _figure_row(cell: str, tier: str, group: TierFigures, metric: str, proven: str) -> FigureRow:
    """proven: the word for rows that count. A simulator's rows are never called proven, nor a free load's unmarked."""
    figures, rows = group.metrics[metric], group.rows
    n = figures.n if figures else 0
    needed = figures.samples_for_5_percent if figures else None
    return FigureRow(
        cell=cell,
        tier=tier,
        n=n,
        mean=mean_with_interval(figures),
        percentiles=tuple(
            Percentile(name, duration(getattr(figures, name) if figures else None), bool(n) and too_few(n, share))
            for name, share in _PERCENTILES.items()
        ),
        slowest=duration(figures.max if figures else None),
        cv=percent(figures.cv if figures else None),
        samples=UNKNOWN if needed is None else f"{needed:,}",
        hit_tokens=_tokens(group.tokens.cached),
        verdicts=_verdicts(rows, proven),
        left_out=rows.measured - rows.counted - (rows.cut_off or 0),
        reasons=tuple(group.left_out_reasons.items()),
    )


def _verdicts(rows: RowCounts, proven: str) -> str:
    """How many rows have which verdict; proven: the word for those that count."""
    errors = "error" if rows.errors == 1 else "errors"
    verdicts = [
        (proven, rows.counted if proven != "proven" else rows.proven),
        ("contradicted", rows.contradicted),
        ("unproven", rows.unproven),
        (errors, rows.errors),
        ("cut off", rows.cut_off or 0),
    ]
    return ", ".join(f"{number:,} {word}" for word, number in verdicts if number) or UNKNOWN


def slow_rows(slowest: Sequence[RequestRecord], labels: Mapping[str, str], proven: str) -> list[SlowRow]:
    return [
        SlowRow(
            id=row.id,
            cell=labels.get(row.cell, row.cell),
            tier=row.expected_tier or FREE_LOAD,
            verdict=proven if row.verdict == "proven" else row.verdict or UNKNOWN,
            sent_s=f"{row.sent_s:,.3f}",
            ttft=duration(row.ttft_s),
            e2e=duration(row.e2e_s),
            prompt_tokens=f"{row.prompt_tokens:,}",
            cached=_tokens(row.cached_tokens),
        )
        for row in slowest
    ]


def lag_rows(summary: Summary) -> list[LagRow]:
    """A line a tier; of several clients, one more for each."""
    found = []
    clients = _client_lags(summary)
    for cell, tier, group in _groups(summary):
        lag, ttft = group.metrics["send_lag_s"], group.metrics["ttft_s"]
        if lag is None or ttft is None:
            continue
        each = clients.get((cell, tier), ())
        lines: list[tuple[str, Latency | ClientLag]] = [("", lag), *((str(one.client), one) for one in each)]
        for name, one in lines:
            share = one.p99 / ttft.p50 if ttft.p50 > 0 else None
            p99 = percentile_text(one.p99, one.n, 0.99)
            late, told = (share is not None and share > limit for limit in (LAG_LIMIT, LAG_TOLD))
            found.append(LagRow(cell, tier, duration(one.p50), p99, percent(share), late, told or bool(each), name))
    return found


def client_lines(summary: Summary) -> list[str]:
    """A line a tier that several clients have sent to: the latest senders first."""
    found = []
    for (cell, tier), lags in _client_lags(summary).items():
        worst = sorted(lags, key=lambda lag: lag.p99, reverse=True)
        told = [f"client {lag.client} {duration(lag.p50)}, {percentile_text(lag.p99, lag.n, 0.99)}" for lag in worst]
        rest = f"; {len(told) - _MOST_CLIENTS} more in the report" if len(told) > _MOST_CLIENTS else ""
        found.append(f"{cell}, {tier}: send lag, median and p99: {'; '.join(told[:_MOST_CLIENTS])}{rest}")
    return found


def _client_lags(summary: Summary) -> dict[tuple[str, str], list[ClientLag]]:
    """By a cell's label and a tier; nothing where one process has sent the load."""
    labels = cell_labels(summary.cells)
    found: dict[tuple[str, str], list[ClientLag]] = {}
    for cell in summary.cells:
        for lag in cell.clients:
            found.setdefault((labels[cell.key], lag.tier), []).append(lag)
    return found


def flow_rows(summary: Summary) -> list[FlowRow]:
    found = []
    output_of = dict(_storage_outputs(summary))
    labels = cell_labels(summary.cells)
    ceilings = {labels[cell.key]: ceiling_words(cell.ceiling) for cell in summary.cells}
    for cell, _, group in _groups(summary):
        if flow := group.throughput:
            output = output_of.get(cell, flow.output_tokens_per_s)
            found.append(
                FlowRow(
                    cell,
                    f"{digits(flow.requests_per_s)}/s",
                    f"{digits(flow.prompt_tokens_per_s)}/s",
                    NOT_REPORTED if output is None else f"{digits(output)}/s",
                    NOT_REPORTED if output is None else f"{digits(flow.prompt_tokens_per_s + output)}/s",
                    NOT_REPORTED if group.tokens.hit_rate is None else percent(group.tokens.hit_rate),
                    ceilings[cell],
                    NOT_REPORTED if group.preemptions is None else f"{group.preemptions:,}",
                )
            )
    return found


def _storage_outputs(summary: Summary) -> Iterator[tuple[str, float | None]]:
    """Output tokens a second of loads that storage alone served: by the device's clock, as its own findings say it."""
    labels = cell_labels(summary.cells)
    for cell in summary.cells:
        if cell.storage and cell.storage.throughput and (wall := cell.storage.throughput.get("wall_clock")):
            yield labels[cell.key], wall.tokens_per_s


def told_sources(manifest: Manifest, summary: Summary) -> tuple[str, ...]:
    """Sources that have a column: computed, and each tier that a cell has or that served a token."""
    had = {tier for cell in manifest.cells if cell.cache for tier in cell.cache.tiers}
    groups = [group.tokens.by_source for _, _, group in _groups(summary)]
    return tuple(
        source
        for source in sources()
        if source == COMPUTED or source in had or any(group.get(source) for group in groups)
    )


def source_rows(summary: Summary, names: Sequence[str]) -> list[SourceRow]:
    """names: the sources that have a column."""
    return [
        SourceRow(
            cell,
            tier,
            _verdicts(group.rows, proven_word(summary)),
            f"{group.tokens.prompt:,}",
            tuple(_tokens(group.tokens.by_source.get(source)) for source in names),
            _device_read(group.counters),
        )
        for cell, tier, group in _groups(summary)
        if group.rows.counted
    ]


def _device_read(counters: Mapping[str, int | None]) -> str:
    known = [value for name, value in counters.items() if name.endswith("device_read_bytes")]
    return NOT_REPORTED if not known or None in known else format_bytes(sum(value or 0 for value in known))


def _tokens(value: int | None) -> str:
    return NOT_REPORTED if value is None else f"{value:,}"


def cache_sizes(cell: CellEntry) -> list[tuple[str, str, str]]:
    """(tier, configured, resolved by the engine): an unmatched size is the commonest reason for unlike figures."""
    cache, found = cell.cache, cell.resolved or Resolved()
    bytes_of = [(tier, cache.bytes_of(tier) if cache else None, found.bytes_of(tier)) for tier in tier_names()]
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
