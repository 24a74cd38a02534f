"""Trace files: open_trace(path) reads Mooncake and Qwen Bailian JSONL, Weka's agent sessions, ShareGPT JSON and this
project's own JSONL.

    trace = open_trace("conversation.jsonl", options=TraceOptions(limit=500, block_tokens=64, time_scale=10))

open_trace reads and checks the whole file. Any defect raises a TraceFileError of one line, 'FILE:LINE: what is wrong
(value); cure'. open_trace never skips, clamps or guesses a value.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from traces.formats.blocks import read_bailian, read_mooncake
from traces.formats.fields import Recorded
from traces.formats.options import TraceOptions as TraceOptions
from traces.formats.own import read_own
from traces.formats.own import write_trace as write_trace
from traces.formats.sharegpt import read_sharegpt
from traces.formats.weka import read_weka
from traces.request import Request, Segment
from traces.textfile import TraceFile, shorten

READERS: dict[str, Callable[[TraceFile, TraceOptions], Recorded]] = {
    "mooncake": read_mooncake,
    "bailian": read_bailian,
    "weka": read_weka,
    "sharegpt": read_sharegpt,
    "own": read_own,
}
# Keys that only one format's objects have. A Bailian line has Mooncake's keys too.
_KEYS = {
    "mooncake": {"timestamp", "input_length", "output_length", "hash_ids"},
    "bailian": {"chat_id", "parent_chat_id"},
    "weka": {"requests", "hash_id_scope"},
    "own": {"prompt", "output_tokens", "at_s"},
}


@dataclass(frozen=True)
class Trace:
    """The requests taken from a file.

    sha256 is the hash of the file's bytes. total_requests counts the whole file, or its first `conversations`.
    left_out counts the requests of the slice whose prompts were too long. tokenizer_sha256: of the tokenizer's file.
    """

    name: str
    format: str
    requests: tuple[Request, ...]
    sha256: str
    total_requests: int
    left_out: int
    tokenizer_sha256: str | None = None


def open_trace(path: str | Path, *, options: TraceOptions | None = None) -> Trace:
    """Reads the requests of a trace file and recognizes its format by the content. Raises TraceFileError."""
    options = options or TraceOptions()
    file = TraceFile(Path(path))
    name = _guess_format(file)
    options.check_format(name)
    recorded = READERS[name](file, options)
    if not recorded.requests:
        raise file.error(None, "holds no requests (0)", "give a trace with at least one")
    kept, left_out = _fit(file, recorded, options)
    digest = hashlib.sha256(file.data).hexdigest()
    return Trace(file.path.stem, name, kept, digest, len(recorded.requests), left_out, recorded.tokenizer_sha256)


def _guess_format(file: TraceFile) -> str:
    """'[' begins ShareGPT; the keys of the first object identify any other format."""
    if file.text.lstrip().startswith(b"["):
        return "sharegpt"
    number, first = next(iter(file.objects()))
    row = file.decode(_ANY, number, first, {"": "write one JSON object a line"})
    keys = set(row) if isinstance(row, dict) else set()
    found = [name for name, own in _KEYS.items() if keys & own]
    if found == ["mooncake", "bailian"]:
        return "bailian"
    if len(found) == 1:
        return found[0]
    value = shorten(first.decode())
    if found:
        kinds = " and of ".join(f"{name} ({', '.join(sorted(keys & _KEYS[name]))})" for name in found)
        raise file.error(number, f"has keys of {kinds}", "keep the keys of one format")
    raise file.error(number, f"is of no known format ({value})", f"give one of: {', '.join(READERS)}")


_ANY = msgspec.json.Decoder()


# --- slicing and scaling


def _fit(file: TraceFile, recorded: Recorded, options: TraceOptions) -> tuple[tuple[Request, ...], int]:
    """Returns the selected requests and the number of requests left out of the slice."""
    requests = recorded.requests
    rest = len(requests) - options.start
    if rest <= 0:
        problem = f"start is beyond the file's {len(requests)} requests ({options.start})"
        raise file.error(None, problem, f"give a start below {len(requests)}")
    if options.limit is not None and options.limit > rest:
        problem = f"limit asks for more than the {rest} requests from {options.start} on ({options.limit})"
        raise file.error(None, problem, f"give a limit of at most {rest}, or none")
    stop = None if options.limit is None else options.start + options.limit
    taken = requests[options.start : stop]
    scaled = [_scale(request, recorded.block_tokens, options) for request in taken] if options.scales else taken
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
    if options.rate_per_s is not None:
        kept = _paced(kept, options.rate_per_s, options.seed)
    return tuple(kept), len(scaled) - len(kept)


def _paced(requests: list[Request], rate_per_s: float, seed: int) -> list[Request]:
    """The first request of each conversation at a moment of its own, exponential gaps apart; the first at 0."""
    chance = random.Random(f"conversations {seed}")
    begun: set[str | None] = set()
    paced, at_s = [], 0.0
    for request in requests:
        if request.session not in begun:
            at_s += chance.expovariate(rate_per_s) if begun else 0.0
            begun.add(request.session)
            request = msgspec.structs.replace(request, at_s=at_s)
        paced.append(request)
    return paced


def _scale(request: Request, block_tokens: int, options: TraceOptions) -> Request:
    prompt, output = request.prompt, request.output_tokens
    if (block := options.block_tokens) is not None:
        prompt = tuple([Segment(s.hash_id, max(1, s.tokens * block // block_tokens)) for s in prompt])
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
        interval_s=request.interval_s * options.time_scale,
    )
