"""How much longer a slow core took is told from the loops beside each point's own samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.calibration import cores as module
from harness.calibration.cores import core_times, slow_samples
from harness.records import Counters, HostSample, Sample


def sample(cell: str, tier: str, index: int, loop_s: float | None, at_s: float = 0.0) -> Sample:
    nothing = Counters()
    return Sample(
        cell=cell, tier=tier, index=index, started_s=at_s, ended_s=at_s + 1, verdict="proven", observed=nothing,
        expected=nothing, host=HostSample(core_loop_s=loop_s),
    )  # fmt: skip


def test_the_loops_of_its_time_tell_how_slow_a_point_s_core_was(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [
        *(sample("c:a#1", "gpu", index, loop_s) for index, loop_s in enumerate((50e-6, 60e-6, 70e-6))),
        sample("c:a#1", "disk", 0, None),
        # Minutes later; one of them had quick cores for the moment in which the loop ran.
        *(sample("c:a#1", "cpu", index, loop_s, 300.0) for index, loop_s in enumerate((60e-6, 120e-6))),
        sample("other:a#1", "gpu", 0, 90e-6, 330.0),
    ]
    monkeypatch.setattr(module, "read_samples", lambda _folder: iter(samples))
    usual_s, host_times = core_times(Path("run"), "c:")
    assert usual_s == pytest.approx(60e-6)
    once = pytest.approx(1.0)
    assert host_times == {("c:a#1", "gpu"): once, ("c:a#1", "disk"): once, ("c:a#1", "cpu"): pytest.approx(1.5)}


def test_a_run_that_timed_no_core_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_samples", lambda _folder: iter([sample("c#1", "gpu", 0, None)]))
    assert core_times(Path("run")) == (None, {})


def test_a_sample_is_slow_where_its_loop_took_a_fifth_longer_than_most(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [sample("c:a#1", "gpu", index, loop_s) for index, loop_s in enumerate((60e-6, 71e-6, 73e-6, None, 58e-6))]
    samples += [sample("c:a#1", "cpu", index, 60e-6) for index in range(2)]
    samples += [sample("other#1", "gpu", index, 90e-6) for index in range(9)]
    monkeypatch.setattr(module, "read_samples", lambda _folder: iter(samples))
    assert slow_samples(Path("run"), "c:") == {("c:a#1", "gpu", 0, 2)}
    assert slow_samples(Path("run")) == set(), "most of all took 90 us"
