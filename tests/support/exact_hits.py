"""Streams of block keys, and which of them hit: exactly, and in the simulator's CPU tier."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

from simulator.models import load_model
from simulator.simulate import Simulator
from tests.support.oracle_cases import calibration
from traces.catalogue import find_trace
from traces.formats import open_trace
from traces.request import Request, Segment


def conversation_keys(count: int) -> list[int]:
    """The first blocks of the public conversation trace; of the tiny one where that is not at hand."""
    real = (Path(os.environ.get("HARNESS_TRACES", "")) / "mooncake_conversation.jsonl").is_file()
    requests = open_trace(find_trace("mooncake_conversation" if real else "tiny_conversation")).requests
    return list(islice((segment.hash_id for request in requests for segment in request.prompt), count))


def stack_distances(stream: list[int]) -> list[int | None]:
    """How many different others were used since the last use of each; None: it was never used before.

    A Fenwick tree over positions holds a one at the last use of every block.
    """
    ones = [0] * (len(stream) + 1)

    def add(at: int, value: int) -> None:
        while at < len(ones):
            ones[at] += value
            at += at & -at

    def upto(at: int) -> int:
        total = 0
        while at:
            total += ones[at]
            at -= at & -at
        return total

    last: dict[int, int] = {}
    distances: list[int | None] = []
    for now, block in enumerate(stream, start=1):
        before = last.get(block)
        distances.append(None if before is None else upto(now) - upto(before))
        if before is not None:
            add(before, -1)
        add(now, 1)
        last[block] = now
    return distances


def tier_hits(eviction: str, capacity: int, keys: list[int]) -> list[bool]:
    """Which blocks the CPU tier of the eviction's pack holds; a request of its own asks for each."""
    model = load_model("tiny-llama")
    simulator = Simulator(
        model,
        calibration({"step_s": 1e-3}),
        "vllm-0.32",
        eviction,
        gpu_blocks=2,
        block_tokens=64,
        chunk_tokens=64,
        cpu_bytes=capacity * 64 * model.kv_bytes_per_token,
        max_num_batched_tokens=64,
        max_num_seqs=1,
    )
    hits = []
    for index, key in enumerate(keys):
        simulator.submit(Request(id=str(index), prompt=(Segment(key, 64),), output_tokens=1), simulator.now_s)
        (done,) = simulator.advance()
        simulator.drain()
        assert done.gpu == 0 and done.cpu in (0, 63)  # a full hit computes the last token again
        hits.append(done.cpu > 0)
    return hits
