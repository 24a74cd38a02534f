"""Workloads that the simulator and an engine's own classes both run, and the simulator's side of it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from simulator.calibration import Calibration, load_calibration
from simulator.models import load_model
from simulator.policies import LMCACHE, lmcache_evicting
from simulator.simulate import Completion, Note, Simulator
from tests.support.paths import ROOT
from traces.request import Request, Segment, reply_stream

PYTHON = ROOT / ".engines" / "vllm" / "bin" / "python"


class Case(msgspec.Struct):
    """One workload: requests by the time they are sent, and the simulator's settings. eviction: of the CPU tier, as
    LMCache's server has it: policy, watermark, ratio."""

    requests: list[tuple[float, Request]]
    settings: dict[str, Any]
    constants: dict[str, float] = {}
    eviction: tuple[str, float, float] = ("lru", 0.8, 0.2)


def calibration(constants: dict[str, float]) -> Calibration:
    """One second a step, transfers in no time, but for what `constants` says."""
    known = load_calibration("cpu-2core")
    free = {name: 1e30 if name.endswith("bytes_per_s") else 0.0 for name in known.constants}
    return msgspec.structs.replace(known, constants=free | {"step_s": 1.0} | constants, synchronous_loads=False)


def chats(chance: random.Random, count: int, pauses: list[float], longest: int) -> list[tuple[float, Request]]:
    """Requests that share prefixes; a third goes on from an earlier one's reply."""
    at, sent = 0.0, list[tuple[float, Request]]()
    for index in range(count):
        at += chance.choice(pauses)
        prompt = [Segment(chance.randrange(6), chance.randrange(1, longest))]
        if sent and chance.random() < 0.35:
            _, earlier = chance.choice(sent)
            replied = Segment(reply_stream(earlier.id), earlier.output_tokens)
            longer = [*earlier.prompt, replied]
            prompt = longer if sum(part.tokens for part in longer) <= 2 * longest else longer[:1]
        if chance.random() < 0.8:
            prompt.append(Segment(1000 + index, chance.randrange(1, longest // 2)))
        request = Request(id=f"r{index}", prompt=tuple(prompt), output_tokens=chance.randrange(1, longest // 2))
        sent.append((at, request))
    return sent


def random_batching(seed: int) -> Case:
    """Workloads on a busy GPU with too few blocks, without tiers."""
    chance = random.Random(seed)
    requests = chats(chance, 70, [0, 0, 0, 0.5, 1, 3, 7], 120)
    block = chance.choice([4, 8, 16])
    longest = max(-(-(request.prompt_tokens + request.output_tokens) // block) for _, request in requests)
    settings = {
        "block_tokens": block,
        "gpu_blocks": int(longest * chance.choice([1.05, 1.6, 4])) + 2,
        "max_num_batched_tokens": chance.choice([32, 64, 256]),
        "max_num_seqs": chance.choice([3, 8, 30]),
    }
    return Case(requests, settings)


def random_tiers(seed: int) -> Case:
    """A small CPU tier above a disk (in a fifth of the cases: above nothing), with transfers that overlap."""
    chance = random.Random(seed)
    requests = chats(chance, 80, [0, 0, 0.1, 0.5, 2], 160)
    chunk_bytes = 16 * load_model("tiny-llama").kv_bytes_per_token
    slow = chance.choice([1e-3, 0.1, 1.0])
    constants = {"step_s": 0.05, "cpu.write.latency_s": chance.choice([1e-3, 0.2]), "cpu.read.latency_s": 0.02}
    constants |= {f"disk.{way}.latency_s": slow * chance.choice([1, 4]) for way in ("read", "write")}
    settings = {
        "block_tokens": 8,
        "gpu_blocks": chance.choice([70, 150]),
        "chunk_tokens": 16,
        "cpu_bytes": chunk_bytes * chance.choice([8, 20, 45, 90]),
        "disk_bytes": chunk_bytes * 100_000 if chance.random() < 0.8 else None,
        "odirect": True,
        "max_num_batched_tokens": chance.choice([64, 512]),
        "max_num_seqs": chance.choice([4, 16]),
    }
    return Case(requests, settings, constants)


def random_eviction(seed: int) -> Case:
    """Such tiers, by ARC or with another watermark and share."""
    chance = random.Random(seed)
    policy, watermark = chance.choice(["arc", "arc", "lru"]), chance.choice([0.3, 0.5, 0.8, 0.95])
    eviction = (policy, watermark, chance.choice([0.05, 0.2, 0.5]))
    return msgspec.structs.replace(random_tiers(seed), eviction=eviction)


def completions(simulator: Simulator, requests: Iterable[tuple[float, Request]]) -> dict[str, Completion]:
    """Submits requests at their times in s, lets all of them end, and returns their completions by id."""
    for at_s, request in requests:
        simulator.submit(request, at_s)
    rows: dict[str, Completion] = {}
    while done := simulator.advance():
        rows |= {row.id: row for row in done}
    return rows


def simulate(case: Case, *, macro_steps: bool = True) -> tuple[dict[str, Completion], list[Note], list[Note]]:
    """Completions by id, and the journals of the GPU and of the tiers."""
    simulator = Simulator(
        load_model("llama-3.2-3b" if case.settings["block_tokens"] > 100 else "tiny-llama"),
        calibration(case.constants),
        "vllm-0.32",
        lmcache_evicting(LMCACHE, *case.eviction),
        **{"chunk_tokens": 64, "record_token_times": True, "journal": True} | case.settings,
        macro_steps=macro_steps,
    )
    rows = completions(simulator, case.requests)
    simulator.drain()
    return rows, *simulator.take_journal()


def ask(script: str, cases: list[Any], python: Path = PYTHON) -> list[Any]:
    """Runs an oracle of tests/oracle/ in an engine's environment, which keeps its byte code, and returns its answer,
    one for each case."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"VLLM_LOGGING_LEVEL": "ERROR", "LMCACHE_LOG_LEVEL": "CRITICAL"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    command = [str(python), str(ROOT / "tests" / "oracle" / script)]
    start = time.monotonic()
    done = subprocess.run(command, input=json.dumps(cases), env=environment, capture_output=True, text=True)
    print(f"{script}: {len(cases)} cases in {time.monotonic() - start:.0f} s")
    assert done.returncode == 0, done.stderr[-4000:]
    answers: list[Any] = json.loads(done.stdout)
    return answers
