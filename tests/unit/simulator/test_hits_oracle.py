"""Hits of a prefix cache against kvcache-simulator, which others wrote, and the most that a cache could hit against its
optimal policy. Equal to the token.

Its rules: a block is a prompt's tokens of one hash id behind its prefix, the last one of a prompt may be shorter. Whole
requests are looked up, then taken in, one after another, at no cost of time. `fifo` forgets the oldest block. `lru` and
`optimal` forget the end of a prompt first: that which was used least recently, or is used again last. Only requests of
the second half count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from kvcache_sim.plan import build_execution_plan
from kvcache_sim.policies import simulate_ceiling, simulate_policy
from kvcache_sim.trace import parse_trace_file

from simulator.ceiling import most_hits
from simulator.policies import cache_hits
from tests.support.paths import ROOT
from traces.catalogue import DATA
from traces.formats import open_trace
from traces.request import Request, Segment

TINY = DATA / "tiny_conversation.jsonl"


class Answer(NamedTuple):
    """Hit tokens of the conversation trace's second half, at so many blocks, as kvcache-simulator 0.1.3 says."""

    blocks: int
    lru: int
    fifo: int
    optimal: int


CONVERSATION = [
    Answer(256, lru=3_082_824, fifo=2_851_400, optimal=7_034_301),
    Answer(1_024, lru=3_194_814, fifo=3_106_872, optimal=13_516_455),
    Answer(4_096, lru=5_935_037, fifo=5_806_048, optimal=23_452_732),
    Answer(8_192, lru=12_781_765, fifo=11_210_017, optimal=27_038_068),
    Answer(16_384, lru=18_940_960, fifo=16_348_500, optimal=27_038_068),
    Answer(32_768, lru=24_161_208, fifo=21_376_864, optimal=27_038_068),
    Answer(65_536, lru=26_055_540, fifo=24_445_347, optimal=27_038_068),
]
CONVERSATION_CEILING = 27_038_068
SECOND_HALF = 6_015  # the first request that counts


def block_names(requests: Sequence[Request]) -> list[list[int]]:
    """Each prompt's blocks by numbers of their own: a hash id behind another prefix is another block."""
    names: dict[tuple[int, int], int] = {}
    prompts = []
    for request in requests:
        prompt, prefix = [], -1
        for segment in request.prompt:
            prefix = names.setdefault((prefix, segment.hash_id), len(names))
            prompt.append(prefix)
        prompts.append(prompt)
    return prompts


def hit_blocks(policy: str, prompts: list[list[int]], capacity: int) -> list[int]:
    """How many of each prompt's first blocks the cache holds when the prompt comes.

    `lru` forgets a prompt's end first: each prompt is used once more, from its end, after it was taken in. For this the
    cache has to have room for every whole prompt.
    """
    keys: list[int] = []
    begins = []
    for prompt in prompts:
        begins.append(len(keys))
        keys += prompt
        keys += reversed(prompt) if policy == "lru" else ()
    flags = cache_hits(policy, capacity, keys)
    found = []
    for begin, prompt in zip(begins, prompts, strict=True):
        held = flags[begin : begin + len(prompt)]
        found.append(held.index(False) if False in held else len(prompt))
    return found


def most_blocks(requests: Sequence[Request], capacity: int | None) -> list[int]:
    prompts = [[Segment(segment.hash_id, 1) for segment in request.prompt] for request in requests]
    return most_hits(prompts) if capacity is None else most_hits(prompts, capacity)


def hit_tokens(requests: Sequence[Request], blocks: list[int], first: int) -> int:
    return sum(
        segment.tokens
        for request, hits in list(zip(requests, blocks, strict=True))[first:]
        for segment in request.prompt[:hits]
    )


def test_a_small_trace_hits_as_kvcache_simulator_says() -> None:
    requests = open_trace(TINY).requests
    prompts = block_names(requests)
    plan = build_execution_plan(parse_trace_file(TINY, block_size=512))
    first = plan.warmup_requests
    assert first == 100
    found = set()
    longest = max(map(len, prompts))
    for capacity in (3, 5, 8, 12, 20, 40, 80, 150):
        for policy in ("lru", "fifo", "optimal"):
            if policy == "lru" and capacity < longest:
                continue
            theirs = simulate_policy(plan, policy, capacity)
            assert theirs.measurementMode == "fixed_window"
            optimal = policy == "optimal"
            blocks = most_blocks(requests, capacity) if optimal else hit_blocks(policy, prompts, capacity)
            assert hit_tokens(requests, blocks, first) == theirs.hitTokens, (policy, capacity)
            found.add(theirs.hitTokens)
    assert len(found) >= 15
    assert hit_tokens(requests, most_blocks(requests, None), first) == simulate_ceiling(plan).hitTokens


@pytest.fixture(scope="module")
def conversation() -> tuple[Request, ...]:
    folder = os.environ.get("HARNESS_TRACES") or ROOT.parent / "shared" / "traces"
    path = Path(folder) / "mooncake_conversation.jsonl"
    if not path.is_file():
        pytest.skip("mooncake_conversation.jsonl is in neither $HARNESS_TRACES nor ../shared/traces")
    return open_trace(path).requests


@pytest.mark.parametrize("answer", CONVERSATION, ids=lambda answer: f"{answer.blocks} blocks")
def test_the_conversation_trace_hits_as_kvcache_simulator_says(
    answer: Answer, conversation: tuple[Request, ...]
) -> None:
    prompts = block_names(conversation)
    found = {policy: hit_blocks(policy, prompts, answer.blocks) for policy in ("lru", "fifo")}
    found["optimal"] = most_blocks(conversation, answer.blocks)
    mine = {policy: hit_tokens(conversation, blocks, SECOND_HALF) for policy, blocks in found.items()}
    assert mine == {"lru": answer.lru, "fifo": answer.fifo, "optimal": answer.optimal}


def test_the_most_that_any_cache_could_hit_of_the_conversation_trace(conversation: tuple[Request, ...]) -> None:
    assert hit_tokens(conversation, most_blocks(conversation, None), SECOND_HALF) == CONVERSATION_CEILING
    # Token by token it is the same: the trace's shorter blocks are of ids of their own.
    assert sum(most_hits([request.prompt for request in conversation])[SECOND_HALF:]) == CONVERSATION_CEILING


def test_the_answers_are_those_that_were_kept() -> None:
    path = ROOT.parent / "shared" / "reference" / "kvcache_simulator_conversation.json"
    if not path.is_file():
        pytest.skip("../shared/reference/kvcache_simulator_conversation.json, the package's own output, is not here")
    kept = json.loads(path.read_text())
    points = [
        Answer(point["cacheBlocks"], **{name: one["hitTokens"] for name, one in point["results"].items()})
        for point in kept["points"]
    ]
    assert points == CONVERSATION and kept["ceiling"]["hitTokens"] == CONVERSATION_CEILING
    assert kept["metadata"]["warmupRequests"] == SECOND_HALF
