"""How fast a core is, and whether it stays so."""

import asyncio
import itertools
import os
from collections.abc import Callable, Iterable
from statistics import median

import pytest

from harness.collectors.cores import KEPT_LOOP_S, Slower, core_loop_s, cores_slower, uninterrupted_s
from harness.collectors.steady import SteadyCores
from simulator.calibration import load_calibration
from tests.support.paths import ROOT

KEPT = ROOT / "results/validation"


def test_turns_that_another_process_interrupts_do_not_count() -> None:
    alone_s = [70e-6, 74e-6, 72e-6]
    assert uninterrupted_s(alone_s) == pytest.approx(72e-6)
    assert uninterrupted_s([*alone_s, 4070e-6, 3072e-6]) == uninterrupted_s(alone_s)


def test_a_core_whose_turns_are_all_slow_is_slow() -> None:
    assert uninterrupted_s([140e-6, 144e-6, 70e-6]) == pytest.approx(118e-6)


def test_a_look_whose_core_was_taken_for_all_of_it_still_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = itertools.count()
    monkeypatch.setattr("harness.collectors.cores.time.perf_counter", lambda: float(next(now_s)))
    assert core_loop_s(min(os.sched_getaffinity(0))) == 1.0


def test_a_core_that_another_guest_slows_is_told_from_one_that_is_slow_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Core 0 is twice as slow as core 1 and steady; core 1 takes half more in every third look."""
    monkeypatch.setattr("harness.collectors.cores.time.sleep", lambda _: None)
    looks = {0: iter([2.0] * 25), 1: iter([1.0, 1.0, 1.5] * 9)}
    monkeypatch.setattr("harness.collectors.cores.core_loop_s", lambda core: next(looks[core]))
    slower = cores_slower([0, 1])
    assert (slower.half, slower.quarter) == (0.0, 0.0), "8 of 50 looks"
    looks = {0: iter([1.5, 1.0] * 13), 1: iter([1.0, 1.5] * 13)}
    assert cores_slower([0, 1]) == (0.25, 0.5, 1.25), "25 of 50 looks"


def test_a_core_that_is_slow_always_is_said_to_be() -> None:
    """The median of its looks is held against those of the kept calibrations."""
    kept = [load_calibration(str(path)).fitted_on.core_loop_s for path in KEPT.glob("*/calibration.yaml")]
    timed_s = [each for each in kept if each is not None]
    assert timed_s and pytest.approx(median(timed_s), rel=0.02) == KEPT_LOOP_S
    assert Slower(0.0, 0.0, 1.2 * KEPT_LOOP_S).in_words().endswith("a quarter of it")
    assert "2.1 times as long as where the validations were kept" in Slower(0.0, 0.0, 2.1 * KEPT_LOOP_S).in_words()


class Clock:
    """Time that only sleeping moves, and cores that take half longer at some moments."""

    def __init__(self, slow_at: Callable[[float], bool], slower: float = 0.5) -> None:
        self.now_s, self._slow_at, self._slower = 0.0, slow_at, slower

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def core_loop_s(self, core: int) -> float:
        return (1 + core) * (1 + self._slower * self._slow_at(self.now_s))


@pytest.fixture
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(*request.param)
    monkeypatch.setattr("harness.collectors.steady.time.monotonic", clock.monotonic)
    monkeypatch.setattr("harness.collectors.steady.asyncio.sleep", clock.sleep)
    monkeypatch.setattr("harness.collectors.steady.core_loop_s", clock.core_loop_s)
    return clock


def waited(clock: Clock, cores: tuple[int, ...], asked_at_s: Iterable[float], at_most_s: float) -> list[float]:
    async def ask() -> list[float]:
        steady, found = SteadyCores(cores), list[float]()
        for moment_s in asked_at_s:
            clock.now_s = max(clock.now_s, moment_s)
            found.append(await steady.wait(at_most_s))
        return found

    return asyncio.run(ask())


@pytest.mark.parametrize("clock", [(lambda now_s: 10 <= now_s < 12,)], indirect=True)
def test_a_sample_waits_for_cores_that_another_guest_slows(clock: Clock) -> None:
    assert waited(clock, (0, 1), [0.0, 10.5, 13.0], 5.0) == [0.0, pytest.approx(1.5, abs=0.02), 0.0]
    assert waited(clock, (), [10.5], 5.0) == [0.0], "no core is named"


@pytest.mark.parametrize("clock", [(lambda now_s: 10 <= now_s < 12, 0.1)], indirect=True)
def test_looks_that_differ_by_little_are_alike(clock: Clock) -> None:
    assert waited(clock, (0,), [0.0, 10.5], 5.0) == [0.0, 0.0]


@pytest.mark.parametrize("clock", [(lambda now_s: now_s >= 1,)], indirect=True)
def test_cores_that_hardly_ever_rest_are_sampled_as_they_are(clock: Clock) -> None:
    first, second, third, *others = waited(clock, (0,), [0.0, 2.0, *(float(at) for at in range(7, 40))], 4.0)
    assert first == 0.0 and second == pytest.approx(4.0, abs=0.02), "no longer than was asked"
    assert third == pytest.approx(2.75, abs=0.02), "5 s, and a quarter of the 7 s that have passed, less the 4 s"
    assert max(others[1:]) == 0.0, "three looks of four were slow"


@pytest.mark.parametrize("clock", [(lambda now_s: now_s % 10 >= 4,)], indirect=True)
def test_all_waits_together_take_a_quarter_of_the_time(clock: Clock) -> None:
    """Asked every second, of which six of ten are slow: the first of these would wait for six."""
    all_s = sum(waited(clock, (0,), map(float, range(1000)), 6.0))
    assert 0.9 * 255 < all_s <= 256, "a quarter of 1,000 s, and 5 s"
