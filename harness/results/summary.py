"""What a run's rows say: figures by cell and tier. Made from the rows alone, so that they can always be made again.

    summary = read_summary(folder)               # or summarize(manifest, rows, samples)
    summary.cells[0].tiers["gpu"].metrics["ttft_s"]

Nothing else knows the keys of summary.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from harness.engines import ENGINES
from harness.errors import ResultsError
from harness.experiment.goals import Goal
from harness.records import AcceleratorFacts, Counters, HitCeiling, LoadFacts, PresetFacts, Sample, is_cut_off
from harness.results.against import AgainstCell, Served, held_against
from harness.results.asked import AskedLoad, asked_load
from harness.results.break_even import BreakEven, break_evens
from harness.results.goals import TierGoals, classes_of, goals_of, judge_goals
from harness.results.manifest import CellEntry, Manifest
from harness.results.paired import Answered, PairedLoad, asked_of, paired_loads
from harness.results.provenance import is_simulated
from harness.results.rows import (
    ClientLag,
    Latency,
    LoadRates,
    TokenTotals,
    client_lags,
    latency_figures,
    load_rates,
    sample_values,
    sum_or_none,
    token_totals,
)
from harness.results.trials import (
    SplitTrials,
    TrialFigures,
    TrialKey,
    ended_trials,
    split_trials,
    trial_figures,
    trials_asked,
    with_storage,
)
from harness.results.turns import TurnFigures, turn_figures
from harness.storage_records import StorageFigures
from traces.request import RequestRecord

METRICS = ("ttft_s", "e2e_s", "tpot_s", "send_lag_s")
FREE_LOAD = "load"
# Measured rows by cell and tier.
_Groups = dict[str, dict[str, list[RequestRecord]]]


class RowCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Measured rows by verdict. counted: those that are in the figures. cut_off: requests that measure.budget or
    workload.duration ended.

    Those are no errors. None: a file of an older version, which counts them among the errors. in_incomplete_trials:
    answered rows of trials that are in no figure (trials.py).
    """

    measured: int
    errors: int
    proven: int
    contradicted: int
    unproven: int
    counted: int
    cut_off: int | None = None
    in_incomplete_trials: int = 0


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
    in_incomplete_trials: int = 0


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
    asked: of a free load with a duration. beyond_model: turns of free loads that their sessions did not come to.
    turns: of a free load of conversations; () of other loads, and in files of an older version. trials: of a free load
    with measure.trials above 1; its other figures are over the rows of all complete trials. against: of a free load,
    beside the cell that report.against names; None without one, and of that cell. ceiling: of a free load (ceiling.py).
    classes: end to end times by class of service; {} without classes. Their goals are in goals, as tiers' are.
    clients: of rows that count, by tier; () where one process has sent the load.
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
    asked: AskedLoad | None = None
    beyond_model: int = 0
    turns: tuple[TurnFigures, ...] = ()
    trials: TrialFigures | None = None
    against: AgainstCell | None = None
    ceiling: HitCeiling | None = None
    classes: dict[str, Latency | None] = {}
    clients: tuple[ClientLag, ...] = ()


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """break_evens: of sweeps of free loads that name a cell in report.against; () of others, and in older files."""

    run_id: str
    engine: str
    status: str
    rows: RunRows
    cells: list[CellFigures]
    break_evens: tuple[BreakEven, ...] = ()


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


def summarize(
    manifest: Manifest,
    rows: Iterable[RequestRecord],
    samples: Iterable[Sample] = (),
    ceilings: Mapping[str, HitCeiling] = MappingProxyType({}),
) -> Summary:
    """Per cell and tier: counts, latencies with intervals, tokens by tier, throughput, what the counters moved by.

    A tier's figures hold its proven rows only (or, in a free load without warm states, all rows without error, of
    complete trials); rows left out are counted with their reasons. ceilings: by cell.
    """
    groups: _Groups = {cell.key: {} for cell in manifest.cells}
    warm = total = 0
    for row in rows:
        total += 1
        if row.phase != "measure":
            warm += 1
            continue
        groups.setdefault(row.cell, {}).setdefault(row.expected_tier or FREE_LOAD, []).append(row)
    samples = list(samples)
    splits = _split_loads(manifest, groups, samples)
    counters: dict[tuple[str, str], list[Counters]] = {}
    facts: dict[str, list[LoadFacts]] = {}
    for sample in samples:
        split = splits.get(sample.cell)
        if sample.load is not None and (split is None or split.has(sample.index, sample.attempt)):
            facts.setdefault(sample.cell, []).append(sample.load)
        counters.setdefault((sample.cell, sample.tier), []).append(sample.observed)
    measured = [row for tiers in groups.values() for group in tiers.values() for row in group]
    others = [row for split in splits.values() for row in split.others]
    answered = _answered(manifest.cells, groups)
    paired = paired_loads(answered)
    cells = [
        _cell_figures(
            manifest.engine,
            cell,
            groups[cell.key],
            counters,
            splits.get(cell.key),
            paired.get(cell.key),
            facts.get(cell.key, ()),
        )
        for cell in manifest.cells
    ]
    loads = _served(cells, answered)
    held = held_against(manifest.cells, loads)
    return Summary(
        run_id=manifest.run_id,
        engine=manifest.engine,
        status=manifest.status,
        rows=RunRows(total=total, warm=warm, **msgspec.structs.asdict(_verdicts(measured, others))),
        cells=[
            msgspec.structs.replace(cell, against=held.get(cell.key), ceiling=ceilings.get(cell.key)) for cell in cells
        ],
        break_evens=break_evens(manifest.cells, loads),
    )


def _answered(cells: Sequence[CellEntry], groups: _Groups) -> dict[str, Answered]:
    """By cell, the rows that count of its free load."""
    return {
        cell.key: Answered(asked_of(cell), [row for row in groups[cell.key][FREE_LOAD] if counted(row)])
        for cell in cells
        if FREE_LOAD in groups[cell.key]
    }


def _served(cells: Sequence[CellFigures], answered: Mapping[str, Answered]) -> dict[str, Served]:
    """By cell, what cells are held against each other by."""
    return {
        cell.key: Served(
            answered[cell.key],
            load.metrics["ttft_s"],
            load.throughput,
            cell.trials,
            cell.repeats,
            timed=cell.asked is not None,
        )
        for cell in cells
        if (load := cell.tiers.get(FREE_LOAD)) is not None
    }


def _cell_figures(
    engine: str,
    cell: CellEntry,
    tiers: Mapping[str, Sequence[RequestRecord]],
    counters: Mapping[tuple[str, str], Sequence[Counters]],
    split: SplitTrials | None,
    paired: PairedLoad | None,
    facts: Sequence[LoadFacts],
) -> CellFigures:
    return CellFigures(
        key=cell.key,
        overrides=cell.overrides,
        storage=cell.record.storage if cell.record else None,
        tiers={tier: tier_figures(rows, counters.get((cell.key, tier), ()), split) for tier, rows in tiers.items()},
        preset=cell.resolved.preset if cell.resolved else None,
        accelerator=cell.resolved.accelerator if cell.resolved else None,
        goals=_goals(goals_of(cell.config), tiers) + _goals_by_class(classes_of(cell.config), tiers.get(FREE_LOAD, ())),
        classes=_classes(classes_of(cell.config), tiers.get(FREE_LOAD, ())),
        repeats=repeats_exactly(engine, cell),
        paired=paired,
        asked=asked_load(facts),
        beyond_model=sum(each.beyond_model for each in facts),
        turns=_turns(tiers.get(FREE_LOAD, ()), split),
        trials=_trials(engine, cell, split),
        clients=tuple(lag for tier, rows in tiers.items() for lag in client_lags(tier, filter(counted, rows))),
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
        flow = load_rates(good)
        rates = msgspec.structs.asdict(flow) if flow else {}
        found.append(judge_goals(goals, tier, good, _verdicts(rows).errors, rates))
    return tuple(judged for judged in found if judged is not None)


def _goals_by_class(classes: Mapping[str, Sequence[Goal]], rows: Sequence[RequestRecord]) -> tuple[TierGoals, ...]:
    own = {name: [row for row in rows if row.service == name] for name in classes}
    return tuple(each for name, goals in classes.items() for each in _goals(goals, {name: own[name]}))


def _classes(classes: Collection[str], rows: Sequence[RequestRecord]) -> dict[str, Latency | None]:
    by_class: dict[str, list[RequestRecord]] = {name: [] for name in classes}
    for row in rows:
        if counted(row) and row.service is not None:
            by_class.setdefault(row.service, []).append(row)
    return {name: latency_figures(sample_values(own, "e2e_s")) for name, own in by_class.items()}


def _split_loads(manifest: Manifest, groups: _Groups, samples: Sequence[Sample]) -> dict[str, SplitTrials]:
    """By cell with several trials; in `groups` such a load keeps the rows of its complete trials alone."""
    ended: dict[str, set[TrialKey]] | None = None
    found = {}
    for cell in manifest.cells:
        own = groups[cell.key]
        if trials_asked(cell.config) == 1 or FREE_LOAD not in own:
            continue
        ended = ended_trials(samples, FREE_LOAD) if ended is None else ended
        split = split_trials(own[FREE_LOAD], ended.get(cell.key, set()))
        found[cell.key] = with_storage(split, (sample for sample in samples if sample.cell == cell.key))
        own[FREE_LOAD] = found[cell.key].complete
    return found


def _trials(engine: str, cell: CellEntry, split: SplitTrials | None) -> TrialFigures | None:
    if split is None:
        return None
    rows = [row for row in split.complete if counted(row)]
    return trial_figures(trials_asked(cell.config), split, rows, once=repeats_exactly(engine, cell))


def _turns(rows: Sequence[RequestRecord], split: SplitTrials | None) -> tuple[TurnFigures, ...]:
    left_out = [row for row in rows if not counted(row)] + (split.others if split else [])
    return turn_figures([row for row in rows if counted(row)], left_out)


def counted(row: RequestRecord) -> bool:
    """Whether a row's figures stand for its tier: no error, and proven where a warm state was claimed."""
    return row.error is None and (row.expected_tier is None or row.verdict == "proven")


def _is_left_out(row: RequestRecord) -> bool:
    return not counted(row) and not is_cut_off(row.error)


def tier_figures(
    rows: Sequence[RequestRecord], moved: Sequence[Counters], split: SplitTrials | None = None
) -> TierFigures:
    """The figures of the rows that one tier of one cell got. moved: the counters of each of its samples.

    split: of a load with several trials, of which `rows` has the complete ones.
    """
    good = [row for row in rows if counted(row)]
    reasons = Counter(_reason(row) for row in rows if _is_left_out(row))
    for trial in split.left_out if split else ():
        reasons[f"{trial.name}: {trial.reason}"] += trial.requests
    return TierFigures(
        rows=_verdicts(rows, split.others if split else ()),
        left_out_reasons=dict(reasons.most_common(5)),
        metrics={name: latency_figures(sample_values(good, name)) for name in METRICS},
        tokens=token_totals(good),
        throughput=load_rates(good),
        counters=_moved(moved),
        preemptions=sum_or_none([row.preemptions for row in good]),
    )


def _moved(moved: Sequence[Counters]) -> dict[str, int | None]:
    """Sum of the counters' movements over all samples, proven or not; None where one sample lacks a counter."""
    named = [one.named() for one in moved]
    names = dict.fromkeys(name for one in named for name in one)
    return {name: sum_or_none([one.get(name) for one in named]) for name in names}


def _reason(row: RequestRecord) -> str:
    return row.error or row.verdict_reason or "no evidence"


def _verdicts(rows: Sequence[RequestRecord], others: Sequence[RequestRecord] = ()) -> RowCounts:
    """others: rows of incomplete trials, none of which counts."""
    by_verdict = Counter(row.verdict for row in rows if row.error is None)
    failed = [row.error for row in (*rows, *others) if row.error is not None]
    cut_off = sum(map(is_cut_off, failed))
    return RowCounts(
        measured=len(rows) + len(others),
        errors=len(failed) - cut_off,
        proven=by_verdict["proven"],
        contradicted=by_verdict["contradicted"],
        unproven=by_verdict["unproven"],
        counted=sum(map(counted, rows)),
        cut_off=cut_off,
        in_incomplete_trials=sum(row.error is None for row in others),
    )


def core_slower(samples: Sequence[Sample], *, client: bool = False) -> list[float | None]:
    """By which share the loop on the engine's core, or the client's, took longer around each sample than in the run's
    quickest."""
    loops_s = [s.host.client_loop_s if client else s.host.core_loop_s for s in samples]
    best_s = min((loop_s for loop_s in loops_s if loop_s is not None), default=1.0)
    return [None if loop_s is None else loop_s / best_s - 1 for loop_s in loops_s]
