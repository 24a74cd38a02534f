"""Users of different kinds in conversations: lengths of their questions, of the answers, and their think times.

    spec = PersonaSpec(users=8, turns=3, personas=(Persona(name="chatbot", share=1.0, context_tokens=(256, 1024),
                                                           output_tokens=(50, 150), think_s=(0.1, 0.5)),))
    load = Load(persona_requests(spec, seed=1), concurrency=8)

Pure: the same spec and seed give equal requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traces.errors import SpecError
from traces.request import Request, Segment, stable_id


@dataclass(frozen=True, kw_only=True)
class Persona:
    """A kind of user with a relative share of all users. Each turn draws uniformly from the inclusive ranges."""

    name: str
    share: float
    context_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    think_s: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        for field, least in (("context_tokens", 1), ("output_tokens", 1), ("think_s", 0)):
            low, high = getattr(self, field)
            if not least <= low <= high:
                raise SpecError(f"{field} of {self.name}: needs {least} <= low <= high ({low}, {high}); correct it")
        if not self.share > 0:
            raise SpecError(f"share of {self.name}: must be above 0 ({self.share}); leave the persona out instead")


@dataclass(frozen=True, kw_only=True)
class PersonaSpec:
    users: int
    turns: int
    personas: tuple[Persona, ...]

    def __post_init__(self) -> None:
        for field in ("users", "turns"):
            if getattr(self, field) < 1:
                raise SpecError(f"{field}: must be at least 1 ({getattr(self, field)})")
        if not self.personas:
            raise SpecError("personas: is empty; name at least one")


def persona_requests(spec: PersonaSpec, seed: int) -> tuple[Request, ...]:
    """Makes `turns` requests for each user, user after user.

    A turn's prompt is the whole conversation so far and the new question. A stand-in of the same number of tokens
    replaces each answer. Users share no content. delay_s is the think time.
    """
    rng = np.random.default_rng([seed, stable_id("personas")])
    shares = np.array([persona.share for persona in spec.personas])
    kinds = rng.choice(len(spec.personas), size=spec.users, p=shares / shares.sum())
    requests = []
    for user, kind in enumerate(kinds.tolist()):
        persona = spec.personas[kind]
        prompt: tuple[Segment, ...] = ()
        for turn in range(spec.turns):
            asked, answered = (
                int(rng.integers(low, high + 1)) for low, high in (persona.context_tokens, persona.output_tokens)
            )
            think_s = float(rng.uniform(*persona.think_s))
            prompt += (Segment(stable_id("asked", seed, user, turn), asked),)
            requests.append(
                Request(
                    id=f"{user:06d}-{turn:02d}",
                    prompt=prompt,
                    output_tokens=answered,
                    session=f"{persona.name}-{user:06d}",
                    turn=turn,
                    delay_s=think_s if turn else 0.0,
                )
            )
            prompt += (Segment(stable_id("answered", seed, user, turn), answered),)
    return tuple(requests)
