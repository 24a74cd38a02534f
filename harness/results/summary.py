"""What a run's rows say, as one dictionary. Made from the rows alone, so that it can always be made again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from harness.records import Counters, Sample
from harness.results.manifest import Manifest
from harness.stats import coefficient_of_variation, mean_interval, percentile, samples_needed
from traces.request import RequestRecord
from traces.tiers import sources

METRICS = ("ttft_s", "e2e_s", "tpot_s", "send_lag_s")
FREE_LOAD = "load"


def summarize(manifest: Manifest, rows: Iterable[RequestRecord], samples: Iterable[Sample] = ()) -> dict[str, Any]:
    """Per cell and tier: counts, latencies with intervals, tokens by tier, throughput, what the counters moved by.

    A tier's figures hold its proven rows only (or, in a free load without warm states, all rows without error);
    rows left out are counted with their reasons.
    """
    groups: dict[str, dict[str, list[RequestRecord]]] = {cell.key: {} for cell in manifest.cells}
    warm = total = 0
    for row in rows:
        total += 1
        if row.phase == "warm":
            warm += 1
            continue
        groups.setdefault(row.cell, {}).setdefault(row.expected_tier or FREE_LOAD, []).append(row)
    counters: dict[tuple[str, str], list[Counters]] = {}
    for sample in samples:
        counters.setdefault((sample.cell, sample.tier), []).append(sample.observed)
    measured = [row for tiers in groups.values() for group in tiers.values() for row in group]
    return {
        "run_id": manifest.run_id,
        "engine": manifest.engine,
        "status": manifest.status,
        "rows": {"total": total, "warm": warm, **_verdicts(measured)},
        "cells": [
            {
                "key": cell.key,
                "overrides": cell.overrides,
                "storage": msgspec.to_builtins(cell.record.storage) if cell.record else None,
                "tiers": {
                    tier: tier_figures(group) | {"counters": _moved(counters.get((cell.key, tier), []))}
                    for tier, group in groups[cell.key].items()
                },
            }
            for cell in manifest.cells
        ],
    }


def counted(row: RequestRecord) -> bool:
    """Whether a row's figures stand for its tier: no error, and proven where a warm state was claimed."""
    return row.error is None and (row.expected_tier is None or row.verdict == "proven")


def tier_figures(rows: Sequence[RequestRecord]) -> dict[str, Any]:
    """The figures of the rows that one tier of one cell got."""
    good = [row for row in rows if counted(row)]
    return {
        "rows": _verdicts(rows),
        "left_out_reasons": dict(Counter(_reason(row) for row in rows if not counted(row)).most_common(5)),
        "metrics": {name: latency_figures(metric_values(good, name)) for name in METRICS},
        "tokens": _tokens(good),
        "throughput": _throughput(good),
    }


def metric_values(rows: Iterable[RequestRecord], name: str) -> list[float]:
    """The metric of every row that has it. send_lag_s is the actual send minus the intended one."""
    values = (row.sent_s - row.scheduled_s if name == "send_lag_s" else getattr(row, name) for row in rows)
    return [value for value in values if value is not None]


def latency_figures(values: Sequence[float]) -> dict[str, Any] | None:
    """n, mean with its 95 % interval, percentiles and spread, seconds; None without values."""
    if not values:
        return None
    interval = mean_interval(values)
    return {
        "n": len(values),
        "mean": sum(values) / len(values),
        "mean_low": interval[0] if interval else None,
        "mean_high": interval[1] if interval else None,
        **{f"p{int(share * 100)}": percentile(values, share) for share in (0.5, 0.9, 0.99)},
        "min": min(values),
        "max": max(values),
        "cv": coefficient_of_variation(values),
        "samples_for_5_percent": samples_needed(values, 0.05),
    }


def _moved(moved: Sequence[Counters]) -> dict[str, int | None]:
    """Sum of the counters' movements over all samples, proven or not; None where one sample lacks a counter."""
    named = [one.named() for one in moved]
    names = dict.fromkeys(name for one in named for name in one)
    return {name: _sum_or_none([one.get(name) for one in named]) for name in names}


def _reason(row: RequestRecord) -> str:
    return row.error or row.verdict_reason or "no evidence"


def _verdicts(rows: Sequence[RequestRecord]) -> dict[str, int]:
    by_verdict = Counter(row.verdict for row in rows if row.error is None)
    return {
        "measured": len(rows),
        "errors": sum(row.error is not None for row in rows),
        "proven": by_verdict["proven"],
        "contradicted": by_verdict["contradicted"],
        "unproven": by_verdict["unproven"],
        "counted": sum(map(counted, rows)),
    }


def _tokens(rows: Sequence[RequestRecord]) -> dict[str, Any]:
    """Sums over rows; None where no row has the figure, and a sum never mixes rows that have it with others."""
    totals: dict[str, Any] = {"prompt": sum(row.prompt_tokens for row in rows)}
    for source in sources():
        totals[source] = _sum_or_none([row.tokens_by_tier.get(source) for row in rows])
    totals["output"] = _sum_or_none([row.output_tokens for row in rows])
    totals["cached"] = _sum_or_none([row.cached_tokens for row in rows])
    totals["expected_hit"] = _sum_or_none([row.expected_hit_tokens for row in rows])
    cached, prompt = totals["cached"], totals["prompt"]
    totals["hit_rate"] = cached / prompt if cached is not None and prompt else None
    return totals


def _sum_or_none(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _throughput(rows: Sequence[RequestRecord]) -> dict[str, Any] | None:
    """Of a free load: completed work over the time from the first send to the last token, attempt by attempt."""
    if not rows or rows[0].expected_tier is not None:
        return None
    spans: defaultdict[int, list[float]] = defaultdict(list)
    for row in rows:
        spans[row.attempt] += [row.sent_s, row.last_token_s or row.sent_s]
    duration_s = sum(max(times) - min(times) for times in spans.values())
    if duration_s <= 0:
        return None
    output = _sum_or_none([row.output_tokens for row in rows])
    return {
        "duration_s": duration_s,
        "requests_per_s": len(rows) / duration_s,
        "prompt_tokens_per_s": sum(row.prompt_tokens for row in rows) / duration_s,
        "output_tokens_per_s": None if output is None else output / duration_s,
    }


def core_slower(samples: Sequence[Sample]) -> list[float | None]:
    """By which share the loop on the engine's core took longer, around each sample, than in the run's quickest."""
    loops_s = [s.host.core_loop_s for s in samples]
    best_s = min((loop_s for loop_s in loops_s if loop_s is not None), default=1.0)
    return [None if loop_s is None else loop_s / best_s - 1 for loop_s in loops_s]
