"""What load an experiment asks for: one model a kind."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from harness.experiment.fields import FROM_LIST, Positive, PositiveFloat, Share, Strict
from harness.experiment.units import Seconds


class PrefixWorkload(Strict):
    """One prompt at a time (or `concurrency` different ones together), its prefix put in a named tier first.

    kind: this kind of load.
    prompt_tokens: k chunks and one token fit best, for the engine always computes the last token.
    hit_rate: the share of the prompt's whole chunks that the tier serves; exact, or refused.
    output_tokens: tokens that each request generates.
    concurrency: requests that are sent together, each with a prefix of its own.
    """

    kind: Literal["prefix"]
    prompt_tokens: Annotated[int, Field(ge=2, le=2**24)]
    hit_rate: Share = 1.0
    output_tokens: Positive = 1
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 1


class SyntheticWorkload(Strict):
    """Many requests over shared prefixes, popularity by Zipf's law.

    kind: this kind of load.
    requests: how many are sent.
    prompt_tokens: the length of each prompt.
    hit_rate: the share of a prompt that is its shared prefix; exact, or refused.
    prefixes: how many different shared prefixes there are.
    zipf: the exponent of the prefixes' popularity; 0 makes all equally popular.
    output_tokens: tokens that each request generates.
    arrivals: the next request is sent when one ends (closed), at a constant rate, or at random (poisson).
    rate_per_s: requests per second; for constant and poisson arrivals.
    concurrency: requests that are under way at most; closed arrivals need it.
    warm: each prefix is sent once before the measurement.
    """

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

    kind: this kind of load.
    sessions: how many conversations there are.
    turns: user messages in each conversation.
    system_tokens: a first part that all conversations share.
    user_tokens: new prompt tokens in each turn.
    output_tokens: tokens that each turn generates.
    think: the pause between an answer and the next turn.
    arrivals: a session starts when one ends (closed), at a constant rate, or at random (poisson).
    rate_per_s: sessions that start per second; for constant and poisson arrivals.
    concurrency: how many are under way at most; closed arrivals need it.
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
    """Rounds of conversations: in each round every client asks once, `parallel` at a time; see traces/rounds.py.

    kind: this kind of load.
    clients: how many conversations there are.
    rounds: user messages in each conversation.
    first_tokens: the prompt of a conversation's first round.
    turn_tokens: new prompt tokens in each later round.
    output_tokens: tokens that each request generates.
    parallel: requests that are under way at most.
    rate_per_s: requests per second; null sends as places come free.
    order: clients take their turns at random, or in their order (fifo).
    barrier: a round begins when all of the one before have ended.
    answers: a later prompt holds tokens in place of earlier answers (synthetic), or none.
    """

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
    """A recorded trace, replayed at its own times. `block_tokens` scales each of its 512-token blocks.

    kind: this kind of load.
    trace: a name of `harness traces list`, or a path with a '/'.
    start: the first request that is taken.
    limit: how many requests are taken; null takes all.
    block_tokens: the tokens that each of the trace's 512-token blocks becomes; null leaves them.
    max_prompt_tokens: longer prompts are cut.
    max_output_tokens: longer outputs are cut.
    time_scale: 2 sends at half the speed, 0 all at once.
    concurrency: requests that are under way at most; null sets no limit.
    """

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
    """A kind of user; ranges [low, high] are drawn from evenly, turn by turn.

    name: the persona's name in figures.
    share: its share of the users, relative to the other personas' shares.
    context_tokens: the range of new prompt tokens per turn.
    output_tokens: the range of generated tokens per turn.
    think: the range of pauses before the next turn.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]
    share: PositiveFloat = 1.0
    context_tokens: Annotated[tuple[Positive, Positive], FROM_LIST]
    output_tokens: Annotated[tuple[Positive, Positive], FROM_LIST]
    think: Annotated[tuple[Seconds, Seconds], FROM_LIST] = (0.0, 0.0)


class PersonasWorkload(Strict):
    """Users of different kinds in conversations, all at once: each goes on when it was answered and has thought.

    kind: this kind of load.
    users: how many there are, all at once.
    turns: user messages in each conversation.
    personas: the kinds of users.
    """

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
