"""What stands between a command line and a run: reading, running, telling. Errors end here, as one line each."""

from __future__ import annotations

import functools
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import msgspec

from harness.errors import ConfigError, EngineError, Interrupted, ResultsError
from harness.experiment.model import EngineName
from harness.experiment.read import Cell, Plan, load_experiment
from harness.measure.run import RunRequest, new_folder
from harness.measure.run import run as run_cells
from harness.results.manifest import read_manifest
from traces.errors import UserError

USER_ERROR, RUN_FAILED = 2, 1
P = ParamSpec("P")


def told(work: Callable[P, int]) -> Callable[P, int]:
    """A command whose mistakes become one line on stderr and an exit code. Bugs keep their traceback."""

    @functools.wraps(work)
    def command(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return work(*args, **kwargs)
        except EngineError as error:
            print(f"harness: {error}", file=sys.stderr)
            return RUN_FAILED
        except UserError as error:
            print(f"harness: {error}", file=sys.stderr)
            return USER_ERROR
        except Interrupted as error:
            print(f"harness: {error}", file=sys.stderr)
            return 128 + error.signal
        except KeyboardInterrupt:
            return 128 + signal.SIGINT

    return command


@told
def measure(
    experiment: Path | None,
    engine: EngineName | None,
    overrides: list[str],
    size: str | None,
    out: Path | None,
    resume: Path | None,
    *,
    sweep: bool,
) -> int:
    """Runs or resumes; returns the exit code."""
    from rich.console import Console

    from harness.report.refresh import seal
    from harness.report.run.terminal import Progress, render_summary

    plan = None if experiment is None else load_experiment(experiment, overrides, size)
    request = _resumed(resume, plan, engine, sweep) if resume else _fresh(plan, engine, out, sweep)
    folder = request.folder
    try:
        with Progress() as progress:
            run_cells(request, progress)
    except (EngineError, Interrupted):
        if (folder / "manifest.json").exists():
            seal(folder)
            print(f"harness: rows so far are in {folder}; harness run --resume {folder} goes on", file=sys.stderr)
        raise
    summary = seal(folder)
    Console().print(render_summary(summary, read_manifest(folder)))
    print(f"report: {folder / 'report.html'}")
    return 0 if _every_tier_counts(summary) else RUN_FAILED


def _every_tier_counts(summary: dict[str, Any]) -> bool:
    """A tier without one row that counts was not measured, whatever else went well."""
    return all(tier["rows"]["counted"] for cell in summary["cells"] for tier in cell["tiers"].values())


def _fresh(plan: Plan | None, engine: EngineName | None, out: Path | None, sweep: bool) -> RunRequest:
    if plan is None:
        raise ConfigError("no experiment given; name a file, e.g. configs/experiments/quickstart.yaml")
    if engine is None:
        raise ConfigError("no engine given; add --engine sim, vllm or openai")
    if out is not None and out.exists():
        raise ConfigError(f"--out {out}: exists already; choose another folder, or go on with --resume {out}")
    if sweep and not plan.axes:
        raise ConfigError(f"{plan.path}: has no sweep axes; add `sweep: {{KEY: [values]}}`, or use harness run")
    cells = plan.cells() if sweep else [plan.base_cell()]
    return RunRequest(
        name=plan.experiment.name,
        cells=cells,
        engine=engine,
        experiment=plan.origin(),
        command=command_line(),
        folder=out or new_folder(plan.experiment.name, engine),
    )


def command_line() -> str:
    """The command line that this is, for the report. Keys are in the environment, never here."""
    return shlex.join(["harness", *sys.argv[1:]])


def _resumed(resume: Path, plan: Plan | None, engine: EngineName | None, sweep: bool) -> RunRequest:
    """The cells that the manifest holds; a file that is also given has to say the same."""
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
        engine=msgspec.convert(manifest.engine, EngineName),
        experiment=manifest.experiment,
        folder=resume,
        resume=True,
    )


@told
def report_again(folders: Sequence[Path]) -> int:
    """Seals each folder again; returns the exit code."""
    from rich.console import Console

    from harness.report.refresh import seal
    from harness.report.run.terminal import render_summary

    if not folders:
        raise ConfigError("no folder given; name one, e.g. harness report results/*")
    for folder in folders:
        summary = seal(folder)
        Console().print(render_summary(summary, read_manifest(folder)))
        print(f"report: {folder / 'report.html'}")
    return 0


@told
def serve(
    experiment: Path, overrides: list[str], size: str | None, host: str, port: int, api_key_env: str | None
) -> int:
    """Serves the simulator over HTTP until it is interrupted; returns the exit code."""
    from harness.serving.server import serve as serve_experiment

    return serve_experiment(load_experiment(experiment, overrides, size).experiment, host, port, api_key_env)


@told
def create_device(name: str, settings: dict[str, Any]) -> int:
    """Makes a reference device; returns the exit code."""
    from harness.blockio import attach as session

    return session.create_device(name, settings)


@told
def list_devices() -> int:
    """Prints the reference devices; returns the exit code."""
    from harness.blockio import attach as session

    return session.list_devices()


@told
def destroy_devices(name: str | None, everything: bool) -> int:
    """Removes reference devices; returns the exit code."""
    from harness.blockio import attach as session

    return session.destroy_devices(name, everything)


@told
def characterize(folders: Sequence[Path]) -> int:
    """Prints what traced runs did to the disk; returns the exit code."""
    from harness.report.io.tables import render
    from harness.report.refresh import seal
    from harness.results.folder import read_io

    if not folders:
        raise ConfigError("no folder given; name a traced run's, e.g. harness io characterize results/*")
    found = []
    for folder in folders:
        seal(folder)
        if (io := read_io(folder)) is None:
            raise ConfigError(f"{folder}: holds no trace; run it again with --set storage.trace=true (root, bpftrace)")
        found.append(io)
    print(render(found))
    return 0


@told
def baseline(folder: Path, run: Path | None, seconds: int) -> int:
    """Prints what fio reaches in a folder; returns the exit code."""
    from harness.blockio.fio import compare

    return compare(folder, run, seconds)


@told
def replay(run: Path, folder: Path, fio: Path | None, timed: bool) -> int:
    """Replays or exports a run's file calls; returns the exit code."""
    from harness.blockio.replay import replay_run

    return replay_run(run, folder, fio, timed)


def list_traces() -> int:
    """Prints the catalogue; returns the exit code."""
    from traces.catalogue import catalogue

    for name, entry in catalogue().items():
        print(f"{name:24} {entry.format:9} {entry.licence:12} {entry.description}")
    return 0


@told
def fetch_trace(name: str, into: Path | None, accept_digest: str | None) -> int:
    """Downloads one trace; returns the exit code."""
    import os

    from harness.report.run.terminal import Progress
    from traces.catalogue import fetch

    target = into or Path(os.environ.get("HARNESS_TRACES", "traces/data"))
    with Progress() as progress:
        told = 0

        def tell(done: int, total: int | None) -> None:
            nonlocal told
            if not told:
                progress.start(total, f"{name} (bytes)")
            progress.advance(done - told)
            told = done

        path = fetch(name, target, accept_digest=accept_digest, progress=tell)
    print(path)
    return 0
