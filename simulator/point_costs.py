"""How often each constant counts in a calibration point's time: what a fit solves for, and what constants predict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from simulator.calibration import (
    ASKING,
    LAUNCH,
    READ_PASS,
    RESPONSE_STORE,
    RESPONSE_TOKEN,
    STEP,
    Calibration,
    CalibrationPoint,
    FittedOn,
    on_slower_cores,
)
from simulator.models import load_model
from simulator.policies import engine_policy, tier_policy
from traces.tiers import PAGE_CACHE, state_named, tier_named, tier_names

# Of the mean of a lone request's polls: the first one, which wakes the cache server up, and others (core's cost.rs).
FIRST_POLL, SHORT_POLL = 4 / 3, 5 / 6
# Of what a lone request's chunks take, three quarters pass beside polls that wake the server, or at most a quarter of a
# poll (core's polls.rs).
HIDDEN = 1 / 4
# What part of a request's parsing comes before other tasks of the front end (core/src/engine/intake.rs).
_READING = 1 / 3


def design(point: CalibrationPoint, fitted_on: FittedOn, *, synchronous_loads: bool = False) -> dict[str, float]:
    """How often each constant counts in a lone request's time (for bytes_per_s: bytes, so its inverse is linear), and
    in that of a batch whose transfers pass beside its steps. Of other points: which constants count, and about how
    often.
    """
    if point.metric == "batch_s":
        return _batch(point, fitted_on)
    if point.hit_share < 1:
        shares = ((point.hit_share, point.hit_tokens), (1 - point.hit_share, 0))
        parts = [
            (
                share,
                design(
                    msgspec.structs.replace(point, hit_tokens=tokens, hit_share=1.0),
                    fitted_on,
                    synchronous_loads=synchronous_loads,
                ),
            )
            for share, tokens in shares
        ]
        names = dict.fromkeys(name for _, part in parts for name in part)
        return {name: sum(share * part.get(name, 0.0) for share, part in parts) for name in names}
    if point.metric == "tpot_s":
        context = point.prompt_tokens + point.output_tokens / 2 - 1
        count = point.concurrency
        ctx = count * context
        attention = {"attention_s": count / 2, "attention_context_s": ctx, "context_s": ctx}
        return {"step_s": 1.0, "token_s": float(count), "response_s": 1 / point.output_tokens} | attention
    steps = prefill_steps(point, fitted_on)
    row = {
        "step_s": float(len(steps)),
        "token_s": float(point.prompt_tokens - point.hit_tokens),
        "attention_s": sum(new * new / 2 for new, _ in steps),
        "attention_context_s": float(sum(new * context for new, context in steps)),
        "context_s": float(sum(context for _, context in steps)),
        "request_token_s": float(point.prompt_tokens),
        ASKING: float(point.prompt_tokens // point.chunk_tokens),
        "step_request_s": 1.0,
        "hit_token_s": float(point.hit_tokens),
        RESPONSE_TOKEN: float(point.prompt_tokens),
    }
    if is_behind_gpu(point.tier):
        row["store_token_s"] = float(_stored_tokens(point))
    if answers_beside_stores(point, fitted_on):
        row[RESPONSE_STORE] = 1.0
    row |= {name: times for name, times in for_each_request(fitted_on).items() if times}
    devices = _devices(point.tier, fitted_on) if point.hit_tokens else ()
    if devices and not synchronous_loads and (polls := tier_policy(fitted_on.tier_policy).connector.load_polls):
        # It asks all the time: of the one time during which the load ends, half is left.
        row["poll_s"] = row.get("poll_s", 0.0) + (polls + 0.5) * SHORT_POLL
    row |= _ahead(point, fitted_on)
    for device in devices:
        row[f"{device}.latency_s"] = 1.0
        row[f"{device}.chunk_s"] = point.hit_tokens / point.chunk_tokens
        row[f"{device}.bytes_per_s"] = float(point.hit_tokens * load_model(fitted_on.model).kv_bytes_per_token)
        if (point.concurrency > 1 or point.device_bytes_per_s is not None) and device != "cpu.read":
            row[f"{device}.shared_bytes_per_s"] = row[f"{device}.bytes_per_s"]
    return row


def prefill_steps(point: CalibrationPoint, fitted_on: FittedOn) -> list[tuple[int, int]]:
    """(new tokens, tokens of context) of each step of a lone prefill."""
    most, end = fitted_on.max_num_batched_tokens, point.prompt_tokens
    return [(min(most, end - context), context) for context in range(point.hit_tokens, end, most)]


def wakes_server(point: CalibrationPoint, fitted_on: FittedOn) -> bool:
    """Whether polls that wake the cache server up go before an answer that takes no read of storage."""
    woken = tier_policy(fitted_on.tier_policy).connector.wake_polls > 0
    return woken and point.metric == "ttft_s" and state_named(point.tier).from_device is None


def asked_s(all_s: float, poll_s: float) -> float:
    """What a lone request's chunks add to its time, of what the server takes for them, where polls wake it."""
    return max(HIDDEN * all_s, all_s - HIDDEN * poll_s)


def lone_s(
    row: Mapping[str, float], steps: Sequence[tuple[int, int]], slopes: Mapping[str, float], *, woken: bool
) -> float:
    """The time of a point whose `design`, `prefill_steps` and `wakes_server` these are."""
    hidden_s = 0.0
    if woken:
        asking_s = slopes[ASKING] * row[ASKING]
        hidden_s = asking_s - asked_s(asking_s, slopes["poll_s"])
    if not slopes[LAUNCH]:
        return sum(slopes[name] * times for name, times in row.items()) - hidden_s
    computed = (
        slopes["step_s"]
        + slopes["token_s"] * new
        + slopes["attention_s"] * new * new / 2
        + slopes["attention_context_s"] * new * context
        + slopes["context_s"] * context
        for new, context in steps
    )
    beside = sum(slopes[name] * times for name, times in row.items() if name not in STEP) - hidden_s
    return beside + sum(max(slopes[LAUNCH], step_s) for step_s in computed)


def _batch(point: CalibrationPoint, fitted_on: FittedOn) -> dict[str, float]:
    """The engine's steps for requests that are sent at once and get one token each."""
    context = min(point.hit_tokens, point.prompt_tokens - 1)
    count, new = point.concurrency, point.prompt_tokens - context
    steps = max(count * new / fitted_on.max_num_batched_tokens, count / fitted_on.max_num_seqs)
    return {
        "step_s": float(math.ceil(steps)),
        "token_s": float(count * new),
        "attention_s": count * new * new / 2,
        "attention_context_s": float(count * new * context),
        "context_s": float(count * context),
        "step_request_s": float(count),
        "hit_token_s": float(count * context),
        "request_wait_s": 1.0,
    }


def is_behind_gpu(name: str) -> bool:
    """Whether hits in a state come from a tier behind the engine's own."""
    served_by = state_named(name).served_by
    return served_by is not None and tier_named(served_by).offload


def answers_beside_stores(point: CalibrationPoint, fitted_on: FittedOn) -> bool:
    """The first token passes the front end while what the request computed is stored. An engine that prefills first
    stores once a request has ended. An engine without a tier behind its own stores nothing, and what published points
    stored is not known.
    """
    stores = fitted_on.engine is not None and any(is_behind_gpu(one.tier) for one in fitted_on.points)
    before = stores and not engine_policy(fitted_on.engine_policy).prefills_first
    return before and _stored_tokens(point) > 0


def _stored_tokens(point: CalibrationPoint) -> int:
    """In whole chunks, and not what a hit held."""
    return max(0, point.prompt_tokens // point.chunk_tokens * point.chunk_tokens - point.hit_tokens)


def asks_storage(point: CalibrationPoint, fitted_on: FittedOn) -> bool:
    """An engine that reads ahead asks the tiers below the first one behind it for what that and the GPU lack."""
    below = _read_ahead(fitted_on)
    held = 0 if state_named(point.tier).served_by in below else point.hit_tokens
    lacking = (point.prompt_tokens - 1 - held) // fitted_on.block_tokens * fitted_on.block_tokens
    least = max(1, tier_policy(fitted_on.tier_policy).min_prefetch_tokens)
    return engine_policy(fitted_on.engine_policy).reads_ahead and bool(below) and lacking >= least


def is_read_ahead(name: str, fitted_on: FittedOn) -> bool:
    """Whether an engine that reads ahead has hits in a state read before their turn."""
    ahead = engine_policy(fitted_on.engine_policy).reads_ahead
    return ahead and state_named(name).served_by in _read_ahead(fitted_on)


def reading_share(fitted_on: FittedOn) -> float:
    """What part of a request's parsing the front end does before it turns to others that are there."""
    return 0.0 if engine_policy(fitted_on.engine_policy).parses_whole else _READING


def _read_ahead(fitted_on: FittedOn) -> set[str | None]:
    """The tiers below the first one behind the engine that some point is served by."""
    behind = [tier for tier in tier_names() if tier_named(tier).offload]
    return {state_named(one.tier).served_by for one in fitted_on.points} & set(behind[1:])


def _ahead(point: CalibrationPoint, fitted_on: FittedOn) -> dict[str, float]:
    """What a prompt takes that storage is asked about before its turn."""
    if not asks_storage(point, fitted_on):
        return {}
    if not is_read_ahead(point.tier, fitted_on):
        return {"poll_s": 1.0}
    # All wait while the first one is read, and the last one alone: the mean of n has the sum of 1² to n² over n.
    waiting = (point.concurrency + 1) * (2 * point.concurrency + 1) / 6
    return {"poll_s": 1.0, READ_PASS: point.hit_tokens / point.chunk_tokens * waiting}


def _devices(name: str, fitted_on: FittedOn) -> list[str]:
    """What the bytes of a hit pass: the device of storage or its page cache, and the RAM between it and the engine.

    Of tiers in RAM, those that some point is served by; where none is, the one next to the engine.
    """
    state = state_named(name)
    if state.served_by is None or not is_behind_gpu(name):
        return []
    served = {state_named(point.tier).served_by for point in fitted_on.points}
    down_to = tier_names().index(state.served_by) + 1
    ram = [tier for tier in tier_names()[:down_to] if tier_named(tier).kind == "memory"]
    passed = [tier for tier in ram if tier in served] or ram[:1]
    if state.from_device is not None:
        passed.append(state.served_by if state.from_device else PAGE_CACHE)
    return [f"{device}.read" for device in passed]


def predicted_s(point: CalibrationPoint, calibration: Calibration) -> float:
    """What the constants say of a lone point."""
    row = design(point, calibration.fitted_on, synchronous_loads=calibration.synchronous_loads)
    steps = prefill_steps(point, calibration.fitted_on)
    slopes = {name: slope_of(name, calibration.constant(name)) for name in (*row, *STEP)}
    slopes = on_slower_cores(slopes, point.host_time)
    return lone_s(row, steps, slopes, woken=wakes_server(point, calibration.fitted_on))


def for_each_request(fitted_on: FittedOn) -> dict[str, float]:
    """How often a lone request takes each constant of the host's, whatever its prompt."""
    connector = tier_policy(fitted_on.tier_policy).connector
    polls = connector.lookup_polls + connector.wake_polls
    return {"request_s": 1.0, "request_wait_s": 1.0, "response_s": 1.0, "poll_s": float(polls)}


def is_linear(point: CalibrationPoint, fitted_on: FittedOn) -> bool:
    """Its time is linear in the constants, as `design` says. Not where an engine computes while what it loads comes."""
    if point.metric == "batch_s":
        return True
    beside = engine_policy(fitted_on.engine_policy).prefills_first and is_behind_gpu(point.tier)
    return point.concurrency == 1 and point.device_bytes_per_s is None and point.metric == "ttft_s" and not beside


def slope_of(name: str, value: float) -> float:
    return 1 / value if name.endswith("bytes_per_s") else value
