"""Users who join, ask, and leave, as LMCache's multi-round question answering benchmark sends them.

    spec = QaSpec(users=15, rounds=20, rate_per_s=2.0, history_tokens=8000, duration_s=1200.0)
    load = Load(qa_requests(spec, seed=1), duration_s=spec.duration_s)

An open loop per user: a user asks every users/rate_per_s seconds. One whose answer comes later asks when it comes, and
from then on again at that pace: what was missed is never made up for. Pure: the same spec and seed give equal requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from traces.errors import SpecError
from traces.request import Request, Segment, reply_stream, stable_id

MOST_REQUESTS = 10_000_000


@dataclass(frozen=True, kw_only=True)
class QaSpec:
    """A user asks `rounds` questions and leaves; a new one joins every (rounds - 1) / rate_per_s seconds.

    At second 0, `users` of them are there: one that joins, and others who are in the middle of their sessions. Their
    first prompts hold the turns that they would have had. A prompt is the system's tokens, which all users share, the
    user's history, then each earlier question with its answer, then the question. answers: 'synthetic', a stand-in of
    output_tokens is the answer; 'quoted', the engine's own is, but for the turns before second 0.

    All together ask rounds / (rounds - 1) times rate_per_s, because a user's first and last question both count.
    """

    users: int
    rounds: int
    rate_per_s: float
    duration_s: float
    system_tokens: int = 0
    history_tokens: int = 0
    question_tokens: int = 20
    output_tokens: int = 100
    answers: Literal["synthetic", "quoted"] = "synthetic"

    def __post_init__(self) -> None:
        least = {"users": 1, "rounds": 2, "system_tokens": 0, "history_tokens": 0, "question_tokens": 1}
        for name, at_least in (least | {"output_tokens": 1}).items():
            if getattr(self, name) < at_least:
                raise SpecError(f"{name}: must be at least {at_least} ({getattr(self, name)}); correct it")
        for name in ("rate_per_s", "duration_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise SpecError(f"{name}: must be above 0 ({getattr(self, name)}); correct it")
        if self.rate_per_s * self.duration_s > MOST_REQUESTS:
            asked = f"{self.rate_per_s * self.duration_s:.3g}"
            most = f"{MOST_REQUESTS:,}"
            raise SpecError(f"duration_s: {self.duration_s:g} s hold {asked} requests; shorten it to at most {most}")

    @property
    def interval_s(self) -> float:
        """Between two questions of a user who gets every answer in time."""
        return self.users / self.rate_per_s


def qa_requests(spec: QaSpec, seed: int) -> tuple[Request, ...]:
    """What is asked if every answer comes in time, in order: no load sends more of it within duration_s."""
    # All moments are whole ticks of 1 / rate_per_s. The margin keeps rounding from moving one beyond the end.
    end = spec.duration_s * spec.rate_per_s * (1 - 1e-9)
    step = spec.rounds - 1
    found: list[tuple[int, Request]] = []
    for user in range(spec.users - 1 + math.ceil(end / step)):
        joins = (user - spec.users + 1) * step
        turns = [turn for turn in range(spec.rounds) if 0 <= joins + turn * spec.users < end]
        found += [(joins + one.turn * spec.users, one) for one in _user(spec, seed, user, turns, joins)]
    return tuple(request for _, request in sorted(found, key=lambda entry: entry[0]))


def qa_warmers(spec: QaSpec, seed: int, requests: int, tokens: int) -> tuple[Request, ...]:
    """Requests of their own prompts, for before the load: `tokens` in, as many out as an answer of the load."""
    return tuple(
        Request(
            id=f"warm-{number:06d}",
            prompt=(Segment(stable_id("qa-warm", seed, number), tokens),),
            output_tokens=spec.output_tokens,
        )
        for number in range(requests)
    )


def _user(spec: QaSpec, seed: int, user: int, turns: list[int], joins: int) -> list[Request]:
    """The requests of one user: those of these turns, in order. joins: the tick of turn 0."""
    shared = (Segment(stable_id("qa-system", seed), spec.system_tokens),) if spec.system_tokens else ()
    own = (Segment(stable_id("qa-history", seed, user), spec.history_tokens),) if spec.history_tokens else ()
    prompt = shared + own
    quotes: tuple[str, ...] = ()
    requests = []
    for turn in range(turns[-1] + 1 if turns else 0):
        name, answer = f"{user:06d}-{turn:03d}", stable_id("qa-answer", seed, user, turn)
        prompt += (Segment(stable_id("qa-question", seed, user, turn), spec.question_tokens),)
        if turn >= turns[0]:
            first = turn == turns[0]
            requests.append(
                Request(
                    id=name,
                    prompt=prompt,
                    output_tokens=spec.output_tokens,
                    at_s=(joins + turn * spec.users) / spec.rate_per_s if first else None,
                    session=f"{user:06d}",
                    turn=turn,
                    interval_s=0.0 if first else spec.interval_s,
                    quotes=quotes,
                )
            )
            if spec.answers == "quoted":
                answer = reply_stream(name)
                quotes += (name,)
        prompt += (Segment(answer, spec.output_tokens),)
    return requests
