"""`harness capacity`: the most users that keep the targets, or those with the highest throughput."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from harness.commands.errors import DONE, RUN_FAILED, command_line, told
from harness.commands.options import EngineChoice, Goals, Out, Overrides, Size
from harness.commands.output import IN_WORDS, OutputChoice, console, print_json
from harness.errors import ConfigError

if TYPE_CHECKING:
    from harness.measure.search import Found, Search, Step
    from harness.results.summary import Summary

_What = Annotated[Path, Parameter(help="The experiment: a file, or a name of `harness list experiments`.")]
_Key = Annotated[str, Parameter(help="The whole number that is searched for.")]


@told
def capacity(
    experiment: _What,
    /,
    *,
    engine: EngineChoice,
    mode: Annotated[
        Literal["slo", "peak"], Parameter(help="slo: the most within every goal; peak: the highest throughput.")
    ] = "slo",
    goals: Goals = None,
    key: _Key = "workload.users",
    most: Annotated[int, Parameter(help="No load above this one is tried.")] = 4096,
    tolerance: Annotated[float, Parameter(help="The search ends when the answer is known to this share of it.")] = 0.05,
    overrides: Overrides = None,
    size: Size = None,
    out: Out = None,
    answer: OutputChoice = IN_WORDS,
) -> int:
    """Finds the most users that keep the targets, or those with the highest throughput.

    Each load is a run of its own from fresh caches, in a folder below --out; a search that was interrupted takes the
    runs that are there. capacity.json holds the steps and the answer.

    Example: harness capacity mlperf_suite --engine sim --goal 'e2e_p95<5s' --set workload.duration=20s
    """
    import msgspec

    from harness.experiment.read import load_experiment
    from harness.measure.run import new_folder
    from harness.measure.search import highest, most_within
    from harness.results.folder import write_atomically

    asked = [*(overrides or []), *([f"measure.goals={json.dumps(goals)}"] if goals else [])]
    plan = load_experiment(experiment, asked, size)
    if mode == "slo" and not plan.experiment.measure.goals:
        raise ConfigError("--mode slo: needs a target; add --goal, e.g. 'ttft_p95<500ms', or use --mode peak")
    start = _start(plan.experiment, key)
    if not 1 <= start <= most or not 0 < tolerance < 1:
        raise ConfigError(f"--most {most}, --tolerance {tolerance}: {key} is {start}; give a larger one, and a share")
    folder = out or new_folder(f"capacity-{plan.experiment.name}", engine)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot be made ({error.strerror}); choose another folder") from None
    search: Search = (most_within if mode == "slo" else highest)(start, most, tolerance)

    def one(load: int) -> Found:
        return _measured(experiment, engine, [*asked, f"{key}={load}"], size, folder / f"{load:06d}", mode)

    steps, best = _searched(search, one, None if answer.as_json else key)
    content = {"mode": mode, "key": key, "answer": best, "steps": msgspec.to_builtins(steps)}
    write_atomically(folder / "capacity.json", msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    if answer.as_json:
        print_json(content)
    else:
        what = "Most within the targets" if mode == "slo" else "Peak capacity found"
        console().print(f"{what}: {key} = {best}" if best else "Not even one keeps the targets.", highlight=False)
        print(f"steps and runs: {folder}", file=sys.stderr)
    return DONE if best else RUN_FAILED


def _searched(search: Search, one: Callable[[int], Found], told_as: str | None) -> tuple[list[Step], int | None]:
    """The steps of a search, each told as it is done, and its answer."""
    from harness.measure.search import Step

    steps: list[Step] = []
    try:
        load, action, reason = next(search)
        while True:
            found = one(load)
            steps.append(Step(load=load, action=action, reason=reason, met=found.met, rate=found.rate))
            if told_as is not None:
                console().print(_line(steps[-1], told_as), markup=False, highlight=False)
            load, action, reason = search.send(found)
    except StopIteration as end:
        return steps, end.value


def _start(experiment: object, key: str) -> int:
    """The file's own value. Raises ConfigError where it is no whole number."""
    value = experiment
    for name in key.split("."):
        value = getattr(value, name, None)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"--key {key}: is no whole number of this experiment; name one, e.g. workload.users")
    return value


def _measured(
    experiment: Path, engine: EngineChoice, overrides: list[str], size: str | None, folder: Path, mode: str
) -> Found:
    """One load from fresh caches, or what an earlier search measured of it."""
    from harness.experiment.read import load_experiment
    from harness.measure.run import RunRequest, run
    from harness.report.refresh import seal
    from harness.report.run.terminal import ProgressLine
    from harness.results.manifest import read_manifest

    plan = load_experiment(experiment, overrides, size)
    cell = plan.base_cell()
    if (folder / "manifest.json").exists():
        kept = read_manifest(folder)
        if kept.engine != engine or kept.cells[0].experiment != cell.experiment:
            raise ConfigError(f"{folder}: is of another search; choose another --out")
        if kept.status == "complete":
            return _found(seal(folder), mode)
    request = RunRequest(
        name=plan.experiment.name,
        cells=[cell],
        engine=engine,
        experiment=plan.origin(),
        command=command_line(),
        folder=folder,
        resume=folder.exists(),
    )
    with ProgressLine() as progress:
        run(request, progress)
    return _found(seal(folder), mode)


def _found(summary: Summary, mode: str) -> Found:
    from harness.measure.search import Found

    [cell] = summary.cells
    judged = [each for tier in cell.goals for each in tier.judged]
    rates = [group.throughput.output_tokens_per_s for group in cell.tiers.values() if group.throughput]
    wall = (cell.storage.throughput or {}).get("wall_clock") if cell.storage else None
    rate = wall.tokens_per_s if wall else next(iter(rates), None)
    met = mode == "peak" or (bool(judged) and all(each.verdict == "met" for each in judged))
    return Found(met=met, rate=rate)


def _line(step: Step, key: str) -> str:
    rate = "no throughput" if step.rate is None else f"{step.rate:,.0f} output tokens/s"
    return f"{key} = {step.load} ({step.action}: {step.reason}): {'kept' if step.met else 'missed'}, {rate}"
