"""What a user may choose of a trace file, and how its requests are scaled."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from traces.errors import TraceFileError
from traces.formats.fields import MAX_TOKENS

MAX_FACTOR = 1e6

# Options that only some formats give a meaning to: those whose conversations have no times, or hold texts.
OPTIONS_OF = {
    "conversations": ("sharegpt", "weka"),
    "rate_per_s": ("sharegpt", "weka"),
    "first_turn_only": ("sharegpt",),
    "max_chars": ("sharegpt",),
    "tokenizer": ("sharegpt",),
}


@dataclass(frozen=True)
class TraceOptions:
    """Selects requests of a file, and scales them to fit the machine under test.

    start, limit: a slice of the file's requests; requests that are left out later count too.
    block_tokens: the new length of one of the format's blocks (Mooncake 512 tokens, Bailian 16, Weka as the file says;
    of 512 tokens in other formats). Every segment scales by it, rounded down, to at least one token.
    output_scale, then max_output_tokens: factor and cap for the output, at least one token.
    time_scale: factor for time stamps and think times; 0.5 doubles the load.
    max_prompt_tokens: a longer (scaled) prompt is left out and counted in Trace.left_out, never cut.

    conversations: the first so many that ask for an answer. rate_per_s: conversations that begin per second, at
    random moments that follow from `seed`. first_turn_only: of each conversation. max_chars: a message's first
    characters. tokenizer: a tokenizer.json, or the folder of one; None: tokens are estimated by bytes.
    Raises TraceFileError for impossible values.
    """

    start: int = 0
    limit: int | None = None
    block_tokens: int | None = None
    max_output_tokens: int | None = None
    output_scale: float | None = None
    time_scale: float = 1.0
    max_prompt_tokens: int | None = None
    conversations: int | None = None
    rate_per_s: float | None = None
    first_turn_only: bool = False
    max_chars: int | None = None
    tokenizer: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.start < 0:
            raise _bad_option("start", "must not be negative", self.start, "give 0 for the first request")
        for name in ("limit", "block_tokens", "max_output_tokens", "max_prompt_tokens", "conversations", "max_chars"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_TOKENS:
                raise _bad_option(name, f"must be 1 to {MAX_TOKENS}", value, "leave it out for no limit")
        for name, cure in (
            ("output_scale", "give 1.0 for no scaling"),
            ("time_scale", "give 1.0 for no scaling"),
            ("rate_per_s", "leave it out to send as places come free"),
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value <= MAX_FACTOR:
                raise _bad_option(name, f"must be a factor above 0 and at most {MAX_FACTOR:g}", value, cure)

    def check_format(self, name: str) -> None:
        """Raises TraceFileError where an option has no meaning for the format."""
        for field in fields(self):
            value, formats = getattr(self, field.name), OPTIONS_OF.get(field.name, (name,))
            if value != field.default and name not in formats:
                problem = f"has no meaning for a {name} trace, only for {' and '.join(formats)}"
                raise _bad_option(field.name, problem, value, "leave it out")

    @property
    def scales(self) -> bool:
        """Whether any request may come out other than as it is in the file."""
        factors = (self.block_tokens, self.output_scale, self.max_output_tokens)
        return factors != (None, None, None) or self.time_scale != 1.0


def _bad_option(name: str, problem: str, value: object, cure: str) -> TraceFileError:
    return TraceFileError(f"trace option {name}: {problem} ({value}); {cure}")
