"""This project's own format: one Request as JSON per line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from traces.formats.fields import MAX_TOKENS, HashId, Recorded, RecordedSeconds, TokenCount
from traces.formats.options import TraceOptions
from traces.request import Request, Segment
from traces.textfile import TraceFile


def write_trace(path: str | Path, requests: Iterable[Request]) -> None:
    """Writes the project's own format, one Request as JSON per line. open_trace returns equal requests."""
    Path(path).write_bytes(msgspec.json.Encoder().encode_lines(list(requests)))


class _OwnRow(msgspec.Struct, forbid_unknown_fields=True):
    id: Annotated[str, Meta(min_length=1, max_length=200)]
    prompt: Annotated[list[tuple[HashId, TokenCount]], Meta(min_length=1)]
    output_tokens: TokenCount
    at_s: RecordedSeconds | None = None
    session: str | None = None
    turn: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    delay_s: RecordedSeconds = 0.0
    interval_s: RecordedSeconds = 0.0
    after: tuple[str, ...] = ()
    wave: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    instance: Annotated[int, Meta(ge=0, le=100_000)] | None = None
    quotes: tuple[str, ...] = ()
    kinds: tuple[Literal["system", "document"], ...] = ()
    service: str | None = None
    priority: Annotated[int, Meta(ge=0, le=1000)] = 0


_OWN = msgspec.json.Decoder(_OwnRow)
_OWN_CURES = {
    "": "each line needs id, prompt and output_tokens, and may have at_s, session, turn, delay_s, interval_s, after,"
    " wave, instance, quotes, kinds, service and priority",
    "id": "give a name of 1 to 200 characters",
    "prompt": "give a list of [hash id, tokens] pairs, hash ids from 0 to 2^63-1 and tokens from 1",
    "output_tokens": f"give a whole number from 1 to {MAX_TOKENS}",
    "at_s": "give seconds from 0, or null for a closed loop",
    "session": "give a name, or null for a request of its own",
    "turn": "give the turn as a whole number from 0",
    "delay_s": "give seconds from 0",
    "interval_s": "give seconds from 0",
    "after": "give a list of ids of earlier requests of the session",
    "wave": "give the wave as a whole number from 0",
    "instance": "give the instance as a whole number from 0, or null to let the router choose",
    "quotes": "give a list of the ids of earlier requests",
    "service": "give a class of service, or null",
    "priority": "give the priority as a whole number from 0 to 1000",
    "kinds": "give a list of system or document, for the prompt's first segments",
}


def read_own(file: TraceFile, _: TraceOptions) -> Recorded:
    """One Request as JSON per line, as write_trace writes it. Ids are unique; the turns of a session ascend."""
    requests: list[Request] = []
    seen: dict[str, int] = {}
    turns: dict[str, int] = {}
    sessions: dict[str, str | None] = {}
    for number, line in file.lines():
        row: _OwnRow = file.decode(_OWN, number, line, _OWN_CURES)
        file.once(seen, number, "id", row.id, "give every request an id of its own")
        if row.session is None and row.turn:
            raise file.error(number, f"turn: has no session ({row.turn})", "name the session, or give turn 0")
        if row.session is not None:
            before = turns.get(row.session, -1)
            if row.turn <= before:
                problem = f"turn: is out of order ({row.turn} after {before} in session {row.session!r})"
                raise file.error(number, problem, "sort the lines of a session by turn")
            turns[row.session] = row.turn
        for name in row.after:
            if row.session is None or sessions.get(name) != row.session:
                problem = f"after: is no earlier request of the session ({name!r})"
                raise file.error(number, problem, "name requests of the session that stand above")
        sessions[row.id] = row.session
        fields = {name: getattr(row, name) for name in row.__struct_fields__ if name != "prompt"}
        requests.append(Request(prompt=tuple(Segment(*pair) for pair in row.prompt), **fields))
    return Recorded(requests)
