"""Turns a client's prompts into the simulator's segments: equal prefixes become equal segments, block by block.

Token ids stay as they are. Text is cut from the left into pieces of up to six characters, each with the blank before it
("hello world" is "hello", " world"). Each piece is one token. If a text is longer than another one that it begins with,
both have the same tokens up to the shorter one's last token, as with real tokenizers.

A simulated reply repeats the word " tok17", where 17 is the request's number. The next turn of a chat quotes the reply
in its prompt. The quoted words become the generated tokens, so that the prompt hits the reply's blocks too.
"""

from __future__ import annotations

import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import groupby

from traces.request import Segment, reply_stream

_PIECES = re.compile(r" tok\d{1,18}(?!\w)| ?\S{1,6}|\s")
_REPLY = re.compile(r" tok\d{1,18}")


def reply_word(number: int) -> str:
    """The token, as text, that the reply to request `number` repeats."""
    return f" {request_name(number)}"


def request_name(number: int) -> str:
    """The request's id in the simulator, which names the stream of its reply."""
    return f"tok{number}"


def from_ids(ids: Sequence[int], block_tokens: int) -> tuple[Segment, ...]:
    """One segment a block, named by its ids. OverflowError, TypeError: an id is no unsigned 32-bit number."""
    return tuple(_blocks(array("I", ids), 0, block_tokens))


def from_text(text: str, block_tokens: int) -> tuple[Segment, ...]:
    """Returns one segment per block and one per quoted reply."""
    segments: list[Segment] = []
    position = 0
    for reply, run in groupby(_PIECES.findall(text), key=_quoted):
        pieces = list(run)
        if reply is None:
            ids = array("I", (zlib.crc32(piece.encode("utf-8", "surrogatepass")) for piece in pieces))
            segments += _blocks(ids, position, block_tokens)
        else:
            segments.append(Segment(reply_stream(reply), len(pieces)))
        position += len(pieces)
    return tuple(segments)


def flatten(messages: Sequence[tuple[str, str]]) -> str:
    """Joins a chat into one text: per message a line '<|role|> message', then the start of the answer's line."""
    lines = [f"<|{role}|> {content.strip()}\n" for role, content in messages]
    return "".join([*lines, "<|assistant|>"])


def _quoted(piece: str) -> str | None:
    """The name of the request whose reply holds this piece; None for any other piece."""
    return piece[1:] if _REPLY.fullmatch(piece) else None


def _blocks(ids: array[int], position: int, block_tokens: int) -> Iterator[Segment]:
    """Cuts ids at the prompt's block boundaries; the first id stands at `position` of the prompt."""
    begin, end = 0, block_tokens - position % block_tokens
    while begin < len(ids):
        block = ids[begin:end]
        digest = blake2b(block.tobytes(), digest_size=8).digest()
        yield Segment(int.from_bytes(digest, "big") >> 1, len(block))
        begin, end = end, end + block_tokens
