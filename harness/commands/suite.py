"""`harness suite`: every test of a suite that this machine can run, in one folder, and one comparison at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from harness.commands.errors import DONE, RUN_FAILED, command_line, told
from harness.commands.options import Out, Overrides, Size
from harness.commands.output import IN_WORDS, OutputChoice, console, name_report, print_json, tell_kept
from harness.errors import ConfigError, EngineError, Interrupted
from traces.errors import UserError

if TYPE_CHECKING:
    from harness.experiment.read import Cell, Plan
    from harness.measure.run import RunRequest

# Suite: its experiment, and the axis whose names are its tests.
SUITES = {"mlperf": ("mlperf_suite", "test")}
_Only = Annotated[
    str | None, Parameter(name=["--only", "-w"], help="Some of its tests, e.g. cpu,storage. Default: all.")
]


@told
def suite(
    name: Annotated[Literal["mlperf"], Parameter(help="The suite.")],
    /,
    *,
    only: _Only = None,
    overrides: Overrides = None,
    size: Size = None,
    out: Out = None,
    answer: OutputChoice = IN_WORDS,
) -> int:
    """Runs the tests of a suite that this machine can run, and compares them.

    A test that lacks something here is skipped, with the reason. The folder holds an ordinary run.

    Example: harness suite mlperf

    Example: harness suite mlperf --only cpu,storage,cpu_storage --set cache.disk.path=/mnt/nvme
    """
    from harness.experiment.read import load_experiment
    from harness.measure.run import RunRequest, new_folder

    experiment, axis = SUITES[name]
    plan = _chosen(load_experiment(Path(experiment), overrides or [], size), axis, only, overrides or [], size)
    if out is not None and out.exists():
        raise ConfigError(f"--out {out}: exists already; choose another folder")
    request = RunRequest(
        name=plan.experiment.name,
        cells=plan.cells(),
        engine="sim",
        experiment=plan.origin(),
        command=command_line(),
        folder=out or new_folder(plan.experiment.name, "sim"),
    )
    skipped = _skipped(request)
    left = [cell for cell in request.cells if cell.key not in skipped]
    if not left:
        raise ConfigError(f"suite {name}: no test of it can run here: {next(iter(skipped.values()))}")
    return _measured(request, left, skipped, axis, answer)


def _chosen(plan: Plan, axis: str, only: str | None, overrides: list[str], size: str | None) -> Plan:
    """The suite with these tests alone: what is set for all of them need not go with the others."""
    from harness.experiment.read import load_experiment

    if only is None:
        return plan
    names = [name.strip() for name in only.split(",")]
    if odd := [name for name in names if name not in plan.axes[axis]]:
        known = ", ".join(map(str, plan.axes[axis]))
        raise ConfigError(f"--only {odd[0]}: is no test of the suite; use some of {known}")
    kept = [name for name in plan.axes[axis] if name in names]
    return load_experiment(plan.path, [*overrides, f"sweep.{axis}=[{', '.join(map(str, kept))}]"], size)


def _skipped(request: RunRequest) -> dict[str, str]:
    """By cell, why this machine cannot run it."""
    import msgspec

    from harness.measure.run import preflight

    found = {}
    for cell in request.cells:
        try:
            preflight(msgspec.structs.replace(request, cells=[cell]))
        except UserError as error:
            found[cell.key] = str(error)
    return found


def _measured(request: RunRequest, cells: list[Cell], skipped: dict[str, str], axis: str, answer: OutputChoice) -> int:
    import msgspec

    from harness.measure.run import run
    from harness.report.refresh import seal
    from harness.report.run.terminal import ProgressLine
    from harness.report.suite import suite_rows, suite_words

    folder = request.folder
    try:
        with ProgressLine() as progress:
            run(msgspec.structs.replace(request, cells=cells), progress)
    except (EngineError, Interrupted):
        tell_kept(folder, "sweep")
        raise
    summary = seal(folder)
    rows = suite_rows(summary, axis)
    reasons = {str(cell.overrides[axis]): skipped[cell.key] for cell in request.cells if cell.key in skipped}
    if answer.as_json:
        print_json({"tests": rows, "skipped": reasons})
        return DONE if len(rows) == len(cells) else RUN_FAILED
    _show(rows)
    for line in suite_words(rows, reasons):
        console().print(line, markup=False, highlight=False)
    name_report(folder, browse=answer.browse)
    return DONE if len(rows) == len(cells) else RUN_FAILED


def _show(rows: list[dict[str, object]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from harness.report.suite import COLUMNS, in_words

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(COLUMNS.values()):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows:
        table.add_row(*in_words(row))
    console().print(table)
