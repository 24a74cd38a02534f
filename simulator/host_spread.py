"""How the host's times vary, from measured times, and how often an engine looks for an answer then. It needs numpy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.calibration import Answers, CalibrationPoint
from simulator.errors import CalibrationError
from traces.tiers import state_named, tier_named

# A point's own interval tells its spread from so many samples on.
TELLING_SAMPLES = 5
NORMAL_975 = 1.96
# What a front end takes to parse a request.
_PARSING = ("request_s", "request_token_s", "request_chunk_s")
# A look-up, and what came of it (lmcache/integration/vllm/vllm_multi_process_adapter.py, check_lookup_result).
_QUESTIONS = 2
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
            looks_at = functools.partial(looks, answers, point.prompt_tokens // point.chunk_tokens, named["poll_s"])
            found.append(_spread(spread_s, math.hypot(*tasks), looks_at))
        elif any(tasks := [*tasks, *[named["poll_s"]] * questions]):
            found.append(spread_s / math.hypot(*tasks))
    return float(np.median(found)) if found else 0.0


def _spread(spread_s: float, tasks_s: float, looks_at: Callable[[float], Looks]) -> float:
    """The one with which tasks and looks together vary by spread_s. tasks_s: the tasks' root sum of squares."""
    low, high = 0.0, _MOST_SPREAD
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if math.hypot(middle * tasks_s, looks_at(middle).spread_s) < spread_s:
            low = middle
        else:
            high = middle
    return (low + high) / 2


class Looks(NamedTuple):
    """How many there are on average, and the standard deviation of what all of them take, in seconds."""

    number: float
    spread_s: float


@functools.lru_cache(maxsize=4096)
def looks(answers: Answers, chunks: int, poll_s: float, spread: float) -> Looks:
    """For the answers about a lone request of so many chunks; the connector asks on at the look that sees an answer.
    spread: of each answer and each look, over its mean; as the simulator draws them. CalibrationError: looks take no
    time.
    """
    if not poll_s > 0:
        raise CalibrationError("answers take time, and a look for one (poll_s) none: time both, or neither")
    random, reach = np.random.default_rng(0), min(1.0, spread / _MOST_SPREAD)

    def drawn(mean_s: float, count: int = _DRAWS) -> NDArray[np.float64]:
        return mean_s * (1 + reach * random.uniform(-1, 1, count))

    number, at_s = 0, np.zeros(_DRAWS)
    begun_s = drawn(answers.lookup_s)
    found_s = begun_s + drawn(answers.find_chunk_s * chunks)
    for question in range(_QUESTIONS):
        answered_s = begun_s if question == 0 else np.maximum(at_s, found_s) + drawn(answers.status_s)
        waiting = np.ones(_DRAWS, dtype=bool)
        while waiting.any():
            number += int(waiting.sum())
            at_s[waiting] += drawn(poll_s, int(waiting.sum()))
            waiting &= at_s < answered_s
    return Looks(number / _DRAWS, float(at_s.std()))
