"""`scripts/bench sim`: how many requests a second does the simulator take? Usage and sample output: scripts/bench."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from simulator.calibration import load_calibration
from simulator.columns import CompletionColumns, RequestColumns
from simulator.models import load_model
from simulator.simulate import Simulator
from traces.catalogue import find_trace
from traces.formats import open_trace

GIB = 1 << 30
GPU_TOKENS = 132_800  # what 14.19 GiB hold of llama-3.2-3b
CHUNK_TOKENS = 256
INSTANCES = 8
BLOCK_TOKENS = (16, 512)
TIER_PACKS = ("lmcache-0.5.6-mp", "lru")
REQUESTS = 1_000_000
TRACE_REQUESTS = 12_031
SHORT_RUNS = 5
# A quarter of an hour's time between the last request of one repetition and the first of the next.
PAUSE_S = 900.0
NAMESPACE = 1 << 32


def simulator(block_tokens: int, tier_pack: str) -> Simulator:
    chunk = max(CHUNK_TOKENS, block_tokens)
    return Simulator(
        load_model("llama-3.2-3b"),
        load_calibration("rtx-a5000-nfs"),
        "vllm-0.32",
        tier_pack,
        gpu_blocks=GPU_TOKENS // block_tokens + 1,
        block_tokens=block_tokens,
        chunk_tokens=chunk,
        cpu_bytes=64 * GIB,
        disk_bytes=2048 * GIB,
        odirect=True,
        max_num_batched_tokens=2048,
        max_num_seqs=256,
    )


def repetitions(count: int) -> Iterator[list[tuple[RequestColumns, float]]]:
    """The trace again and again: for each instance its requests of one repetition, and when that one is over.

    Each repetition has hash ids of its own, so that it shares no prefix with another.
    """
    requests = open_trace(find_trace("mooncake_conversation")).requests
    shares = [RequestColumns.of(requests[i::INSTANCES]) for i in range(INSTANCES)]
    period_s = max(request.at_s or 0.0 for request in requests) + PAUSE_S
    del requests
    for number in range(count):
        start_s, namespace = number * period_s, number * NAMESPACE
        yield [
            (
                RequestColumns(
                    ids=[f"{number}-{name}" for name in share.ids],
                    hash_ids=np.asarray(share.hash_ids) + namespace,
                    segment_tokens=share.segment_tokens,
                    segment_ends=share.segment_ends,
                    output_tokens=share.output_tokens,
                    reply_ids=np.asarray(share.reply_ids) ^ namespace,
                    at_s=np.asarray(share.at_s) + start_s,
                ),
                (number + 1) * period_s,
            )
            for share in shares
        ]


def add(totals: Counter[str], done: CompletionColumns) -> None:
    totals["requests"] += len(done.ids)
    totals["failed"] += len(done.errors)
    for name in ("prompt_tokens", "output_tokens", "computed", "gpu", "cpu", "disk", "preemptions"):
        totals[name] += int(np.asarray(getattr(done, name)).sum())


def case(block_tokens: int, tier_pack: str, count: int) -> dict[str, Any]:
    """Replays so many repetitions in this process.

    The time is of all that happens once the trace is read: making each repetition's columns is in it. The instances
    are independent engines that one thread runs in turn, a repetition each; no clock and no tier is shared.
    """
    instances = [simulator(block_tokens, tier_pack) for _ in range(INSTANCES)]
    totals: Counter[str] = Counter()
    loads = repetitions(count)
    load: list[tuple[RequestColumns, float]] | None = next(loads)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    while load is not None:
        for instance, (requests, _) in zip(instances, load, strict=True):
            instance.submit_many(requests)
        for instance, (_, until_s) in zip(instances, load, strict=True):
            add(totals, instance.advance_many(until_s))
        load = next(loads, None)
    for instance in instances:
        add(totals, instance.advance_many())
    return {
        "wall_s": time.perf_counter() - begin_s,
        "cpu_s": time.process_time() - begin_cpu_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **totals,
    }


def measured(block_tokens: int, tier_pack: str, count: int) -> dict[str, Any]:
    """A case in a process of its own, so that its peak memory is its own."""
    words = ["case", str(block_tokens), tier_pack, str(count)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, __file__, *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed: {done.stderr.strip().splitlines()[-1]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def report(block_tokens: int, tier_pack: str, requests: int) -> str:
    count = -(-requests // TRACE_REQUESTS)
    short = [measured(block_tokens, tier_pack, 1) for _ in range(SHORT_RUNS)]
    long = measured(block_tokens, tier_pack, count)
    if failed := long["failed"]:
        sys.exit(f"blocks of {block_tokens}, {tier_pack}: {failed} requests failed; the figures are worth nothing")
    short_s = statistics.median(run["wall_s"] / run["requests"] for run in short)
    long_s = long["wall_s"] / long["requests"]
    hits = ", ".join(f"{tier} {long[tier] / long['prompt_tokens']:.1%}" for tier in ("gpu", "cpu", "disk"))
    return (
        f"{tier_pack}, blocks of {block_tokens} tokens: {1 / long_s:,.0f} requests/s\n"
        f"    {long['requests']:,} requests in {long['wall_s']:.1f} s, peak {long['peak_bytes'] / GIB:.2f} GiB;"
        f" prompt tokens from {hits}\n"
        f"    a request takes {long_s / short_s:.2f} times as long as with {TRACE_REQUESTS:,} ({1 / short_s:,.0f}"
        f" requests/s, median of {SHORT_RUNS})"
    )


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench sim", description="How fast is the simulator?")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="whole repetitions of the trace up to this many")
    requests = parser.parse_args().requests
    print(f"{cpu_name()}, one thread; load before the start (1 min): {os.getloadavg()[0]:.2f}")
    print(
        f"Mooncake's conversation trace again and again, round-robin to {INSTANCES} independent instances; three tiers"
    )
    for tier_pack in TIER_PACKS:
        for block_tokens in BLOCK_TOKENS:
            print(report(block_tokens, tier_pack, requests), flush=True)
    print(f"load after the end (1 min): {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        print(json.dumps(case(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))))
    else:
        main()
