"""`harness validate` of a table of published figures: the simulator predicts each row with its machine's preset.

    validate_published(Path("configs/validation/published.yaml"), folder, 0.05, "", progress).document.verdict

The document separates rows that the preset was fitted on from predicted ones. A published value is one number without
its spread, so a row's interval is only the rounding of the printed value, or the range that its document gives.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from harness.errors import ConfigError, NotComparable
from harness.experiment.model import Experiment
from harness.experiment.read import Cell, load_experiment, shipped
from harness.measure.cell import Progress
from harness.measure.run import RunRequest, run
from harness.records import Origin
from harness.results import provenance
from harness.results.folder import read_rows
from harness.results.summary import counted
from harness.stats import equivalence
from harness.validation.curves import (
    Curves,
    Value,
    batch_tokens_per_s,
    calibration_of,
    curve_cell,
    curve_values,
    reasons,
)
from harness.validation.document import Judgement, SideFacts, document_of, write_document
from harness.validation.equivalence import Figure, PointResult, verdict_of
from simulator.calibration import Calibration, load_calibration
from traces.request import RequestRecord
from traces.tiers import all_states

# A document that names storage means the device, not the page cache, below an engine that has run for a while.
_STATES = {
    state.served_by or state.name: state.name
    for state in all_states()
    if state.from_device is not False and not state.restarted
}
# The document ran these without a cache server, so that nothing was stored behind the GPU.
_GPU_ALONE = ("recompute", "gpu")
_SAME = 1e-5  # a point of a calibration has six digits
_NEAR = 0.02  # 8K may be printed for 8,000 or 8,192 tokens


class Setup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hardware: str
    model: str
    cache: dict[str, Any]


class Range(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The range that a document gives for the row of that setup, scheme and x."""

    setup: str
    scheme: str
    x: str
    low: float
    high: float


class Rounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A multi-turn study, which is an experiment. setup: what the table calls it. schemes: the table's names of the
    experiment's set-ups, by which of the sweep's `caches` they are. times: why its times are not judged."""

    setup: str
    experiment: str
    size: str | None
    times: str
    seeds: tuple[int, ...]
    schemes: dict[str, str]


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file: which preset stands for which setup, and what each experiment kept fixed."""

    name: str
    description: str
    table: str
    origin: str
    setups: dict[str, Setup]
    experiments: dict[str, dict[str, float]]
    ranges: tuple[Range, ...]
    rounds: Rounds
    curves: Curves
    why: tuple[str, ...] = ()


def is_published(path: Path) -> bool:
    """Whether the file is a table of published figures; else it is an experiment."""
    try:
        raw = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False
    return isinstance(raw, dict) and "table" in raw and "workload" not in raw


def validate_published(path: Path, folder: Path, margin: float, command: str, progress: Progress) -> Judgement:
    """Predicts every row, writes validation.json.

    Raises NotComparable where the file or its table cannot be used.
    """
    published = _read(path)
    table, drawn = (_table(path, name) for name in (published.table, published.curves.table))
    values = curve_values(published.curves, drawn)
    cells = {number: _cell(number, row, published) for number, row in enumerate(table) if _has_preset(row, published)}

    def measured(name: str, asked: list[Cell]) -> list[RequestRecord]:
        origin = Origin(path=path.name)
        made = RunRequest(
            name=published.name, cells=asked, engine="sim", experiment=origin, command=command, folder=folder / name
        )
        return list(read_rows(run(made, progress)))

    means = _means(measured("sim", list(cells.values())))
    lone = [value for value in values if value.of.requests == 1]
    along = _means(measured("curves", [curve_cell(value, published.name) for value in lone]))
    along |= {value.name: batch_tokens_per_s(value) for value in values if value.of.requests > 1}
    rates = hit_rates(measured("rounds", round_cells(published.rounds)), published.rounds)
    points = [
        *_time_points(table, cells, means, published, margin),
        *_round_points(table, rates, published, margin),
        *_curve_points(values, along, margin),
    ]
    written = document_of(
        points,
        margin,
        name=published.name,
        command=command,
        notes=tuple(
            [*_notes(table, points, margin, published.rounds.times), *_left(published.curves, drawn), *published.why]
        ),
        reference=_origin(published),
        candidate=_simulator(),
    )
    write_document(folder, written)
    return Judgement(written)


def _read(path: Path) -> Published:
    try:
        return msgspec.convert(yaml.safe_load(path.read_text()), Published)
    except (OSError, msgspec.ValidationError, yaml.YAMLError) as error:
        raise NotComparable(f"{path}: {' '.join(str(error).split())}; correct the file") from None


def _table(path: Path, name: str) -> list[dict[str, str]]:
    try:
        with (path.parent / name).open(newline="") as lines:
            return list(csv.DictReader(lines))
    except OSError as error:
        raise NotComparable(f"{path}: its table {name} cannot be read ({error.strerror}); correct the file") from None


def _has_preset(row: dict[str, str], published: Published) -> bool:
    return row["setup"] in published.setups and row["experiment"] in published.experiments


# ---- times to first token


def _cell(number: int, row: dict[str, str], published: Published) -> Cell:
    """The row as an experiment for the simulator: whole chunks and one token, nearest to the printed length."""
    setup, (prompt_tokens, hit_rate, state) = published.setups[row["setup"]], _place(row, published)
    cache = {name: of for name, of in setup.cache.items() if state not in _GPU_ALONE or name not in ("cpu", "disk")}
    chunk_tokens = setup.cache["chunk_tokens"]
    chunks = round(prompt_tokens / chunk_tokens)
    experiment = Experiment.model_validate(
        {
            "name": published.name,
            "model": setup.model,
            "workload": {
                "kind": "prefix",
                "prompt_tokens": chunks * chunk_tokens + 1,
                "hit_rate": round(hit_rate * chunks) / chunks,
            },
            "measure": {"tiers": [state], "samples": 1},
            "cache": cache,
            "engines": {"sim": {"hardware": setup.hardware, "max_batched_tokens": _step_tokens(setup)}},
        }
    )
    return Cell(f"row {number + 2}", {}, experiment)


def _step_tokens(setup: Setup) -> int:
    """The step that the preset's constants were fitted for."""
    return load_calibration(setup.hardware).fitted_on.max_num_batched_tokens


def _place(row: dict[str, str], published: Published) -> tuple[float, float, str]:
    """Prompt tokens, hit rate and warm state of a row, from its document."""
    fixed = dict(published.experiments[row["experiment"]])
    if row["x_name"] in ("prompt_tokens", "hit_rate"):
        fixed[row["x_name"]] = float(row["x"])
    hit_rate = fixed["hit_rate"] if row["scheme"] != "recompute" else 0.0
    state = _STATES[row["scheme"]]
    return fixed["prompt_tokens"], hit_rate, "recompute" if state == "gpu" and not hit_rate else state


def _means(rows: Sequence[RequestRecord]) -> dict[str, float]:
    times: dict[str, list[float]] = {}
    for row in rows:
        if row.phase == "measure" and counted(row) and row.ttft_s is not None:
            times.setdefault(row.cell, []).append(row.ttft_s)
    return {cell: sum(values) / len(values) for cell, values in times.items()}


def _time_points(
    table: Sequence[dict[str, str]],
    cells: dict[int, Cell],
    means: dict[str, float],
    published: Published,
    margin: float,
) -> list[PointResult]:
    found = []
    for number, cell in cells.items():
        row = table[number]
        calibration = load_calibration(published.setups[row["setup"]].hardware)
        prompt_tokens, hit_rate, state = _place(row, published)
        axes = {
            "tier": state,
            "source": f"{row['experiment'].split()[0]} {row['x']} {calibration.name}",
            "prompt_tokens": round(prompt_tokens),
            "hit_rate": hit_rate,
            "constants": _role(state, prompt_tokens, hit_rate, float(row["value"]), calibration),
        }
        figure = _figure("ttft_mean_s", row, means[cell.key], published, margin)
        found.append(_point(cell.key, axes, [figure]))
    return found


def _role(
    state: str, prompt_tokens: float, hit_rate: float, taken_s: float, calibration: Calibration, requests: int = 1
) -> str:
    """'fitted': the preset was fitted on this row; 'printed twice': on another value of the same place."""
    for point in calibration.fitted_on.points:
        same_load = point.concurrency == requests and abs(point.prompt_tokens / prompt_tokens - 1) < _NEAR
        hit = 0.0 if point.tier == "recompute" else point.hit_tokens / point.prompt_tokens
        same_tier = point.tier == state or (requests > 1 and not hit)
        if same_load and same_tier and abs(hit - (0.0 if state == "recompute" else hit_rate)) < _NEAR:
            return "fitted" if abs(point.measured_s / taken_s - 1) < _SAME else "printed twice"
    return "predicted"


def _figure(metric: str, row: dict[str, str], predicted: float, published: Published, margin: float) -> Figure:
    value = float(row["value"])
    half = 0.5 * 10.0 ** -len(row["value"].partition(".")[2])
    stated = (r for r in published.ranges if (r.setup, r.scheme, r.x) == (row["setup"], row["scheme"], row["x"]))
    known = next(stated, None)
    bottom, top = (known.low, known.high) if known else (value - half, value + half)
    return _held(metric, value, (bottom, top), predicted, margin)


def _held(metric: str, value: float, between: tuple[float, float], predicted: float, margin: float) -> Figure:
    low, high = predicted / between[1] - 1, predicted / between[0] - 1
    return Figure(
        metric=metric,
        reference=value,
        candidate=predicted,
        error=predicted / value - 1,
        low=low,
        high=high,
        verdict=equivalence(low, high, margin),
        samples=1,
    )


def _point(cell: str, axes: dict[str, Any], figures: Sequence[Figure]) -> PointResult:
    return PointResult(
        cell=cell,
        tier=axes["tier"],
        axes=axes,
        figures=tuple(figures),
        counts=(),
        noise=(),
        wasserstein_s=None,
        left_out=0,
        verdict=verdict_of(figures),
    )


def _curve_points(values: Sequence[Value], means: dict[str, float], margin: float) -> list[PointResult]:
    found = []
    for value in values:
        calibration = calibration_of(value)
        axes = {
            "tier": value.of.state,
            "source": f"curve {value.of.label} {calibration.name}",
            "prompt_tokens": value.prompt_tokens,
            "hit_rate": value.hit_rate,
            "constants": _role(
                value.of.state,
                value.prompt_tokens,
                value.hit_rate,
                value.taken_s,
                calibration,
                value.of.requests,
            ),
        }
        figure = _held(value.metric, value.value, (value.low, value.high), means[value.name], margin)
        found.append(_point(value.name, axes, [figure]))
    return found


# ---- hit rates by round


def round_cells(rounds: Rounds) -> list[Cell]:
    """A cell for each scheme and seed. Raises ConfigError where the experiment has no such set-up."""
    plan = load_experiment(shipped(Path(rounds.experiment)), (), rounds.size)
    setups = {str(cell.overrides.get("caches")): cell.experiment for cell in plan.cells()}
    if unknown := sorted(set(rounds.schemes.values()) - setups.keys()):
        raise ConfigError(f"rounds.schemes: {rounds.experiment} has no {', '.join(unknown)}; name one of its caches")
    return [
        Cell(_round_cell(scheme, seed), {}, setups[name].model_copy(update={"seed": seed}))
        for scheme, name in rounds.schemes.items()
        for seed in rounds.seeds
    ]


def _round_cell(scheme: str, seed: int) -> str:
    return f"rounds {scheme} seed {seed}"


def hit_rates(rows: Iterable[RequestRecord], rounds: Rounds) -> dict[str, list[list[float]]]:
    """By scheme and seed: the share of each round's prompt tokens that any tier served."""
    names = {_round_cell(scheme, seed) for scheme in rounds.schemes for seed in rounds.seeds}
    tokens: dict[str, dict[int, tuple[int, int]]] = {name: {} for name in names}
    for row in rows:
        if row.cell not in names:
            continue
        if row.error is not None or row.cached_tokens is None:
            raise NotComparable(f"{row.cell}: request {row.id} of {row.prompt_tokens} tokens: {row.error}")
        cached, asked = tokens[row.cell].get(row.turn, (0, 0))
        tokens[row.cell][row.turn] = (cached + row.cached_tokens, asked + row.prompt_tokens)

    def by_round(scheme: str, seed: int) -> list[float]:
        return [
            1 - (asked - cached) / asked for _, (cached, asked) in sorted(tokens[_round_cell(scheme, seed)].items())
        ]

    return {scheme: [by_round(scheme, seed) for seed in rounds.seeds] for scheme in rounds.schemes}


def _round_points(
    table: Sequence[dict[str, str]], known: dict[str, list[list[float]]], published: Published, margin: float
) -> list[PointResult]:
    """The document counts rounds from 0. It plots nine, because the tenth exceeds the model's length."""
    rounds = published.rounds
    found = []
    for number, row in enumerate(table):
        if row["setup"] != rounds.setup or row["metric"] != "hit_rate":
            continue
        by_seed = [rates[int(row["x"])] for rates in known[row["scheme"]]]
        axes = {
            "tier": "load",
            "source": f"{row['scheme']} round {row['x']}",
            "prompt_tokens": None,
            "hit_rate": None,
            "constants": "none needed",
        }
        figure = _figure("hit_rate", row, sum(by_seed) / len(by_seed), published, margin)
        spread = f"{min(by_seed):.2f} to {max(by_seed):.2f} over {len(by_seed)} random orders"
        found.append(_point(f"row {number + 2}", axes, [msgspec.structs.replace(figure, reason=spread)]))
    return found


# ---- the document


def _origin(published: Published) -> SideFacts:
    return SideFacts(
        engine="published",
        runs=(published.table, published.curves.table),
        created_at=None,
        host={},
        git=None,
        versions={},
        gpu_blocks=None,
        block_tokens=None,
        origin=published.origin,
    )


def _simulator() -> SideFacts:
    return SideFacts(
        engine="sim",
        runs=("sim", "rounds", "curves"),
        created_at=provenance.now(),
        host={},
        git=provenance.git(),
        versions={},
        gpu_blocks=None,
        block_tokens=None,
    )


def _notes(table: Sequence[dict[str, str]], points: Sequence[PointResult], margin: float, times: str) -> list[str]:
    """By role of the constants: the number of rows and their MAPE; then the rows that no preset predicts."""
    said = []
    for role in ("fitted", "printed twice", "predicted", "none needed"):
        own = [point for point in points if point.axes["constants"] == role]
        errors = [abs(f.error) for point in own for f in point.figures if f.error is not None]
        if errors:
            passed = sum(point.verdict == "pass" for point in own)
            within = sum(error <= margin for error in errors)
            said.append(
                f"{role}: {len(own)} rows, {within} within ± {margin:.0%}, of which {passed} pass with all of"
                f" their interval, MAPE {sum(errors) / len(errors):.1%}"
            )
    asked = {point.cell for point in points}
    left = [f"{row['scheme']} {row['metric']} {row['x_name']} {row['x']}" for n, row in enumerate(table)
            if f"row {n + 2}" not in asked]  # fmt: skip
    return [*said, f"not predicted, as {times}: {', '.join(left)}" if left else "every row is predicted"]


def _left(curves: Curves, table: Sequence[dict[str, str]]) -> list[str]:
    return [f"{curves.table}, {number} rows not judged: {why}" for why, number in reasons(curves, table).items()]
