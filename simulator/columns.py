"""Requests and completions as columns: for loads of which one Python object a request would be the slowest part.

A column is anything with a buffer of 64-bit numbers: array.array, a numpy array, a memoryview.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from traces.request import Request, stable_id

if TYPE_CHECKING:
    from typing_extensions import Buffer  # collections.abc has it from Python 3.12 on


@dataclass(frozen=True, slots=True)
class RequestColumns:
    """Requests with the moments at which they are sent.

    hash_ids, segment_tokens: all prompts' segments, one request's after the other's. segment_ends: a request each,
    where its segments end in those two. reply_ids: the hash id of the stream that its generated tokens lead.
    int64 all, but at_s: float64, seconds.
    """

    ids: Sequence[str]
    hash_ids: Buffer
    segment_tokens: Buffer
    segment_ends: Buffer
    output_tokens: Buffer
    reply_ids: Buffer
    at_s: Buffer

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Self:
        """Each at its own at_s; one without is sent at 0. ValueError: waves or pins, which columns do not have."""
        if any(request.wave or request.instance is not None for request in requests):
            raise ValueError("requests with a wave or an instance do not go into columns; send them through a Load")
        hash_ids, tokens, ends = array("q"), array("q"), array("q")
        for request in requests:
            for segment in request.prompt:
                hash_ids.append(segment.hash_id)
                tokens.append(segment.tokens)
            ends.append(len(tokens))
        return cls(
            ids=[request.id for request in requests],
            hash_ids=hash_ids,
            segment_tokens=tokens,
            segment_ends=ends,
            output_tokens=array("q", [request.output_tokens for request in requests]),
            reply_ids=array("q", [reply_stream(request.id) for request in requests]),
            at_s=array("d", [request.at_s or 0.0 for request in requests]),
        )


@dataclass(frozen=True, slots=True)
class CompletionColumns:
    """What came of requests, in the order of their completion: simulate.Completion's fields without token_s.

    Times are float64, NaN where it did not happen; the counts are int64. instances: which one of a cluster served it.
    errors: by position, for those that failed.
    """

    ids: list[str]
    first_token_s: memoryview[float]
    last_token_s: memoryview[float]
    prompt_tokens: memoryview
    output_tokens: memoryview
    computed: memoryview
    gpu: memoryview
    cpu: memoryview
    disk: memoryview
    preemptions: memoryview
    instances: memoryview
    errors: dict[int, str]

    @classmethod
    def of(cls, ids: list[str], times: Sequence[bytes], counts: Sequence[bytes], errors: dict[int, str]) -> Self:
        """What the core's advance_many returns."""
        first_token_s, last_token_s = (memoryview(column).cast("d") for column in times)
        ints = (memoryview(column).cast("q") for column in counts)
        prompt, output, computed, gpu, cpu, disk, preemptions, instances = ints
        return cls(
            ids=ids,
            first_token_s=first_token_s,
            last_token_s=last_token_s,
            prompt_tokens=prompt,
            output_tokens=output,
            computed=computed,
            gpu=gpu,
            cpu=cpu,
            disk=disk,
            preemptions=preemptions,
            instances=instances,
            errors=errors,
        )


def reply_stream(request_id: str) -> int:
    """The hash id of the stream that a request's generated tokens lead: a later prompt may name it."""
    return stable_id("reply", request_id)
