"""How fast a core is, and whether it stays so."""

import pytest

from harness.collectors.cores import cores_slower, uninterrupted_s


def test_turns_that_another_process_interrupts_do_not_count() -> None:
    alone_s = [70e-6, 74e-6, 72e-6]
    assert uninterrupted_s(alone_s) == pytest.approx(72e-6)
    assert uninterrupted_s([*alone_s, 4070e-6, 3072e-6]) == uninterrupted_s(alone_s)


def test_a_core_whose_turns_are_all_slow_is_slow() -> None:
    assert uninterrupted_s([140e-6, 144e-6, 70e-6]) == pytest.approx(118e-6)


def test_a_core_that_another_guest_slows_is_told_from_one_that_is_slow_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Core 0 is twice as slow as core 1 and steady; core 1 takes half more in every third look."""
    monkeypatch.setattr("harness.collectors.cores.time.sleep", lambda _: None)
    looks = {0: iter([2.0] * 25), 1: iter([1.0, 1.0, 1.5] * 9)}
    monkeypatch.setattr("harness.collectors.cores.core_loop_s", lambda core: next(looks[core]))
    slower = cores_slower([0, 1])
    assert (slower.half, slower.quarter) == (0.0, 0.0), "8 of 50 looks"
    looks = {0: iter([1.5, 1.0] * 13), 1: iter([1.0, 1.5] * 13)}
    assert cores_slower([0, 1]) == (0.25, 0.5), "25 of 50 looks"
