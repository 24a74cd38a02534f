"""The simulator against exact computations that need no engine: stack distances, and its own single steps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from simulator.models import load_model
from simulator.simulate import Simulator
from tests.support.oracle_cases import calibration, random_batching, random_tiers, simulate
from traces.catalogue import find_trace
from traces.formats import open_trace
from traces.request import Request, Segment


def block_stream(trace: str, count: int) -> list[int]:
    blocks = (segment.hash_id for request in open_trace(find_trace(trace)).requests for segment in request.prompt)
    return [block for _, block in zip(range(count), blocks, strict=False)]


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


def lru_hits(stream: list[int], capacity: int) -> list[bool]:
    """Which blocks the CPU tier of the 'lru' pack holds: each is asked for by a request of its own."""
    model = load_model("tiny-llama")
    simulator = Simulator(
        model,
        calibration({"step_s": 1e-3}),
        "vllm-0.32",
        "lru",
        gpu_blocks=2,
        block_tokens=64,
        chunk_tokens=64,
        cpu_bytes=capacity * 64 * model.kv_bytes_per_token,
        max_num_batched_tokens=64,
        max_num_seqs=1,
    )
    hits = []
    for index, block in enumerate(stream):
        simulator.submit(Request(id=str(index), prompt=(Segment(block, 64),), output_tokens=1), simulator.now_s)
        (done,) = simulator.advance()
        simulator.drain()
        assert done.gpu == 0 and done.cpu in (0, 63)  # a full hit computes the last token again
        hits.append(done.cpu > 0)
    return hits


def test_stack_distances_of_a_small_stream() -> None:
    assert stack_distances([1, 2, 1, 3, 2, 2, 1]) == [None, None, 1, None, 2, 0, 2]


@pytest.mark.parametrize("capacity", [1, 20, 1_000, 3_000])
def test_lru_hits_are_those_of_stack_distances(capacity: int) -> None:
    real = (Path(os.environ.get("HARNESS_TRACES", "")) / "mooncake_conversation.jsonl").is_file()
    stream = block_stream("mooncake_conversation" if real else "tiny_conversation", 100_000)
    exact = [distance is not None and distance < capacity for distance in stack_distances(stream)]
    assert lru_hits(stream, capacity) == exact
    assert 0 < sum(exact) < len(exact) or capacity == 1


@pytest.mark.parametrize("seed", [70, 132, 169])
def test_macro_steps_admit_in_the_step_that_makes_the_hit(seed: int) -> None:
    case = random_batching(seed)
    assert simulate(case) == simulate(case, macro_steps=False)


@pytest.mark.parametrize("seed", [53, 64, 69, 77, 82, 92])
def test_macro_steps_that_pass_the_ends_of_stores_change_nothing_in_the_tiers(seed: int) -> None:
    case = random_tiers(seed)
    (rows, blocks, tiers), (one_rows, one_blocks, one_tiers) = simulate(case), simulate(case, macro_steps=False)
    assert (rows, blocks) == (one_rows, one_blocks)
    # Ticks are noted where something looks at the tiers, which single steps do more often.
    assert [note for note in tiers if note[0] != "tick"] == [note for note in one_tiers if note[0] != "tick"]
    dropped = [[key for note in notes if note[0] == "tick" for key in note[2][1:]] for notes in (tiers, one_tiers)]
    assert dropped[0] == dropped[1]
