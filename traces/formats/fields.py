"""What the readers of trace formats share: the bounds of a file's numbers, and what a reader returns."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from msgspec import Meta

from traces.request import Request

DEFAULT_BLOCK_TOKENS = 512  # of formats without blocks, and of Mooncake, whose hash id stands for so many tokens
MAX_TOKENS = 100_000_000
MAX_TIME_S = 1e10

TokenCount = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
HashId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
RecordedSeconds = Annotated[float, Meta(ge=0, le=MAX_TIME_S)]

LENGTH_CURES = {
    "input_length": f"give the prompt's tokens as a whole number from 1 to {MAX_TOKENS}, or drop the line",
    "output_length": f"give the output's tokens as a whole number from 1 to {MAX_TOKENS}, or drop the line",
    "hash_ids": "give a list of whole numbers from 0 to 2^63-1",
}


class Recorded(NamedTuple):
    """A file's requests, unscaled, with times as in the file.

    block_tokens: what one of the format's blocks holds. tokenizer_sha256: of the file that counted the tokens.
    """

    requests: list[Request]
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    tokenizer_sha256: str | None = None
