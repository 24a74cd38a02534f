"""Mooncake's own master and client as an oracle of its pool: who is hit, who is evicted, by which put.

    ENGINE_PYTHON mooncake_pool.py < workloads.json > results.json

In:  [{"chunks": 64, "watermark": 0.9, "ratio": 0.05, "lease_s": 0.001, "every_s": 0.0, "uses": [7, 3, ...]}, ...]
Out: [[{"hit": false, "put": true, "gone": [5, 9]}, ...] or null, ...]

A use asks whether a chunk exists (which leases it) and puts it if it does not. Then the pool rests until the eviction
thread has nothing more to do; `gone` has the chunks that it dropped. With `every_s`, use number i begins at i times so
many seconds, as leases that run out between uses need it; null: the machine was too slow for that each time.

Each workload has a master and a client of its own, which end with it; they listen on loopback, the client's data port
on all addresses (Mooncake has no setting for it). No network is asked for names (P2PHANDSHAKE), nothing is on disk.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

MASTER = Path(sys.executable).with_name("mooncake_master")
CHUNK_BYTES = 1024 * 1024  # a segment has 16 MiB at least
TICK_S = 0.01  # master_service.h: kEvictionThreadSleepMs
LATE = 0.4  # of the time between two uses; after twice as much, the evicting thread has had its turn
TRIES = 12  # a try of 12 s ends at its first late use, so a busy machine is given a few minutes at most
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Pool:
    """A master, and this process as the client that holds its only segment."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case, port, self.http = case, free_port(), free_port()
        flags = {"rpc_port": port, "rpc_address": "127.0.0.1", "metrics_port": self.http}
        flags |= {"default_kv_lease_ttl": round(case["lease_s"] * 1000), "eviction_ratio": case["ratio"]}
        flags |= {"eviction_high_watermark_ratio": case["watermark"], "enable_metric_reporting": "false"}
        command = [str(MASTER), *(f"--{name}={value}" for name, value in flags.items())]
        self.master = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=die_with_parent
        )
        self.until(lambda: self.get("/metrics") is not None, "the master does not answer")
        from mooncake.store import MooncakeDistributedStore

        self.store = MooncakeDistributedStore()
        size = case["chunks"] * CHUNK_BYTES
        code = self.store.setup("127.0.0.1", "P2PHANDSHAKE", size, 16 * 1024 * 1024, "tcp", "", f"127.0.0.1:{port}")
        if code != 0:
            raise RuntimeError(f"the client does not start: {code}")
        self.value = bytes(CHUNK_BYTES)

    def get(self, path: str) -> str | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}{path}", timeout=5) as answer:
                text: str = answer.read().decode()
                return text
        except OSError:
            return None

    def until(self, ready: Any, what: str) -> None:
        end = time.monotonic() + 30
        while not ready():
            if time.monotonic() > end or self.master.poll() is not None:
                raise RuntimeError(what)
            time.sleep(0.02)

    def keys(self) -> set[int]:
        """What the pool holds; asking leases nothing."""
        return {int(key) for key in (self.get("/get_all_keys") or "").split()}

    def use(self, key: int) -> dict[str, Any]:
        hit = self.store.is_exist(str(key)) == 1
        return {"hit": hit, "put": not hit and self.store.put(str(key), self.value) == 0}

    def rest(self, leased: set[int], refused: bool) -> set[int]:
        """The keys, once nothing is left to drop and three ticks have changed nothing."""
        keys, end = self.keys(), time.monotonic() + 10
        while True:
            time.sleep(3 * TICK_S)
            now = self.keys()
            full = len(now) / self.case["chunks"] > self.case["watermark"] or (refused and now == keys)
            if now == keys and (not (full and now - leased) or time.monotonic() > end):
                return keys
            refused &= now == keys
            keys = now

    def close(self) -> None:
        self.store.close()
        self.master.kill()
        self.master.wait()


def tried(case: dict[str, Any]) -> list[dict[str, Any]] | None:
    pool = Pool(case)
    try:
        done, before, leased = list[dict[str, Any]](), set[int](), set[int]()
        start = time.monotonic()
        for index, key in enumerate(case["uses"]):
            if case["every_s"]:
                due = start + index * case["every_s"]
                time.sleep(max(0.0, due - time.monotonic()))
            used = pool.use(key)
            held = before | ({key} if used["put"] else set())
            if case["every_s"]:
                if time.monotonic() > due + LATE * case["every_s"]:
                    return None
                time.sleep(max(0.0, due + 2 * LATE * case["every_s"] - time.monotonic()))
                before = pool.keys()
            else:
                leased |= {key} if used["hit"] and case["lease_s"] > 1 else set()
                before = pool.rest(leased, not used["hit"] and not used["put"])
            done.append(used | {"gone": sorted(held - before)})
        return done
    finally:
        pool.close()


def run(case: dict[str, Any]) -> list[dict[str, Any]] | None:
    answers = (tried(case) for _ in range(TRIES if case["every_s"] else 1))
    return next((answer for answer in answers if answer is not None), None)


def main() -> None:
    cases = json.load(sys.stdin)
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    # A process can be one client only.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(6, context, die_with_parent, max_tasks_per_child=1) as workers:
        print(json.dumps(list(workers.map(run, cases))), file=RESULT, flush=True)


if __name__ == "__main__":
    # The client's libraries write to file descriptor 1.
    RESULT = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main()
