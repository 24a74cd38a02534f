"""`harness calibrate`: measures, fits, writes the file."""

from __future__ import annotations

from pathlib import Path

from harness.calibration.calibrate import calibrated, planned_micro_cells, write_calibration
from harness.commands.session import RUN_FAILED, command_line, told
from harness.errors import ConfigError
from harness.experiment.model import EngineName
from harness.experiment.read import Plan, load_experiment
from harness.measure.run import RunRequest, new_folder, run
from simulator.calibration import Calibration


@told
def calibrate(
    experiment: Path, engine: EngineName, overrides: list[str], size: str | None, output: Path, run_folder: Path | None,
    budget: str,
) -> int:  # fmt: skip
    """Measures, fits and writes; returns the exit code: 1 where leave-one-out says that the fit is not good."""
    from harness.report.refresh import seal
    from harness.report.run.terminal import Progress

    plan = load_experiment(experiment, overrides, size)
    _check(output, run_folder)
    request = _request(plan, engine, run_folder, _seconds(budget))
    with Progress() as progress:
        folder = run(request, progress)
    seal(folder)
    calibration = calibrated(folder, output.stem, plan.experiment, engine)
    write_calibration(output, calibration)
    write_calibration(folder / "calibration.yaml", calibration)
    _tell(calibration, output, folder)
    return 0 if calibration.good else RUN_FAILED


def _check(output: Path, run_folder: Path | None) -> None:
    if output.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"-o {output}: a calibration is a YAML file; name it NAME.yaml")
    if output.exists():
        raise ConfigError(f"-o {output}: exists already; choose another file, or remove it")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"-o {output}: there is no folder {output.parent}; make it first")
    if run_folder is not None and run_folder.exists():
        raise ConfigError(f"--run {run_folder}: exists already; choose another folder")


def _seconds(budget: str) -> float:
    from harness.experiment.units import parse_seconds

    try:
        return parse_seconds(budget)
    except ValueError as error:
        raise ConfigError(f"--budget {error}") from None


def _request(plan: Plan, engine: EngineName, run_folder: Path | None, budget_s: float) -> RunRequest:
    return RunRequest(
        name=f"calibrate-{plan.experiment.name}",
        cells=planned_micro_cells(plan, budget_s),
        engine=engine,
        experiment=plan.origin(),
        command=command_line(),
        folder=run_folder or new_folder(f"calibrate-{plan.experiment.name}", engine),
    )


def _tell(calibration: Calibration, output: Path, folder: Path) -> None:
    print(" tier       tokens    hit chunk at once    measured     fit left out")
    for point in calibration.fitted_on.points:
        where = f"{point.tier:10} {point.prompt_tokens:6} {point.hit_tokens:6} {point.chunk_tokens:5}"
        errors = f"{point.error or 0.0:+7.1%} {point.loo_error or 0.0:+8.1%}"
        what = "  per output token" if point.metric == "tpot_s" else ""
        print(f" {where} {point.concurrency:7} {point.measured_s * 1e3:8.1f} ms {errors}{what}")
    print(f"{'good' if calibration.good else 'NOT GOOD'}: {calibration.verdict}")
    print(f"calibration: {output}\nrun: {folder}")
