"""The command line's side of `validate` and `compare`: reading, telling, exit codes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.commands.session import command_line, told
from harness.errors import ConfigError
from harness.experiment.model import EngineName
from harness.experiment.read import Cell, Plan, load_experiment
from harness.experiment.units import parse_seconds
from harness.measure.run import new_folder
from harness.validation.document import EXIT_CODES, Judged

if TYPE_CHECKING:
    from harness.validation.validate import Micro


@told
def validate(
    experiment: Path,
    calibration: str | None,
    real: Sequence[Path],
    engine: EngineName | None,
    overrides: list[str],
    sizes: Sequence[str],
    budget: str,
    tolerance: float,
    out: Path | None,
    calibrate: tuple[str, str, int] | None = None,
) -> int:
    """Validates; returns the exit code. calibrate: on which size, how long, and in how many passes."""
    from harness.report.run.terminal import Progress
    from harness.validation.published import is_published
    from harness.validation.validate import Validation
    from harness.validation.validate import validate as run_validation

    if is_published(experiment):
        return _published(experiment, tolerance, out)
    source = calibration if calibrate is None else _micro(experiment, overrides, *calibrate)
    if source is None or (calibration is not None and calibrate is not None):
        raise ConfigError(
            "give either --calibration FILE, as `harness calibrate` wrote it, or --calibrate SIZE, to measure one too"
        )
    chosen: list[str | None] = [*sizes] or [None]
    plans = {size: load_experiment(experiment, overrides, size) for size in chosen}
    first = next(iter(plans.values()))
    name = first.experiment.name
    folder = out or new_folder(f"validate-{name}", engine or "vllm")
    request = Validation(
        name=name,
        cells=planned_cells(plans),
        engine=engine or "vllm",
        calibration=source,
        experiment=first.origin(),
        folder=folder,
        real=tuple(real),
        budget_s=_seconds(budget, "--budget"),
        margin=_margin(tolerance),
        command=command_line(),
    )
    with Progress() as progress:
        judged = run_validation(request, progress)
    return _tell(judged, folder)


def _published(table: Path, tolerance: float, out: Path | None) -> int:
    from harness.report.run.terminal import Progress
    from harness.validation.published import validate_published

    folder = out or new_folder("validate-published", "sim")
    with Progress() as progress:
        judged = validate_published(table, folder, _margin(tolerance), command_line(), progress)
    return _tell(judged, folder)


def planned_cells(plans: Mapping[str | None, Plan]) -> list[Cell]:
    """The cells of all sizes that were asked for. A size's name goes before its cells' keys."""
    return [cell for size, plan in plans.items() for cell in _of_size(size, plan.cells())]


def _of_size(size: str | None, cells: Sequence[Cell]) -> list[Cell]:
    return [Cell(f"{size}:{cell.key}" if size else cell.key, cell.overrides, cell.experiment) for cell in cells]


def _micro(experiment: Path, overrides: list[str], size: str, budget: str, passes: int) -> Micro:
    from harness.calibration.calibrate import planned_micro_cells
    from harness.validation.validate import Micro

    plan = load_experiment(experiment, overrides, size)
    cells = planned_micro_cells(plan, _seconds(budget, "--calibrating"), passes)
    return Micro(size=f"{size}:", cells=_of_size(size, cells), passes=passes, experiment=plan.experiment)


@told
def compare(reference: Path, candidate: Path, tolerance: float, out: Path | None) -> int:
    """Compares two run folders; returns the exit code."""
    from harness.validation.validate import compare_runs

    folder = out or new_folder("compare", "sim").with_name(f"compare-{reference.name}-{candidate.name}")
    judged = compare_runs(reference, candidate, folder, _margin(tolerance), command_line())
    return _tell(judged, folder)


def _margin(tolerance: float) -> float:
    if not 0 < tolerance < 1 or math.isnan(tolerance):
        raise ConfigError(f"--tolerance {tolerance}: not between 0 and 1; write 5 % as 0.05")
    return tolerance


def _seconds(text: str, option: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def _tell(judged: Judged, folder: Path) -> int:
    from rich.console import Console

    from harness.report.validation.html import findings, terminal_table, write_comparison

    content = judged.content
    write_comparison(folder, *judged)
    Console().print(terminal_table(content))
    for line in findings(content):
        print(line)
    print(f"{content['verdict']}; report: {folder / 'report.html'}")
    return EXIT_CODES[content["verdict"]]
