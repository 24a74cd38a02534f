"""When the parts of an answer came, where the client's thread waited for its core."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from harness.engines.http.moments import FEW, Moments, Turns, turns_of_this_thread


class _Thread:
    """A clock, and a thread's turns on its core."""

    def __init__(self) -> None:
        self.now_s, self.turns = 0.0, Turns()

    def moments(self) -> Moments:
        return Moments(lambda: self.now_s, lambda: self.turns)

    def passes(self, seconds: float, waiting_s: float = 0.0, turns: int = 1) -> None:
        self.now_s += seconds
        self.turns = Turns(self.turns.waited_s + waiting_s, self.turns.times + turns)


def test_an_answer_came_before_the_thread_that_it_woke_up_waited_for_its_core() -> None:
    thread = _Thread()
    moments = thread.moments()
    thread.passes(1.0, waiting_s=0.5)  # before the request, which this does not concern
    moments.begins(0)
    thread.passes(0.25, waiting_s=0.125)
    assert moments.sent() == 1.25
    thread.passes(0.5)
    assert moments.came() == 1.75
    thread.passes(0.5, waiting_s=0.125)
    assert moments.came() == 2.125
    thread.passes(0.5)
    assert moments.came() == 2.75


def test_a_thread_that_got_its_core_more_often_may_have_waited_for_something_else() -> None:
    thread = _Thread()
    moments = thread.moments()
    moments.begins(0)
    moments.sent()
    thread.passes(1.0, waiting_s=0.5, turns=2)
    assert moments.came() == 1.0
    thread.passes(1.0, waiting_s=0.5, turns=0)  # read without sleep
    assert moments.came() == 2.0
    thread.passes(1.0, waiting_s=0.5)
    assert moments.came() == 2.5


def test_no_part_of_an_answer_comes_before_the_part_before_it() -> None:
    thread = _Thread()
    moments = thread.moments()
    moments.begins(0)
    thread.passes(1.0)
    assert moments.sent() == 1.0
    thread.passes(0.25, waiting_s=0.5)
    assert moments.came() == 1.0


def test_of_answers_in_flight_together_the_first_that_is_read_had_woken_the_thread() -> None:
    thread = _Thread()
    moments = thread.moments()
    moments.begins(0)
    moments.sent()
    moments.begins(1)
    thread.passes(0.25, turns=0)
    assert moments.sent() == 0.25
    thread.passes(1.0, waiting_s=0.5)
    assert moments.came() == 0.75
    thread.passes(0.125, turns=0)  # the other answer came while the thread waited, or now
    assert moments.came() == 1.375
    thread.passes(0.5, waiting_s=0.25)
    assert moments.came() == 1.625


def test_a_heavy_load_keeps_its_times_as_they_are() -> None:
    thread = _Thread()
    moments = thread.moments()
    moments.begins(FEW)
    moments.sent()
    thread.passes(1.0, waiting_s=0.5)
    assert moments.came() == 1.0


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(),
    reason="this kernel does not count what threads wait for their cores",
)
def test_the_kernel_counts_what_a_thread_waits_for_a_core_that_another_has() -> None:
    core = {min(os.sched_getaffinity(0))}
    found = []

    def shares() -> None:
        os.sched_setaffinity(0, core)
        before, ends_s = turns_of_this_thread(), time.monotonic() + 0.5
        while time.monotonic() < ends_s:
            sum(range(1000))
        after = turns_of_this_thread()
        found.append((after.waited_s - before.waited_s, after.times - before.times))

    pid = os.fork()
    if pid == 0:
        os.sched_setaffinity(0, core)
        while True:
            pass
    try:
        worker = threading.Thread(target=shares)
        worker.start()
        worker.join()
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    [(waited_s, times)] = found
    assert 0.1 < waited_s < 0.5 and times > 1
