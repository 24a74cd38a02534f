"""Seeded load: shared prefixes with an exact hit rate, and sessions whose prompts grow.

    spec = SyntheticSpec(requests=100, prompt_tokens=4097, hit_rate=0.75, prefixes=10)
    load = Load(warmers(spec, seed=1) + synthetic(spec, seed=1), concurrency=4)

All functions are pure: the same spec and seed give equal requests. The seed is also the namespace of the token
streams: different seeds share no content. So a measurement that needs a cold cache uses a seed of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from traces.errors import SpecError
from traces.request import Request, Segment, reply_stream, stable_id

Arrivals = Literal["closed", "constant", "poisson"]
ARRIVALS = ("closed", "constant", "poisson")


@dataclass(frozen=True, kw_only=True)
class SyntheticSpec:
    """Requests that share prefixes.

    hit_rate: the share of a prompt that is one of `prefixes` prefixes, in whole chunks of granularity_tokens.
    zipf: requests choose the k-th prefix in proportion to k**-zipf; 0 makes all equally likely.
    arrivals: 'closed' has no times; 'constant' and 'poisson' begin at 0 s with rate_per_s on average.
    """

    requests: int
    prompt_tokens: int
    hit_rate: float = 0.0
    prefixes: int = 1
    zipf: float = 0.0
    output_tokens: int = 1
    granularity_tokens: int = 256
    arrivals: Arrivals = "closed"
    rate_per_s: float | None = None

    def __post_init__(self) -> None:
        _at_least(self, 1, "requests", "prompt_tokens", "prefixes", "output_tokens", "granularity_tokens")
        _check_arrivals(self.arrivals, self.rate_per_s)
        if not 0 <= self.hit_rate <= 1:
            raise SpecError(f"hit_rate: must lie in 0..1 ({self.hit_rate}); give a share, not a percentage")
        if not 0 <= self.zipf <= 10:
            raise SpecError(f"zipf: must lie in 0..10 ({self.zipf}); give 0 for equally likely prefixes")
        if self.hit_rate > 0 and self.prompt_tokens <= self.granularity_tokens:
            raise SpecError(
                f"prompt_tokens: no whole chunk can be hit in a prompt this short ({self.prompt_tokens}); give at "
                f"least granularity_tokens + 1 = {self.granularity_tokens + 1}, or hit_rate 0"
            )


@dataclass(frozen=True, kw_only=True)
class SessionSpec:
    """Multi-turn sessions. Arrivals are those of the sessions; think_s is the mean pause before a next turn.

    answers: 'synthetic', a stand-in of output_tokens is each answer; 'quoted', the engine's own is.
    """

    sessions: int
    turns: int
    user_tokens: int
    output_tokens: int
    system_tokens: int = 0
    think_s: float = 0.0
    arrivals: Arrivals = "closed"
    rate_per_s: float | None = None
    answers: Literal["synthetic", "quoted"] = "synthetic"

    def __post_init__(self) -> None:
        _at_least(self, 1, "sessions", "turns", "user_tokens", "output_tokens")
        _at_least(self, 0, "system_tokens")
        _check_arrivals(self.arrivals, self.rate_per_s)
        if not 0 <= self.think_s < float("inf"):
            raise SpecError(f"think_s: must be seconds from 0 ({self.think_s}); give 0 for no pause")


def shared_tokens(spec: SyntheticSpec) -> int:
    """Number of leading tokens that each prompt shares: whole chunks, and never the last token of the prompt.

    An engine recomputes at least one token, so a prompt of n tokens can hit (n - 1) // granularity chunks. The
    resulting rate is the nearest one that whole chunks allow.
    """
    chunks = (spec.prompt_tokens - 1) // spec.granularity_tokens
    return round(spec.hit_rate * chunks) * spec.granularity_tokens


def synthetic(spec: SyntheticSpec, seed: int) -> tuple[Request, ...]:
    """Makes requests of a shared prefix of shared_tokens(spec) tokens and a unique suffix each."""
    rng = _rng(seed, "synthetic")
    weights = np.arange(1, spec.prefixes + 1, dtype=np.float64) ** -spec.zipf
    chosen = rng.choice(spec.prefixes, size=spec.requests, p=weights / weights.sum())
    times = _times(rng, spec.requests, spec.arrivals, spec.rate_per_s)
    shared = shared_tokens(spec)
    requests = []
    for index, (prefix, at_s) in enumerate(zip(chosen.tolist(), times, strict=True)):
        suffix = Segment(stable_id("suffix", seed, index), spec.prompt_tokens - shared)
        prompt = (_prefix(seed, prefix, shared), suffix) if shared else (suffix,)
        requests.append(Request(id=f"{index:06d}", prompt=prompt, output_tokens=spec.output_tokens, at_s=at_s))
    return tuple(requests)


def warmers(spec: SyntheticSpec, seed: int) -> tuple[Request, ...]:
    """One request per shared prefix: exactly that prefix and one output token; no request if shared_tokens is 0."""
    shared = shared_tokens(spec)
    return tuple(
        Request(id=f"warm-{prefix:06d}", prompt=(_prefix(seed, prefix, shared),), output_tokens=1)
        for prefix in range(spec.prefixes if shared else 0)
    )


def conversation(spec: SessionSpec, seed: int) -> tuple[Request, ...]:
    """Sessions one after another, each of `turns` requests whose prompts grow.

    A prompt is the system prefix that all sessions share, then per earlier turn the user's segment and the answer,
    then the user's new segment. KV that the engine computed while decoding is hit only where answers are quoted.
    delay_s is drawn from an exponential distribution of mean think_s; the first turn has none.
    """
    rng = _rng(seed, "conversation")
    times = _times(rng, spec.sessions, spec.arrivals, spec.rate_per_s)
    pauses = rng.exponential(spec.think_s, size=(spec.sessions, spec.turns))
    pauses[:, 0] = 0.0
    system = (Segment(stable_id("system", seed), spec.system_tokens),) if spec.system_tokens else ()
    requests = []
    for session, at_s in enumerate(times):
        prompt: tuple[Segment, ...] = system
        quotes: tuple[str, ...] = ()
        for turn in range(spec.turns):
            prompt += (Segment(stable_id("user", seed, session, turn), spec.user_tokens),)
            name, answer = f"{session:06d}-{turn:02d}", stable_id("answer", seed, session, turn)
            requests.append(
                Request(
                    id=name,
                    prompt=prompt,
                    output_tokens=spec.output_tokens,
                    at_s=None if turn else at_s,
                    session=f"{session:06d}",
                    turn=turn,
                    delay_s=float(pauses[session, turn]),
                    quotes=quotes,
                )
            )
            if spec.answers == "quoted":
                answer, quotes = reply_stream(name), (*quotes, name)
            prompt += (Segment(answer, spec.output_tokens),)
    return tuple(requests)


def _prefix(seed: int, index: int, tokens: int) -> Segment:
    return Segment(stable_id("prefix", seed, index), tokens)


def _rng(seed: int, purpose: str) -> np.random.Generator:
    if seed < 0:
        raise SpecError(f"seed: must not be negative ({seed}); give any whole number from 0")
    return np.random.default_rng([seed, stable_id(purpose)])


def _times(
    rng: np.random.Generator, count: int, arrivals: Arrivals, rate_per_s: float | None
) -> list[float] | list[None]:
    """Send times in seconds, the first 0; Nones for a closed loop."""
    if rate_per_s is None:
        return [None] * count
    if arrivals == "constant":
        return [index / rate_per_s for index in range(count)]
    gaps = rng.exponential(1 / rate_per_s, size=count)
    gaps[0] = 0.0
    times: list[float] = np.cumsum(gaps).tolist()
    return times


def _at_least(spec: object, least: int, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if not least <= value <= 10**9:
            raise SpecError(f"{name}: must be {least} to 10^9 ({value}); give a whole number in that range")


def _check_arrivals(arrivals: str, rate_per_s: float | None) -> None:
    if arrivals not in ARRIVALS:
        raise SpecError(f"arrivals: is unknown ({arrivals!r}); give one of {', '.join(ARRIVALS)}")
    if arrivals == "closed" and rate_per_s is not None:
        raise SpecError(f"rate_per_s: a closed loop has no rate ({rate_per_s}); leave it out, or choose poisson")
    if arrivals != "closed" and (rate_per_s is None or not 0 < rate_per_s <= 1e9):
        raise SpecError(f"rate_per_s: {arrivals} arrivals need a rate above 0 ({rate_per_s}); give requests per s")
