"""When the parts of an answer came, where the client's thread waited for its core."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from harness.engines.http.moments import Moments, waited_for_core_s


class _Thread:
    """A clock, and what a thread has waited."""

    def __init__(self) -> None:
        self.now_s = self.waited_s = 0.0

    def moments(self) -> Moments:
        return Moments(lambda: self.now_s, lambda: self.waited_s)

    def passes(self, seconds: float, waiting_s: float = 0.0) -> None:
        self.now_s += seconds
        self.waited_s += waiting_s


def test_an_answer_came_before_the_thread_waited_for_its_core() -> None:
    thread = _Thread()
    moments = thread.moments()
    thread.passes(1.0, waiting_s=0.5)  # before the request, which this does not concern
    moments.begins(alone=True)
    thread.passes(0.25, waiting_s=0.125)
    assert moments.sent() == 1.25
    thread.passes(0.5)
    assert moments.came() == 1.75
    thread.passes(0.5, waiting_s=0.125)
    assert moments.came() == 2.125
    thread.passes(0.5)
    assert moments.came() == 2.75


def test_no_part_of_an_answer_comes_before_the_part_before_it() -> None:
    thread = _Thread()
    moments = thread.moments()
    moments.begins(alone=True)
    thread.passes(1.0)
    assert moments.sent() == 1.0
    thread.passes(0.25, waiting_s=0.5)
    assert moments.came() == 1.0


def test_with_others_in_flight_nothing_is_taken_off() -> None:
    thread = _Thread()
    moments = thread.moments()
    moments.begins(alone=True)
    moments.sent()
    moments.begins(alone=False)
    moments.sent()
    thread.passes(1.0, waiting_s=0.5)
    assert moments.came() == 1.0


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="this kernel does not count what threads wait for their cores")
def test_the_kernel_counts_what_a_thread_waits_for_a_core_that_another_has() -> None:
    core = {min(os.sched_getaffinity(0))}
    waited_s = []

    def shares() -> None:
        os.sched_setaffinity(0, core)
        before_s, ends_s = waited_for_core_s(), time.monotonic() + 0.5
        while time.monotonic() < ends_s:
            sum(range(1000))
        waited_s.append(waited_for_core_s() - before_s)

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
    assert 0.1 < waited_s[0] < 0.5
