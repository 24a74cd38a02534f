"""Workloads for SGLang's own cache, and the simulator's side of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from simulator.models import load_model
from simulator.policies import tier_policy
from simulator.simulate import Completion, Note, Simulator
from tests.support.oracle_cases import calibration, completions
from traces.request import Request, Segment, reply_stream

# Between two requests, in seconds of the simulator.
APART_S = 1.0
# Between the requests before a flush and those after it: longer than all of them take.
FLUSH_APART_S = 1e6


class Workload(msgspec.Struct, kw_only=True):
    """Requests that run one after another, and the sizes of the cache in pages.

    chunk: tokens of prefill at a time. host_pages None: no HiCache. storage: None, "fast", or "stalled": written at
    once, never read. threshold: tokens that a prefetch brings at least. flushes: numbers of requests before which
    device and host are emptied.
    """

    requests: list[Request]
    page: int
    chunk: int
    device_pages: int
    host_pages: int | None = None
    storage: str | None = None
    prefetch: str = "wait_complete"
    threshold: int = 1
    flushes: list[int] = []


class Crowd(msgspec.Struct, kw_only=True):
    """Requests by the time at which they are sent, in steps of the engine, and the sizes of the cache in pages.

    chunk: tokens of prefill in a step. running: requests that may run at a time. The others as in `Workload`; before a
    flush all earlier requests end.
    """

    requests: list[tuple[float, Request]]
    page: int
    chunk: int
    device_pages: int
    running: int
    host_pages: int | None = None
    storage: str | None = None
    prefetch: str = "wait_complete"
    threshold: int = 1
    flushes: list[int] = []


class Simulated(NamedTuple):
    rows: dict[str, Completion]
    gpu: list[Note]
    tiers: list[Note]


def prompts(chance: random.Random, page: int, longest: int, reply: int, aligned: bool) -> list[Request]:
    """Requests that share prefixes. longest: a prompt's pages are twice as many at most; reply: its tokens at most.
    aligned: some prompts are whole pages."""
    made = list[Request]()
    for index in range(60):
        prompt = [Segment(chance.randrange(5), chance.randrange(1, longest * page))]
        if made and chance.random() < 0.5:
            earlier = chance.choice(made)
            prompt = [*earlier.prompt, Segment(reply_stream(earlier.id), earlier.output_tokens)]
        if chance.random() < 0.6:
            prompt.append(Segment(1000 + index, chance.randrange(1, longest * page // 2)))
        if sum(part.tokens for part in prompt) >= 2 * longest * page:
            prompt = prompt[:1]
        if aligned and chance.random() < 0.3:
            prompt.append(Segment(2000 + index, -sum(part.tokens for part in prompt) % page))
        elif sum(part.tokens for part in prompt) % page == 0:
            prompt.append(Segment(2000 + index, 1))
        made.append(Request(id=f"r{index}", prompt=tuple(prompt), output_tokens=chance.randint(1, reply)))
    return made


def random_device(
    seed: int, *, reply_pages: int = 4, aligned: bool = True, pages: Sequence[int] = (16, 32, 64)
) -> Workload:
    """A small GPU alone."""
    chance = random.Random(seed)
    page, longest = chance.choice(pages), chance.choice([4, 8, 12])
    requests = prompts(chance, page, longest, reply_pages * page or 1, aligned)
    size = int((2 * longest + reply_pages + 3) * chance.choice([1, 1.3, 2]))
    return Workload(requests=requests, page=page, chunk=page * chance.choice([1, 3, 8, 100]), device_pages=size)


def random_host(seed: int) -> Workload:
    """Such a GPU over host memory. Every other host memory is small: there prompts end inside of a page, replies
    have no page of their own, and prefill takes a page at a time. The others hold everything, mostly over storage, and
    are emptied at times; pages may be of 8 tokens there."""
    chance = random.Random(10**6 + seed)
    small = seed % 2 == 1
    device = random_device(seed, reply_pages=0, aligned=False) if small else random_device(seed, pages=[8, 16, 64])
    if small:
        host_pages = int(device.device_pages * chance.choice([1.2, 1.5, 2]))
        return msgspec.structs.replace(device, chunk=device.page, host_pages=host_pages)
    storage = chance.choice([None, "fast", "fast", "stalled"])
    return msgspec.structs.replace(
        device,
        host_pages=1500,
        storage=storage,
        prefetch=chance.choice(["timeout", "best_effort" if storage == "stalled" else "wait_complete"]),
        threshold=device.page * chance.choice([1, 2, 4]),
        flushes=sorted(chance.sample(range(10, len(device.requests)), 4)),
    )


def random_crowd(seed: int) -> Crowd:
    """Such requests, of which several begin in one step and run together, with replies of up to four pages."""
    chance = random.Random(2 * 10**6 + seed)
    page, longest, replies = chance.choice([16, 32, 64]), chance.choice([4, 8, 12]), chance.choice([0, 2, 4])
    at, sent = 0.0, list[tuple[float, Request]]()
    for request in prompts(chance, page, longest, replies * page or 1, aligned=True):
        at += chance.choice([0, 0, 0, 0.5, 1, 3, 7, 40])
        sent.append((at, request))
    room = int((2 * longest + replies + 3) * chance.choice([1, 1.5, 2, 4]))
    chunk, running = page * chance.choice([1, 3, 8, 100]), chance.choice([2, 4, 8])
    return Crowd(requests=sent, page=page, chunk=chunk, device_pages=room, running=running)


def random_crowd_over_host(seed: int, storage: str | None = None) -> Crowd:
    """Such requests over host memory that holds everything. Three times both are emptied."""
    chance = random.Random(3 * 10**6 + seed)
    crowd = random_crowd(seed)
    flushes = sorted(chance.sample(range(10, len(crowd.requests)), 3))
    later = [FLUSH_APART_S * sum(index >= flush for flush in flushes) for index in range(len(crowd.requests))]
    return msgspec.structs.replace(
        crowd,
        requests=[(at + more, request) for more, (at, request) in zip(later, crowd.requests, strict=True)],
        host_pages=3000,
        storage=storage,
        threshold=crowd.page * chance.choice([1, 2, 4]),
        flushes=flushes,
    )


def random_crowd_over_storage(seed: int) -> Crowd:
    """Such requests over host memory and storage."""
    return random_crowd_over_host(seed, "fast")


def asked_of(request: Request) -> dict[str, Any]:
    return {
        "id": request.id,
        "prompt": [[segment.hash_id, segment.tokens] for segment in request.prompt],
        "reply": reply_stream(request.id),
        "output": request.output_tokens,
    }


def asked_together(case: Crowd) -> dict[str, Any]:
    """What tests/oracle/sglang_schedule.py reads."""
    sizes = {name: getattr(case, name) for name in case.__struct_fields__ if name != "requests"}
    return sizes | {"requests": [asked_of(request) | {"at": at} for at, request in case.requests]}


def simulate_together(case: Crowd, *, macro_steps: bool = True) -> Simulated:
    """The same by SGLang's packs, at a step a second."""
    page_bytes = case.page * load_model("tiny-llama").kv_bytes_per_token
    simulator = Simulator(
        load_model("tiny-llama"),
        calibration({}),
        "sglang-0.5.23",
        msgspec.structs.replace(tier_policy("sglang-0.5.23-hicache-wait"), min_prefetch_tokens=case.threshold),
        gpu_blocks=case.device_pages,
        block_tokens=case.page,
        chunk_tokens=case.page,
        cpu_bytes=None if case.host_pages is None else case.host_pages * page_bytes,
        disk_bytes=None if case.storage is None else 10**6 * page_bytes,
        odirect=True,
        max_num_batched_tokens=case.chunk,
        max_num_seqs=case.running,
        journal=True,
        macro_steps=macro_steps,
    )
    rows: dict[str, Completion] = {}
    for start, end in itertools.pairwise([0, *case.flushes, len(case.requests)]):
        if start > 0:
            simulator.drain()
            simulator.reset(["gpu", "cpu"])
        rows |= completions(simulator, case.requests[start:end])
    simulator.drain()
    return Simulated(rows, *simulator.take_journal())


def asked(case: Workload) -> dict[str, Any]:
    """What tests/oracle/sglang_hicache.py reads."""
    sizes = {name: getattr(case, name) for name in case.__struct_fields__ if name != "requests"}
    return sizes | {"requests": [asked_of(request) for request in case.requests]}


def simulate_sglang(case: Workload) -> Simulated:
    """The same by the packs of SGLang. A stalled storage takes hours to read."""
    stalled = case.storage == "stalled"
    pack = msgspec.structs.replace(
        tier_policy("sglang-0.5.23-hicache"),
        min_prefetch_tokens=case.threshold,
        prefetch_timeout_s=0.0 if stalled else None,
        prefetch_token_s=0.0,
    )
    page_bytes = case.page * load_model("tiny-llama").kv_bytes_per_token
    simulator = Simulator(
        load_model("tiny-llama"),
        calibration({"disk.read.latency_s": 1e4 if stalled else 0.0}),
        "sglang-0.5.23",
        pack,
        gpu_blocks=case.device_pages,
        block_tokens=case.page,
        chunk_tokens=case.page,
        cpu_bytes=None if case.host_pages is None else case.host_pages * page_bytes,
        disk_bytes=None if case.storage is None else 10**6 * page_bytes,
        odirect=True,
        max_num_batched_tokens=case.chunk,
        max_num_seqs=1,
        journal=True,
    )
    rows: dict[str, Completion] = {}
    for index, request in enumerate(case.requests):
        if index in case.flushes:
            simulator.reset(["gpu", "cpu"])
        simulator.submit(request, simulator.now_s + APART_S)
        rows |= {row.id: row for row in simulator.advance()}
        simulator.drain()
    return Simulated(rows, *simulator.take_journal())


class Rule(msgspec.Struct, kw_only=True):
    """A rule of SGLang's that the simulator lacks: the last request's hit tokens on device, host and in storage."""

    case: Workload
    sglang: tuple[int, int, int]
    simulator: tuple[int, int, int]


def _asking(*prompts: list[tuple[int, int]]) -> list[Request]:
    made = [tuple(Segment(stream, tokens) for stream, tokens in prompt) for prompt in prompts]
    return [Request(id=f"r{index}", prompt=prompt, output_tokens=1) for index, prompt in enumerate(made)]


def rules() -> dict[str, Rule]:
    sizes: dict[str, Any] = {"page": 16, "chunk": 1600, "device_pages": 12, "host_pages": 60}
    return {
        "the host evicts whole nodes": Rule(
            case=Workload(
                requests=_asking([(1, 113)], [(2, 160)], [(3, 113)], [(1, 113)]), **sizes | {"host_pages": 20}
            ),
            sglang=(0, 0, 0),
            simulator=(0, 48, 0),
        ),
    }
