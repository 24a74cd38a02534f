"""Workloads for Mooncake's own pool, and the simulator's side of them."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec

from simulator.models import load_model
from simulator.policies import tier_policy
from simulator.simulate import Simulator
from tests.support.oracle_cases import calibration
from traces.request import Request, Segment

# No lease outlives the use that gave it; no lease runs out.
NO_LEASE_S, ENDLESS_S = 0.001, 3600.0
CHUNK_TOKENS = 16


class PoolCase(msgspec.Struct, kw_only=True):
    """Uses of chunks, one after another; every_s: apart by so many seconds, 0: by as many as the pool needs to rest."""

    chunks: int
    watermark: float
    ratio: float
    lease_s: float
    every_s: float
    uses: list[int]

    @property
    def told_apart(self) -> bool:
        """How many chunks an eviction drops does not depend on whether it sees the chunk that is being put."""
        steps = [self._share(used, used) == self._share(used, used - 1) for used in range(1, self.chunks + 1)]
        return all(steps)

    def _share(self, used: int, keys: int) -> int:
        usage = used / self.chunks
        if usage <= self.watermark:
            return 0
        return math.ceil(max(self.ratio, usage - self.watermark + self.ratio) * keys - 1e-9)


def random_pool(seed: int) -> PoolCase:
    """Uses of more chunks than the pool holds, some more often than others."""
    chance = random.Random(seed)
    while True:
        case = PoolCase(
            chunks=chance.choice([24, 40, 64, 96]),
            watermark=chance.choice([0.7, 0.8, 0.9, 0.9, 0.95]),
            ratio=chance.choice([0.02, 0.05, 0.05, 0.1, 0.3]),
            lease_s=chance.choice([NO_LEASE_S, NO_LEASE_S, NO_LEASE_S, ENDLESS_S]),
            every_s=0.0,
            uses=[],
        )
        if case.told_apart:
            break
    many = int(case.chunks * chance.choice([1.1, 1.5, 2.5]))
    power = chance.choice([1.0, 2.0])
    case.uses = [int(many * chance.random() ** power) for _ in range(2 * case.chunks)]
    return case


def timed_pool(seed: int) -> PoolCase:
    """Leases that run out between uses."""
    chance = random.Random(seed)
    # A lease ends between two uses, far from both.
    every_s = 0.2
    lease_s = every_s * (chance.randrange(5, 25) + 0.5)
    uses = [int(40 * chance.random() ** 2) for _ in range(60)]
    return PoolCase(chunks=24, watermark=0.9, ratio=0.05, lease_s=lease_s, every_s=every_s, uses=uses)


def simulate_pool(case: PoolCase) -> list[dict[str, Any]]:
    """What tests/oracle/mooncake_pool.py answers, by the pack of Mooncake: each use is a request for one chunk."""
    chunk_bytes = CHUNK_TOKENS * load_model("tiny-llama").kv_bytes_per_token
    pack = msgspec.structs.replace(
        tier_policy("mooncake-0.3.13"), lease_s=case.lease_s, watermark=case.watermark, evict_ratio=case.ratio
    )
    simulator = Simulator(
        load_model("tiny-llama"),
        calibration({"step_s": 1e-4}),
        "vllm-0.32",
        pack,
        gpu_blocks=4,
        block_tokens=CHUNK_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
        cpu_bytes=case.chunks * chunk_bytes,
        max_num_batched_tokens=64,
        max_num_seqs=1,
        journal=True,
    )
    # One more use makes the ticks run that follow the last one.
    for index, key in enumerate([*case.uses, 10**6]):
        prompt = (Segment(key, CHUNK_TOKENS), Segment(10**7, 1))
        simulator.submit(Request(id=f"u{index}", prompt=prompt, output_tokens=1), index * (case.every_s or 1.0))
    while simulator.advance():
        pass
    _, notes = simulator.take_journal()
    done, uses, names = list[dict[str, Any]](), iter([*case.uses, 10**6]), dict[int, int]()
    for what, _, numbers in notes:
        if what == "lookup":
            names[numbers[1]] = next(uses)
            done.append({"hit": False, "put": False, "gone": []})
        elif what == "answer":
            done[-1]["hit"] = len(numbers) > 1
        elif what == "storing":
            done[-1]["put"] = bool(numbers)
        elif what == "tick" and done:
            done[-1]["gone"] = sorted([*done[-1]["gone"], *(names[key] for key in numbers[1:])])
    return done[:-1]
