"""ShareGPT: conversations as texts, without times. Their tokens are counted by a tokenizer, or estimated."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from traces.errors import TraceFileError
from traces.formats.fields import Recorded
from traces.formats.options import TraceOptions
from traces.request import Request, Segment, stable_id
from traces.textfile import TraceFile, shorten

BYTES_PER_TOKEN = 4  # an estimate, for texts without a tokenizer

CountTokens = Callable[[str], int]


class _Message(msgspec.Struct):
    role: str = msgspec.field(name="from")
    value: str


class _Conversation(msgspec.Struct):
    id: str | int
    conversations: list[_Message]


class _Turn(NamedTuple):
    """An answer, and how many of the conversation's messages come before it."""

    before: int
    answer: str


_CONVERSATION = msgspec.json.Decoder(_Conversation)
_CURES = {"": "each conversation needs id and conversations, a list of {from, value}, both texts"}
_ANSWERS = ("gpt", "assistant", "chatgpt", "bing", "bard")
_ROLES = ("human", "user", "system", "tool", *_ANSWERS)


def read_sharegpt(file: TraceFile, options: TraceOptions) -> Recorded:
    """[{id, conversations: [{from, value}]}]: each conversation is a session, each answer to a message a turn.

    A turn's prompt is all messages before the answer, including recorded answers. A message's tokens are those of the
    tokenizer, each message on its own, without special tokens; without a tokenizer they are estimated as UTF-8
    bytes / 4, rounded up. An empty answer counts one token. Each message is one segment named by its text. Equal texts
    are equal segments; two texts with a common beginning are different segments. The format has no times, so the load
    is a closed loop. A conversation without a turn gives no request, and is not one of options.conversations.
    """
    count, digest = _counter(options.tokenizer)
    requests: list[Request] = []
    with_turns = 0
    for position, (line, talk) in enumerate(_conversations(file)):
        turns = list(_turns(talk.conversations))
        if not turns:
            continue
        with_turns += 1
        if options.conversations is not None and with_turns > options.conversations:
            continue
        texts = [message.value[: options.max_chars] for message in talk.conversations]
        prompt = [(stable_id("text", text), count(text)) for text in texts]
        for number, turn in enumerate(turns[:1] if options.first_turn_only else turns):
            segments = tuple(Segment(name, tokens) for name, tokens in prompt[: turn.before] if tokens)
            if not segments:
                problem = f"conversations: the tokenizer gives the prompt of turn {number} no tokens (0)"
                raise file.error(line, problem, "drop the conversation, or give another tokenizer")
            requests.append(
                Request(
                    id=f"{len(requests):06d}",
                    prompt=segments,
                    output_tokens=max(1, count(turn.answer)),
                    session=f"{position:06d}:{talk.id}",
                    turn=number,
                )
            )
    if options.conversations is not None and options.conversations > with_turns:
        problem = f"conversations asks for more than the {with_turns} that ask for an answer ({options.conversations})"
        raise file.error(None, problem, f"ask for at most {with_turns}, or for all")
    return Recorded(requests, tokenizer_sha256=digest)


def _conversations(file: TraceFile) -> Iterator[tuple[int, _Conversation]]:
    """Each conversation and the line on which it begins."""
    try:
        entries: list[msgspec.Raw] = msgspec.json.decode(file.text, type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        place = re.search(r"\(byte (\d+)\)", str(error))
        line = file.line_at(int(place[1]) if place else len(file.data.rstrip()))
        raise file.error(line, f"is not JSON ({error})", "give one list of conversations") from None
    for line, raw in file.places(file.text, 1, entries):
        talk: _Conversation = file.decode(_CONVERSATION, line, raw, _CURES)
        role = next((message.role for message in talk.conversations if message.role not in _ROLES), None)
        if role is not None:
            problem = f"conversations: unknown speaker ({shorten(role)!r})"
            raise file.error(line, problem, f"use one of {', '.join(_ROLES)}")
        yield line, talk


def _turns(messages: list[_Message]) -> Iterator[_Turn]:
    asked = said = False
    for before, message in enumerate(messages):
        if message.role in _ANSWERS and asked and said:
            yield _Turn(before, message.value)
        asked = message.role not in _ANSWERS
        said = said or bool(message.value)


def _counter(tokenizer: Path | None) -> tuple[CountTokens, str | None]:
    """What counts a text's tokens, and the sha256 of the tokenizer's file."""
    if tokenizer is None:
        return lambda text: -(-len(text.encode()) // BYTES_PER_TOKEN), None
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    where = f"trace option tokenizer: {path}"
    if not path.is_file():
        raise TraceFileError(f"{where}: there is no such file ({tokenizer}); name a tokenizer.json, or its folder")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        problem = "needs the package tokenizers (not installed)"
        raise TraceFileError(f"{where}: {problem}; run: pip install 'kv-harness[tokenizer]'") from None
    try:
        content = path.read_bytes()
        loaded = Tokenizer.from_buffer(content)
    except Exception as error:  # the package raises Exception itself
        reason = shorten(" ".join(str(error).split()))
        raise TraceFileError(f"{where}: is no tokenizer ({reason}); give a tokenizer.json") from None
    # Answers come again in the prompts of later turns.
    count = cache(lambda text: len(loaded.encode(text, add_special_tokens=False).ids))
    return count, hashlib.sha256(content).hexdigest()
