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
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from harness.records import Counters
from harness.results.folder import read_rows, read_samples
from harness.results.manifest import read_manifest
from harness.results.summary import counted
from simulator.calibration import (
    ASKING,
    LAUNCH,
    PARSING,
    RESPONSE_NEXT,
    RESPONSE_STORE,
    RESPONSE_TOKEN,
    STEP,
    Assumption,
    CalibrationPoint,
    FittedOn,
)
from simulator.middle import middle_mean
from simulator.point_costs import (
    FIRST_POLL,
    SHORT_POLL,
    asked_s,
    asks_storage,
    design,
    for_each_request,
    is_behind_gpu,
    is_read_ahead,
    reading_share,
)
from traces.request import RequestRecord

_POLLED = "not fitted: timed inside the engine, by how long its scheduler looks for an answer"
_ASKED = "not fitted: timed, by how much longer the engine looks for an answer about more chunks"
_ARRIVED = "not fitted: timed, from the sending of requests to their arrival at the scheduler, alone and together"
_ANSWERED = "not fitted: timed, from the end of the engine's step to the client's first token"
_DECODED = "not fitted: from decoding, where a first token waits for the engine's next step and a last one does not"
_STORAGE = "not fitted: timed, by how much longer a prompt takes beside its step if storage is asked for a part of it"
_NO_PACE = "only of steps whose time is given does decoding tell it"
# Of a poll, an idle engine sleeps so long, and the front end has its core (core/src/engine/cost.rs).
_IDLE_SLEEP_S = 1e-3


class _Timed(NamedTuple):
    """A sample: its requests, which were sent together, and what the accelerator counted meanwhile. chunk_tokens: cells
    of one size share a start of the engine. host_time: how much longer the host's work took meanwhile."""

    tier: str
    chunk_tokens: int
    rows: list[RequestRecord]
    moved: Counters
    host_time: float


def timed(
    folder: Path,
    size: str,
    given: Mapping[str, Assumption],
    fitted_on: FittedOn,
    host_times: Mapping[tuple[str, str], float] | None = None,
) -> dict[str, Assumption]:
    """Constants by name. given: those that the accelerator keeps to; empty without one, and then little is timed.
    host_times: by cell and tier, how much longer the host's work took than what the constants say."""
    samples = list(_samples(folder, size, host_times or {}))
    poll_s, answered = _poll_s(samples), _responses(samples)
    next_s = _waits_for_next_step_s(fitted_on, given, answered.get(RESPONSE_TOKEN, 0.0))
    found = {RESPONSE_NEXT: Assumption(value=median(next_s or [0.0]), why=_DECODED if next_s else _NO_PACE)}
    if poll_s is None:
        if (waits_s := _storage_wait_s(samples, fitted_on)) is not None:
            found["poll_s"] = Assumption(value=waits_s, why=_STORAGE)
    else:
        if asking := _asking(samples, poll_s, for_each_request(fitted_on)["poll_s"]):
            asking_s, poll_s = asking
            found[ASKING] = Assumption(value=asking_s, why=_ASKED)
        found["poll_s"] = Assumption(value=poll_s, why=_POLLED)
    found |= {name: Assumption(value=s, why=_ARRIVED) for name, s in _parsing(samples, poll_s, fitted_on).items()}
    return found | {name: Assumption(value=s, why=_ANSWERED) for name, s in answered.items()}


def _samples(folder: Path, size: str, host_times: Mapping[tuple[str, str], float]) -> Iterator[_Timed]:
    chunk_tokens = _chunk_tokens(folder)
    rows = defaultdict[tuple[object, ...], list[RequestRecord]](list)
    for row in read_rows(folder):
        if row.phase == "measure" and row.expected_tier is not None and counted(row):
            rows[row.cell, row.expected_tier, row.attempt, row.sample].append(row)
    for sample in read_samples(folder):
        mine = rows.get((sample.cell, sample.tier, sample.attempt, sample.index))
        if sample.cell.startswith(size) and mine:
            host_time = host_times.get((sample.cell, sample.tier), 1.0)
            yield _Timed(sample.tier, chunk_tokens.get(sample.cell, 0), mine, sample.observed, host_time)


def _chunk_tokens(folder: Path) -> dict[str, int]:
    """By cell."""
    return {cell.key: cell.cache.chunk_tokens for cell in read_manifest(folder).cells if cell.cache}


def _poll_s(samples: Sequence[_Timed]) -> float | None:
    """What one look for an answer takes. An engine that waits for a load looks for its end instead, and quicker."""
    seen = [one for one in samples if not is_behind_gpu(one.tier)]
    count = sum(one.moved.paced.get("polls", 0) for one in seen)
    return sum(_polled_s(one) for one in seen) / count if count else None


def _polled_s(one: _Timed) -> float:
    return one.moved.asked_us.get("polls", 0) / 1e6 / one.host_time


def _storage_wait_s(samples: Sequence[_Timed], fitted_on: FittedOn) -> float | None:
    """What a lone prompt of one step takes beyond that step, more than a whole hit of as many tokens does, where the
    engine asks storage for what its own tier lacks; None: no such prompts were timed, or nothing told their steps."""
    beyond_s = defaultdict[int, tuple[list[float], list[float]]](lambda: ([], []))
    for one in samples:
        row, step_us = one.rows[0], one.moved.asked_us.get("steps")
        lone = len(one.rows) == 1 and row.output_tokens == 1 and one.moved.paced.get("steps") == 1
        if not lone or is_behind_gpu(one.tier) or step_us is None or row.first_token_s is None:
            continue
        point = CalibrationPoint(
            tier=one.tier,
            prompt_tokens=row.prompt_tokens,
            hit_tokens=row.cached_tokens or 0,
            chunk_tokens=one.chunk_tokens,
            measured_s=row.first_token_s - row.sent_s,
        )
        asking = asks_storage(point, fitted_on)
        if asking or point.hit_tokens >= point.prompt_tokens - fitted_on.block_tokens:
            beyond_s[row.prompt_tokens][asking].append((point.measured_s - step_us / 1e6) / one.host_time)
    both = [
        (middle_mean(asked) - middle_mean(whole), len(asked)) for whole, asked in beyond_s.values() if whole and asked
    ]
    if not both:
        return None
    more_s, weights = zip(*both, strict=True)
    return max(0.0, float(np.average(more_s, weights=weights)))


def _asking(samples: Sequence[_Timed], poll_s: float, polls: float) -> tuple[float, float] | None:
    """What a chunk of a prompt adds to the time in which the engine looks for an answer, and what each of a lone
    look-up's polls takes without: a slow server has the engine ask more often than the rules say, each time as quickly.
    None where all lone requests ask about as many chunks."""
    looked = defaultdict[int, list[float]](list)
    for one in samples:
        if len(one.rows) == 1 and one.chunk_tokens and not is_behind_gpu(one.tier):
            looked[one.rows[0].prompt_tokens // one.chunk_tokens].append(_polled_s(one))
    if len(looked) < 2:
        return None
    chunks, took_s = list(looked), [fmean(times) for times in looked.values()]

    def missed(unknown: NDArray[np.float64]) -> list[float]:
        asking_s, each_s = map(float, unknown)
        says_s = [polls * each_s + asked_s(asking_s * of, each_s) for of in chunks]
        return [says / s - 1 for says, s in zip(says_s, took_s, strict=True)]

    begin = (poll_s / 10, poll_s)
    asking_s, each_s = least_squares(missed, begin, bounds=(0.0, np.inf), x_scale=begin).x
    return float(asking_s), float(each_s)


def _parsing(samples: Sequence[_Timed], poll_s: float | None, fitted_on: FittedOn) -> dict[str, float]:
    """What a front end takes for a request, for each token of its prompt, and the wait after that: the mean over
    samples of what each start of the engine tells, as a host may be quicker during one than during another.

    Of requests sent together it reads all, unless it parses each as a whole, then parses one after another. poll_s:
    once the first has arrived, the engine looks for an answer again and again, and does what it does then on the front
    end's core. None: it gives the core up as long as it waits for storage. Of hits in the engine's own tier, a step
    begins meanwhile, so that of requests sent together others count: of those that are read ahead, two, as the reading
    of the first has the core from then on.
    """
    slower, first_s = 1.0, 0.0
    if poll_s is not None:
        short_s = poll_s * SHORT_POLL
        slower, first_s = short_s / min(short_s, _IDLE_SLEEP_S), FIRST_POLL * poll_s - short_s
    starts = defaultdict[int, dict[tuple[int, int], list[float]]](lambda: defaultdict(list))
    for one in samples:
        count = len(one.rows)
        together = is_behind_gpu(one.tier) if poll_s is not None else count == 2 and is_read_ahead(one.tier, fitted_on)
        if "arrivals" in one.moved.at_us and (count == 1 or together):
            took_s = one.moved.at_us["arrivals"] / 1e6 / count - fmean(row.sent_s for row in one.rows)
            before_s = first_s * (count - 1) / count
            starts[one.chunk_tokens][count, one.rows[0].prompt_tokens].append(took_s / one.host_time - before_s)
    reading = reading_share(fitted_on)
    found, weights = list[NDArray[np.float64]](), list[int]()
    for arrivals in starts.values():
        if min(len(set(each)) for each in zip(*arrivals, strict=True)) < 2:
            continue
        measured = np.array([middle_mean(times) for times in arrivals.values()])
        times = [count * reading + (1 + (count - 1) / 2 * slower) * (1 - reading) for count, _ in arrivals]
        matrix = np.array([(each, each * tokens, 1.0) for each, (_, tokens) in zip(times, arrivals, strict=True)])
        scale = np.linalg.norm(matrix / measured[:, None], axis=0)
        found.append(nnls(matrix / measured[:, None] / scale, np.ones(len(measured)))[0] / scale)
        weights.append(sum(map(len, arrivals.values())))
    if not found:
        return {}
    named = dict(zip((*PARSING, "request_wait_s"), np.average(found, axis=0, weights=weights).tolist(), strict=True))
    # Between its arrival and its step, SGLang's scheduler does more for a request than this: the fit finds the sum.
    return {name: s for name, s in named.items() if poll_s is not None or name in PARSING}


def _responses(samples: Sequence[_Timed]) -> dict[str, float]:
    """What passes until the client has a lone request's only token, for any prompt and for each token of it; and what
    more, where the request is stored."""
    hits, stored = defaultdict[int, list[float]](list), list[tuple[int, float]]()
    for one in samples:
        row = one.rows[0]
        lone = len(one.rows) == 1 and row.output_tokens == 1 and one.moved.paced.get("steps") == 1
        if lone and "ends" in one.moved.at_us and row.first_token_s is not None:
            passed_s = (row.first_token_s - one.moved.at_us["ends"] / 1e6) / one.host_time
            if row.cached_tokens is not None and row.cached_tokens >= row.prompt_tokens - 1:
                hits[row.prompt_tokens].append(passed_s)
            else:
                stored.append((row.prompt_tokens, passed_s))
    if not hits:
        return {}
    measured = np.array([max(0.0, middle_mean(found)) for found in hits.values()])
    matrix = np.array([(1.0, tokens) for tokens in hits])
    found, _ = nnls(matrix[:, : len(hits)], measured)
    response_s, token_s = (*map(float, found), 0.0)[:2]
    answered = {"response_s": response_s, RESPONSE_TOKEN: token_s}
    if stored:
        more_s = float(middle_mean([passed_s - token_s * tokens for tokens, passed_s in stored]))
        answered[RESPONSE_STORE] = max(0.0, more_s - response_s)
    return answered


def _waits_for_next_step_s(
    fitted_on: FittedOn, given: Mapping[str, Assumption], response_token_s: float
) -> list[float]:
    """By how much the first token of a lone decoding came late, of each point, for another reason than its prompt: its
    steps take what the accelerator says. Of several at once, first tokens come apart for other reasons, too."""
    waits_s = []
    for point in fitted_on.points if "step_s" in given else ():
        if point.metric == "tpot_s" and point.concurrency == 1:
            row = design(point, fitted_on)
            computed_s = sum(times * (given[name].value or 0.0) for name, times in row.items() if name in STEP)
            late_s = (max(given[LAUNCH].value or 0.0, computed_s) - point.measured_s) * (point.output_tokens - 1)
            late_s /= point.host_time
            waits_s.append(max(0.0, late_s - response_token_s * point.prompt_tokens))
    return waits_s
