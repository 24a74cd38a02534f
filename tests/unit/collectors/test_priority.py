"""The load loop wakes before others' work on its core while requests are timed, and no longer."""

import os
import subprocess
import sys

import pytest

from harness.collectors.priority import before_others


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may ask for it")
def test_the_thread_comes_before_others_and_its_children_do_not() -> None:
    policy = os.sched_getscheduler(0)
    with before_others():
        assert os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_RR
        asked = "import os; print(os.sched_getscheduler(0))"
        child = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
        assert int(child.stdout) == os.SCHED_OTHER
    assert os.sched_getscheduler(0) == policy


def test_it_ends_with_an_error_inside() -> None:
    policy = os.sched_getscheduler(0)
    with pytest.raises(ZeroDivisionError), before_others():
        raise ZeroDivisionError
    assert os.sched_getscheduler(0) == policy


def test_who_may_not_ask_for_it_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refused)
    done = []
    with before_others():
        done.append(True)
    assert done
