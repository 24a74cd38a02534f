"""`harness validate` and `harness compare`: what is held against what, the verdict, and its exit code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from harness.commands.errors import DONE, command_line, seconds, told
from harness.commands.options import EngineChoice, Out, Overrides, Resume, Tolerance
from harness.commands.output import IN_WORDS, OutputChoice, console, name_report, print_json
from harness.errors import ConfigError, NotComparable

if TYPE_CHECKING:
    from harness.experiment.read import Cell, Plan
    from harness.validation.document import Judgement
    from harness.validation.points import Side
    from harness.validation.validate import Micro


_TOLERANCE = 0.05
_EITHER = "give either --calibration FILE, as `harness calibrate` wrote it, or --calibrate SIZE, to measure one too"
_NOT_RESOLVED = 3
_Equality = Annotated[
    float | None,
    Parameter(
        help=f"The largest relative error that passes. Default: {_TOLERANCE} where the set-ups are alike; given, unlike"
        " set-ups are judged by it too, or refused."
    ),
]
_Budget = Annotated[str, Parameter(help="The time for all: what is left goes to points that do not resolve.")]
_Calibrate = Annotated[str | None, Parameter(help="Or this size of the file is calibrated on, in turns with the rest.")]
_Sizes = Annotated[list[str] | None, Parameter(name="--size", help="Sizes of the file to measure. Repeatable.")]
_Real = Annotated[list[Path] | None, Parameter(help="Finished runs to use for the real side. Repeatable.")]


@told
def validate(
    experiment: Annotated[Path, Parameter(help="The experiment (file or name), or a table of published figures.")],
    /,
    *,
    calibration: Annotated[str | None, Parameter(help="A file, or a name of `harness list presets`.")] = None,
    calibrate: _Calibrate = None,
    real: _Real = None,
    engine: EngineChoice | None = "vllm",
    overrides: Overrides = None,
    sizes: _Sizes = None,
    budget: _Budget = "0s",
    calibrating: Annotated[str, Parameter(help="With --calibrate: how long its own points may take.")] = "15min",
    passes: Annotated[int, Parameter(help="With --calibrate: how often it is each point's turn.")] = 6,
    tolerance: Tolerance = _TOLERANCE,
    out: Out = None,
    resume: Resume = None,
    answer: OutputChoice = IN_WORDS,
) -> int:
    """Holds the calibrated simulator against a real engine: pass, fail, and why.

    Exit codes: 0 pass, 1 fail, 3 not resolvable.

    Machines drift: --calibrate measures the calibration's points in the same minutes, on the same running engine.
    --resume FOLDER, with the rest as it was, measures what FOLDER lacks, and judges all that was asked for.

    Example: harness validate configs/validation/cpu_vllm.yaml --calibration mine.yaml --size lengths --size hits

    Example: harness validate configs/validation/cpu_vllm.yaml --calibrate calibration --size lengths --size hits
    """
    from harness.experiment.read import load_experiment, shipped
    from harness.measure.run import new_folder
    from harness.report.run.terminal import ProgressLine
    from harness.validation import validate as validation
    from harness.validation.published import is_published

    if is_published(shipped(experiment)):
        return _published(shipped(experiment), tolerance, out, answer)
    source = calibration if calibrate is None else _micro(experiment, overrides or [], calibrate, calibrating, passes)
    if source is None or (calibration is not None and calibrate is not None):
        raise ConfigError(_EITHER)
    chosen: list[str | None] = [*(sizes or [])] or [None]
    plans = {size: load_experiment(experiment, overrides or [], size) for size in chosen}
    first = next(iter(plans.values()))
    folder = _begun(resume) or out or new_folder(f"validate-{first.experiment.name}", engine or "vllm")
    request = validation.Validation(
        name=first.experiment.name,
        cells=_as_run(plans, real or ()),
        engine=engine or "vllm",
        calibration=source,
        experiment=first.origin(),
        folder=folder,
        real=tuple(real or []),
        resume=resume is not None,
        budget_s=seconds("--budget", budget),
        margin=_margin(tolerance),
        command=command_line(),
    )
    with ProgressLine() as progress:
        judgement = validation.validate(request, progress)
    return _tell(judgement, folder, answer)


def _begun(folder: Path | None) -> Path | None:
    if folder is not None and not (folder / "real" / "manifest.json").exists():
        raise ConfigError(f"--resume {folder}: holds no real run; begin with --out {folder}")
    return folder


@told
def compare(
    reference: Annotated[Path, Parameter(help="The run that is the measure.")],
    candidate: Annotated[Path, Parameter(help="The run that is judged.")],
    /,
    *,
    tolerance: _Equality = None,
    out: Out = None,
    answer: OutputChoice = IN_WORDS,
) -> int:
    """Holds two runs against each other: equal before and after, or by how much two set-ups differ.

    Of one set-up, the question is whether both are equal within --tolerance: exit code 0 pass, 1 fail, 3 not
    resolvable. Of two set-ups under one load (chunk sizes, tiers, engines), it is by what factor the second is faster,
    with an interval and a list of what differs: exit code 0, or 3 where no point has samples enough.

    Example: harness compare results/before results/after --tolerance 0.05

    Example: harness compare results/chunk128 results/chunk256
    """
    from harness.measure.run import new_folder
    from harness.validation.contrast import are_unlike
    from harness.validation.points import read_side
    from harness.validation.validate import compare_runs

    folder = out or new_folder("compare", "sim").with_name(f"compare-{reference.name}-{candidate.name}")
    sides = read_side([reference]), read_side([candidate])
    unlike = are_unlike(*sides)
    if tolerance is None and unlike:
        return _contrast(*sides, folder, answer)
    margin = _margin(_TOLERANCE if tolerance is None else tolerance)
    try:
        judgement = compare_runs(*sides, folder, margin, command_line())
    except NotComparable as error:
        hint = "; leave --tolerance out to be told by how much they differ" if unlike else ""
        raise NotComparable(f"{error}{hint}") from None
    return _tell(judgement, folder, answer)


def _contrast(ours: Side, theirs: Side, folder: Path, answer: OutputChoice) -> int:
    from harness.report.validation.contrast import contrast_findings, contrast_table, write_contrast_page
    from harness.results.folder import make_folder
    from harness.validation.contrast import contrast, write_contrast

    found = contrast(ours, theirs, command_line())
    make_folder(folder)
    write_contrast(folder, found)
    write_contrast_page(folder / "report.html", found)
    if answer.as_json:
        print_json(found)
    else:
        console().print(contrast_table(found))
        for line in contrast_findings(found):
            print(line)
        name_report(folder, browse=answer.browse)
    return DONE if found.resolved else _NOT_RESOLVED


def planned_cells(plans: Mapping[str | None, Plan]) -> list[Cell]:
    """The cells of all sizes that were asked for. A size's name goes before its cells' keys."""
    return [cell for size, plan in plans.items() for cell in _of_size(size, plan.cells())]


def _as_run(plans: Mapping[str | None, Plan], real: Sequence[Path]) -> list[Cell]:
    """Cells by the keys that the finished runs have: `harness sweep --size` puts no size before them."""
    from harness.results.manifest import read_manifest
    from harness.validation.points import point_name

    known = {point_name(cell.key) for folder in real for cell in read_manifest(folder).cells}
    cells = planned_cells(plans)
    if known and len(plans) == 1 and not any(cell.key in known for cell in cells):
        [plan] = plans.values()
        return plan.cells()
    return cells


def _of_size(size: str | None, cells: Sequence[Cell]) -> list[Cell]:
    from harness.experiment.read import Cell

    return [Cell(f"{size}:{cell.key}" if size else cell.key, cell.overrides, cell.experiment) for cell in cells]


def _micro(experiment: Path, overrides: list[str], size: str, budget: str, passes: int) -> Micro:
    from harness.calibration.calibrate import planned_micro_cells
    from harness.experiment.read import load_experiment
    from harness.validation.validate import Micro

    plan = load_experiment(experiment, overrides, size)
    cells = planned_micro_cells(plan, seconds("--calibrating", budget), passes, "--calibrating")
    return Micro(size=f"{size}:", cells=_of_size(size, cells), passes=passes, experiment=plan.experiment)


def _published(table: Path, tolerance: float, out: Path | None, answer: OutputChoice) -> int:
    from harness.measure.run import new_folder
    from harness.report.run.terminal import ProgressLine
    from harness.validation.published import validate_published

    folder = out or new_folder("validate-published", "sim")
    with ProgressLine() as progress:
        judgement = validate_published(table, folder, _margin(tolerance), command_line(), progress)
    return _tell(judgement, folder, answer)


def _margin(tolerance: float) -> float:
    if not 0 < tolerance < 1 or math.isnan(tolerance):
        raise ConfigError(f"--tolerance {tolerance}: not between 0 and 1; write 5 % as 0.05")
    return tolerance


def _tell(judgement: Judgement, folder: Path, answer: OutputChoice) -> int:
    from harness.report.validation.html import comparison_findings, terminal_tables, write_comparison
    from harness.validation.document import EXIT_CODES

    document = judgement.document
    write_comparison(folder, *judgement)
    if answer.as_json:
        print_json(document)
    else:
        for table in terminal_tables(document):
            console().print(table)
        for line in comparison_findings(document):
            print(line)
        name_report(folder, f"{document.verdict}; ", answer.browse)
    return EXIT_CODES[document.verdict]
