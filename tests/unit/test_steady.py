"""Samples around which the machine was slower than asked are kept, left out, and taken again."""

import os
from pathlib import Path

import msgspec
import pytest

from harness.collectors import speed
from harness.collectors.speed import SpeedProbe
from harness.config import Measure, Steady, Until
from harness.engines.fake import FakeEngine
from harness.results import read_manifest, read_samples
from harness.run import run
from harness.sampling import Sampler
from harness.seal import seal
from tests.unit.test_run_loop import Quiet, measured, request

MEASURE = {
    "tiers": ["gpu", "cpu"],
    "until": {"half_width": 0.5, "min_samples": 4, "max_samples": 4},
    "budget": "1000s",
    "steady": {"speed": 0.8, "patience": "0s"},
}


def loops(monkeypatch: pytest.MonkeyPatch, *times_s: float) -> None:
    """The fixed loop takes these times, the last one for ever; learning takes none."""
    left = list(times_s)
    monkeypatch.setattr(speed, "_loop_s", lambda: left.pop(0) if len(left) > 1 else left[0])
    monkeypatch.setattr("harness.run._SPEED_LEARNING_S", 0.0)


def test_speed_is_against_the_fastest_loop_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    loops(monkeypatch, *[2e-3] * 12, *[1e-3] * 12, 2e-3)
    probe = SpeedProbe([0])
    assert [probe.read(), probe.read(), probe.read()] == [1.0, 1.0, 0.5]
    assert probe.best_loop_s == {0: 1e-3}


def test_a_real_reading_is_a_share_and_leaves_the_thread_where_it_was() -> None:
    allowed = os.sched_getaffinity(0)
    assert all(0 < SpeedProbe(sorted(allowed)).read() <= 1 for _ in range(3))
    assert os.sched_getaffinity(0) == allowed


def test_disturbed_samples_are_kept_left_out_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_time = msgspec.structs.replace(FakeEngine.capabilities, virtual_time=False)
    monkeypatch.setattr(FakeEngine, "capabilities", real_time)
    cores = len(os.sched_getaffinity(0))
    # Each sample reads the speed before and after itself: the third and the sixth sample are slow.
    reading = [1e-3] * 12 * cores
    slow = [2e-3] * 12 * cores
    loops(monkeypatch, *reading * 5, *slow, *reading * 4, *slow, *reading, 1e-3)
    folder = run(request(tmp_path, measure=MEASURE), Quiet())
    rows = measured(folder)
    disturbed = [row for row in rows if row.verdict == "disturbed"]
    assert len(disturbed) == 2 and len(rows) == 10
    assert all("50%" in (row.verdict_reason or "") for row in disturbed)
    speeds = [(sample.host.speed_before, sample.host.speed_after) for sample in read_samples(folder)]
    assert speeds[2] == (1.0, 0.5) and speeds[5] == (0.5, 1.0)
    summary = seal(folder)
    assert summary["rows"]["disturbed"] == 2 and summary["rows"]["counted"] == 8
    assert set(read_manifest(folder)["cells"][0]["best_loop_s"].values()) == {1e-3}


def test_a_sample_waits_for_the_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_time = msgspec.structs.replace(FakeEngine.capabilities, virtual_time=False)
    monkeypatch.setattr(FakeEngine, "capabilities", real_time)
    monkeypatch.setattr("harness.measure._SPEED_PAUSE_S", 0.0)
    cores = len(os.sched_getaffinity(0))
    loops(monkeypatch, *[1e-3] * 12 * cores, *[2e-3] * 36 * cores, 1e-3)
    rows = measured(run(request(tmp_path, measure={**MEASURE, "steady": {"speed": 0.8, "patience": "10s"}}), Quiet()))
    assert [row.verdict for row in rows].count("disturbed") == 1 and len(rows) == 9


def test_disturbed_samples_do_not_give_a_tier_up() -> None:
    measure = Measure(
        tiers=("gpu",), until=Until(half_width=0.5, min_samples=3, max_samples=3), budget="100s", steady=Steady()
    )
    sampler = Sampler(measure)
    for _ in range(20):
        sampler.add("gpu", [], proven=False, disturbed=True)
    assert sampler.round(0.0) == ["gpu"] and sampler.gave_up() == [] and sampler.samples_of("gpu") == 20
    for value in (1.0, 1.1, 0.9):
        sampler.add("gpu", [value], proven=True)
    assert sampler.round(0.0) == []
    assert sampler.samples_of("gpu") == 23


def test_steady_needs_until_and_budget() -> None:
    with pytest.raises(ValueError, match="give until and budget"):
        Measure(tiers=("gpu",), samples=3, steady=Steady())
