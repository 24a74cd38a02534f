"""Two or more run folders of one engine as one side of a comparison: what each point measured, ready to be judged.

A point is one warm state of one cell, or one free load. Cells that measure the same thing again have `#1`, `#2` … at
the end of their key: their rows are repeats of one point.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from harness.experiment.workloads import (
    PersonasWorkload,
    PrefixWorkload,
    QaWorkload,
    RoundsWorkload,
    SyntheticWorkload,
)
from harness.records import MAX_LATE_SHARE, Counters, Sample
from harness.results.folder import read_rows, read_samples
from harness.results.manifest import CellEntry, Manifest, read_manifest
from harness.results.summary import FREE_LOAD, counted
from harness.results.trials import ended_trials, split_trials, trials_asked
from traces.request import RequestRecord
from traces.tiers import from_storage

_REPEAT = re.compile(r"#(\d+)$")
PointKey = tuple[str, str]


@dataclass
class Repeat:
    """One pass over a free load, a trial for instance, or all samples of a warm state in one run folder."""

    rows: list[RequestRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    left_out: list[RequestRecord] = field(default_factory=list)

    def by_sample(self) -> dict[tuple[int, int], list[RequestRecord]]:
        """Rows that were sent together, by sample and attempt, in the order measured."""
        groups: dict[tuple[int, int], list[RequestRecord]] = {}
        for row in self.rows:
            groups.setdefault((row.sample, row.attempt), []).append(row)
        return groups


@dataclass
class Point:
    """cell: the first folder's entry in its manifest. repeats: by folder and repeat, in that order."""

    tier: str
    cell: CellEntry
    repeats: dict[tuple[int, str], Repeat] = field(default_factory=dict)

    @property
    def free(self) -> bool:
        return self.tier == FREE_LOAD

    @property
    def paced(self) -> bool:
        """Whether a reference accelerator stood for a GPU."""
        return self.cell.resolved is not None and self.cell.resolved.accelerator is not None

    @property
    def rows(self) -> list[RequestRecord]:
        return [row for repeat in self.repeats.values() for row in repeat.rows]

    @property
    def left_out(self) -> list[RequestRecord]:
        return [row for repeat in self.repeats.values() for row in repeat.left_out]

    def observed(self) -> list[Counters]:
        """The counters' differences: one per proven sample of a warm state, or one per pass over a free load."""
        return [sample.observed for sample in self._judged()]

    def lateness(self) -> str | None:
        """Why the times are neither machine's: the host ran behind its accelerator's steps. None: they count."""
        judged = self._judged()
        took_s = sum(sample.ended_s - sample.started_s for sample in judged)
        late_s = sum(sample.observed.overrun_us.get("steps", 0) for sample in judged) / 1e6
        if late_s <= MAX_LATE_SHARE * took_s:
            return None
        return f"its steps ended late by {late_s / took_s:.1%} of the time measured, more than {MAX_LATE_SHARE:.0%}"

    def _judged(self) -> list[Sample]:
        samples = [sample for repeat in self.repeats.values() for sample in repeat.samples]
        return [sample for sample in samples if self.free or sample.verdict == "proven"]

    def turns(self) -> list[list[list[RequestRecord]]]:
        """Rows by turn and sample: a turn's samples of a warm state, and a sample's rows, which were sent together."""
        return [list(repeat.by_sample().values()) for repeat in self.repeats.values()]


@dataclass
class Side:
    """All points that the folders of one engine measured."""

    folders: tuple[Path, ...]
    manifests: tuple[Manifest, ...]
    points: dict[PointKey, Point]

    @property
    def manifest(self) -> Manifest:
        return self.manifests[0]

    @property
    def engine(self) -> str:
        return self.manifest.engine


def read_side(folders: Sequence[Path]) -> Side:
    """Reads the rows of measured phases. Raises ResultsError where a folder is not a run's."""
    side = Side(tuple(folders), tuple(read_manifest(folder) for folder in folders), {})
    for number, (folder, manifest) in enumerate(zip(side.folders, side.manifests, strict=True)):
        cells = {cell.key: cell for cell in manifest.cells}
        several = {cell.key for cell in manifest.cells if trials_asked(cell.config) > 1}
        trials: dict[str, list[RequestRecord]] = {}
        for row in read_rows(folder):
            if row.phase != "measure":
                continue
            if row.cell in several and row.expected_tier is None:
                trials.setdefault(row.cell, []).append(row)
                continue
            repeat = _repeat(side, cells, number, row.cell, row.expected_tier or FREE_LOAD)
            (repeat.rows if counted(row) else repeat.left_out).append(row)
        samples = list(read_samples(folder))
        for sample in samples:
            if sample.cell not in several or sample.tier != FREE_LOAD:
                _repeat(side, cells, number, sample.cell, sample.tier).samples.append(sample)
        for cell, rows in trials.items():
            point = side.points.setdefault((point_name(cell), FREE_LOAD), Point(FREE_LOAD, cells[cell]))
            _add_trials(point, number, cell, rows, [sample for sample in samples if sample.cell == cell])
    return side


def _add_trials(point: Point, folder: int, cell: str, rows: Sequence[RequestRecord], samples: Sequence[Sample]) -> None:
    """Each complete trial is a repeat. Rows of the others stand beside those of the first, for their reasons."""
    split = split_trials(rows, ended_trials(samples, FREE_LOAD).get(cell, set()))
    for row in split.complete:
        repeat = point.repeats.setdefault((folder, f"{cell}, trial {row.sample + 1}"), Repeat())
        (repeat.rows if counted(row) else repeat.left_out).append(row)
    for key in {(row.sample, row.attempt) for row in split.complete}:
        repeat = point.repeats[folder, f"{cell}, trial {key[0] + 1}"]
        repeat.samples += [sample for sample in samples if (sample.index, sample.attempt) == key]
    first = next(iter(point.repeats.values()), None) or point.repeats.setdefault((folder, cell), Repeat())
    reason = {(trial.trial, trial.attempt): f"{trial.name}: {trial.reason}" for trial in split.left_out}
    first.left_out += [
        msgspec.structs.replace(row, verdict_reason=reason[row.sample, row.attempt]) for row in split.others
    ]


def point_name(cell: str) -> str:
    """A cell's key without the number of its repeat."""
    return _REPEAT.sub("", cell)


def repeated(cell: str, times: int) -> list[str]:
    """Keys of the cells that measure the same thing `times` times."""
    return [f"{cell}#{number}" for number in range(1, times + 1)]


def _repeat(side: Side, cells: dict[str, CellEntry], folder: int, cell: str, tier: str) -> Repeat:
    entry = cells.get(cell) or CellEntry(key=cell)
    point = side.points.setdefault((point_name(cell), tier), Point(tier, entry))
    return point.repeats.setdefault((folder, cell), Repeat())


def axes(point: Point) -> dict[str, Any]:
    """A point's place on each axis, which distinguishes a calibration's points and a report's residuals."""
    cell, workload = point.cell, point.cell.workload
    on_disk = from_storage(point.tier) or point.free
    one_length = workload if isinstance(workload, PrefixWorkload | SyntheticWorkload) else None
    return {
        "tier": point.tier,
        "workload": workload.kind if workload else None,
        "prompt_tokens": one_length.prompt_tokens if one_length else None,
        "hit_rate": one_length.hit_rate if one_length and not point.free else None,
        "chunk_tokens": cell.cache.chunk_tokens if cell.cache else None,
        "concurrency": None
        if workload is None or isinstance(workload, PersonasWorkload | QaWorkload | RoundsWorkload)
        else workload.concurrency,
        "device_bytes_per_s": cell.device_bytes_per_s if on_disk else None,
        "file_system": cell.disk_file_system if on_disk else None,
    }


def left_out_reasons(rows: Iterable[RequestRecord]) -> list[str]:
    """Why the rows do not count, each reason once."""
    return list(dict.fromkeys(row.error or row.verdict_reason or "no evidence" for row in rows))
