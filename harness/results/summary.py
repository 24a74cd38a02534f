"""What a run's rows say: figures by cell and tier. Made from the rows alone, so that they can always be made again.

    summary = read_summary(folder)               # or summarize(manifest, rows, samples)
    summary.cells[0].tiers["gpu"].metrics["ttft_s"]

Nothing else knows the keys of summary.json.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.engines import ENGINES
from harness.errors import ResultsError
from harness.experiment.goals import Goal
from harness.records import CUT_OFF, AcceleratorFacts, Counters, PresetFacts, Sample, StorageFigures
from harness.results.goals import TierGoals, goals_of, judge_goals
from harness.results.manifest import CellEntry, Manifest
from harness.results.paired import Answered, PairedLoad, asked_of, paired_loads
from harness.results.provenance import is_simulated
from harness.stats import FEWEST_SAMPLES, coefficient_of_variation, mean_interval, percentile, samples_needed
from traces.request import RequestRecord
from traces.tiers import sources

METRICS = ("ttft_s", "e2e_s", "tpot_s", "send_lag_s")
FREE_LOAD = "load"


class RowCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Measured rows by verdict. counted: those that are in the figures. cut_off: requests that measure.budget ended.

    Those are no errors. None: a file of an older version, which counts them among the errors.
    """

    measured: int
    errors: int
    proven: int
    contradicted: int
    unproven: int
    counted: int
    cut_off: int | None = None


class RunRows(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rows of a whole run, as RowCounts has them. total: with the warm ones."""

    total: int
    warm: int
    measured: int
    errors: int
    proven: int
    contradicted: int
    unproven: int
    counted: int
    cut_off: int | None = None


class Latency(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One metric of a tier, seconds. n: requests; mean, percentiles, cv: over requests.

    Requests that were sent together depend on each other, so that an interval rests on whole samples. sample_means: the
    mean of each sample, in order; (): a file of an older version. A free load is one sample. mean_low, mean_high: the
    95 % interval of the mean; None with fewer than three samples. samples_for_5_percent: how many samples would give
    an interval of ±5 %; None where the samples do not say.
    """

    n: int
    mean: float
    mean_low: float | None
    mean_high: float | None
    p50: float
    p90: float
    p99: float
    min: float
    max: float
    cv: float | None
    samples_for_5_percent: int | None
    sample_means: tuple[float, ...] = ()

    @property
    def half_width(self) -> float | None:
        """Of the mean's interval; None without one, or where it reaches to 0: too few samples for how they spread."""
        if self.mean_low is None or self.mean_high is None or (self.mean_low <= 0 < self.mean):
            return None
        return (self.mean_high - self.mean_low) / 2

    @property
    def samples(self) -> tuple[tuple[float, ...], ...]:
        """One value a sample, as stats.ratio_interval takes them."""
        return tuple((mean,) for mean in self.sample_means)


class TokenTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the rows that count. by_source: prompt tokens by where their KV came from. None: not reported.

    In the file the sources stand between `prompt` and `output`, not in a map of their own.
    """

    prompt: int
    by_source: dict[str, int | None]
    output: int | None
    cached: int | None
    expected_hit: int | None
    hit_rate: float | None


class LoadRates(msgspec.Struct, frozen=True, kw_only=True):
    """What a free load completed per second, from the first send to the last token."""

    duration_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float | None


class TierFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of one cell. metrics: None where no row has the metric. throughput: of a free load.

    counters: by how much all samples moved them, by flattened name; None where one sample lacks the counter.
    preemptions: of the rows that count; None where the engine does not report them, as in older files.
    """

    rows: RowCounts
    left_out_reasons: dict[str, int]
    metrics: dict[str, Latency | None]
    tokens: TokenTotals
    throughput: LoadRates | None
    counters: dict[str, int | None]
    preemptions: int | None = None


class CellFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One cell. tiers: by warm state, or FREE_LOAD. storage: of mode storage. preset: of a simulator.

    accelerator: what stood for the GPU of a real engine; None: nothing did.
    goals: how far each tier keeps measure.goals; () without goals. repeats: simulated without a real device, so that
    the run made again has the same times. paired: of a free load; None where the run's quickest sent other requests.
    """

    key: str
    overrides: dict[str, Any]
    storage: StorageFigures | None
    tiers: dict[str, TierFigures]
    preset: PresetFacts | None = None
    accelerator: AcceleratorFacts | None = None
    goals: tuple[TierGoals, ...] = ()
    repeats: bool = False
    paired: PairedLoad | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    engine: str
    status: str
    rows: RunRows
    cells: list[CellFigures]


def plain_summary(summary: Summary) -> dict[str, Any]:
    """As summary.json holds it."""
    content: dict[str, Any] = msgspec.to_builtins(summary)
    for tier in _tiers(content):
        tokens = tier["tokens"]
        tier["tokens"] = {"prompt": tokens.pop("prompt")} | tokens.pop("by_source") | tokens
    return content


def encode_summary(summary: Summary) -> bytes:
    return msgspec.json.format(msgspec.json.encode(plain_summary(summary)), indent=1) + b"\n"


def read_summary(folder: Path) -> Summary:
    """The summary of a run that has ended. Raises ResultsError."""
    path = folder / "summary.json"
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        return _converted(content)
    except FileNotFoundError:
        raise ResultsError(f"{folder}: holds no summary.json; make it with harness report {folder}") from None
    except (OSError, msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(f"{path}: is no summary ({error!r}); make it again with harness report {folder}") from None


def _converted(content: dict[str, Any]) -> Summary:
    for tier in _tiers(content):
        tokens = tier["tokens"]
        totals = {key: tokens.pop(key) for key in ("prompt", "output", "cached", "expected_hit", "hit_rate")}
        tier["tokens"] = totals | {"by_source": tokens}
    return msgspec.convert(content, Summary)


def summary_of_cells(run_id: str, engine: str, cells: list[dict[str, Any]]) -> Summary:
    """The summary of a complete run of which only the cells were kept, as summary.json holds them.

    Raises KeyError, TypeError, AttributeError or msgspec.ValidationError where they are no cells.
    """
    counts = [tier["rows"] for tier in _tiers({"cells": cells})]
    names = ("measured", "errors", "proven", "contradicted", "unproven", "counted")
    rows = {name: sum(each[name] for each in counts) for name in names}
    rows |= {"total": rows["measured"], "warm": 0}
    return _converted({"run_id": run_id, "engine": engine, "status": "complete", "rows": rows, "cells": cells})


def _tiers(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [tier for cell in content["cells"] for tier in cell["tiers"].values()]


def summarize(manifest: Manifest, rows: Iterable[RequestRecord], samples: Iterable[Sample] = ()) -> Summary:
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
    paired = paired_loads(
        {
            cell.key: Answered(asked_of(cell), [row for row in groups[cell.key][FREE_LOAD] if counted(row)])
            for cell in manifest.cells
            if FREE_LOAD in groups[cell.key]
        }
    )
    return Summary(
        run_id=manifest.run_id,
        engine=manifest.engine,
        status=manifest.status,
        rows=RunRows(total=total, warm=warm, **msgspec.structs.asdict(_verdicts(measured))),
        cells=[
            CellFigures(
                key=cell.key,
                overrides=cell.overrides,
                storage=cell.record.storage if cell.record else None,
                tiers={
                    tier: tier_figures(group, counters.get((cell.key, tier), []))
                    for tier, group in groups[cell.key].items()
                },
                preset=cell.resolved.preset if cell.resolved else None,
                accelerator=cell.resolved.accelerator if cell.resolved else None,
                goals=_goals(goals_of(cell.config), groups[cell.key]),
                repeats=repeats_exactly(manifest.engine, cell),
                paired=paired.get(cell.key),
            )
            for cell in manifest.cells
        ],
    )


def repeats_exactly(engine: str, cell: CellEntry) -> bool:
    """Whether a cell's times are computed from a model alone; False where the manifest does not say."""
    try:
        return is_simulated(engine) and ENGINES[engine].disk(cell.experiment).moves == "modelled"
    except ResultsError:
        return False


def _goals(goals: Sequence[Goal], groups: Mapping[str, Sequence[RequestRecord]]) -> tuple[TierGoals, ...]:
    found = []
    for tier, rows in groups.items() if goals else ():
        good = [row for row in rows if counted(row)]
        flow = _throughput(good)
        rates = msgspec.structs.asdict(flow) if flow else {}
        found.append(judge_goals(goals, tier, good, _verdicts(rows).errors, rates))
    return tuple(judged for judged in found if judged is not None)


def counted(row: RequestRecord) -> bool:
    """Whether a row's figures stand for its tier: no error, and proven where a warm state was claimed."""
    return row.error is None and (row.expected_tier is None or row.verdict == "proven")


def _is_left_out(row: RequestRecord) -> bool:
    return not counted(row) and row.error != CUT_OFF


def tier_figures(rows: Sequence[RequestRecord], moved: Sequence[Counters]) -> TierFigures:
    """The figures of the rows that one tier of one cell got. moved: the counters of each of its samples."""
    good = [row for row in rows if counted(row)]
    return TierFigures(
        rows=_verdicts(rows),
        left_out_reasons=dict(Counter(_reason(row) for row in rows if _is_left_out(row)).most_common(5)),
        metrics={name: latency_figures(sample_values(good, name)) for name in METRICS},
        tokens=_tokens(good),
        throughput=_throughput(good),
        counters=_moved(moved),
        preemptions=_sum_or_none([row.preemptions for row in good]),
    )


def metric_values(rows: Iterable[RequestRecord], name: str) -> list[float]:
    """The metric of every row that has it. send_lag_s is the actual send minus the intended one."""
    values = (row.sent_s - row.scheduled_s if name == "send_lag_s" else getattr(row, name) for row in rows)
    return [value for value in values if value is not None]


def sample_values(rows: Iterable[RequestRecord], name: str) -> list[list[float]]:
    """The metric of the rows of each sample. Requests of a free load wait for each other: they are one sample."""
    found: dict[tuple[int, int] | None, list[RequestRecord]] = {}
    for row in rows:
        found.setdefault((row.attempt, row.sample) if row.expected_tier else None, []).append(row)
    samples = [metric_values(group, name) for group in found.values()]
    return [values for values in samples if values]


def latency_figures(samples: Sequence[Sequence[float]]) -> Latency | None:
    """None without values."""
    values = [value for sample in samples for value in sample]
    if not values:
        return None
    means = [sum(sample) / len(sample) for sample in samples]
    interval = mean_interval(means) if len(means) >= FEWEST_SAMPLES else None
    return Latency(
        n=len(values),
        mean=sum(values) / len(values),
        mean_low=interval[0] if interval else None,
        mean_high=interval[1] if interval else None,
        p50=_percentile(values, 0.5),
        p90=_percentile(values, 0.9),
        p99=_percentile(values, 0.99),
        min=min(values),
        max=max(values),
        cv=coefficient_of_variation(values),
        samples_for_5_percent=samples_needed(means, 0.05),
        sample_means=tuple(means),
    )


def _percentile(values: Sequence[float], share: float) -> float:
    found = percentile(values, share)
    assert found is not None, "no values"
    return found


def _moved(moved: Sequence[Counters]) -> dict[str, int | None]:
    """Sum of the counters' movements over all samples, proven or not; None where one sample lacks a counter."""
    named = [one.named() for one in moved]
    names = dict.fromkeys(name for one in named for name in one)
    return {name: _sum_or_none([one.get(name) for one in named]) for name in names}


def _reason(row: RequestRecord) -> str:
    return row.error or row.verdict_reason or "no evidence"


def _verdicts(rows: Sequence[RequestRecord]) -> RowCounts:
    by_verdict = Counter(row.verdict for row in rows if row.error is None)
    cut_off = sum(row.error == CUT_OFF for row in rows)
    return RowCounts(
        measured=len(rows),
        errors=sum(row.error is not None for row in rows) - cut_off,
        proven=by_verdict["proven"],
        contradicted=by_verdict["contradicted"],
        unproven=by_verdict["unproven"],
        counted=sum(map(counted, rows)),
        cut_off=cut_off,
    )


def _tokens(rows: Sequence[RequestRecord]) -> TokenTotals:
    """Sums over rows; None where no row has the figure, and a sum never mixes rows that have it with others."""
    prompt = sum(row.prompt_tokens for row in rows)
    cached = _sum_or_none([row.cached_tokens for row in rows])
    return TokenTotals(
        prompt=prompt,
        by_source={source: _sum_or_none([row.tokens_by_tier.get(source) for row in rows]) for source in sources()},
        output=_sum_or_none([row.output_tokens for row in rows]),
        cached=cached,
        expected_hit=_sum_or_none([row.expected_hit_tokens for row in rows]),
        hit_rate=cached / prompt if cached is not None and prompt else None,
    )


def _sum_or_none(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _throughput(rows: Sequence[RequestRecord]) -> LoadRates | None:
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
    return LoadRates(
        duration_s=duration_s,
        requests_per_s=len(rows) / duration_s,
        prompt_tokens_per_s=sum(row.prompt_tokens for row in rows) / duration_s,
        output_tokens_per_s=None if output is None else output / duration_s,
    )


def core_slower(samples: Sequence[Sample]) -> list[float | None]:
    """By which share the loop on the engine's core took longer, around each sample, than in the run's quickest."""
    loops_s = [s.host.core_loop_s for s in samples]
    best_s = min((loop_s for loop_s in loops_s if loop_s is not None), default=1.0)
    return [None if loop_s is None else loop_s / best_s - 1 for loop_s in loops_s]
