"""What load an experiment asks for: one model a kind."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from harness.experiment.fields import FROM_LIST, Positive, PositiveFloat, Share, Strict
from harness.experiment.units import Seconds


class PrefixWorkload(Strict):
    """One prompt at a time (or `concurrency` different ones together), its prefix put in a named tier first."""

    kind: Literal["prefix"]
    prompt_tokens: Annotated[int, Field(ge=2, le=2**24)]
    hit_rate: Share = 1.0
    output_tokens: Positive = 1
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 1


class SyntheticWorkload(Strict):
    """Many requests over shared prefixes, popularity by Zipf's law."""

    kind: Literal["synthetic"]
    requests: Annotated[int, Field(ge=1, le=10_000_000)]
    prompt_tokens: Annotated[int, Field(ge=2, le=2**24)]
    hit_rate: Share = 0.5
    prefixes: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    zipf: Annotated[float, Field(ge=0.0, le=10.0, strict=False)] = 0.0
    output_tokens: Positive = 16
    arrivals: Literal["closed", "constant", "poisson"] = "closed"
    rate_per_s: PositiveFloat | None = None
    concurrency: Annotated[int, Field(ge=1, le=100_000)] | None = None
    warm: bool = True


class SessionsWorkload(Strict):
    """Conversations: every turn carries all turns before it.

    concurrency: requests in flight. With fewer slots than sessions, a session under way goes on before a new one
    begins: the sessions end one after another. active_sessions: conversations that are live at once, thinking users
    included.
    """

    kind: Literal["sessions"]
    sessions: Annotated[int, Field(ge=1, le=1_000_000)]
    turns: Annotated[int, Field(ge=1, le=10_000)]
    system_tokens: Annotated[int, Field(ge=0, le=2**24)] = 0
    user_tokens: Positive = 256
    output_tokens: Positive = 64
    think: Seconds = 0.0
    arrivals: Literal["closed", "constant", "poisson"] = "closed"
    rate_per_s: PositiveFloat | None = None
    concurrency: Annotated[int, Field(ge=1, le=100_000)] | None = None
    active_sessions: Annotated[int, Field(ge=1, le=1_000_000)] | None = None


class RoundsWorkload(Strict):
    """Rounds of conversations: in each round every client asks once, `parallel` at a time; see traces/rounds.py."""

    kind: Literal["rounds"]
    clients: Annotated[int, Field(ge=1, le=100_000)] = 20
    rounds: Annotated[int, Field(ge=1, le=10_000)] = 10
    first_tokens: Annotated[int, Field(ge=1, le=2**24)] = 4096
    turn_tokens: Annotated[int, Field(ge=0, le=2**24)] = 0
    output_tokens: Positive = 1
    parallel: Annotated[int, Field(ge=1, le=100_000)] = 4
    rate_per_s: PositiveFloat | None = None
    order: Literal["random", "fifo"] = "random"
    barrier: bool = True
    answers: Literal["synthetic", "none"] = "synthetic"


class TraceWorkload(Strict):
    """A recorded trace, replayed at its own times. `block_tokens` scales each of its 512-token blocks."""

    kind: Literal["trace"]
    trace: Annotated[str, Field(min_length=1)]
    start: Annotated[int, Field(ge=0)] = 0
    limit: Positive | None = None
    block_tokens: Annotated[int, Field(ge=1, le=4096)] | None = None
    max_prompt_tokens: Positive | None = None
    max_output_tokens: Positive | None = None
    time_scale: Annotated[float, Field(ge=0.0, le=1e6, strict=False)] = 1.0
    concurrency: Annotated[int, Field(ge=1, le=100_000)] | None = None


class PersonaSettings(Strict):
    """A kind of user; ranges [low, high] are drawn from evenly, turn by turn."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]
    share: PositiveFloat = 1.0
    context_tokens: Annotated[tuple[Positive, Positive], FROM_LIST]
    output_tokens: Annotated[tuple[Positive, Positive], FROM_LIST]
    think: Annotated[tuple[Seconds, Seconds], FROM_LIST] = (0.0, 0.0)


class PersonasWorkload(Strict):
    """Users of different kinds in conversations, all at once: each goes on when it was answered and has thought."""

    kind: Literal["personas"]
    users: Annotated[int, Field(ge=1, le=100_000)]
    turns: Annotated[int, Field(ge=1, le=10_000)]
    personas: Annotated[tuple[PersonaSettings, ...], FROM_LIST]


FreeWorkload = SyntheticWorkload | SessionsWorkload | RoundsWorkload | TraceWorkload | PersonasWorkload


Workload = Annotated[PrefixWorkload | FreeWorkload, Field(discriminator="kind")]


WORKLOAD_KINDS = ("prefix", "synthetic", "sessions", "rounds", "personas", "trace")


def hit_tokens(prompt_tokens: int, hit_rate: float, chunk_tokens: int) -> int:
    """Tokens of the shared prefix: the hit rate's share of the whole chunks that can hit (the last token never).

    Raises ValueError where the share is not a whole number of chunks: a hit rate is exact or refused.
    """
    chunks = (prompt_tokens - 1) // chunk_tokens
    share = hit_rate * chunks
    if abs(share - round(share)) > 1e-6:
        near = sorted({int(share), int(share) + 1})
        rates = " or ".join(f"{n / chunks:.4g}" for n in near)
        raise ValueError(
            f"hit_rate {hit_rate:g} of {chunks} chunks is not a whole number of chunks; use {rates}, or a prompt of"
            f" k*{chunk_tokens}+1 tokens where {hit_rate:g}*k is whole"
        )
    return round(share) * chunk_tokens


def check_arrivals(workload: FreeWorkload) -> None:
    if isinstance(workload, TraceWorkload | PersonasWorkload | RoundsWorkload):
        return
    if workload.arrivals == "closed":
        limited = isinstance(workload, SessionsWorkload) and workload.active_sessions is not None
        if workload.concurrency is None and not limited:
            raise ValueError("workload.arrivals closed needs workload.concurrency; add it")
        if workload.rate_per_s is not None:
            raise ValueError("workload.rate_per_s has no meaning with arrivals closed; remove it")
    elif workload.rate_per_s is None:
        raise ValueError(f"workload.arrivals {workload.arrivals} needs workload.rate_per_s; add it")
