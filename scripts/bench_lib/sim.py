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
from typing import Any, NamedTuple, cast

import numpy as np
from msgspec.structs import replace

from harness.collectors.cores import core_loop_s
from simulator.calibration import load_calibration
from simulator.cluster import Cluster, Routing
from simulator.columns import CompletionColumns, RequestColumns
from simulator.levels import Level, RemoteDevice, standard_levels
from simulator.models import load_model
from simulator.policies import tier_policy
from simulator.simulate import Simulator
from traces.catalogue import find_trace
from traces.formats import open_trace
from traces.tiers import tier_names

GIB = 1 << 30
GPU_TOKENS = 132_800  # what 14.19 GiB hold of llama-3.2-3b
CHUNK_TOKENS = 256
INSTANCES, MANY_INSTANCES = 8, 1000
BLOCK_TOKENS = (16, 512)
TIER_PACKS = ("lmcache-0.5.6-mp", "lru")
ROUTINGS = ("round-robin", "least-loaded", "prefix-aware")
REQUESTS = 1_000_000
TRACE_REQUESTS = 12_031
ROW_REQUESTS = 25_000
SHORT_RUNS = 5
LOOKS = 20
# A quarter of an hour's time between the last request of one repetition and the first of the next.
PAUSE_S = 900.0
NAMESPACE = 1 << 32


class Case(NamedTuple):
    """What is measured; `shared` as in the experiment file, with commas. four: a pool and a remote store as well."""

    tier_pack: str = TIER_PACKS[0]
    block_tokens: int = BLOCK_TOKENS[0]
    instances: int = INSTANCES
    routing: str = ROUTINGS[0]
    shared: str = ""
    four: int = 0

    def __str__(self) -> str:
        shared = f", {self.shared} shared" if self.shared else ""
        words = f"{self.tier_pack}, blocks of {self.block_tokens} tokens, {self.instances:,} instances"
        return f"{words}, {self.routing}{shared}{', four tiers below the GPU' if self.four else ''}"


CASES = (
    *(Case(pack, block) for pack in TIER_PACKS for block in BLOCK_TOKENS),
    *(Case(routing=routing) for routing in ROUTINGS[1:]),
    Case(shared="disk"),
    Case(shared="cpu,disk"),
    Case("lru", shared="pool,disk,remote", four=1),
    Case(instances=MANY_INSTANCES),
)


def four_levels(pack: str) -> tuple[Level, ...]:
    """CPU RAM, and a pool, a disk and a store behind links of 12.5 GB/s, at whose total the instances queue."""
    remote = RemoteDevice(latency_s=2e-4, bytes_per_s=12.5e9, total_bytes_per_s=50e9, connections=64)
    sizes = {"cpu": 16 * GIB, "pool": 64 * GIB, "disk": 256 * GIB, "remote": 2048 * GIB}
    levels = standard_levels(tier_policy(pack), tier_policy(pack), sizes)
    return tuple(replace(level, device=None if level.name in ("cpu", "disk") else remote) for level in levels)


def cluster(case: Case) -> Cluster:
    one = Simulator(
        load_model("llama-3.2-3b"),
        load_calibration("rtx-a5000-nfs"),
        "vllm-0.32",
        case.tier_pack,
        gpu_blocks=GPU_TOKENS // case.block_tokens + 1,
        block_tokens=case.block_tokens,
        chunk_tokens=max(CHUNK_TOKENS, case.block_tokens),
        cpu_bytes=64 * GIB,
        disk_bytes=2048 * GIB,
        levels=four_levels(case.tier_pack) if case.four else (),
        odirect=True,
        max_num_batched_tokens=2048,
        max_num_seqs=256,
    )
    shared = tuple(filter(None, case.shared.split(",")))
    return Cluster(one, instances=case.instances, routing=cast(Routing, case.routing), shared=cast(Any, shared))


def repetitions(count: int, at_once: int) -> Iterator[tuple[RequestColumns, float]]:
    """Repeats the trace, `at_once` repetitions concurrently, in rows of limited length.

    Yields each row with the time until which it is complete. Each repetition has its own hash ids, so repetitions
    share no prefix.
    """
    requests = open_trace(find_trace("mooncake_conversation")).requests
    one = RequestColumns.of(requests)
    period_s = max(request.at_s or 0.0 for request in requests) + PAUSE_S
    at_s = np.tile(np.asarray(one.at_s), at_once)
    order = np.argsort(at_s, kind="stable")
    ends = np.asarray(one.segment_ends)
    del requests
    for first in range(0, count, at_once):
        numbers = range(first, min(first + at_once, count))
        start_s = first // at_once * period_s
        sent = order[order < len(numbers) * len(one.ids)]
        for begin in range(0, len(sent), ROW_REQUESTS):
            row, rest = sent[begin : begin + ROW_REQUESTS], sent[begin + ROW_REQUESTS :]
            # Exactly the number at which the next repetitions start: a sum could be later by a rounding error.
            until_s = start_s + at_s[rest[0]] if len(rest) else (first // at_once + 1) * period_s
            yield _together(one, ends, numbers, start_s, row), until_s


def _together(
    one: RequestColumns, ends: np.ndarray[Any, Any], numbers: range, start_s: float, order: np.ndarray[Any, Any]
) -> RequestColumns:
    """Repetitions of these numbers from start_s on, in the order of sending."""
    starts, width = np.concatenate([[0], ends[:-1]]), len(ends)
    number, index = order // width, order % width
    lengths = (ends - starts)[index]
    new_ends: np.ndarray[tuple[int], np.dtype[np.int64]] = np.cumsum(lengths)
    # Where each segment lies in the one repetition that there is.
    at = np.arange(new_ends[-1]) + np.repeat(starts[index] - (new_ends - lengths), lengths)
    namespaces = (np.asarray(numbers)[number]) * NAMESPACE
    names = [f"{number}-" for number in numbers]
    return RequestColumns(
        ids=[names[n] + one.ids[i] for n, i in zip(number.tolist(), index.tolist(), strict=True)],
        hash_ids=np.asarray(one.hash_ids)[at] + np.repeat(namespaces, lengths),
        segment_tokens=np.asarray(one.segment_tokens)[at],
        segment_ends=new_ends.data,
        output_tokens=np.asarray(one.output_tokens)[index],
        reply_ids=np.asarray(one.reply_ids)[index] ^ namespaces,
        at_s=np.asarray(one.at_s)[index] + start_s,
    )


def add(totals: Counter[str], done: CompletionColumns) -> None:
    totals["requests"] += len(done.ids)
    totals["failed"] += len(done.errors)
    for name in ("prompt_tokens", "output_tokens", "computed", "gpu", "cpu", "pool", "disk", "remote", "preemptions"):
        totals[name] += int(np.asarray(getattr(done, name)).sum())


def take_core() -> tuple[int, float]:
    """Pins this process to the core with the least load from other guests; returns it and its loop time in s."""
    loops_s = {core: loop_s(core) for core in sorted(os.sched_getaffinity(0))}
    core = min(loops_s, key=lambda core: loops_s[core])
    os.sched_setaffinity(0, {core})
    return core, loops_s[core]


def loop_s(core: int) -> float:
    return statistics.fmean(core_loop_s(core) for _ in range(LOOKS))


def replay(case: Case, count: int) -> dict[str, Any]:
    """Replays `count` repetitions in this process, one at once per eight instances.

    The time includes everything after the trace is read, also making each repetition's columns.
    """
    core, before_s = take_core()
    engines = cluster(case)
    totals: Counter[str] = Counter()
    loads = repetitions(count, max(1, case.instances // INSTANCES))
    load: tuple[RequestColumns, float] | None = next(loads)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    while load is not None:
        engines.submit_many(load[0])
        add(totals, engines.advance_many(load[1]))
        load = next(loads, None)
    add(totals, engines.advance_many())
    return {
        "wall_s": time.perf_counter() - begin_s,
        "cpu_s": time.process_time() - begin_cpu_s,
        "loop_s": (before_s + loop_s(core)) / 2,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        **totals,
    }


def measured(case: Case, count: int) -> dict[str, Any]:
    """Runs a case in a separate process, so that its peak memory counts alone."""
    words = ["case", str(count), *map(str, case)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([sys.executable, __file__, *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{case} failed: {done.stderr.strip().splitlines()[-1]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def report(case: Case, requests: int) -> str:
    count = -(-requests // TRACE_REQUESTS)
    long = measured(case, count)
    if failed := long["failed"]:
        sys.exit(f"{case}: {failed} requests failed; the figures are worth nothing")
    long_s = long["wall_s"] / long["requests"]
    hits = ", ".join(f"{tier} {long[tier] / long['prompt_tokens']:.1%}" for tier in tier_names() if long[tier])
    lines = [
        f"{case}: {1 / long_s:,.0f} requests/s",
        f"    {long['requests']:,} requests in {long['wall_s']:.1f} s ({long['cpu_s']:.1f} s of CPU), peak"
        f" {long['peak_bytes'] / GIB:.2f} GiB; prompt tokens from {hits}; loop {long['loop_s'] * 1e6:.0f} us",
    ]
    if case.instances == INSTANCES:
        short = [measured(case, 1) for _ in range(SHORT_RUNS)]
        short_s = statistics.median(run["wall_s"] / run["requests"] for run in short)
        lines.append(
            f"    a request takes {long_s / short_s:.2f} times as long as with {TRACE_REQUESTS:,} ({1 / short_s:,.0f}"
            f" requests/s, median of {SHORT_RUNS})"
        )
    return "\n".join(lines)


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench sim", description="How fast is the simulator?")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="whole repetitions of the trace up to this many")
    requests = parser.parse_args().requests
    print(f"{cpu_name()}, one thread; load before the start (1 min): {os.getloadavg()[0]:.2f}")
    best_s = min(core_loop_s(core) for core in os.sched_getaffinity(0) for _ in range(LOOKS))
    print(f"a loop on a core that has nothing else to do takes {best_s * 1e6:.0f} us; with other guests on it, longer")
    print(
        "Mooncake's conversation trace again and again on a cluster with one clock; three tiers. With more instances,"
        " as many\nrepetitions at once as make the load of each the same."
    )
    for case in CASES:
        print(report(case, requests), flush=True)
    print(f"load after the end (1 min): {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["case"]:
        count, tier_pack, block_tokens, instances, routing, shared, *four = sys.argv[2:]
        case = Case(tier_pack, int(block_tokens), int(instances), routing, shared, *map(int, four))
        print(json.dumps(replay(case, int(count))))
    else:
        main()
