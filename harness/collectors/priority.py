"""The load loop's place among the other work on its core."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def before_others() -> Iterator[None]:
    """For the calling thread, where it may ask for it (root): the kernel wakes it before others' work on its core.

    For some requests whose arrival is timed, not for a load that keeps the core busy: the others would starve. Children
    that start meanwhile do not have it.
    """
    policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, param)
