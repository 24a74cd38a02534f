"""`harness calibrate`: measures, fits, writes the file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from harness.commands.errors import DONE, RUN_FAILED, command_line, seconds, told
from harness.commands.options import EngineChoice, ExperimentFile, Overrides, Size
from harness.commands.output import check_writable
from harness.errors import ConfigError

if TYPE_CHECKING:
    from simulator.calibration import Calibration


@told
def calibrate(
    experiment: ExperimentFile,
    /,
    *,
    engine: EngineChoice,
    output: Annotated[Path, Parameter(name=["--output", "-o"], help="The calibration file to write.")],
    overrides: Overrides = None,
    size: Size = None,
    run_folder: Annotated[Path | None, Parameter(name="--run", help="The run's folder, for the raw rows.")] = None,
    budget: Annotated[str, Parameter(help="How long it may take.")] = "15min",
) -> int:
    """Measures an engine's costs; fits the simulator's constants to them.

    Of the experiment, its model, cache, engines and chunk sizes count. Exit code 1: the fit does not predict points
    that are left out of it.

    Example: harness calibrate quickstart --engine vllm -o mine.yaml
    """
    from harness.calibration.calibrate import calibrated, packs_of, planned_micro_cells, write_calibration
    from harness.experiment.read import load_experiment
    from harness.measure.run import RunRequest, new_folder, run
    from harness.report.refresh import seal
    from harness.report.run.terminal import ProgressLine

    plan = load_experiment(experiment, overrides or [], size)
    packs_of(plan.experiment, engine)  # raises before anything is measured
    _check(output, run_folder)
    name = f"calibrate-{plan.experiment.name}"
    request = RunRequest(
        name=name,
        cells=planned_micro_cells(plan, seconds("--budget", budget)),
        engine=engine,
        experiment=plan.origin(),
        command=command_line(),
        folder=run_folder or new_folder(name, engine),
    )
    with ProgressLine() as progress:
        folder = run(request, progress)
    seal(folder)
    calibration = calibrated(folder, output.stem, plan.experiment, engine)
    write_calibration(output, calibration)
    write_calibration(folder / "calibration.yaml", calibration)
    _tell(calibration, output, folder)
    return DONE if calibration.good else RUN_FAILED


def _check(output: Path, run_folder: Path | None) -> None:
    if output.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"-o {output}: a calibration is a YAML file; name it NAME.yaml")
    if output.exists():
        raise ConfigError(f"-o {output}: exists already; choose another file, or remove it")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"-o {output}: there is no folder {output.parent}; make it first")
    check_writable(output)
    if run_folder is not None and run_folder.exists():
        raise ConfigError(f"--run {run_folder}: exists already; choose another folder")


def _tell(calibration: Calibration, output: Path, folder: Path) -> None:
    print(" tier       tokens    hit chunk at once    measured     fit left out")
    for point in calibration.fitted_on.points:
        where = f"{point.tier:10} {point.prompt_tokens:6} {point.hit_tokens:6} {point.chunk_tokens:5}"
        errors = f"{point.error or 0.0:+7.1%} {point.loo_error or 0.0:+8.1%}"
        what = "  per output token" if point.metric == "tpot_s" else ""
        print(f" {where} {point.concurrency:7} {point.measured_s * 1e3:8.1f} ms {errors}{what}")
    print(f"{'good' if calibration.good else 'NOT GOOD'}: {calibration.verdict}")
    print(f"calibration: {output}\nrun: {folder}")
