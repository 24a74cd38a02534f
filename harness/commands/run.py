"""`harness run` and `harness sweep`: one loop, over the base point or over every point of the file's axes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from harness.commands.errors import DONE, RUN_FAILED, command_line, told
from harness.commands.options import EngineChoice, Out, Overrides, Resume, Size
from harness.engines import ENGINES
from harness.errors import ConfigError, EngineError, Interrupted, ResultsError

if TYPE_CHECKING:
    from harness.experiment.read import Plan
    from harness.measure.run import RunRequest
    from harness.results.summary import Summary

ToMeasure = Annotated[
    Path | None,
    Parameter(help="The experiment: a file, or a name of `harness list experiments`. Not needed with --resume."),
]


@told
def run(
    experiment: ToMeasure = None,
    /,
    *,
    engine: EngineChoice | None = None,
    overrides: Overrides = None,
    size: Size = None,
    out: Out = None,
    resume: Resume = None,
) -> int:
    """Measures an experiment's base point.

    Example: harness run quickstart --engine sim --set seed=2
    """
    plan = _plan(experiment, overrides, size)
    return _measured(_resumed(resume, plan, engine, False) if resume else _fresh(plan, engine, out, False))


@told
def sweep(
    experiment: ToMeasure = None,
    /,
    *,
    engine: EngineChoice | None = None,
    overrides: Overrides = None,
    size: Size = None,
    out: Out = None,
    resume: Resume = None,
) -> int:
    """Measures every point of the file's `sweep` axes, into one folder.

    Example: harness sweep thesis_exp2_hit_rate --engine vllm
    """
    plan = _plan(experiment, overrides, size)
    return _measured(_resumed(resume, plan, engine, True) if resume else _fresh(plan, engine, out, True))


def _plan(experiment: Path | None, overrides: list[str] | None, size: str | None) -> Plan | None:
    from harness.experiment.read import load_experiment

    return None if experiment is None else load_experiment(experiment, overrides or [], size)


def _measured(request: RunRequest) -> int:
    from rich.console import Console

    from harness.measure.run import run as run_cells
    from harness.report.refresh import seal
    from harness.report.run.terminal import ProgressLine, render_summary
    from harness.results.manifest import read_manifest

    folder = request.folder
    try:
        with ProgressLine() as progress:
            run_cells(request, progress)
    except (EngineError, Interrupted):
        if (folder / "manifest.json").exists():
            seal(folder)
            print(f"harness: rows so far are in {folder}; harness run --resume {folder} goes on", file=sys.stderr)
        raise
    summary = seal(folder)
    Console().print(render_summary(summary, read_manifest(folder)))
    print(f"report: {folder / 'report.html'}")
    return DONE if _every_tier_counts(summary) else RUN_FAILED


def _every_tier_counts(summary: Summary) -> bool:
    """A tier without one row that counts was not measured, whatever else went well."""
    return all(tier.rows.counted for cell in summary.cells for tier in cell.tiers.values())


def _fresh(plan: Plan | None, engine: EngineChoice | None, out: Path | None, sweep: bool) -> RunRequest:
    from harness.measure.run import RunRequest, new_folder

    if plan is None:
        raise ConfigError("no experiment given; name one, e.g. quickstart: `harness list experiments` shows all")
    if engine is None:
        raise ConfigError(f"no engine given; add --engine with one of {', '.join(ENGINES)}")
    if out is not None and out.exists():
        raise ConfigError(f"--out {out}: exists already; choose another folder, or go on with --resume {out}")
    if sweep and not plan.axes:
        raise ConfigError(f"{plan.path}: has no sweep axes; add `sweep: {{KEY: [values]}}`, or use harness run")
    return RunRequest(
        name=plan.experiment.name,
        cells=plan.cells() if sweep else [plan.base_cell()],
        engine=engine,
        experiment=plan.origin(),
        command=command_line(),
        folder=out or new_folder(plan.experiment.name, engine),
    )


def _resumed(resume: Path, plan: Plan | None, engine: EngineChoice | None, sweep: bool) -> RunRequest:
    """The cells that the manifest holds; a file that is also given has to say the same."""
    from harness.experiment.read import Cell
    from harness.measure.run import RunRequest
    from harness.results.manifest import read_manifest

    manifest = read_manifest(resume)
    if manifest.status == "complete":
        raise ResultsError(f"{resume}: is complete already; nothing to resume")
    if engine is not None and engine != manifest.engine:
        raise ConfigError(f"--engine {engine}: {resume} was made with {manifest.engine}; leave --engine out")
    cells = [Cell(entry.key, entry.overrides, entry.experiment) for entry in manifest.cells]
    if plan is not None and [c.experiment for c in (plan.cells() if sweep else [plan.base_cell()])] != [
        c.experiment for c in cells
    ]:
        raise ConfigError(f"{plan.path}: differs from what {resume} was started with; resume without naming the file")
    return RunRequest(
        name=manifest.name,
        cells=cells,
        engine=manifest.engine,
        experiment=manifest.experiment,
        folder=resume,
        resume=True,
    )
