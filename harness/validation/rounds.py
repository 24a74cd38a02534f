"""Multi-turn rounds as SGLang's benchmark sends them: in each round every client once, in random order, some at a time,
its prompt longer by a turn. What the simulator's tiers hit in each round."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from harness.experiment.units import parse_bytes
from simulator.calibration import load_calibration
from simulator.errors import ModelError
from simulator.models import load_model
from simulator.simulate import Completion, Simulator
from traces.request import Request, Segment

_MAX_BATCHED_TOKENS = 8192  # SGLang's chunked prefill size


class Rounds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """cache: sizes of the GPU and CPU tiers and their grain; schemes: size of the last tier, by the table's names."""

    setup: str
    model: str
    hardware: str
    clients: int
    rounds: int
    round_tokens: int
    parallel: int
    seeds: tuple[int, ...]
    cache: dict[str, Any]
    schemes: dict[str, str]


def hit_rates(rounds: Rounds, scheme: str) -> list[list[float]]:
    """Share of the prompt tokens of each round that came from any tier, a list for each seed; it ends before the first
    round whose prompts are longer than the model takes."""
    return [_one(rounds, parse_bytes(rounds.schemes[scheme]), seed) for seed in rounds.seeds]


def _one(rounds: Rounds, pool_bytes: int, seed: int) -> list[float]:
    rng, simulator = np.random.default_rng(seed), _simulator(rounds, pool_bytes)
    found = []
    longest = (simulator.model.max_position - 1) // rounds.round_tokens
    for number in range(1, min(rounds.rounds, longest) + 1):
        order = rng.permutation(rounds.clients).tolist()
        requests = [_request(rounds, client, number) for client in order]
        done = _closed_loop(simulator, requests, rounds.parallel)
        found.append(1 - sum(one.computed for one in done) / sum(one.prompt_tokens for one in done))
    return found


def _simulator(rounds: Rounds, pool_bytes: int) -> Simulator:
    model, cache = load_model(rounds.model), rounds.cache
    return Simulator(
        model,
        load_calibration(rounds.hardware),
        "vllm-0.32",
        "lru",
        gpu_blocks=parse_bytes(cache["gpu"]) // (model.kv_bytes_per_token * cache["block_tokens"]),
        block_tokens=cache["block_tokens"],
        chunk_tokens=cache["chunk_tokens"],
        cpu_bytes=parse_bytes(cache["cpu"]),
        disk_bytes=pool_bytes,
        odirect=True,
        max_num_batched_tokens=_MAX_BATCHED_TOKENS,
        max_num_seqs=256,
    )


def _request(rounds: Rounds, client: int, number: int) -> Request:
    prompt = (Segment(client + 1, number * rounds.round_tokens),)
    return Request(id=f"{number}-{client}", prompt=prompt, output_tokens=1)


def _closed_loop(simulator: Simulator, requests: list[Request], parallel: int) -> list[Completion]:
    """Sends the requests in order, so many at a time, and waits for all: the benchmark's barrier."""
    waiting, done = list(reversed(requests)), []
    flying = 0
    while waiting or flying:
        while waiting and flying < parallel:
            simulator.submit(waiting.pop(), simulator.now_s)
            flying += 1
        completions = simulator.advance()
        if failed := next((one for one in completions if one.error), None):
            raise ModelError(f"rounds: request {failed.id} of {failed.prompt_tokens} tokens: {failed.error}")
        flying -= len(completions)
        done += completions
    return done
