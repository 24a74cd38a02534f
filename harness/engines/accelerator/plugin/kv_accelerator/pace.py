"""When a step or a transfer has to end, how to wait for it, and how late it was. Knows no engine.

The formulas and the names of the constants are the simulator's: core/src/engine/cost.rs and core/src/tiers/device.rs.
Times are seconds of one clock, time.perf_counter unless a test gives another.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

# Up to this much past its end, the next step makes up for a step: a sleeper wakes a little late.
CARRIED_S = 1e-3
# A step or a transfer that ends later than this after its due moment counts as late.
LATE_S = 1e-3
_PR_SET_TIMERSLACK = 29
# A report is written in place: it is padded, so that a shorter one covers all of a longer one.
_REPORT_BYTES = 1024


def wake_precisely() -> None:
    """For the calling thread alone: the kernel wakes it to the microsecond and, where we may ask for it, before others'
    work on the core. A GPU keeps its pace whatever its host does."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def sleep_precisely(seconds: float) -> None:
    """Sleeps, and wakes before others' work on the core; for a thread that must not keep them off it while it works."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        time.sleep(seconds)
        return
    try:
        time.sleep(seconds)
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def share_interpreter() -> None:
    """For the whole process: a thread that wakes gets the interpreter after half a millisecond, and not after five."""
    sys.setswitchinterval(5e-4)


@dataclass(frozen=True)
class StepCost:
    """step = step_s + token_s Σq + attention_s Σq²/2 + attention_context_s Σqc + context_s Σc, and launch_s at least,
    with q the new tokens of a sequence in this step and c its context before it."""

    step_s: float
    token_s: float
    attention_s: float
    attention_context_s: float
    context_s: float
    launch_s: float = 0.0

    def of(self, sequences: Iterable[tuple[int, int]]) -> float:
        """sequences: (q, c) of each."""
        tokens = pairs_twice = context_pairs = context = 0
        for q, c in sequences:
            tokens, pairs_twice = tokens + q, pairs_twice + q * q
            context_pairs, context = context_pairs + q * c, context + c
        computed_s = (
            self.step_s
            + self.token_s * tokens
            + self.attention_s * pairs_twice / 2
            + self.attention_context_s * context_pairs
            + self.context_s * context
        )
        return max(self.launch_s, computed_s)


@dataclass
class Tally:
    """How many there were, the seconds that they were to take, and how late they ended. overrun_s: the sum of what
    they ended after their due moments, whether late or not; worst_s: the most of one."""

    count: int = 0
    asked_s: float = 0.0
    late: int = 0
    overrun_s: float = 0.0
    worst_s: float = 0.0

    def add(self, asked_s: float, overrun_s: float) -> None:
        overrun_s = max(0.0, overrun_s)
        self.count, self.asked_s = self.count + 1, self.asked_s + asked_s
        self.late += overrun_s > LATE_S
        self.overrun_s, self.worst_s = self.overrun_s + overrun_s, max(self.worst_s, overrun_s)


@dataclass
class Report:
    """Totals since the start, written after each step and transfer to a file of the harness. path None: no file.

    polls: schedules of an engine that has requests and can compute none, each with the time until the next schedule.
    moments: how many there were and the sum of their times, of 'arrivals' (a request reached the scheduler) and 'ends'
    (a step ended). With when the requests were sent and answered they tell what the host takes before and after.
    """

    path: str | None = None
    steps: Tally = field(default_factory=Tally)
    polls: Tally = field(default_factory=Tally)
    loads: Tally = field(default_factory=Tally)
    stores: Tally = field(default_factory=Tally)
    moments: dict[str, tuple[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644) if self.path else None
        self._write()

    def add(self, kind: str, asked_s: float, overrun_s: float) -> None:
        """kind: 'steps', 'loads' or 'stores'."""
        with self._lock:
            getattr(self, kind).add(asked_s, overrun_s)
            self._write()

    def note(self, what: str, at_s: float) -> None:
        """A moment of 'arrivals' or 'ends'. The next step or transfer writes it with its own."""
        count, sum_s = self.moments.get(what, (0, 0.0))
        self.moments[what] = count + 1, sum_s + at_s

    def _write(self) -> None:
        if self._file is not None:
            tallies = {name: vars(getattr(self, name)) for name in ("steps", "polls", "loads", "stores")}
            os.pwrite(
                self._file, json.dumps(tallies | {"moments": self.moments}).encode().ljust(_REPORT_BYTES - 1) + b"\n", 0
            )


class Steps:
    """The pace of an engine's steps: begin, plan, finish, each once a step, all in the engine's thread.

    A step's time runs from the moment when the engine begins to schedule it, or from the end of the step before where
    the engine had work all along. So the engine's own Python counts towards the step.
    """

    def __init__(
        self,
        cost: StepCost,
        report: Report,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._cost, self._report, self._clock, self._sleep = cost, report, clock, sleep
        self._began_s = 0.0
        self._follows_s: float | None = None
        self._asked_s: float | None = None
        self._scheduled_s = 0.0
        self._polled_s: float | None = None  # when a schedule began that could compute none of the requests
        self.due_s: float | None = None  # when the step that was planned last ends; None: it computes nothing

    def arrived(self) -> None:
        """A request has reached the scheduler."""
        self._report.note("arrivals", self._clock())

    def begin(self) -> None:
        now_s = self._clock()
        if self._polled_s is not None:
            # The next step writes it with its own: polls come every millisecond.
            self._report.polls.add(now_s - self._polled_s, 0.0)
        self._scheduled_s, self._polled_s = now_s, None
        self._began_s = now_s if self._follows_s is None else self._follows_s

    def plan(self, sequences: Iterable[tuple[int, int]], waiting: bool = False) -> None:
        """sequences: (new tokens, context) of each. Without any, the step only asks its connector, and is not paced.
        waiting: the engine has requests, whether it computes any or not."""
        sequences = tuple(sequences)
        if waiting and not sequences:
            self._polled_s = self._scheduled_s
        self._follows_s = self.due_s = self._asked_s = None
        if sequences:
            self._asked_s = self._cost.of(sequences)
            self.due_s = self._began_s + self._asked_s

    def held_up(self, share_left: float) -> None:
        """What the step waited for came now: this share of its time is still to come, whatever has passed."""
        if self.due_s is not None and self._asked_s is not None:
            self.due_s = max(self.due_s, self._clock() + share_left * self._asked_s)

    def rest(self) -> None:
        """The engine has nothing to go on with: its next step begins when it schedules one."""
        self._follows_s = None

    def finish(self, more: bool) -> None:
        """Waits for the step's end. more: the engine has requests to go on with."""
        if self.due_s is None or self._asked_s is None:
            return
        left_s = self.due_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)
        ended_s = self._clock()
        self._report.note("ends", ended_s)
        self._report.add("steps", self._asked_s, ended_s - self.due_s)
        on_time = ended_s - self.due_s <= CARRIED_S
        self._follows_s = (self.due_s if on_time else ended_s) if more else None


@dataclass(frozen=True)
class LinkCost:
    """One direction. Alone, n chunks take latency_s + n chunk_s + bytes / bytes_per_s; all transfers together move at
    most shared_bytes_per_s."""

    latency_s: float
    chunk_s: float
    bytes_per_s: float
    shared_bytes_per_s: float


class Link:
    """One direction between GPU and CPU RAM: data moves first come, first served; latencies overlap."""

    def __init__(self, cost: LinkCost) -> None:
        self._cost, self._busy_until_s, self._lock = cost, 0.0, threading.Lock()

    def reserve(self, ready_s: float, chunks: float, nbytes: int) -> float:
        """When a transfer ends whose data can move from ready_s on. Parts of one transfer have the same ready_s, and
        share its chunks."""
        alone_s = chunks * self._cost.chunk_s + nbytes / self._cost.bytes_per_s
        with self._lock:
            start_s = max(ready_s + self._cost.latency_s, self._busy_until_s)
            self._busy_until_s = start_s + max(alone_s, nbytes / self._cost.shared_bytes_per_s)
            return self._busy_until_s


def wait_until(due_s: float) -> float:
    """Sleeps until a moment of time.perf_counter. Returns how long ago that moment then is."""
    left_s = due_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
    return time.perf_counter() - due_s


def link_of(constants: Mapping[str, float]) -> Link:
    return Link(LinkCost(**constants))
