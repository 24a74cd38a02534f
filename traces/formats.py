"""Trace files: open_trace(path) reads Mooncake JSONL, ShareGPT JSON and this project's own JSONL.

    trace = open_trace("conversation.jsonl", options=TraceOptions(limit=500, block_tokens=64, time_scale=10))

open_trace reads and checks the whole file. Any defect raises a TraceFileError of one line, 'FILE:LINE: what is wrong
(value); cure'. open_trace never skips, clamps or guesses a value.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from traces.errors import TraceFileError
from traces.request import Request, Segment, stable_id
from traces.textfile import TraceFile, shorten

HASH_BLOCK_TOKENS = 512  # one Mooncake hash id stands for this many tokens
BYTES_PER_TOKEN = 4  # an estimate: ShareGPT texts are counted without a tokenizer
MAX_TOKENS = 100_000_000
MAX_TIME_MS = 1e13
MAX_SCALE = 1e6

_Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
_HashId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Seconds = Annotated[float, Meta(ge=0, le=MAX_TIME_MS / 1000)]


@dataclass(frozen=True)
class TraceOptions:
    """Selects requests of a file, and scales them to fit the machine under test.

    start, limit: a slice of the file's requests; requests that are left out later count too.
    block_tokens: the new length of 512 tokens. Every segment scales by it, rounded down, to at least one token.
    output_scale, then max_output_tokens: factor and cap for the output, at least one token.
    time_scale: factor for time stamps and think times; 0.5 doubles the load.
    max_prompt_tokens: a longer (scaled) prompt is left out and counted in Trace.left_out, never cut.
    Raises TraceFileError for impossible values.
    """

    start: int = 0
    limit: int | None = None
    block_tokens: int | None = None
    max_output_tokens: int | None = None
    output_scale: float | None = None
    time_scale: float = 1.0
    max_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.start < 0:
            raise _bad_option("start", "must not be negative", self.start, "give 0 for the first request")
        for name in ("limit", "block_tokens", "max_output_tokens", "max_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_TOKENS:
                raise _bad_option(name, f"must be 1 to {MAX_TOKENS}", value, "leave it out for no limit")
        for name in ("output_scale", "time_scale"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= MAX_SCALE:
                problem = f"must be a factor above 0 and at most {MAX_SCALE:g}"
                raise _bad_option(name, problem, value, "give 1.0 for no scaling")


def _bad_option(name: str, problem: str, value: object, cure: str) -> TraceFileError:
    return TraceFileError(f"trace option {name}: {problem} ({value}); {cure}")


@dataclass(frozen=True)
class Trace:
    """The requests taken from a file.

    sha256 is the hash of the file's bytes. total_requests counts the whole file. left_out counts the requests of the
    slice whose prompts were too long.
    """

    name: str
    format: str
    requests: tuple[Request, ...]
    sha256: str
    total_requests: int
    left_out: int


def open_trace(path: str | Path, *, options: TraceOptions | None = None) -> Trace:
    """Reads the requests of a trace file and recognizes its format by the content. Raises TraceFileError."""
    options = options or TraceOptions()
    file = TraceFile(Path(path))
    name = _guess_format(file)
    requests = READERS[name](file)
    if not requests:
        raise file.error(None, "holds no requests (0)", "give a trace with at least one")
    kept, left_out = _fit(file, requests, options)
    return Trace(file.path.stem, name, kept, hashlib.sha256(file.data).hexdigest(), len(requests), left_out)


def write_trace(path: str | Path, requests: Iterable[Request]) -> None:
    """Writes the project's own format, one Request as JSON per line. open_trace returns equal requests."""
    Path(path).write_bytes(msgspec.json.Encoder().encode_lines(list(requests)))


def _guess_format(file: TraceFile) -> str:
    """'[' begins ShareGPT; the keys of the first line identify a JSONL format."""
    if file.text.lstrip().startswith(b"["):
        return "sharegpt"
    number, first = next(iter(file.lines()))
    row = file.decode(_ANY, number, first, {"": "write one JSON object a line"})
    keys = set(row) if isinstance(row, dict) else set()
    if keys & {"timestamp", "input_length", "output_length", "hash_ids"}:
        return "mooncake"
    if keys & {"prompt", "output_tokens", "at_s"}:
        return "own"
    value = shorten(first.decode())
    raise file.error(number, f"is of no known format ({value})", f"give one of: {', '.join(READERS)}")


# --- readers: a file's requests, unscaled, with times as in the file


class _MooncakeRow(msgspec.Struct, forbid_unknown_fields=True):
    timestamp: Annotated[float, Meta(ge=0, le=MAX_TIME_MS)]
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: list[_HashId]


_MOONCAKE_CURES = {
    "": "each line needs exactly timestamp, input_length, output_length and hash_ids",
    "timestamp": f"give milliseconds from 0 to {MAX_TIME_MS:.0e}",
    "input_length": f"give the prompt's tokens as a whole number from 1 to {MAX_TOKENS}, or drop the line",
    "output_length": f"give the output's tokens as a whole number from 1 to {MAX_TOKENS}, or drop the line",
    "hash_ids": "give a list of whole numbers from 0 to 2^63-1",
}


def _read_mooncake(file: TraceFile) -> list[Request]:
    """{timestamp: ms, input_length, output_length, hash_ids: one per 512 tokens}; the first is at 0 s."""
    requests: list[Request] = []
    first_ms = last_ms = None
    for number, line in file.lines():
        row: _MooncakeRow = file.decode(_MOONCAKE, number, line, _MOONCAKE_CURES)
        full, rest = divmod(row.input_length, HASH_BLOCK_TOKENS)
        ids = full + (rest > 0)
        if len(row.hash_ids) != ids:
            problem = f"hash_ids: {row.input_length} tokens take {ids} ids ({len(row.hash_ids)} given)"
            cure = f"give one id per {HASH_BLOCK_TOKENS} tokens, and one for the rest"
            raise file.error(number, problem, cure)
        if last_ms is not None and row.timestamp < last_ms:
            problem = f"timestamp: time goes backwards ({row.timestamp:g} after {last_ms:g})"
            raise file.error(number, problem, "sort the lines by timestamp")
        last_ms = row.timestamp
        first_ms = last_ms if first_ms is None else first_ms
        prompt = tuple(map(Segment, row.hash_ids[:full], repeat(HASH_BLOCK_TOKENS)))
        if rest:
            prompt += (Segment(row.hash_ids[-1], rest),)
        name, at_s = f"{len(requests):06d}", (last_ms - first_ms) / 1000
        requests.append(Request(id=name, prompt=prompt, output_tokens=row.output_length, at_s=at_s))
    return requests


class _OwnRow(msgspec.Struct, forbid_unknown_fields=True):
    id: Annotated[str, Meta(min_length=1, max_length=200)]
    prompt: Annotated[list[tuple[_HashId, _Tokens]], Meta(min_length=1)]
    output_tokens: _Tokens
    at_s: _Seconds | None = None
    session: str | None = None
    turn: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    delay_s: _Seconds = 0.0
    wave: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    instance: Annotated[int, Meta(ge=0, le=100_000)] | None = None


_OWN_CURES = {
    "": "each line needs id, prompt and output_tokens, and may have at_s, session, turn, delay_s, wave and instance",
    "id": "give a name of 1 to 200 characters",
    "prompt": "give a list of [hash id, tokens] pairs, hash ids from 0 to 2^63-1 and tokens from 1",
    "output_tokens": f"give a whole number from 1 to {MAX_TOKENS}",
    "at_s": "give seconds from 0, or null for a closed loop",
    "session": "give a name, or null for a request of its own",
    "turn": "give the turn as a whole number from 0",
    "delay_s": "give seconds from 0",
    "wave": "give the wave as a whole number from 0",
    "instance": "give the instance as a whole number from 0, or null to let the router choose",
}


def _read_own(file: TraceFile) -> list[Request]:
    """One Request as JSON per line, as write_trace writes it. Ids are unique; the turns of a session ascend."""
    requests: list[Request] = []
    seen: dict[str, int] = {}
    turns: dict[str, int] = {}
    for number, line in file.lines():
        row: _OwnRow = file.decode(_OWN, number, line, _OWN_CURES)
        if row.id in seen:
            problem = f"id: is that of line {seen[row.id]} too ({row.id!r})"
            raise file.error(number, problem, "give every request an id of its own")
        seen[row.id] = number
        if row.session is None and row.turn:
            raise file.error(number, f"turn: has no session ({row.turn})", "name the session, or give turn 0")
        if row.session is not None:
            before = turns.get(row.session, -1)
            if row.turn <= before:
                problem = f"turn: is out of order ({row.turn} after {before} in session {row.session!r})"
                raise file.error(number, problem, "sort the lines of a session by turn")
            turns[row.session] = row.turn
        fields = {name: getattr(row, name) for name in row.__struct_fields__ if name != "prompt"}
        requests.append(Request(prompt=tuple(Segment(*pair) for pair in row.prompt), **fields))
    return requests


class _Message(msgspec.Struct):
    role: str = msgspec.field(name="from")
    value: str


class _Conversation(msgspec.Struct):
    id: str | int
    conversations: list[_Message]


_SHAREGPT_CURES = {"": "each conversation needs id and conversations, a list of {from, value}, both texts"}
_ANSWERS = ("gpt", "assistant", "chatgpt", "bing", "bard")
_ROLES = ("human", "user", "system", "tool", *_ANSWERS)


def _read_sharegpt(file: TraceFile) -> list[Request]:
    """[{id, conversations: [{from, value}]}]: each conversation is a session, each answer to a message a turn.

    A turn's prompt is all messages before the answer, including recorded answers. The estimate of tokens is UTF-8
    bytes / 4, rounded up; an empty answer counts one token. Each message is one segment named by its text. Equal texts
    are equal segments; two texts with a common beginning are different segments. The format has no times, so the load
    is a closed loop. A conversation without a turn gives no request.
    """
    try:
        entries: list[msgspec.Raw] = msgspec.json.decode(file.text, type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        place = re.search(r"\(byte (\d+)\)", str(error))
        line = file.line_at(int(place[1]) if place else len(file.data.rstrip()))
        raise file.error(line, f"is not JSON ({error})", "give one list of conversations") from None
    requests: list[Request] = []
    line, end = 1, 0
    for position, entry in enumerate(entries):
        raw = bytes(entry)
        begin = file.data.index(raw, end)
        line += file.data.count(b"\n", end, begin)
        conversation: _Conversation = file.decode(_CONVERSATION, line, raw, _SHAREGPT_CURES)
        role = next((m.role for m in conversation.conversations if m.role not in _ROLES), None)
        if role is not None:
            problem = f"conversations: unknown speaker ({shorten(role)!r})"
            raise file.error(line, problem, f"use one of {', '.join(_ROLES)}")
        requests += _turns(conversation, f"{position:06d}:{conversation.id}", len(requests))
        line, end = line + raw.count(b"\n"), begin + len(raw)
    return requests


def _turns(conversation: _Conversation, session: str, first_index: int) -> list[Request]:
    requests: list[Request] = []
    prompt: list[Segment] = []
    asked = False
    for message in conversation.conversations:
        tokens = -(-len(message.value.encode()) // BYTES_PER_TOKEN)
        if message.role in _ANSWERS and asked and prompt:
            turn = len(requests)
            requests.append(
                Request(
                    id=f"{first_index + turn:06d}",
                    prompt=tuple(prompt),
                    output_tokens=max(1, tokens),
                    session=session,
                    turn=turn,
                )
            )
        asked = message.role not in _ANSWERS
        if tokens:
            prompt.append(Segment(stable_id("text", message.value), tokens))
    return requests


_ANY = msgspec.json.Decoder()
_MOONCAKE = msgspec.json.Decoder(_MooncakeRow)
_OWN = msgspec.json.Decoder(_OwnRow)
_CONVERSATION = msgspec.json.Decoder(_Conversation)

READERS: dict[str, Callable[[TraceFile], list[Request]]] = {
    "mooncake": _read_mooncake,
    "sharegpt": _read_sharegpt,
    "own": _read_own,
}


# --- slicing and scaling


def _fit(file: TraceFile, requests: list[Request], options: TraceOptions) -> tuple[tuple[Request, ...], int]:
    """Returns the selected requests and the number of requests left out of the slice."""
    rest = len(requests) - options.start
    if rest <= 0:
        problem = f"start is beyond the file's {len(requests)} requests ({options.start})"
        raise file.error(None, problem, f"give a start below {len(requests)}")
    if options.limit is not None and options.limit > rest:
        problem = f"limit asks for more than the {rest} requests from {options.start} on ({options.limit})"
        raise file.error(None, problem, f"give a limit of at most {rest}, or none")
    stop = None if options.limit is None else options.start + options.limit
    taken = requests[options.start : stop]
    scaled = [_scale(request, options) for request in taken] if options != TraceOptions() else taken
    most = options.max_prompt_tokens
    kept = [request for request in scaled if most is None or request.prompt_tokens <= most]
    if not kept:
        shortest = min(request.prompt_tokens for request in scaled)
        problem = f"every prompt is longer than max_prompt_tokens ({most}; the shortest is {shortest})"
        cure = f"raise max_prompt_tokens to at least {shortest}, or lower block_tokens"
        raise file.error(None, problem, cure)
    # Without this shift, a load that lacks the first request would begin with an idle wait.
    if kept[0].id != requests[0].id:
        begin = min((request.at_s for request in kept if request.at_s is not None), default=0.0)
        kept = [r if r.at_s is None else msgspec.structs.replace(r, at_s=r.at_s - begin) for r in kept]
    return tuple(kept), len(scaled) - len(kept)


def _scale(request: Request, options: TraceOptions) -> Request:
    prompt, output = request.prompt, request.output_tokens
    if (block := options.block_tokens) is not None:
        prompt = tuple([Segment(s.hash_id, max(1, s.tokens * block // HASH_BLOCK_TOKENS)) for s in prompt])
    if options.output_scale is not None:
        output = max(1, round(output * options.output_scale))
    if options.max_output_tokens is not None:
        output = min(output, options.max_output_tokens)
    return msgspec.structs.replace(
        request,
        prompt=prompt,
        output_tokens=output,
        at_s=None if request.at_s is None else request.at_s * options.time_scale,
        delay_s=request.delay_s * options.time_scale,
    )
