"""Published curves of time to first token over prompt length: presets fitted on a few named points predict the others.

A table has one row a value, from many sources. `judged` says which rows a preset of configs/hardware stands for; of all
other rows `not_judged` says why none does. Every row is one or the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from harness.errors import NotComparable
from harness.experiment.model import Experiment
from harness.experiment.read import Cell
from simulator.calibration import Calibration, load_calibration

_SECONDS = {"ms": 1e-3, "s": 1.0}


class Judged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows of one machine and warm state. rows: what these columns of the table hold.

    cache: as in an experiment. reading_error: of a value, in the row's unit, where a figure was read off; 0: half of
    the last printed digit.
    """

    rows: dict[str, str]
    state: str
    hardware: str
    model: str
    cache: dict[str, Any]
    reading_error: float = 0.0


class NotJudged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows that nothing predicts, and why."""

    rows: dict[str, str]
    why: str


class Curves(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first entry that fits a row counts, those of `judged` before those of `not_judged`."""

    table: str
    judged: tuple[Judged, ...]
    not_judged: tuple[NotJudged, ...]


class Value(msgspec.Struct, frozen=True):
    """A published time, seconds. low_s, high_s: where it may lie, by how it was read or printed."""

    number: int
    of: Judged
    prompt_tokens: int
    hit_tokens: int
    value_s: float
    low_s: float
    high_s: float

    @property
    def name(self) -> str:
        return f"curve row {self.number + 2}"

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens


def curve_values(curves: Curves, table: Sequence[dict[str, str]]) -> list[Value]:
    """The rows that a preset stands for. Raises NotComparable where a row fits no entry of the file."""
    found = []
    for number, row in enumerate(table):
        of = _entry(curves, number, row)
        if isinstance(of, NotJudged):
            continue
        try:
            unit_s, printed = _SECONDS[row["unit"]], float(row["value"])
            prompt_tokens, hit_tokens = int(row["prompt_tokens"]), int(row["hit_tokens"])
        except (KeyError, ValueError):
            raise NotComparable(
                f"{curves.table}: row {number + 2} is no time at a prompt length; put it under curves.not_judged"
            ) from None
        half = of.reading_error or 0.5 * 10.0 ** -len(row["value"].partition(".")[2])
        low_s, high_s = ((printed + off) * unit_s for off in (-half, half))
        found.append(Value(number, of, prompt_tokens, hit_tokens, printed * unit_s, low_s, high_s))
    return found


def reasons(curves: Curves, table: Sequence[dict[str, str]]) -> dict[str, int]:
    """Why rows are not judged, and how many rows that is."""
    found: dict[str, int] = {}
    for number, row in enumerate(table):
        if isinstance(of := _entry(curves, number, row), NotJudged):
            found[of.why] = found.get(of.why, 0) + 1
    return found


def _entry(curves: Curves, number: int, row: dict[str, str]) -> Judged | NotJudged:
    entries: Iterator[Judged | NotJudged] = iter((*curves.judged, *curves.not_judged))
    of = next((each for each in entries if all(row.get(key) == text for key, text in each.rows.items())), None)
    if of is None:
        raise NotComparable(
            f"{curves.table}: row {number + 2} ({row.get('source')}, {row.get('storage')}) is neither under"
            " curves.judged nor under curves.not_judged; add it"
        )
    return of


def curve_cell(value: Value, name: str) -> Cell:
    """The row as an experiment for the simulator: whole chunks and one token, nearest to the printed length."""
    chunk_tokens, of = value.of.cache["chunk_tokens"], value.of
    chunks = max(1, round(value.prompt_tokens / chunk_tokens))
    fitted_on = calibration_of(value).fitted_on
    experiment = Experiment.model_validate(
        {
            "name": name,
            "model": of.model,
            "workload": {
                "kind": "prefix",
                "prompt_tokens": chunks * chunk_tokens + 1,
                "hit_rate": round(value.hit_rate * chunks) / chunks,
            },
            "measure": {"tiers": [of.state], "samples": 1},
            "cache": of.cache,
            "engines": {"sim": {"hardware": of.hardware, "max_batched_tokens": fitted_on.max_num_batched_tokens}},
        }
    )
    return Cell(value.name, {}, experiment)


def calibration_of(value: Value) -> Calibration:
    return load_calibration(value.of.hardware)
