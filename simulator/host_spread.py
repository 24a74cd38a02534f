"""How the host's times vary, from measured times, and how often an engine looks for an answer then. It needs numpy."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from simulator.calibration import Answers, CalibrationPoint
from simulator.errors import CalibrationError
from traces.tiers import state_named, tier_named

# A point's own interval tells its spread from so many samples on.
TELLING_SAMPLES = 5
NORMAL_975 = 1.96
# What a front end takes to parse a request.
_PARSING = ("request_s", "request_token_s", "request_chunk_s")
_DRAWS = 4000
# Factors reach from 0 to 2 at most (core/src/engine/jitter.rs).
_MOST_SPREAD = 1 / math.sqrt(3)
# To 0.0002.
_HALVINGS = 12


def host_spread(
    alone: Iterable[tuple[CalibrationPoint, Mapping[str, float]]],
    named: Mapping[str, float],
    answers: Answers,
    questions: int,
) -> float:
    """The spread of each of the host's tasks that gives lone hits in the engine's own tier theirs. Independent tasks
    add their variances. Of the points, the median; 0 where no point tells.

    alone: lone requests, each with how often a constant counts in its time. named: the constants. questions: how many
    the engine's connector asks, at least, and it looks for an answer to each.
    """
    found = []
    for point, row in alone:
        served_by, samples = state_named(point.tier).served_by, point.samples or 0
        own_hit = served_by is not None and not tier_named(served_by).offload
        if not own_hit or samples < TELLING_SAMPLES or point.high_s is None or point.low_s is None:
            continue
        parsing_s = sum(named[name] * row.get(name, 0.0) for name in _PARSING)
        # It parses in two halves (core/src/engine/front_end.rs).
        tasks = [parsing_s / 2, parsing_s / 2, named["request_wait_s"], named["response_s"]]
        # Of a median, whose standard error is that of a mean times the root of π/2.
        spread_s = (point.high_s - point.low_s) / (2 * NORMAL_975) * math.sqrt(samples * 2 / math.pi)
        if answers:
            each_s = answers.each_s(point.prompt_tokens // point.chunk_tokens, questions)
            found.append(_spread(spread_s, math.hypot(*tasks), each_s, named["poll_s"]))
        elif any(tasks := [*tasks, *[named["poll_s"]] * questions]):
            found.append(spread_s / math.hypot(*tasks))
    return float(np.median(found)) if found else 0.0


def _spread(spread_s: float, tasks_s: float, answers_s: tuple[float, ...], poll_s: float) -> float:
    """The one with which tasks and looks together vary by spread_s. tasks_s: the tasks' root sum of squares."""
    low, high = 0.0, _MOST_SPREAD
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if math.hypot(middle * tasks_s, looks(answers_s, poll_s, middle).spread_s) < spread_s:
            low = middle
        else:
            high = middle
    return (low + high) / 2


class Looks(NamedTuple):
    """How many there are on average, and the standard deviation of what all of them take, in seconds."""

    number: float
    spread_s: float


@functools.lru_cache(maxsize=4096)
def looks(answers_s: tuple[float, ...], poll_s: float, spread: float) -> Looks:
    """answers_s: of each question about a lone request, asked at the look that sees the answer before it. spread: of
    each answer and each look, over its mean; as the simulator draws them. CalibrationError: looks take no time.
    """
    if not poll_s > 0:
        raise CalibrationError("answers take time, and a look for one (poll_s) none: time both, or neither")
    random, reach = np.random.default_rng(0), min(1.0, spread / _MOST_SPREAD)
    count, took_s = 0, np.zeros(_DRAWS)
    for answer_s in answers_s:
        left_s, waiting = answer_s * (1 + reach * random.uniform(-1, 1, _DRAWS)), np.ones(_DRAWS, dtype=bool)
        while waiting.any():
            look_s = poll_s * (1 + reach * random.uniform(-1, 1, int(waiting.sum())))
            count += len(look_s)
            took_s[waiting] += look_s
            left_s[waiting] -= look_s
            waiting &= left_s > 0
    return Looks(count / _DRAWS, float(took_s.std()))
