"""What a reference accelerator inside the engine times of its host: constants that a fit need not find.

    assumed |= timed(folder, size, given, fitted_on)

The accelerator notes when requests reach the scheduler, when steps end, and how long looks for an answer take. The
client notes when it sends and when the first token comes. What lies between is the host's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from harness.records import Counters
from harness.results.folder import read_rows, read_samples
from harness.results.summary import counted
from simulator.calibration import PARSING, RESPONSE_NEXT, RESPONSE_STORE, STEP, Assumption, FittedOn
from simulator.middle import middle_mean
from simulator.point_costs import FIRST_POLL, READING, SHORT_POLL, design, is_behind_gpu
from traces.request import RequestRecord

_POLLED = "not fitted: timed inside the engine, from one look of its scheduler for an answer to the next"
_ARRIVED = "not fitted: timed, from the sending of requests to their arrival at the scheduler, alone and together"
_ANSWERED = "not fitted: timed, from the end of the engine's step to the client's first token"
_DECODED = "not fitted: from decoding, where a first token waits for the engine's next step and a last one does not"
_NO_PACE = "only of steps whose time is given does decoding tell it"
# Of a poll, an idle engine sleeps so long, and the front end has its core (core/src/engine/cost.rs).
_IDLE_SLEEP_S = 1e-3


class _Timed(NamedTuple):
    """A sample: its requests, which were sent together, and what the accelerator counted meanwhile."""

    tier: str
    rows: list[RequestRecord]
    moved: Counters


def timed(folder: Path, size: str, given: Mapping[str, Assumption], fitted_on: FittedOn) -> dict[str, Assumption]:
    """Constants by name. given: those that the accelerator keeps to; empty without one, and then little is timed."""
    samples = list(_samples(folder, size))
    poll_s = _poll_s(samples)
    waits_s = _waits_for_next_step_s(fitted_on, given)
    found = {RESPONSE_NEXT: Assumption(value=median(waits_s or [0.0]), why=_DECODED if waits_s else _NO_PACE)}
    if poll_s is None:
        return found
    found["poll_s"] = Assumption(value=poll_s, why=_POLLED)
    found |= {name: Assumption(value=s, why=_ARRIVED) for name, s in _parsing(samples, poll_s).items()}
    return found | {name: Assumption(value=s, why=_ANSWERED) for name, s in _responses(samples).items()}


def _samples(folder: Path, size: str) -> Iterator[_Timed]:
    rows = defaultdict[tuple[object, ...], list[RequestRecord]](list)
    for row in read_rows(folder):
        if row.phase == "measure" and row.expected_tier is not None and counted(row):
            rows[row.cell, row.expected_tier, row.attempt, row.sample].append(row)
    for sample in read_samples(folder):
        mine = rows.get((sample.cell, sample.tier, sample.attempt, sample.index))
        if sample.cell.startswith(size) and mine:
            yield _Timed(sample.tier, mine, sample.observed)


def _poll_s(samples: Sequence[_Timed]) -> float | None:
    """What one look for an answer takes. An engine that waits for a load looks for its end instead, and quicker."""
    seen = [one.moved for one in samples if not is_behind_gpu(one.tier)]
    count = sum(moved.paced.get("polls", 0) for moved in seen)
    return sum(moved.asked_us.get("polls", 0) for moved in seen) / count / 1e6 if count else None


def _parsing(samples: Sequence[_Timed], poll_s: float) -> dict[str, float]:
    """What a front end takes for a request, for each token of its prompt, and the wait after that.

    Of requests sent together it reads all, then parses one after another. Once the first has arrived, the engine looks
    for an answer again and again, and does what it does then on the front end's core. Of hits in the engine's own tier,
    a step begins meanwhile, so that of requests sent together others count.
    """
    short_s = poll_s * SHORT_POLL
    slower, first_s = short_s / min(short_s, _IDLE_SLEEP_S), FIRST_POLL * poll_s - short_s
    arrivals = defaultdict[tuple[int, int], list[float]](list)
    for one in samples:
        count = len(one.rows)
        if "arrivals" in one.moved.at_us and (count == 1 or is_behind_gpu(one.tier)):
            arrived_s = one.moved.at_us["arrivals"] / 1e6 / count
            arrivals[count, one.rows[0].prompt_tokens].append(arrived_s - fmean(row.sent_s for row in one.rows))
    if len({count for count, _ in arrivals}) < 2 or len({tokens for _, tokens in arrivals}) < 2:
        return {}
    measured = np.array([middle_mean(found) - first_s * (count - 1) / count for (count, _), found in arrivals.items()])
    times = [count * READING + (1 + (count - 1) / 2 * slower) * (1 - READING) for count, _ in arrivals]
    matrix = np.array([(each, each * tokens, 1.0) for each, (_, tokens) in zip(times, arrivals, strict=True)])
    scale = np.linalg.norm(matrix / measured[:, None], axis=0)
    found, _ = nnls(matrix / measured[:, None] / scale, np.ones(len(measured)))
    return dict(zip((*PARSING, "request_wait_s"), (float(s) for s in found / scale), strict=True))


def _responses(samples: Sequence[_Timed]) -> dict[str, float]:
    """What passes until the client has a lone request's only token; and what more, where its request is stored."""
    hits, stored = list[float](), list[float]()
    for one in samples:
        row = one.rows[0]
        lone = len(one.rows) == 1 and row.output_tokens == 1 and one.moved.paced.get("steps") == 1
        if lone and "ends" in one.moved.at_us and row.first_token_s is not None:
            whole = row.cached_tokens is not None and row.cached_tokens >= row.prompt_tokens - 1
            (hits if whole else stored).append(row.first_token_s - one.moved.at_us["ends"] / 1e6)
    if not hits:
        return {}
    response_s = max(0.0, float(middle_mean(hits)))
    found = {"response_s": response_s}
    return found | ({RESPONSE_STORE: max(0.0, float(middle_mean(stored)) - response_s)} if stored else {})


def _waits_for_next_step_s(fitted_on: FittedOn, given: Mapping[str, Assumption]) -> list[float]:
    """By how much the first token of a lone decoding came late, of each point: its steps take what the accelerator
    says. Of several at once, first tokens come apart for other reasons, too."""
    waits_s = []
    for point in fitted_on.points if "step_s" in given else ():
        if point.metric == "tpot_s" and point.concurrency == 1:
            row = design(point, fitted_on)
            step_s = sum(times * (given[name].value or 0.0) for name, times in row.items() if name in STEP)
            waits_s.append(max(0.0, (step_s - point.measured_s) * (point.output_tokens - 1)))
    return waits_s
