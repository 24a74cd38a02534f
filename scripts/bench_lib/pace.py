"""How exactly a reference accelerator keeps its pace: steps and transfers against what was asked, and the core's rest.

    $ python scripts/bench_lib/pace.py [--steps 2000] [--core 0]

One thread takes steps as an engine does, with some Python of its own in each; four others take transfers over one link
meanwhile, as LMCache's contexts do. Exit code 1 where a target is missed; the targets hold for a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from harness.engines.accelerator.plugin.kv_accelerator.pace import (
    Link,
    LinkCost,
    Report,
    StepCost,
    Steps,
    share_interpreter,
    wait_until,
    wake_precisely,
)

SHORTEST_S, LONGEST_S = 0.005, 0.5
WORK_S = 0.002  # of an engine's own Python in a step
LINK = LinkCost(latency_s=1e-4, chunk_s=0.0, bytes_per_s=22.9e9, shared_bytes_per_s=22.9e9)
CHUNK_BYTES = 32 << 20
MEDIAN_S, P99_S = 2e-4, 1e-3
TRANSFER_S, TRANSFER_SHARE = 1e-3, 0.01
IDLE_CPU_SHARE = 0.1  # beyond the work itself


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def take_steps(count: int, chance: random.Random) -> tuple[list[float], float]:
    """Seconds by which each step's time was off what was asked, and the CPU seconds of this thread."""
    wake_precisely()
    pace = Steps(StepCost(0.0, 1.0, 0.0, 0.0, 0.0), report := Report())
    off_s, ended_s, cpu_s = [], 0.0, time.thread_time()
    for number in range(count):
        asked_s = SHORTEST_S * (LONGEST_S / SHORTEST_S) ** chance.random()
        pace.begin()
        began_s = ended_s if number else time.perf_counter()
        # A cost of one second a token, so that a step is asked for by its tokens.
        pace.plan([(asked_s, 0)])
        worked_s = time.perf_counter() + WORK_S
        while time.perf_counter() < worked_s:
            pass
        pace.finish(more=True)
        ended_s = time.perf_counter()
        off_s.append(abs(ended_s - began_s - asked_s))
    print(f"  {report.steps.late} of {count:,} steps ended late; worst {1e3 * report.steps.worst_s:.3f} ms")
    return off_s, time.thread_time() - cpu_s


def take_transfers(stopped: threading.Event) -> list[tuple[float, float]]:
    """(seconds asked, seconds off) of transfers of one to sixteen chunks, up to four at once."""
    link, found = Link(LINK), list[tuple[float, float]]()

    def one(chunks: int) -> None:
        ready_s = time.perf_counter()
        due_s = link.reserve(ready_s, chunks, chunks * CHUNK_BYTES)
        found.append((due_s - ready_s, abs(wait_until(due_s))))

    with ThreadPoolExecutor(4, "link", wake_precisely) as threads:
        chance = random.Random(2)
        while not stopped.is_set():
            threads.submit(one, chance.randint(1, 16))
            stopped.wait(chance.expovariate(20.0))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)))
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    print(f"load before the start (1 min): {os.getloadavg()[0]:.2f}")
    share_interpreter()
    stopped = threading.Event()
    with ThreadPoolExecutor(1) as beside:
        transfers = beside.submit(take_transfers, stopped)
        began_s = time.perf_counter()
        off_s, cpu_s = take_steps(args.steps, random.Random(1))
        took_s = time.perf_counter() - began_s
        stopped.set()
        moved = transfers.result()
    beyond = (cpu_s - args.steps * WORK_S) / (took_s - args.steps * WORK_S)
    outside = sum(off > TRANSFER_S + TRANSFER_SHARE * asked for asked, off in moved) / len(moved)
    checks = [
        ("steps off at the median", 1e3 * statistics.median(off_s), 1e3 * MEDIAN_S, "ms"),
        ("steps off at p99", 1e3 * p99(off_s), 1e3 * P99_S, "ms"),
        ("transfers beyond 1 % + 1 ms", 1e2 * outside, 1.0, "%"),
        ("CPU while a step waits", 1e2 * beyond, 1e2 * IDLE_CPU_SHARE, "%"),
    ]
    print(f"  {args.steps:,} steps of 5 to 500 ms in {took_s:.0f} s, {len(moved):,} transfers beside them")
    for name, value, most, unit in checks:
        print(f"  {name:<28}{value:8.3f} {unit} (at most {most:g})  {'ok' if value <= most else 'MISSED'}")
    print(f"load after the end (1 min): {os.getloadavg()[0]:.2f}")
    return 0 if all(value <= most for _, value, most, _ in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
