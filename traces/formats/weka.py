"""Weka's traces of coding agents (kv-cache-tester, cc-traces): one session an object, its prompts in hashed blocks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from traces.formats.fields import MAX_TIME_S, MAX_TOKENS, HashId, Recorded, RecordedSeconds, TokenCount
from traces.formats.options import TraceOptions
from traces.request import Request, Segment, stable_id
from traces.textfile import TraceFile

_Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
_SLACK_S = 1e-6


class _Session(msgspec.Struct, forbid_unknown_fields=True):
    id: Annotated[str, Meta(min_length=1, max_length=200)]
    block_size: Annotated[int, Meta(ge=1, le=65536)]
    requests: list[msgspec.Raw]
    models: list[str] = []
    hash_id_scope: Literal["local", "global"] = "local"
    tool_tokens: _Tokens = 0
    system_tokens: _Tokens = 0
    totals: Any = None
    analysis: Any = msgspec.field(name="_analysis", default=None)


class _Call(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="n"):
    """think_time: below 0 where the request was sent before the answer had ended."""

    t: RecordedSeconds
    input_tokens: TokenCount = msgspec.field(name="in")
    output_tokens: _Tokens = msgspec.field(name="out")
    hash_ids: list[HashId]
    model: str = ""
    input_types: list[str] = []
    output_types: list[str] = []
    stop: str | None = None
    api_time: RecordedSeconds | None = None
    think_time: float | None = None
    ttft: float | None = None


class _StreamedCall(_Call, tag="s"):
    pass


class _SubAgent(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="subagent"):
    t: RecordedSeconds
    requests: list[msgspec.Raw]
    agent_id: str = ""
    subagent_type: str = ""
    status: str = ""
    models: list[str] = []
    duration_ms: float | None = None
    total_tokens: int | None = None
    tool_use_count: int | None = None
    tool_tokens: _Tokens = 0
    system_tokens: _Tokens = 0


class _Placed(NamedTuple):
    """A call, when it began in the session's time, the agent that sent it (0: the main one), and its line.

    agent_end_s: when the agent ended, where the file says so.
    """

    begin_s: float
    agent: int
    line: int
    call: _Call
    agent_end_s: float | None = None

    @property
    def end_s(self) -> float:
        return self.begin_s + (self.call.api_time or 0.0)


class _Agents:
    """Which requests of a session wait for which, request by request in the order of their times."""

    def __init__(self, calls: list[_Placed]) -> None:
        self._ends_s: dict[int, float] = {}
        for each in calls:
            known_s = max(each.end_s, self._ends_s.get(each.agent, 0.0))
            self._ends_s[each.agent] = known_s if each.agent_end_s is None else each.agent_end_s
        self._last: dict[int, tuple[str, float]] = {}

    def pause(self, each: _Placed, name: str) -> tuple[tuple[str, ...], float]:
        """The requests that this one waits for, and how long after the last of them it is sent."""
        own = self._last.get(each.agent, self._last.get(0))
        ended = []
        if each.agent == 0:
            ended = [agent for agent in self._last if agent and self._ends_s[agent] <= each.begin_s + _SLACK_S]
        waits = ([own] if own else []) + [self._last.pop(agent) for agent in ended]
        alone = each.agent in self._last and not ended
        self._last[each.agent] = name, each.end_s
        gap_s = each.begin_s - max((end_s for _, end_s in waits), default=each.begin_s)
        think_s = each.call.think_time
        return tuple(name for name, _ in waits), max(0.0, think_s if alone and think_s is not None else gap_s)


_ANY_CALL = _Call | _StreamedCall
_SESSION = msgspec.json.Decoder(_Session)
_ENTRY: msgspec.json.Decoder[_Call | _SubAgent] = msgspec.json.Decoder(_ANY_CALL | _SubAgent)
_INNER: msgspec.json.Decoder[_Call] = msgspec.json.Decoder(_ANY_CALL)
_SESSION_CURES = {
    "": "each session needs id, block_size and requests, and may have the other keys of docs/traces.md",
    "id": "give a name of 1 to 200 characters",
    "block_size": "give the tokens of a block as a whole number from 1 to 65536",
    "requests": "give a list of requests",
    "hash_id_scope": "give local (hash ids mean something within the session) or global",
}
_CALL_CURES = {
    "": "each request needs t, type, in, out and hash_ids, a sub-agent t, type and requests",
    "type": "give n, s or subagent (a sub-agent has none of its own)",
    "t": f"give seconds from the session's begin, 0 to {MAX_TIME_S:.0e}",
    "in": f"give the prompt's tokens as a whole number from 1 to {MAX_TOKENS}, or drop the request",
    "out": f"give the output's tokens as a whole number from 0 to {MAX_TOKENS}",
    "hash_ids": "give a list of whole numbers from 0 to 2^63-1",
    "api_time": "give seconds from 0, or leave it out",
    "requests": "give the sub-agent's requests as a list",
}


def read_weka(file: TraceFile, options: TraceOptions) -> Recorded:
    """{id, block_size, hash_id_scope, requests}: a session a line, or one in the whole file.

    hash_id_scope local, the default: a session's hash ids are its own, so no session hits another's blocks. Its
    sub-agents share them. The tokens behind the last whole block may have an id of their own; without one, no other
    request has them.

    An agent's requests go one after another. A sub-agent begins after the request of the main agent before it, and the
    main agent waits for the sub-agents that had ended when it went on. A sub-agent whose requests begin before it does
    counts its times from its own begin. A request is sent think_time after the one before it ended; where it waits for
    another agent, or no think_time was recorded, after the recorded gap. Sessions have no recorded begin: they begin as
    places come free, or at options.rate_per_s. An answer of no tokens counts one.
    """
    requests: list[Request] = []
    block_tokens: int | None = None
    lines: dict[str, int] = {}
    for number, raw in file.objects():
        session: _Session = file.decode(_SESSION, number, raw, _SESSION_CURES)
        file.once(lines, number, "id", session.id, "give every session an id of its own")
        if block_tokens not in (None, session.block_size):
            problem = (
                f"block_size: is not the {block_tokens} of line {next(iter(lines.values()))} ({session.block_size})"
            )
            raise file.error(number, problem, "keep sessions of one block size in a file")
        block_tokens = session.block_size
        placed = list(_calls(file, number, raw, session.requests))
        if options.conversations is None or len(lines) <= options.conversations:
            requests += _requests(file, session, placed, len(requests))
    if options.conversations is not None and options.conversations > len(lines):
        problem = f"conversations asks for more than the file's {len(lines)} sessions ({options.conversations})"
        raise file.error(None, problem, f"ask for at most {len(lines)}, or for all")
    return Recorded(requests, block_tokens or 1)


def _calls(file: TraceFile, number: int, session: bytes, entries: list[msgspec.Raw]) -> Iterator[_Placed]:
    """All calls of a session as the file has them, sub-agents' calls in the session's time."""
    for position, (line, raw) in enumerate(file.places(session, number, entries)):
        within = f"requests[{position}]"
        entry = file.decode(_ENTRY, line, raw, _CALL_CURES, within)
        if isinstance(entry, _Call):
            yield _Placed(entry.t, 0, line, entry)
            continue
        inner = [
            (place, file.decode(_INNER, place, text, _CALL_CURES, f"{within}.requests[{index}]"))
            for index, (place, text) in enumerate(file.places(raw, line, entry.requests))
        ]
        relative = any(call.t < entry.t - _SLACK_S for _, call in inner)
        shift_s = entry.t if relative else 0.0
        end_s = None if entry.duration_ms is None else entry.t + entry.duration_ms / 1000
        yield from (_Placed(call.t + shift_s, position + 1, place, call, end_s) for place, call in inner)


def _requests(file: TraceFile, session: _Session, calls: list[_Placed], first: int) -> Iterator[Request]:
    local = session.hash_id_scope == "local"
    blocks: dict[int, Segment] = {}
    agents = _Agents(calls)
    for turn, each in enumerate(sorted(calls, key=lambda each: each.begin_s)):
        call = each.call
        whole, rest = _lengths(file, each, session.block_size)
        for one in call.hash_ids:
            if one not in blocks:
                blocks[one] = Segment(stable_id("weka", session.id, one) if local else one, session.block_size)
        prompt = tuple([blocks[one] for one in islice(call.hash_ids, whole)])
        if rest:
            named = len(call.hash_ids) > whole
            hash_id = blocks[call.hash_ids[-1]].hash_id if named else stable_id("weka rest", session.id, turn)
            prompt += (Segment(hash_id, rest),)
        name = f"{first + turn:06d}"
        after, delay_s = agents.pause(each, name)
        yield Request(
            id=name,
            prompt=prompt,
            output_tokens=max(1, call.output_tokens),
            session=session.id,
            turn=turn,
            after=after,
            delay_s=delay_s,
        )


def _lengths(file: TraceFile, each: _Placed, block: int) -> tuple[int, int]:
    """How many whole blocks a prompt has, and how many tokens behind them."""
    tokens, ids = each.call.input_tokens, len(each.call.hash_ids)
    whole, rest = divmod(tokens, block)
    if ids not in (whole, whole + (rest > 0)):
        problem = f"hash_ids: {tokens} tokens take {whole} ids ({ids} given)"
        cure = f"give one id per {block} tokens (the rest may have one of its own)"
        raise file.error(each.line, problem, cure)
    return whole, rest
