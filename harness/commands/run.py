"""`harness run` and `harness sweep`: one loop, over the base point or over every point of the file's axes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from harness.commands.errors import DONE, GOAL_MISSED, RUN_FAILED, command_line, told
from harness.commands.options import EngineChoice, Goals, LivePort, On, Out, Overrides, Resume, Size
from harness.commands.output import IN_WORDS, OutputChoice, console, name_report, print_json
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
    goals: Goals = None,
    live: LivePort = None,
    answer: OutputChoice = IN_WORDS,
) -> int:
    """Measures an experiment's base point.

    Exit codes: 0 done; 1 failed, or a tier has no row that counts; 3 a goal is not met.

    Example: harness run quickstart --engine sim --set seed=2

    Example: harness run quickstart --engine sim --goal 'disk_cold:ttft_p50<400ms'
    """
    plan = _plan(experiment, overrides, size, goals)
    request = _resumed(resume, plan, engine, False) if resume else _fresh(plan, engine, out, False)
    return _measured(request, answer, live)


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
    goals: Goals = None,
    on: On = None,
    live: LivePort = None,
    answer: OutputChoice = IN_WORDS,
) -> int:
    """Measures every point of the file's `sweep` axes, into one folder.

    Example: harness sweep thesis_exp2_hit_rate --engine vllm

    Example: harness sweep cluster_routing --engine sim --on local:4
    """
    import msgspec

    plan = _plan(experiment, overrides, size, goals)
    request = _resumed(resume, plan, engine, True) if resume else _fresh(plan, engine, out, True)
    return _measured(msgspec.structs.replace(request, on=on), answer, live)


def _plan(
    experiment: Path | None, overrides: list[str] | None, size: str | None, goals: list[str] | None
) -> Plan | None:
    """goals: in place of the file's."""
    import json

    from harness.experiment.read import load_experiment

    if experiment is None:
        if goals:
            raise ConfigError("--goal: needs the experiment; a resumed run keeps the goals that it began with")
        return None
    asked = [f"measure.goals={json.dumps(goals)}"] if goals else []
    plan = load_experiment(experiment, [*(overrides or []), *asked], size)
    _check_goals(plan)
    return plan


def _check_goals(plan: Plan) -> None:
    """Raises ConfigError for a goal that nothing of the plan could meet."""
    from harness.experiment.goals import parse_goal

    measure, kind = plan.experiment.measure, plan.experiment.workload.kind
    for goal in map(parse_goal, measure.goals):
        if goal.state is not None and goal.state not in measure.tiers:
            raise ConfigError(f"{plan.path}: goal {goal.text!r}: measure.tiers has no {goal.state}; add it, or drop it")
        if not goal.each_request and measure.tiers:
            raise ConfigError(f"{plan.path}: goal {goal.text!r}: throughput is a free load's, not a {kind}'s; drop it")


def _measured(request: RunRequest, answer: OutputChoice, live: int | None) -> int:
    from harness.measure.run import run as run_cells
    from harness.report.goals import all_goals_met
    from harness.report.refresh import seal
    from harness.report.run.terminal import ProgressLine, render_summary
    from harness.results.manifest import read_manifest
    from harness.results.summary import plain_summary

    folder = request.folder
    try:
        with _shown_live(folder, live), ProgressLine() as progress:
            run_cells(request, progress)
    except (EngineError, Interrupted):
        if (folder / "manifest.json").exists():
            seal(folder)
            again = f"sweep --resume {folder} --on {request.on}" if request.on else f"run --resume {folder}"
            print(f"harness: rows so far are in {folder}; harness {again} goes on", file=sys.stderr)
        raise
    summary = seal(folder)
    if answer.as_json:
        print_json(plain_summary(summary))
    else:
        console().print(render_summary(summary, read_manifest(folder)))
        name_report(folder, browse=answer.browse)
    if not _every_tier_counts(summary):
        return RUN_FAILED
    return DONE if all_goals_met(summary) else GOAL_MISSED


@contextlib.contextmanager
def _shown_live(folder: Path, port: int | None) -> Iterator[None]:
    """While the block lasts, the growing report is served, if a port is given."""
    if port is None:
        yield
        return
    from harness.report.live import LivePage

    with LivePage(folder, port) as page:
        print(f"live: {page.url}", file=sys.stderr)
        yield


def _every_tier_counts(summary: Summary) -> bool:
    """A tier without one row that counts was not measured, whatever else went well."""
    return all(tier.rows.counted for cell in summary.cells for tier in cell.tiers.values())


def checked_plan(plan: Plan | None, engine: EngineChoice | None, out: Path | None) -> tuple[Plan, EngineChoice]:
    """The plan and the engine that a new run needs. Raises ConfigError where one is missing, or the folder exists."""
    if plan is None:
        raise ConfigError("no experiment given; name one, e.g. quickstart: `harness list experiments` shows all")
    if engine is None:
        raise ConfigError(f"no engine given; add --engine with one of {', '.join(ENGINES)}")
    if out is not None and out.exists():
        raise ConfigError(f"--out {out}: exists already; choose another folder, or go on with --resume {out}")
    return plan, engine


def _fresh(plan: Plan | None, engine: EngineChoice | None, out: Path | None, sweep: bool) -> RunRequest:
    from harness.measure.run import RunRequest, new_folder

    plan, engine = checked_plan(plan, engine, out)
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
    from harness.measure.run import kept_request
    from harness.results.manifest import read_manifest

    manifest = read_manifest(resume)
    if manifest.status == "complete":
        raise ResultsError(f"{resume}: is complete already; nothing to resume")
    if engine is not None and engine != manifest.engine:
        raise ConfigError(f"--engine {engine}: {resume} was made with {manifest.engine}; leave --engine out")
    kept = kept_request(resume)
    if plan is not None and [c.experiment for c in (plan.cells() if sweep else [plan.base_cell()])] != [
        c.experiment for c in kept.cells
    ]:
        raise ConfigError(f"{plan.path}: differs from what {resume} was started with; resume without naming the file")
    return kept
