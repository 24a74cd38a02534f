"""Trials: one free load sent several times, each time with fresh caches. What they agree on is what can be said.

A trial that failed in part, or did not end, is no trial of the same load: it is named, and in no figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median, stdev
from typing import Any, NamedTuple

import msgspec

from harness.records import Sample, is_cut_off
from harness.results.rows import latency_figures, load_rates, metric_values, token_totals
from harness.stats import FEWEST_SAMPLES, coefficient_of_variation, mean_interval
from harness.storage_records import StorageFigures
from traces.request import RequestRecord

_THROUGHPUTS = ("storage", "wall_clock", "per_io_time")
# A trial as rows and samples name it: its number, and the attempt that made it.
TrialKey = tuple[int, int]


class TrialSpread(msgspec.Struct, frozen=True, kw_only=True):
    """A figure over trials. values: one a trial, in their order. mean_low, mean_high: the 95 % interval of the mean
    (Student's t), None with fewer than three trials. sd, cv: None with one trial; cv also at a mean of 0."""

    values: tuple[float, ...]
    median: float
    mean: float
    mean_low: float | None
    mean_high: float | None
    sd: float | None
    cv: float | None


class LeftOutTrial(msgspec.Struct, frozen=True, kw_only=True):
    """A trial that is in no figure. trial counts from 0. requests: how many rows it has. reason: a clause."""

    trial: int
    attempt: int
    requests: int
    reason: str

    @property
    def name(self) -> str:
        """As people count: 'trial 2', and from the second attempt on 'trial 2 (attempt 2)'."""
        return f"trial {self.trial + 1}" + (f" (attempt {self.attempt + 1})" if self.attempt else "")


class TrialFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The trials of a cell's free load. asked: measure.trials. counted: the numbers of those in the figures.

    once: the cell repeats exactly, so that one trial was measured in place of all. figures: by name; a figure that some
    trial lacks has no entry.
    """

    asked: int
    counted: tuple[int, ...]
    left_out: tuple[LeftOutTrial, ...]
    once: bool
    figures: dict[str, TrialSpread]


class SplitTrials(NamedTuple):
    """A load's rows: those of complete trials, and the others. storage: by complete trial, in mode storage."""

    complete: list[RequestRecord]
    others: list[RequestRecord]
    left_out: tuple[LeftOutTrial, ...]
    storage: Mapping[int, StorageFigures] = {}

    def has(self, trial: int, attempt: int) -> bool:
        """Whether a trial is complete."""
        return (trial, attempt) not in {(each.trial, each.attempt) for each in self.left_out}


def trials_asked(config: Mapping[str, Any]) -> int:
    """measure.trials of a cell's config, also of one that is kept only in part."""
    measure = config.get("measure") or {}
    return measure.get("trials") or 1


def ended_trials(samples: Iterable[Sample], tier: str) -> dict[str, set[TrialKey]]:
    """By cell, the trials that were sent to their end. tier: what samples of a free load carry as theirs."""
    found: dict[str, set[TrialKey]] = {}
    for sample in samples:
        if sample.tier == tier:
            found.setdefault(sample.cell, set()).add((sample.index, sample.attempt))
    return found


def split_trials(rows: Sequence[RequestRecord], ended: set[TrialKey]) -> SplitTrials:
    """Of a load's rows. A request that measure.budget ended does not make its trial incomplete: it was asked for."""
    by_trial: dict[TrialKey, list[RequestRecord]] = {}
    for row in rows:
        by_trial.setdefault((row.sample, row.attempt), []).append(row)
    found = SplitTrials([], [], ())
    left_out = []
    for key, own in by_trial.items():
        failed = [row.error for row in own if row.error is not None and not is_cut_off(row.error)]
        if key in ended and not failed:
            found.complete.extend(own)
            continue
        found.others.extend(own)
        number = f"{len(failed):,} of {len(own):,} requests failed: {failed[0]}" if failed else "did not end"
        left_out.append(LeftOutTrial(trial=key[0], attempt=key[1], requests=len(own), reason=number))
    return found._replace(left_out=tuple(left_out))


def with_storage(split: SplitTrials, samples: Iterable[Sample]) -> SplitTrials:
    """samples: of the same cell."""
    found = {each.index: each.storage for each in samples if each.storage and split.has(each.index, each.attempt)}
    return split._replace(storage=found)


def trial_figures(asked: int, split: SplitTrials, rows: Sequence[RequestRecord], *, once: bool) -> TrialFigures:
    """rows: those of complete trials that count."""
    by_trial: dict[int, list[RequestRecord]] = {}
    for row in rows:
        by_trial.setdefault(row.sample, []).append(row)
    figures = [_figures(by_trial[trial]) | _of_device(split.storage.get(trial)) for trial in sorted(by_trial)]
    names = [name for name in figures[0] if all(each.get(name) is not None for each in figures)] if figures else []
    return TrialFigures(
        asked=asked,
        counted=tuple(sorted(by_trial)),
        left_out=split.left_out,
        once=once,
        figures={name: _spread([value for each in figures if (value := each[name]) is not None]) for name in names},
    )


def _figures(rows: Sequence[RequestRecord]) -> dict[str, float | None]:
    """One trial's, by the names that summary.json gives them."""
    ttft, tpot = (latency_figures([metric_values(rows, name)]) for name in ("ttft_s", "tpot_s"))
    rates = load_rates(rows)
    return {
        "ttft_mean_s": ttft.mean if ttft else None,
        "ttft_p50_s": ttft.p50 if ttft else None,
        "ttft_p95_s": ttft.p95 if ttft else None,
        "tpot_mean_s": tpot.mean if tpot else None,
        "prompt_tokens_per_s": rates.prompt_tokens_per_s if rates else None,
        "output_tokens_per_s": rates.output_tokens_per_s if rates else None,
        "total_tokens_per_s": rates.total_tokens_per_s if rates else None,
        "requests_per_s": rates.requests_per_s if rates else None,
        "hit_rate": token_totals(rows).hit_rate,
    }


def _of_device(found: StorageFigures | None) -> dict[str, float | None]:
    """What a real device did in one trial; nothing of a load without one."""
    if found is None:
        return {}
    figures: dict[str, float | None] = {}
    for way, moved in (("read", found.read), ("write", found.write)):
        figures[f"storage_{way}_bytes"] = moved.moved_bytes
        figures[f"storage_{way}_p95_s"] = moved.latency_s.total.get("p95")
    rates = found.throughput or {}
    figures |= {f"{name}_tokens_per_s": rates[name].tokens_per_s if name in rates else None for name in _THROUGHPUTS}
    if found.kv is None:
        return figures
    reads, writes = found.kv.decode_read_bytes, found.kv.prefill_write_bytes
    return figures | {"decode_read_bytes": reads, "prefill_write_bytes": writes}


def _spread(values: Sequence[float]) -> TrialSpread:
    interval = mean_interval(values) if len(values) >= FEWEST_SAMPLES else None
    return TrialSpread(
        values=tuple(values),
        median=median(values),
        mean=sum(values) / len(values),
        mean_low=interval[0] if interval else None,
        mean_high=interval[1] if interval else None,
        sd=stdev(values) if len(values) > 1 else None,
        cv=coefficient_of_variation(values),
    )
