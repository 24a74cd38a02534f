"""`harness capacity`: the most users that keep the targets, or those with the highest throughput."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from harness.commands.errors import DONE, RUN_FAILED, command_line, told
from harness.commands.options import EngineChoice, Goals, Overrides, Size
from harness.commands.output import IN_WORDS, OutputChoice, console, name_report, print_json
from harness.errors import ConfigError, EngineError, Interrupted, ResultsError

if TYPE_CHECKING:
    from harness.experiment.read import Cell, Plan
    from harness.measure.capacity import CapacitySearch
    from harness.measure.run import RunRequest
    from harness.results.capacity import Capacity, Step

_What = Annotated[Path, Parameter(help="The experiment: a file, or a name of `harness list experiments`.")]
_Key = Annotated[str, Parameter(help="The whole number of the workload that is searched for.")]
_Out = Annotated[Path | None, Parameter(help="The run's folder; an unfinished search's goes on. Default: results/ID.")]
_Mode = Annotated[
    Literal["slo", "peak"], Parameter(help="slo: the most within every goal; peak: the highest throughput.")
]
_Tolerance = Annotated[float, Parameter(help="The search ends when the answer is known to this share of it.")]
_Repeats = Annotated[
    int, Parameter(help="How often a load at the edge is measured at most, where a load does not repeat exactly.")
]
_Against = Annotated[
    Path | None, Parameter(help="Another search's folder: whether the two agree within 5 %, and if not, why.")
]


@told
def capacity(
    experiment: _What,
    /,
    *,
    engine: EngineChoice,
    mode: _Mode = "slo",
    goals: Goals = None,
    key: _Key = "workload.users",
    most: Annotated[int, Parameter(help="No load above this one is tried.")] = 4096,
    tolerance: _Tolerance = 0.05,
    repeats: _Repeats = 5,
    against: _Against = None,
    overrides: Overrides = None,
    size: Size = None,
    out: _Out = None,
    answer: OutputChoice = IN_WORDS,
) -> int:
    """Finds the most users that keep the targets, or those with the highest throughput.

    Each load is a cell of one run, measured from fresh caches. The loads beside the answer are measured again until the
    interval of their figures leaves the target out. The folder has an ordinary run's files, and capacity.json.

    Example: harness capacity mlperf_suite --engine sim --goal 'e2e_p95<5s' --set workload.duration=20s
    """
    from harness.measure.capacity import CapacitySearch
    from harness.measure.group import trials_measured
    from harness.measure.search import highest, most_within

    asked = [*(overrides or []), *([f"measure.goals={json.dumps(goals)}"] if goals else [])]
    plan, start = _plan(experiment, asked, size, key)
    targets = plan.experiment.measure.goals
    if mode == "slo" and not targets:
        raise ConfigError("--mode slo: needs a target; add --goal, e.g. 'ttft_p95<500ms', or use --mode peak")
    if not 1 <= start <= most or not 0 < tolerance < 1 or repeats < 2:
        given = f"--most {most}, --tolerance {tolerance}, --repeats {repeats}"
        raise ConfigError(f"{given}: {key} is {start}; give a --most above it, a share above 0, and 2 repeats or more")
    other = None if against is None else _other(against)

    def cell_of(load: int) -> Cell:
        return _cell(experiment, [*asked, f"measure.trials={repeats}"], size, key, load)

    first = cell_of(start)
    times = repeats if trials_measured(first.experiment, engine) > 1 else 1
    driver = CapacitySearch(
        (most_within if mode == "slo" else highest)(start, most, tolerance, times), cell_of,
        mode=mode, key=key, engine=engine, goals=targets, tolerance=tolerance,
    )  # fmt: skip
    request = _request(plan, first, engine, out)
    _carry_out(request, driver)
    return _answered(driver.found, other, request.folder, answer)


def _plan(experiment: Path, asked: list[str], size: str | None, key: str) -> tuple[Plan, int]:
    """The experiment, and the first load: the file's own value. Raises ConfigError where that is no whole number."""
    from harness.experiment.read import load_experiment
    from harness.experiment.workloads import PrefixWorkload

    plan = load_experiment(experiment, asked, size)
    if isinstance(plan.experiment.workload, PrefixWorkload):
        raise ConfigError(f"{plan.path}: workload.kind prefix sends no load; use e.g. sessions, qa or personas")
    section, _, name = key.partition(".")
    value = getattr(plan.experiment.workload, name, None) if section == "workload" else None
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"--key {key}: is no whole number of this workload; name one, e.g. workload.users")
    return plan, value


def _cell(experiment: Path, asked: list[str], size: str | None, key: str, load: int) -> Cell:
    from harness.experiment.read import Cell, load_experiment

    changed = load_experiment(experiment, [*asked, f"{key}={load}"], size)
    return Cell(f"{key}={load}", {key: load}, changed.experiment)


def _request(plan: Plan, first: Cell, engine: EngineChoice, out: Path | None) -> RunRequest:
    """A new run, or an unfinished search's. Raises ConfigError where the folder is of something else."""
    from harness.measure.run import RunRequest, new_folder
    from harness.results.manifest import read_manifest

    folder = out or new_folder(f"capacity-{plan.experiment.name}", engine)
    resume = (folder / "manifest.json").exists()
    if resume:
        kept = read_manifest(folder)
        before = kept.cells[0].experiment.model_copy(update={"measure": first.experiment.measure})
        if kept.engine != engine or before != first.experiment or not (folder / "capacity.json").exists():
            raise ConfigError(f"--out {folder}: holds another run; choose another folder")
    return RunRequest(
        name=plan.experiment.name,
        cells=[first],
        engine=engine,
        experiment=plan.origin(),
        command=command_line(),
        folder=folder,
        resume=resume,
    )


def _other(folder: Path) -> Capacity:
    from harness.results.capacity import read_capacity
    from harness.results.manifest import read_manifest

    read_manifest(folder)
    if (found := read_capacity(folder)) is None or not found.complete:
        raise ResultsError(f"--against {folder}: holds no search that has ended; name the folder of one")
    return found


def _carry_out(request: RunRequest, driver: CapacitySearch) -> None:
    from harness.measure.run import run_search
    from harness.report.refresh import seal
    from harness.report.run.terminal import ProgressLine

    try:
        with ProgressLine() as progress:
            driver.told = lambda step: progress.note(_line(step, driver.found.key))
            run_search(request, driver, progress)
    except (EngineError, Interrupted):
        if (request.folder / "manifest.json").exists():
            seal(request.folder)
            here = request.folder
            print(f"harness: steps so far are in {here}; the same command with --out {here} goes on", file=sys.stderr)
        raise
    seal(request.folder)


def _answered(found: Capacity, other: Capacity | None, folder: Path, answer: OutputChoice) -> int:
    from msgspec import to_builtins

    from harness.report.run.capacity import answer_line, render_capacity
    from harness.results.capacity import search_agreement

    agreed = None if other is None else search_agreement(found, other)
    if answer.as_json:
        print_json(to_builtins(found) | ({} if agreed is None else {"against": agreed}))
    else:
        console().print(render_capacity(found))
        for line in filter(None, (answer_line(found), agreed)):
            console().print(line, markup=False, highlight=False)
        name_report(folder, browse=answer.browse)
    return RUN_FAILED if found.answer.load is None else DONE


def _line(step: Step, key: str) -> str:
    found = step.found
    rate = "no throughput" if found.rate is None else f"{found.rate:,.0f} output tokens/s"
    return f"{key} = {step.load} ({step.action}: {step.reason}): {'kept' if found.met else 'missed'}, {rate}"
