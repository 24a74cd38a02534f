"""Rounds of multi-turn conversations, as SGLang's multi-turn benchmark sends them.

    spec = RoundSpec(clients=20, rounds=10, first_tokens=4096, parallel=4)
    load = rounds_load(spec, seed=1)

In each round every client asks once, at most `parallel` at a time, and each prompt holds all earlier turns. Pure: the
same spec and seed give equal requests and pauses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from traces.errors import SpecError
from traces.request import Request, Segment, reply_stream, stable_id


@dataclass(frozen=True, kw_only=True)
class RoundSpec:
    """first_tokens, turn_tokens: what a client adds in round 0, and in every later one (0: as many as in the first).

    answers: 'synthetic', the next prompt holds a stand-in of output_tokens for each answer; 'quoted', it holds the
    engine's own answers; 'none', it holds none.
    order: who of those that are ready goes next. 'random': one of them. 'fifo': the one that has been ready longest,
    with a barrier the one of the lowest number. 'depth', without a barrier: one that is under way before one that has
    not begun, so that conversations end one after another.
    barrier: a round begins when all of the round before it have ended.
    rate_per_s: sends per second on average, with exponential pauses after the sends; None: no pauses.
    """

    clients: int
    rounds: int
    first_tokens: int
    turn_tokens: int = 0
    output_tokens: int = 1
    parallel: int = 4
    rate_per_s: float | None = None
    order: Literal["random", "fifo", "depth"] = "random"
    barrier: bool = True
    answers: Literal["synthetic", "quoted", "none"] = "synthetic"

    def __post_init__(self) -> None:
        for name, least in (("clients", 1), ("rounds", 1), ("first_tokens", 1), ("turn_tokens", 0), ("parallel", 1)):
            if getattr(self, name) < least:
                raise SpecError(f"{name}: must be at least {least} ({getattr(self, name)}); correct it")
        if self.order == "depth" and self.barrier:
            raise SpecError("order: depth needs barrier False, for at a barrier all wait; set it, or fifo")


@dataclass(frozen=True)
class RoundLoad:
    """Requests by round, and in a round in the order of sending; what else traces.load.Load needs to send them."""

    requests: tuple[Request, ...]
    gaps_s: tuple[float, ...]
    fifo: bool
    shuffle_seed: int | None


def rounds_load(spec: RoundSpec, seed: int) -> RoundLoad:
    """With a barrier all clients are ready when a round begins: a random order is then one permutation a round."""
    rng = np.random.default_rng(seed)
    shuffled = spec.order == "random"
    requests = []
    prompts: list[tuple[Segment, ...]] = [()] * spec.clients
    quotes: list[tuple[str, ...]] = [()] * spec.clients
    for number in range(spec.rounds):
        asked_tokens = spec.first_tokens if number == 0 else spec.turn_tokens or spec.first_tokens
        clients = rng.permutation(spec.clients).tolist() if shuffled and spec.barrier else range(spec.clients)
        for client in clients:
            prompts[client] += (Segment(stable_id("round", seed, client, number), asked_tokens),)
            name = f"{number:03d}-{client:06d}"
            requests.append(
                Request(
                    id=name,
                    prompt=prompts[client],
                    output_tokens=spec.output_tokens,
                    session=f"{client:06d}",
                    turn=number,
                    wave=number if spec.barrier else 0,
                    quotes=quotes[client],
                )
            )
            if spec.answers == "synthetic":
                prompts[client] += (Segment(stable_id("reply", seed, client, number), spec.output_tokens),)
            elif spec.answers == "quoted":
                prompts[client] += (Segment(reply_stream(name), spec.output_tokens),)
                quotes[client] += (name,)
    gaps_s: tuple[float, ...] = ()
    if spec.rate_per_s is not None:
        pauses = np.random.default_rng([seed, stable_id("rounds")])
        gaps_s = tuple(pauses.exponential(1 / spec.rate_per_s, size=len(requests) - 1).tolist())
    # At a barrier all are ready at once, and go in the order given, each when a place comes free.
    fifo = spec.barrier or spec.order == "fifo"
    return RoundLoad(tuple(requests), gaps_s, fifo, seed if shuffled and not spec.barrier else None)
