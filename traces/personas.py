"""Users of different kinds in conversations: lengths of their questions, of the answers, and their think times.

    spec = PersonaSpec(users=8, turns=3, personas=(Persona(name="chatbot", share=1.0, context_tokens=(256, 1024),
                                                           output_tokens=(50, 150), think_s=(0.1, 0.5)),))
    load = Load(persona_requests(spec, seed=1), concurrency=8)

Pure: the same spec and seed give equal requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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


# The kinds of users of the MLPerf Storage KV-cache benchmark, and of a mixed service. In the benchmark all kinds are
# equally frequent, and its coding context begins where its chatbot's ends.
PERSONA_SETS: dict[str, tuple[Persona, ...]] = {
    "mlperf": (
        Persona(name="chatbot", share=1, context_tokens=(512, 4096), output_tokens=(50, 200), think_s=(0.1, 0.5)),
        Persona(name="coding", share=1, context_tokens=(4096, 25000), output_tokens=(100, 500), think_s=(0.2, 1.0)),
        Persona(name="document", share=1, context_tokens=(4096, 16384), output_tokens=(200, 800), think_s=(0.3, 1.5)),
    ),
    "mixed": (
        Persona(name="chatbot", share=6, context_tokens=(256, 1024), output_tokens=(50, 150), think_s=(0.1, 0.5)),
        Persona(name="coding", share=3, context_tokens=(1024, 4096), output_tokens=(100, 500), think_s=(0.2, 1.0)),
        Persona(name="document", share=1, context_tokens=(2048, 8192), output_tokens=(200, 800), think_s=(0.3, 1.5)),
    ),
}


@dataclass(frozen=True, kw_only=True)
class SharedPrompts:
    """System prompts: a share of the conversations begins with one of them."""

    share: float
    prompts: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Retrieval: a share of the turns is a question on some chunks of a document, and a conversation of its own.

    tokens: the range of a document's length. A question draws `chunks` of its chunks; the i-th one, from 0, in
    proportion to 1 / (i + 1)."""

    share: float
    documents: int
    tokens: tuple[int, int]
    chunk_tokens: int
    chunks: int


@dataclass(frozen=True, kw_only=True)
class PersonaSpec:
    """turns: of each user, over all of its conversations. new_conversation: how likely a user begins another one after
    a turn. conversation_tokens: a turn that would make a prompt with its answer longer begins another one, too.

    answers: 'synthetic', a stand-in of each answer is in later prompts; 'none', no answer is.
    draw: 'turn', each turn draws from the persona's ranges; 'user', a user draws its own maxima from them once, and
    each turn between a quarter of its maximum and that; its think time varies by a fifth.
    """

    users: int
    turns: int
    personas: tuple[Persona, ...]
    new_conversation: float = 0.0
    conversation_tokens: int | None = None
    answers: Literal["synthetic", "none"] = "synthetic"
    draw: Literal["turn", "user"] = "turn"
    system: SharedPrompts | None = None
    documents: Documents | None = None

    def __post_init__(self) -> None:
        for field in ("users", "turns"):
            if getattr(self, field) < 1:
                raise SpecError(f"{field}: must be at least 1 ({getattr(self, field)})")
        if not self.personas:
            raise SpecError("personas: is empty; name at least one")

    def outgrown(self, prompt: Sequence[Segment], turn_tokens: int) -> bool:
        """Whether a turn of so many tokens no longer fits into the conversation."""
        most = self.conversation_tokens
        return most is not None and sum(segment.tokens for segment in prompt) + turn_tokens > most


def persona_requests(spec: PersonaSpec, seed: int) -> tuple[Request, ...]:
    """Makes `turns` requests for each user, user after user.

    A turn's prompt is the whole conversation so far and the new question. Users share no content but system prompts and
    documents. delay_s is the think time.
    """
    rng = np.random.default_rng([seed, stable_id("personas")])
    shares = np.array([persona.share for persona in spec.personas])
    kinds = rng.choice(len(spec.personas), size=spec.users, p=shares / shares.sum())
    beginnings = _Beginnings(spec, seed)
    requests = []
    for user, kind in enumerate(kinds.tolist()):
        persona = spec.personas[kind]
        draw = _Draw(spec, persona, rng)
        prompt, names = beginnings.conversation()
        for turn in range(spec.turns):
            asked, answered, think_s = draw.turn()
            question = Segment(stable_id("asked", seed, user, turn), asked)
            retrieved = beginnings.retrieved()
            if not retrieved and spec.outgrown(prompt, asked + answered):
                prompt, names = beginnings.conversation()
            requests.append(
                Request(
                    id=f"{user:06d}-{turn:02d}",
                    prompt=(*(retrieved or prompt), question),
                    output_tokens=answered,
                    session=f"{persona.name}-{user:06d}",
                    turn=turn,
                    delay_s=think_s if turn else 0.0,
                    kinds=("document",) * len(retrieved) if retrieved else names,
                )
            )
            if retrieved:
                continue
            prompt += (question,)
            if spec.answers == "synthetic":
                prompt += (Segment(stable_id("answered", seed, user, turn), answered),)
            if beginnings.leaves():
                prompt, names = beginnings.conversation()
    return tuple(requests)


def document_requests(spec: PersonaSpec, seed: int) -> tuple[Request, ...]:
    """One request a document, which brings all of its chunks into the cache."""
    return tuple(
        Request(id=f"document-{number:04d}", prompt=chunks, output_tokens=1, kinds=("document",) * len(chunks))
        for number, chunks in enumerate(_documents(spec, seed))
    )


class _Draw:
    """Lengths and pauses of one user's turns."""

    def __init__(self, spec: PersonaSpec, persona: Persona, rng: np.random.Generator) -> None:
        self._rng, self._ranges, self._think_s = rng, (persona.context_tokens, persona.output_tokens), persona.think_s
        if spec.draw == "user":
            most = [int(rng.integers(low, high + 1)) for low, high in self._ranges]
            think_s = float(rng.uniform(*persona.think_s))
            self._ranges = ((max(1, most[0] // 4), most[0]), (max(1, most[1] // 4), most[1]))
            self._think_s = (0.8 * think_s, 1.2 * think_s)

    def turn(self) -> tuple[int, int, float]:
        """Tokens asked and answered, and the seconds of thought before."""
        asked, answered = (int(self._rng.integers(low, high + 1)) for low, high in self._ranges)
        return asked, answered, float(self._rng.uniform(*self._think_s))


class _Beginnings:
    """What conversations begin with, what turns retrieve, and when conversations end; by chances of their own."""

    def __init__(self, spec: PersonaSpec, seed: int) -> None:
        self._spec, self._seed = spec, seed
        self._rng = np.random.default_rng([seed, stable_id("conversations")])
        self._documents = _documents(spec, seed)

    def conversation(self) -> tuple[tuple[Segment, ...], tuple[str, ...]]:
        """The prompt before a first question, and its segments' kinds."""
        system = self._spec.system
        if system is None or self._rng.random() >= system.share:
            return (), ()
        return (Segment(stable_id("system", self._seed, int(self._rng.integers(system.prompts))), system.tokens),), (
            "system",
        )

    def retrieved(self) -> tuple[Segment, ...]:
        """The chunks that this turn asks about; none, mostly."""
        asked = self._spec.documents
        if asked is None or self._rng.random() >= asked.share:
            return ()
        chunks = self._documents[int(self._rng.integers(len(self._documents)))]
        weights = 1 / np.arange(1, len(chunks) + 1)
        chosen = self._rng.choice(
            len(chunks), size=min(asked.chunks, len(chunks)), replace=False, p=weights / weights.sum()
        )
        return tuple(chunks[index] for index in sorted(chosen.tolist()))

    def leaves(self) -> bool:
        return bool(self._spec.new_conversation) and self._rng.random() < self._spec.new_conversation


def _documents(spec: PersonaSpec, seed: int) -> list[tuple[Segment, ...]]:
    """Each document's chunks; the last one may be shorter."""
    asked = spec.documents
    if asked is None:
        return []
    rng = np.random.default_rng([seed, stable_id("documents")])
    found = []
    for number in range(asked.documents):
        tokens = int(rng.integers(asked.tokens[0], asked.tokens[1] + 1))
        starts = range(0, tokens, asked.chunk_tokens)
        found.append(
            tuple(
                Segment(stable_id("document", seed, number, start), min(asked.chunk_tokens, tokens - start))
                for start in starts
            )
        )
    return found
