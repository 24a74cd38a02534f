"""Traces of one request a line, whose prompts are lists of hashed blocks: Mooncake's, and Qwen Bailian's."""

from __future__ import annotations

from itertools import repeat
from typing import Annotated

import msgspec
from msgspec import Meta

from traces.formats.fields import (
    DEFAULT_BLOCK_TOKENS,
    LENGTH_CURES,
    MAX_TIME_S,
    HashId,
    Recorded,
    RecordedSeconds,
    TokenCount,
)
from traces.formats.options import TraceOptions
from traces.request import Request, Segment
from traces.textfile import TraceFile

BAILIAN_BLOCK_TOKENS = 16
_MAX_TIME_MS = 1000 * MAX_TIME_S


class _MooncakeRow(msgspec.Struct, forbid_unknown_fields=True):
    timestamp: Annotated[float, Meta(ge=0, le=_MAX_TIME_MS)]
    input_length: TokenCount
    output_length: TokenCount
    hash_ids: list[HashId]


_MOONCAKE = msgspec.json.Decoder(_MooncakeRow)
_MOONCAKE_CURES = LENGTH_CURES | {
    "": "each line needs exactly timestamp, input_length, output_length and hash_ids",
    "timestamp": f"give milliseconds from 0 to {_MAX_TIME_MS:.0e}",
}


def read_mooncake(file: TraceFile, _: TraceOptions) -> Recorded:
    """{timestamp: ms, input_length, output_length, hash_ids: one per 512 tokens}; the first is at 0 s."""
    requests: list[Request] = []
    clock = _Clock(file)
    for number, line in file.lines():
        row: _MooncakeRow = file.decode(_MOONCAKE, number, line, _MOONCAKE_CURES)
        prompt = _prompt(file, number, row, DEFAULT_BLOCK_TOKENS)
        name, at_s = f"{len(requests):06d}", clock.since_first(number, row.timestamp) / 1000
        requests.append(Request(id=name, prompt=prompt, output_tokens=row.output_length, at_s=at_s))
    return Recorded(requests)


class _BailianRow(msgspec.Struct, forbid_unknown_fields=True):
    chat_id: Annotated[int, Meta(ge=0)]
    parent_chat_id: Annotated[int, Meta(ge=-1)]
    timestamp: RecordedSeconds
    input_length: TokenCount
    output_length: TokenCount
    type: Annotated[str, Meta(min_length=1)]
    turn: Annotated[int, Meta(ge=0)]
    hash_ids: list[HashId]


_BAILIAN = msgspec.json.Decoder(_BailianRow)
_BAILIAN_CURES = LENGTH_CURES | {
    "": f"each line needs exactly {', '.join(_BailianRow.__struct_fields__)}",
    "chat_id": "give each chat a whole number of its own, from 0",
    "parent_chat_id": "give the chat_id of the chat before, or -1 for the first of a session",
    "timestamp": f"give seconds from 0 to {MAX_TIME_S:.0e}",
    "type": "give the request's kind, such as text, search, image or file",
    "turn": "give the turn as a whole number",
}


def read_bailian(file: TraceFile, _: TraceOptions) -> Recorded:
    """{chat_id, parent_chat_id, timestamp: s, …, hash_ids: one per 16 tokens}; the first is at 0 s.

    A chat and all that go on from it are a session: each is sent at its own time, and not before its parent has ended.
    A parent that the file lacks was sent before the trace began; its chats wait for each other. Kinds and numbers of
    turns are checked and not used.
    """
    requests: list[Request] = []
    lines: dict[int, int] = {}
    names: dict[int, str] = {}
    sessions: dict[int, str] = {}
    turns: dict[str, int] = {}
    clock = _Clock(file)
    for number, line in file.lines():
        row: _BailianRow = file.decode(_BAILIAN, number, line, _BAILIAN_CURES)
        prompt = _prompt(file, number, row, BAILIAN_BLOCK_TOKENS)
        at_s = clock.since_first(number, row.timestamp)
        chat, parent = row.chat_id, row.parent_chat_id
        file.once(lines, number, "chat_id", chat, "give each chat a number of its own")
        if parent == chat or chat in sessions:
            problem = (
                "parent_chat_id: is the chat itself" if parent == chat else "chat_id: an earlier line goes on from it"
            )
            raise file.error(number, f"{problem} ({chat})", "put each chat after the one that it goes on from")
        session = sessions.setdefault(parent, str(parent)) if parent >= 0 else str(chat)
        sessions[chat] = session
        turn = turns[session] = turns.get(session, -1) + 1
        name = names[chat] = f"{len(requests):06d}"
        requests.append(
            Request(
                id=name,
                prompt=prompt,
                output_tokens=row.output_length,
                at_s=at_s,
                session=session,
                turn=turn,
                after=(names[parent],) if parent in names else (),
            )
        )
    return Recorded(requests, BAILIAN_BLOCK_TOKENS)


def _prompt(file: TraceFile, number: int, row: _MooncakeRow | _BailianRow, block: int) -> tuple[Segment, ...]:
    full, rest = divmod(row.input_length, block)
    ids = full + (rest > 0)
    if len(row.hash_ids) != ids:
        problem = f"hash_ids: {row.input_length} tokens take {ids} ids ({len(row.hash_ids)} given)"
        raise file.error(number, problem, f"give one id per {block} tokens, and one for the rest")
    prompt = tuple(map(Segment, row.hash_ids[:full], repeat(block)))
    return (*prompt, Segment(row.hash_ids[-1], rest)) if rest else prompt


class _Clock:
    """The recorded times of a file, whose lines are in their order."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._first: float | None = None
        self._last = 0.0

    def since_first(self, number: int, time: float) -> float:
        """From the first line's time to that of line `number`. Raises TraceFileError where time goes backwards."""
        if self._first is None:
            self._first = time
        elif time < self._last:
            problem = f"timestamp: time goes backwards ({time:g} after {self._last:g})"
            raise self._file.error(number, problem, "sort the lines by timestamp")
        self._last = time
        return time - self._first
