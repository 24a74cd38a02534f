"""Published curves: presets fitted on a few named points predict the others. A curve is of times to first token over
prompt length, or of the throughput of many requests sent at once over the share of their prompts that hits.

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
from simulator.calibration import Calibration, CalibrationPoint, load_calibration
from simulator.models import load_model
from simulator.probing import simulated_s

# The units of a time to first token, and of the throughput of requests sent at once.
_SECONDS = {"ms": 1e-3, "s": 1.0}
_TOKENS_PER_S = {"tokens/s": 1.0}


class Judged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows of one machine and warm state. rows: what these columns of the table hold.

    cache: as in an experiment. reading_error: of a value, in the row's unit, where a figure was read off; 0: half of
    the last printed digit. requests: how many were sent at once; the rows of more than one are throughputs.
    """

    rows: dict[str, str]
    state: str
    hardware: str
    model: str
    cache: dict[str, Any]
    reading_error: float = 0.0
    requests: int = 1

    @property
    def label(self) -> str:
        at_once = f"{self.requests:,} requests at once" if self.requests > 1 else self.state
        return self.rows.get("storage", at_once)


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
    """A published time in seconds, or throughput in tokens/s. low, high: where it may lie, by how it was read or
    printed."""

    number: int
    of: Judged
    prompt_tokens: int
    hit_tokens: int
    value: float
    low: float
    high: float

    @property
    def name(self) -> str:
        return f"curve row {self.number + 2}"

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens

    @property
    def metric(self) -> str:
        return "ttft_mean_s" if self.of.requests == 1 else "prompt_tokens_per_s"

    @property
    def taken_s(self) -> float:
        """The time that a calibration's point has: up to the first token, or for all requests."""
        return self.value if self.of.requests == 1 else self.of.requests * self.prompt_tokens / self.value


def curve_values(curves: Curves, table: Sequence[dict[str, str]]) -> list[Value]:
    """The rows that a preset stands for. Raises NotComparable where a row fits no entry of the file."""
    found = []
    for number, row in enumerate(table):
        of = _entry(curves, number, row)
        if isinstance(of, NotJudged):
            continue
        units = _SECONDS if of.requests == 1 else _TOKENS_PER_S
        try:
            unit, printed = units[row["unit"]], float(row["value"])
            prompt_tokens, hit_tokens = int(row["prompt_tokens"]), int(row["hit_tokens"])
        except (KeyError, ValueError):
            raise NotComparable(
                f"{curves.table}: row {number + 2} has no value in {' or '.join(units)} at a prompt length; put it"
                " under curves.not_judged"
            ) from None
        half = of.reading_error or 0.5 * 10.0 ** -len(row["value"].partition(".")[2])
        low, high = ((printed + off) * unit for off in (-half, half))
        found.append(Value(number, of, prompt_tokens, hit_tokens, printed * unit, low, high))
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


def batch_tokens_per_s(value: Value) -> float:
    """What the simulator says of requests that are sent at once, each with as many whole chunks in the tier as are
    nearest to the printed hit. The preset's own limits of a step hold."""
    of, known, model = value.of, calibration_of(value), load_model(value.of.model)
    cache = curve_cell(value, "batch").experiment.cache
    settings = msgspec.structs.replace(
        known.fitted_on,
        block_tokens=cache.block_tokens,
        gpu_blocks=cache.gpu // (cache.block_tokens * model.kv_bytes_per_token),
    )
    point = CalibrationPoint(
        tier=of.state,
        prompt_tokens=value.prompt_tokens,
        hit_tokens=round(value.hit_tokens / cache.chunk_tokens) * cache.chunk_tokens,
        chunk_tokens=cache.chunk_tokens,
        concurrency=of.requests,
        metric="batch_s",
        measured_s=value.taken_s,
    )
    taken_s = simulated_s(point, msgspec.structs.replace(known, fitted_on=settings), model)
    return of.requests * value.prompt_tokens / taken_s


def calibration_of(value: Value) -> Calibration:
    return load_calibration(value.of.hardware)
