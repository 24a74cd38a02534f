"""A calibration is of one machine, and a validation says so before it measures on another."""

import platform
from pathlib import Path

import msgspec
import pytest
import yaml

from harness.errors import NotComparable
from harness.results.provenance import host
from harness.validation.comparable import check_host
from harness.validation.validate import validate
from simulator.calibration import load_calibration
from tests.support.noisy_runs import noisy_copy, sim_run
from tests.unit.measure.test_run_loop import Quiet
from tests.unit.validation.test_validate import CONFIG, request


def of_another(tmp_path: Path) -> Path:
    """A calibration of another machine."""
    known = yaml.safe_load(Path("configs/hardware/cpu-2core.yaml").read_text())
    known["fitted_on"]["host"] = {"cpu": "another", "cores": None}
    path = tmp_path / "other.yaml"
    path.write_text(yaml.safe_dump(known))
    return path


def test_a_calibration_of_another_machine_is_refused(tmp_path: Path) -> None:
    run = sim_run(tmp_path / "truth", {key: CONFIG[key] for key in CONFIG if key != "sizes"})
    real = noisy_copy(run, tmp_path / "real", seed=1, spread=0.0)
    with pytest.raises(NotComparable, match=r"unlike hosts: cpu is .*, another in calibration cpu-2core"):
        validate(request(tmp_path, of_another(tmp_path), (None,), real=(real,), engine="fake"), Quiet())


def test_a_calibration_of_another_machine_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(NotComparable, match=r"unlike hosts: cpu is .* in this one, another in calibration cpu-2core"):
        validate(request(tmp_path, of_another(tmp_path), (None,), engine="fake"), Quiet())
    assert not (tmp_path / "out").exists()


def test_a_timed_core_is_held_against_one_of_the_same_python_alone() -> None:
    """One that was built without optimization takes the loop a third longer, on the same core."""
    own = host()
    assert own.python and own.python.startswith(platform.python_version())
    fitted_on = msgspec.structs.replace(load_calibration("cpu-2core").fitted_on, host={"python": "3.11.7 (another)"})

    def check(core_loop_s: float | None) -> None:
        timed = msgspec.structs.replace(fitted_on, core_loop_s=core_loop_s)
        check_host(own, msgspec.structs.replace(load_calibration("cpu-2core"), fitted_on=timed), "real")

    check(None)
    with pytest.raises(NotComparable, match=r"unlike hosts: python is .* in real, 3.11.7 \(another\) in calibration"):
        check(7e-5)
