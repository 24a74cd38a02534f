"""`harness worth`: measures without and with the cache behind the engine, and answers whether that is worth it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from harness.commands.errors import DONE, RUN_FAILED, command_line, told
from harness.commands.options import EngineChoice, Out, Overrides, Resume, Size
from harness.commands.output import IN_WORDS, OutputChoice, console, name_report, print_json, tell_kept
from harness.errors import ConfigError, EngineError, Interrupted, ResultsError

if TYPE_CHECKING:
    from harness.measure.run import RunRequest

_WIDE = 104
_What = Annotated[
    Path | None,
    Parameter(help="The experiment (file or name), or a folder that worth has made: it answers again from its rows."),
]


@told
def worth(
    experiment: _What = None,
    /,
    *,
    engine: EngineChoice | None = None,
    tokens: Annotated[
        list[int] | None,
        Parameter(help="Tokens of a prefix, in whole chunks. Repeatable. Default: 1/8 to all of the file's."),
    ] = None,
    overrides: Overrides = None,
    size: Size = None,
    out: Out = None,
    resume: Resume = None,
    output: OutputChoice = IN_WORDS,
) -> int:
    """Answers whether the cache behind the engine is worth it: from which length on, and at what cost.

    It measures each prefix length without the cache server, then with it, once per tier that the file names. An
    attached server keeps its cache server, so that hits are compared with misses there. The folder holds an ordinary
    run, and worth.json.

    Example: harness worth quickstart --engine sim

    Example: harness worth mine.yaml --engine vllm --tokens 1024 --tokens 8192 --set cache.disk.path=/mnt/nvme
    """
    if experiment is not None and (experiment / "manifest.json").exists() and resume is None:
        return _answer(experiment, output)
    request = _again(resume, experiment) if resume else _first(experiment, engine, tokens or [], overrides, size, out)
    _measure(request)
    return _answer(request.folder, output)


def _first(
    experiment: Path | None,
    engine: EngineChoice | None,
    tokens: list[int],
    overrides: list[str] | None,
    size: str | None,
    out: Path | None,
) -> RunRequest:
    from harness.commands.run import checked_plan
    from harness.experiment.read import load_experiment
    from harness.experiment.worth import worth_cells
    from harness.measure.run import RunRequest, new_folder
    from harness.results.worth import RUN_NAME

    read = None if experiment is None else load_experiment(experiment, overrides or [], size)
    plan, engine = checked_plan(read, engine, out)
    name = f"{RUN_NAME}{plan.experiment.name}"
    return RunRequest(
        name=name,
        cells=worth_cells(plan, tokens, engine),
        engine=engine,
        experiment=plan.origin(),
        command=command_line(),
        folder=out or new_folder(name, engine),
    )


def _again(folder: Path, experiment: Path | None) -> RunRequest:
    from harness.measure.run import kept_request
    from harness.results.manifest import read_manifest

    if experiment is not None:
        raise ConfigError(f"{experiment}: --resume takes everything from {folder}; name no experiment")
    if read_manifest(folder).status == "complete":
        raise ResultsError(f"{folder}: is complete already; harness worth {folder} answers again")
    return kept_request(folder)


def _measure(request: RunRequest) -> None:
    from harness.measure.run import run
    from harness.report.refresh import seal
    from harness.report.run.terminal import ProgressLine

    try:
        with ProgressLine() as progress:
            run(request, progress)
    except (EngineError, Interrupted):
        tell_kept(request.folder, "worth")
        raise
    seal(request.folder)


def _answer(folder: Path, output: OutputChoice) -> int:
    """Writes worth.json, and says what stands in it."""
    import msgspec

    from harness.report.worth import answer, headings, table
    from harness.results.folder import read_rows, read_samples, write_atomically
    from harness.results.manifest import read_manifest
    from harness.results.worth import is_worth, judge

    manifest = read_manifest(folder)
    if not is_worth(manifest):
        raise ResultsError(f"{folder}: is no run of harness worth; name an experiment, or a folder that worth has made")
    found = judge(manifest, read_rows(folder), read_samples(folder))
    lines = answer(found)
    content = {"answer": lines} | msgspec.to_builtins(found)
    encoded = msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"
    try:
        write_atomically(folder / "worth.json", encoded)
    except OSError as error:
        raise ResultsError(f"{folder}: worth.json cannot be written there ({error.strerror}); make room") from None
    if output.as_json:
        print_json(content)
    else:
        _show(headings(found), table(found), lines)
        name_report(folder, browse=output.browse)
    return DONE if any(point.outcome != "too few to compare" for point in found.points) else RUN_FAILED


def _show(columns: tuple[str, ...], rows: list[tuple[str, ...]], lines: list[str]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    screen = console()
    shown = len(columns) if screen.width >= _WIDE else len(columns) - 2
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(columns[:shown]):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row[:shown])
    screen.print(table)
    for line in lines:
        screen.print(line, markup=False, highlight=False)
