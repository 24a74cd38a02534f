"""What load an experiment asks for: one model a kind."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from harness.experiment.classes import ServiceClasses
from harness.experiment.fields import FROM_LIST, Positive, PositiveFloat, Share, Strict
from harness.experiment.units import Seconds
from traces.personas import PERSONA_SETS


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


class FreeLoadLimits(Strict):
    """What every load has that is sent as a whole.

    duration: nothing is sent from this moment of the load on; null sends all.
    drain: what is under way when `duration` is over may end in its own time; false ends it there, and its rows say so.
    warm_up: with duration, figures count the requests that end between this moment and `duration`; those before and
    those after, while the load drains, are apart. null counts all.
    classes: classes of service, a list of them or the name of a set: mlperf (the MLPerf Storage KV-cache benchmark's).
    Who waits goes by its class's priority, and each class's own goals are judged.
    """

    duration: Seconds | None = None
    drain: bool = True
    warm_up: Seconds | None = None
    classes: ServiceClasses = ()


class SyntheticWorkload(FreeLoadLimits):
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


class SessionsWorkload(FreeLoadLimits):
    """Conversations: every turn carries all turns before it.

    concurrency: requests in flight. With fewer slots than sessions, `order` says how many sessions are live at once.
    active_sessions: conversations that are live at once, thinking users included.
    order: who of those that are ready gets a free slot: a session under way before one that has not begun, so that
    sessions end one after another, and no more are live than slots and thinking users (depth); who has been ready
    longest, so that all sessions are live (fifo); or any of them, by the seed (random).

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
    answers: a later prompt holds tokens in place of earlier answers (synthetic), or the engine's own (quoted).
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
    order: Literal["depth", "fifo", "random"] = "depth"
    answers: Literal["synthetic", "quoted"] = "synthetic"


class RoundsWorkload(FreeLoadLimits):
    """Rounds of conversations: in each round every client asks once, `parallel` at a time; see traces/rounds.py.

    kind: this kind of load.
    clients: how many conversations there are.
    rounds: user messages in each conversation.
    first_tokens: the prompt of a conversation's first round.
    turn_tokens: new prompt tokens in each later round.
    output_tokens: tokens that each request generates.
    parallel: requests that are under way at most.
    rate_per_s: requests per second; null sends as places come free.
    order: who of the clients that are ready goes next, at random, in their order (fifo) or, without a barrier, those
    under way first, so that conversations end one after another (depth).
    barrier: a round begins when all of the one before have ended.
    answers: a later prompt holds tokens in place of earlier answers (synthetic), the engine's own answers (quoted), or
    none of them.
    """

    kind: Literal["rounds"]
    clients: Annotated[int, Field(ge=1, le=100_000)] = 20
    rounds: Annotated[int, Field(ge=1, le=10_000)] = 10
    first_tokens: Annotated[int, Field(ge=1, le=2**24)] = 4096
    turn_tokens: Annotated[int, Field(ge=0, le=2**24)] = 0
    output_tokens: Positive = 1
    parallel: Annotated[int, Field(ge=1, le=100_000)] = 4
    rate_per_s: PositiveFloat | None = None
    order: Literal["random", "fifo", "depth"] = "random"
    barrier: bool = True
    answers: Literal["synthetic", "quoted", "none"] = "synthetic"


class QaWorkload(FreeLoadLimits):
    """Users who join, ask at a pace of their own, and leave; see traces/qa.py.

    A user asks every users / rate_per_s seconds. One whose answer comes later asks when it comes: questions that were
    missed are never made up for. A new user joins every (rounds - 1) / rate_per_s seconds. At the start `users` of them
    are there, in the middle of their sessions. Together they ask rounds / (rounds - 1) times rate_per_s.

    kind: this kind of load.
    users: how many are there at once while answers come in time.
    rounds: questions of each user.
    rate_per_s: questions per second of `users` users.
    system_tokens: a first part that all users share.
    history_tokens: a second part, each user's own.
    question_tokens: new prompt tokens in each round.
    output_tokens: tokens that each request generates.
    answers: a later prompt holds tokens in place of earlier answers (synthetic), or the engine's own (quoted).
    duration: no user asks from this moment on.
    warm_up_requests: requests of their own prompts that come before the load.
    warm_up_tokens: the prompt of each of those.
    """

    kind: Literal["qa"]
    users: Annotated[int, Field(ge=1, le=100_000)] = 15
    rounds: Annotated[int, Field(ge=2, le=10_000)] = 20
    rate_per_s: PositiveFloat = 2.0
    system_tokens: Annotated[int, Field(ge=0, le=2**24)] = 1000
    history_tokens: Annotated[int, Field(ge=0, le=2**24)]
    question_tokens: Annotated[int, Field(ge=1, le=2**24)] = 20
    output_tokens: Positive = 100
    answers: Literal["synthetic", "quoted"] = "synthetic"
    duration: Seconds = 1200.0
    warm_up_requests: Annotated[int, Field(ge=0, le=10_000)] = 10
    warm_up_tokens: Annotated[int, Field(ge=1, le=2**24)] = 100


class TraceWorkload(FreeLoadLimits):
    """A recorded trace, replayed at its own times. The formats, and what each option means, are in docs/traces.md.

    kind: this kind of load.
    trace: a name of `harness traces list`, or a path with a '/'.
    start: the first request that is taken.
    limit: how many requests are taken; null takes all.
    block_tokens: the tokens that each of the trace's blocks becomes (Mooncake's have 512); null leaves them.
    max_prompt_tokens: requests with longer prompts are left out, and counted.
    max_output_tokens: longer outputs are cut.
    time_scale: 2 sends at half the speed, 0.5 at double.
    concurrency: requests that are under way at most; null sets no limit.
    active_sessions: conversations that are live at once, thinking users included; of a trace that has conversations.
    conversations: how many conversations are taken, the first ones; ShareGPT and Weka.
    rate_per_s: conversations that begin per second, at random; ShareGPT and Weka, which have no times of their own.
    first_turn_only: only each conversation's first turn; ShareGPT.
    max_chars: a longer message is cut to so many characters; ShareGPT.
    tokenizer: a `tokenizer.json`, or its folder, that counts a text's tokens; null estimates them; ShareGPT.
    """

    kind: Literal["trace"]
    trace: Annotated[str, Field(min_length=1)]
    start: Annotated[int, Field(ge=0)] = 0
    limit: Positive | None = None
    block_tokens: Annotated[int, Field(ge=1, le=4096)] | None = None
    max_prompt_tokens: Positive | None = None
    max_output_tokens: Positive | None = None
    time_scale: Annotated[float, Field(gt=0.0, le=1e6, strict=False)] = 1.0
    concurrency: Annotated[int, Field(ge=1, le=100_000)] | None = None
    active_sessions: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    conversations: Positive | None = None
    rate_per_s: PositiveFloat | None = None
    first_turn_only: bool = False
    max_chars: Positive | None = None
    tokenizer: Annotated[str, Field(min_length=1)] | None = None


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


class SystemPrompts(Strict):
    """Prompts that conversations share.

    share: of the conversations begin with one.
    prompts: how many different ones there are.
    tokens: of each.
    """

    share: Share = 0.2
    prompts: Annotated[int, Field(ge=1, le=10_000)] = 3
    tokens: Positive = 256


class DocumentSettings(Strict):
    """Documents that questions are asked about. Each is sent once before the load.

    share: of the turns ask about one, apart from their conversation.
    documents: how many there are.
    tokens: the range of their lengths.
    chunk_tokens: a document is kept in parts of so many tokens.
    chunks: parts that a question asks about.
    """

    share: Share = 0.1
    documents: Annotated[int, Field(ge=1, le=10_000)] = 10
    tokens: Annotated[tuple[Positive, Positive], FROM_LIST] = (4000, 12000)
    chunk_tokens: Positive = 512
    chunks: Positive = 5


def _named_personas(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value not in PERSONA_SETS:
        raise ValueError(f"{value!r} is no set of personas; use {' or '.join(PERSONA_SETS)}, or list them")
    return [
        {
            "name": each.name,
            "share": float(each.share),
            "context_tokens": list(each.context_tokens),
            "output_tokens": list(each.output_tokens),
            "think": [f"{each_s}s" for each_s in each.think_s],
        }
        for each in PERSONA_SETS[value]
    ]


def _each_once(personas: tuple[PersonaSettings, ...]) -> tuple[PersonaSettings, ...]:
    if not personas:
        raise ValueError("is empty; name at least one kind of user, or a set: mlperf")
    names = [each.name for each in personas]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"names {twice[0]} twice; name each kind of user once")
    return personas


class PersonasWorkload(FreeLoadLimits):
    """Users of different kinds in conversations, all at once: each goes on when it was answered and has thought.

    kind: this kind of load.
    users: how many there are, all at once.
    turns: messages of each user, over all of its conversations.
    personas: the kinds of users: a list, or the name of a set: mlperf (the MLPerf Storage KV-cache benchmark's), mixed.
    new_conversation: how likely a user begins another conversation after a turn; 0.2 in the MLPerf benchmark.
    conversation_tokens: a turn that would make a prompt with its answer longer begins another conversation, too; null:
    one that exceeds the model's length does.
    answers: later prompts hold tokens in place of earlier answers (synthetic), or none of them.
    draw: each turn draws from the ranges (turn), or each user draws its maxima once, and each turn from a quarter of
    those on (user), as in the MLPerf benchmark.
    concurrency: requests that are under way at most; null: one a user.
    system: prompts that conversations share.
    documents: documents that questions are asked about.
    """

    kind: Literal["personas"]
    users: Annotated[int, Field(ge=1, le=100_000)]
    turns: Annotated[int, Field(ge=1, le=10_000)]
    personas: Annotated[
        tuple[PersonaSettings, ...], FROM_LIST, BeforeValidator(_named_personas), AfterValidator(_each_once)
    ]
    new_conversation: Share = 0.0
    conversation_tokens: Annotated[int, Field(ge=1)] | None = None
    answers: Literal["synthetic", "none"] = "synthetic"
    draw: Literal["turn", "user"] = "turn"
    concurrency: Annotated[int, Field(ge=1, le=100_000)] | None = None
    system: SystemPrompts | None = None
    documents: DocumentSettings | None = None


FreeWorkload = SyntheticWorkload | SessionsWorkload | RoundsWorkload | QaWorkload | TraceWorkload | PersonasWorkload


Workload = Annotated[PrefixWorkload | FreeWorkload, Field(discriminator="kind")]


WORKLOAD_KINDS = ("prefix", "synthetic", "sessions", "rounds", "qa", "personas", "trace")


def hit_tokens(prompt_tokens: int, hit_rate: float, chunk_tokens: int) -> int:
    """Tokens of the shared prefix: the hit rate's share of the whole chunks that can hit (the last token never).

    Raises ValueError where the share is not a whole number of chunks: a hit rate is exact, to the digits that the error
    itself proposes, or refused.
    """
    chunks = (prompt_tokens - 1) // chunk_tokens
    share = hit_rate * chunks
    digits = 4 if chunks < 1000 else 6
    if abs(share - round(share)) > max(1e-6, 0.5 * 10**-digits * chunks):
        near = sorted({int(share), int(share) + 1})
        rates = " or ".join(f"{n / chunks:.{digits}g}" for n in near)
        raise ValueError(
            f"hit_rate {hit_rate:g} of {chunks} chunks is not a whole number of chunks; use {rates}, or a prompt of"
            f" k*{chunk_tokens}+1 tokens where {hit_rate:g}*k is whole"
        )
    return round(share) * chunk_tokens


def check_free(workload: FreeWorkload) -> None:
    """Refuses keys of a free load that contradict each other. Raises ValueError with the cure."""
    if workload.duration is not None and workload.duration <= 0:
        raise ValueError("workload.duration must be longer than 0 s; give e.g. 20min")
    if workload.warm_up is not None and not workload.warm_up < (workload.duration or 0.0):
        raise ValueError("workload.warm_up needs a longer workload.duration, in which requests count; give e.g. 5min")
    if workload.duration is None and not workload.drain:
        raise ValueError("workload.drain false needs workload.duration, the moment at which it ends requests; add it")
    if isinstance(workload, RoundsWorkload) and workload.order == "depth" and workload.barrier:
        raise ValueError("workload.order depth needs workload.barrier false: at a barrier all wait; or set order fifo")
    if isinstance(workload, SyntheticWorkload | SessionsWorkload):
        _check_arrivals(workload)


def _check_arrivals(workload: SyntheticWorkload | SessionsWorkload) -> None:
    if workload.arrivals == "closed":
        limited = isinstance(workload, SessionsWorkload) and workload.active_sessions is not None
        if workload.concurrency is None and not limited:
            raise ValueError("workload.arrivals closed needs workload.concurrency; add it")
        if workload.rate_per_s is not None:
            raise ValueError("workload.rate_per_s has no meaning with arrivals closed; remove it")
    elif workload.rate_per_s is None:
        raise ValueError(f"workload.arrivals {workload.arrivals} needs workload.rate_per_s; add it")
