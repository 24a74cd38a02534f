"""The commands, one short function each. What they do is elsewhere; heavy imports wait until a command runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Group, Parameter

app = App(
    name="harness",
    help="""Measures what a prefix served from GPU, CPU RAM or disk does to LLM serving, and proves it.

    Examples:

        harness run configs/experiments/quickstart.yaml --engine sim

        harness run configs/experiments/quickstart.yaml --engine vllm --set workload.prompt_tokens=8193

        harness sweep configs/experiments/thesis_exp2_hit_rate.yaml --engine sim --size paper

        harness serve configs/experiments/quickstart.yaml --port 8000

        harness calibrate configs/experiments/quickstart.yaml --engine vllm -o mine.yaml

        harness validate configs/experiments/thesis_exp2_hit_rate.yaml --calibration mine.yaml

        harness report results/*

        harness doctor
    """,
    help_format="plaintext",
    version="0.1.0",
)
traces = App(name="traces", help="Public traces: what there is, and fetching it.", help_format="plaintext")
app.command(traces)
device = App(name="device", help="Reference devices: storage that repeats to a percent. Root.", help_format="plaintext")
app.command(device)
io = App(name="io", help="What the cache does to the disk.", help_format="plaintext")
app.command(io)

EngineChoice = Literal["sim", "vllm", "openai", "fake"]
Experiment = Annotated[Path | None, Parameter(help="The experiment file. Not needed with --resume.")]
Engine = Annotated[EngineChoice | None, Parameter(help="What serves the load.")]
Overrides = Annotated[
    list[str] | None, Parameter(name="--set", help="KEY=VALUE overrides any key of the file, e.g. seed=2. Repeatable.")
]
Size = Annotated[str | None, Parameter(help="One of the file's sizes, e.g. paper.")]
Out = Annotated[Path | None, Parameter(help="The run's folder; it must not exist. Default: results/<run id>.")]
Resume = Annotated[Path | None, Parameter(help="An unfinished run's folder: goes on where it stopped.")]


@app.command
def run(
    experiment: Experiment = None,
    /,
    *,
    engine: Engine = None,
    overrides: Overrides = None,
    size: Size = None,
    out: Out = None,
    resume: Resume = None,
) -> int:
    """Measures an experiment's base point.

    Example: harness run configs/experiments/quickstart.yaml --engine sim --set seed=2
    """
    from harness.commands.session import measure

    return measure(experiment, engine, overrides or [], size, out, resume, sweep=False)


@app.command
def sweep(
    experiment: Experiment = None,
    /,
    *,
    engine: Engine = None,
    overrides: Overrides = None,
    size: Size = None,
    out: Out = None,
    resume: Resume = None,
) -> int:
    """Measures every point of the file's `sweep` axes, into one folder.

    Example: harness sweep configs/experiments/thesis_exp2_hit_rate.yaml --engine vllm
    """
    from harness.commands.session import measure

    return measure(experiment, engine, overrides or [], size, out, resume, sweep=True)


@app.command
def serve(
    experiment: Annotated[Path, Parameter(help="The experiment file: model, cache sizes and engines.sim count.")],
    /,
    *,
    port: Annotated[int, Parameter(help="0: any free one.")],
    host: Annotated[str, Parameter(help="The address to listen on; 0.0.0.0 for all of the machine's.")] = "127.0.0.1",
    overrides: Overrides = None,
    size: Size = None,
    api_key_env: Annotated[
        str | None, Parameter(help="The environment variable that holds the key to ask for.")
    ] = None,
) -> int:
    """Answers OpenAI requests over HTTP with the simulator's timing.

    Example: harness serve configs/experiments/quickstart.yaml --port 8000
    """
    from harness.commands.session import serve

    return serve(experiment, overrides or [], size, host, port, api_key_env)


@app.command
def calibrate(
    experiment: Annotated[
        Path, Parameter(help="The experiment file: model, cache and engines count, and chunk sizes.")
    ],
    /,
    *,
    engine: EngineChoice,
    output: Annotated[Path, Parameter(name=["--output", "-o"], help="The calibration file to write.")],
    overrides: Overrides = None,
    size: Size = None,
    run_folder: Annotated[Path | None, Parameter(name="--run", help="The run's folder, for the raw rows.")] = None,
    budget: Annotated[str, Parameter(help="How long it may take.")] = "15min",
) -> int:
    """Measures what an engine and its tiers cost here, and fits the simulator's constants to it.

    Exit code 1: the fit does not foretell points that are left out of it.

    Example: harness calibrate configs/experiments/quickstart.yaml --engine vllm -o mine.yaml
    """
    from harness.commands.calibrate import calibrate

    return calibrate(experiment, engine, overrides or [], size, output, run_folder, budget)


@app.command
def validate(
    experiment: Annotated[Path, Parameter(help="The experiment file, or a table of published figures.")],
    /,
    *,
    calibration: Annotated[
        str | None, Parameter(help="The calibration: a file, or a name of configs/hardware.")
    ] = None,
    calibrate: Annotated[
        str | None, Parameter(help="Or this size of the file is calibrated on, in turns with what is validated.")
    ] = None,
    real: Annotated[list[Path] | None, Parameter(help="Finished runs to use for the real side. Repeatable.")] = None,
    engine: Engine = "vllm",
    overrides: Overrides = None,
    sizes: Annotated[
        list[str] | None, Parameter(name="--size", help="Sizes of the file to measure. Repeatable.")
    ] = None,
    budget: Annotated[
        str, Parameter(help="All the time there is: what is left of it goes to points that do not resolve.")
    ] = "0s",
    calibrating: Annotated[str, Parameter(help="With --calibrate: how long its own points may take.")] = "15min",
    passes: Annotated[int, Parameter(help="With --calibrate: how often it is each point's turn.")] = 6,
    tolerance: Annotated[float, Parameter(help="The largest relative error that passes.")] = 0.05,
    out: Out = None,
) -> int:
    """Holds the calibrated simulator against a real engine. Exit codes: 0 pass, 1 fail, 3 not resolvable.

    Machines drift: --calibrate measures the calibration's points in the same minutes, on the same running engine.

    Example: harness validate configs/validation/cpu_vllm.yaml --calibration mine.yaml --size lengths --size hits

    Example: harness validate configs/validation/cpu_vllm.yaml --calibrate calibration --size lengths --size hits
    """
    from harness.commands.validate import validate

    return validate(
        experiment, calibration, real or [], engine, overrides or [], sizes or [], budget, tolerance, out,
        (calibrate, calibrating, passes) if calibrate else None,
    )  # fmt: skip


@app.command
def compare(
    reference: Annotated[Path, Parameter(help="The run that is the measure.")],
    candidate: Annotated[Path, Parameter(help="The run that is judged.")],
    /,
    *,
    tolerance: Annotated[float, Parameter(help="The largest relative error that passes.")] = 0.05,
    out: Out = None,
) -> int:
    """Holds any two runs of one experiment against each other. Exit codes: 0 pass, 1 fail, 3 not resolvable.

    Example: harness compare results/before results/after --tolerance 0.05
    """
    from harness.commands.validate import compare

    return compare(reference, candidate, tolerance, out)


@app.command
def report(*folders: Annotated[Path, Parameter(help="Run folders.")]) -> int:
    """Makes summary, table and report.html again, from the rows alone.

    Example: harness report results/*
    """
    from harness.commands.session import report_again

    return report_again(list(folders))


@app.command
def doctor() -> int:
    """Says what this machine can and cannot do, each with the cure."""
    from harness.doctor import checks, render

    found = checks(Path.cwd())
    print(render(found))
    return 0


@traces.command(name="list")
def list_traces() -> int:
    """Lists the catalogue."""
    from harness.commands.session import list_traces

    return list_traces()


@traces.command
def fetch(
    name: Annotated[str, Parameter(help="A name from `harness traces list`.")],
    /,
    *,
    into: Annotated[Path | None, Parameter(help="The folder. Default: $HARNESS_TRACES, else traces/data.")] = None,
    accept_digest: Annotated[str | None, Parameter(help="The sha256 to accept where the catalogue has none.")] = None,
) -> int:
    """Downloads a trace and checks its sha256.

    Example: harness traces fetch mooncake_conversation
    """
    from harness.commands.session import fetch_trace

    return fetch_trace(name, into, accept_digest)


Rate = Annotated[str | None, Parameter(help="e.g. 400MiB/s")]


@device.command(name="create")
def create_device(
    name: Annotated[str, Parameter(help="Lower-case letters, digits, - and _.")],
    /,
    *,
    bandwidth: Rate = None,
    read_bandwidth: Rate = None,
    write_bandwidth: Rate = None,
    iops: float | None = None,
    read_iops: float | None = None,
    write_iops: float | None = None,
    latency: Annotated[str | None, Parameter(help="Added to each request, e.g. 100us.")] = None,
    file_system: Annotated[str | None, Parameter(help="ext4 (default), xfs or btrfs.")] = None,
    size: Annotated[str | None, Parameter(help="Default: 4GiB.")] = None,
    backing: Annotated[str | None, Parameter(help="A folder for the file with the bytes. Default: RAM.")] = None,
) -> int:
    """Makes a device with the limits given, and mounts a new file system on it. It stays until it is destroyed.

    Example: harness device create ssd --bandwidth 400MiB/s --file-system xfs
    """
    settings = dict(locals())
    from harness.commands.session import create_device

    return create_device(settings.pop("name"), settings)


@device.command(name="list")
def list_devices() -> int:
    """Lists the devices that are there, runs' included."""
    from harness.commands.session import list_devices

    return list_devices()


@device.command(name="destroy")
def destroy_devices(
    name: Annotated[str | None, Parameter(help="As `harness device list` says.")] = None,
    /,
    *,
    everything: Annotated[bool, Parameter(name="--all", help="All of them, also what a crash left.")] = False,
) -> int:
    """Unmounts and removes a device. It touches nothing that `harness device` or a run did not make.

    Example: harness device destroy ssd
    """
    from harness.commands.session import destroy_devices

    return destroy_devices(name, everything)


@io.command
def characterize(*folders: Annotated[Path, Parameter(help="Folders of runs that had storage.trace.")]) -> int:
    """Compares what runs did to their block devices and files; makes io.json and report.html again.

    Example: harness io characterize results/*
    """
    from harness.commands.session import characterize

    return characterize(list(folders))


@io.command
def baseline(
    folder: Annotated[Path, Parameter(help="A folder on the storage in question.")],
    /,
    *,
    run: Annotated[Path | None, Parameter(help="A traced run: its sizes and depth too, and its efficiency.")] = None,
    seconds: Annotated[int, Parameter(help="How long each job runs.")] = 5,
) -> int:
    """What fio reaches there: psync by 32 jobs, io_uring by 4 jobs of depth 64, and as a run did it.

    Example: harness io baseline /mnt/nvme --run results/quickstart-vllm-…
    """
    from harness.commands.session import baseline

    return baseline(folder, run, seconds)


@io.command
def replay(
    run: Annotated[Path, Parameter(help="A traced run.")],
    folder: Annotated[Path, Parameter(help="Where to replay; files are made there, and removed.")],
    /,
    *,
    fio: Annotated[Path | None, Parameter(help="Write a fio job (and its iolog) into this folder instead.")] = None,
    timed: Annotated[bool, Parameter(help="Keep the times between calls; else as fast as it goes.")] = False,
) -> int:
    """Does a run's file calls again, in order, on another device.

    Example: harness io replay results/quickstart-vllm-… /mnt/other
    """
    from harness.commands.session import replay

    return replay(run, folder, fio, timed)


def main() -> None:
    """Runs a command.

    Exit codes: 0 done; 1 the run failed or a tier has no row that counts; 2 the user's mistake; 130, 143 interrupted.
    validate and compare: 0 pass; 1 fail; 3 nothing fails and not everything could be resolved.
    """
    app["--help"].group = app["--version"].group = Group("Help")
    try:
        code = app(exit_on_error=False, print_error=False)
    except CycloptsError as error:
        print(f"harness: {' '.join(str(error).split())} See harness --help.", file=sys.stderr)
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()
