"""Requests and completions as columns, for loads where one Python object a request would be the slowest part.

A column is anything with a buffer of 64-bit numbers: array.array, a numpy array, a memoryview.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from traces.request import Request, reply_stream

if TYPE_CHECKING:
    from typing_extensions import Buffer  # collections.abc has it from Python 3.12 on

    from simulator import _core


@dataclass(frozen=True, slots=True)
class RequestColumns:
    """Requests with the moments at which the caller sends them. The core reads the columns by these names.

    hash_ids, segment_tokens: all prompts' segments, one request's after the other's. segment_ends: for each request,
    where its segments end in those two. reply_ids: the hash id of the stream that its generated tokens lead.
    All are int64; at_s is float64, in seconds.
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
        """Each at its own at_s; a request without one at 0. ValueError: waves or pins, which columns do not have."""
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

    Times are float64, NaN where it did not happen; the counts are int64. instances: which instance of a cluster served
    each request. errors: of failed requests, by position.
    """

    ids: list[str]
    first_token_s: memoryview[float]
    last_token_s: memoryview[float]
    prompt_tokens: memoryview
    output_tokens: memoryview
    computed: memoryview
    gpu: memoryview
    cpu: memoryview
    pool: memoryview
    disk: memoryview
    remote: memoryview
    preemptions: memoryview
    instances: memoryview
    errors: dict[int, str]

    @classmethod
    def of(cls, columns: _core.CompletionColumns) -> Self:
        """The core's columns. A tier that the engine lacks has a column of zeros."""
        ids, hits = columns.ids, columns.hit_tokens

        def of_tier(name: str) -> memoryview:
            return memoryview(hits[name] if name in hits else bytes(8 * len(ids))).cast("q")

        return cls(
            ids=ids,
            first_token_s=memoryview(columns.first_token_s).cast("d"),
            last_token_s=memoryview(columns.last_token_s).cast("d"),
            prompt_tokens=memoryview(columns.prompt_tokens).cast("q"),
            output_tokens=memoryview(columns.output_tokens).cast("q"),
            computed=memoryview(columns.computed).cast("q"),
            gpu=of_tier("gpu"),
            cpu=of_tier("cpu"),
            pool=of_tier("pool"),
            disk=of_tier("disk"),
            remote=of_tier("remote"),
            preemptions=memoryview(columns.preemptions).cast("q"),
            instances=memoryview(columns.instances).cast("q"),
            errors=columns.errors,
        )
