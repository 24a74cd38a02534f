"""`scripts/bench serve`: how punctual and how fast is `harness serve`? Usage and sample output: scripts/bench."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import psutil
import uvloop
import yaml

ROOT = Path(__file__).resolve().parents[2]
LOOPS = ROOT / "scripts/bench_lib/client_loops.py"
SERVER_CORE, CLIENT_CORE = 0, 1
# Made-up machines: one whose answers cost next to nothing, for the rate, and one of slow steps, for many streams.
FREE = {"token_s": 1e-8, "attention_s": 0.0, "attention_context_s": 0.0, "request_s": 0.0, "request_token_s": 0.0}
HARDWARE = {"quick": {**FREE, "step_s": 5e-5}, "slow-steps": {**FREE, "step_s": 0.1}}
PROMPT_TOKENS = 32


@contextmanager
def server(folder: Path, hardware: str) -> Iterator[tuple[str, psutil.Process]]:
    """`harness serve` on its core, with the shape of llama-3.2-3b under the name `instant`."""
    model = yaml.safe_load((ROOT / "configs/models/llama-3.2-3b.yaml").read_text())
    calibration = yaml.safe_load((ROOT / "configs/hardware/rtx-4000ada-ssd.yaml").read_text())
    calibration |= {"name": hardware, "constants": calibration["constants"] | HARDWARE[hardware]}
    (folder / "hardware.yaml").write_text(yaml.safe_dump(calibration))
    (folder / "instant.yaml").write_text(yaml.safe_dump(model | {"name": "instant"}))
    experiment = {
        "name": "bench",
        "model": str(folder / "instant.yaml"),
        "workload": {
            "kind": "synthetic",
            "requests": 1,
            "prompt_tokens": PROMPT_TOKENS,
            "hit_rate": 0.0,
            "concurrency": 1,
        },
        "cache": {"block_tokens": 16, "chunk_tokens": 256, "gpu": "32GiB", "cpu": "16GiB"},
        "engines": {
            "sim": {"hardware": str(folder / "hardware.yaml"), "max_sequences": 2048, "max_batched_tokens": 8192}
        },
    }
    (folder / "bench.yaml").write_text(yaml.safe_dump(experiment))
    command = [sys.executable, "-m", "harness", "serve", str(folder / "bench.yaml"), "--port", "0"]
    pin = partial(os.sched_setaffinity, 0, {SERVER_CORE})
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=pin) as process:
        try:
            assert process.stdout is not None
            url = next(word for word in process.stdout.readline().split() if word.startswith("http")).rstrip(";")
            yield url, psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)


def on_client_core(command: list[str]) -> dict[str, Any]:
    """Runs a loop on the client's core; its JSON line. A run with a failed request is worth nothing: it ends."""
    pin = partial(os.sched_setaffinity, 0, {CLIENT_CORE})
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, preexec_fn=pin)
    if done.returncode:
        sys.exit(f"{command[1]} failed: {done.stderr.strip().splitlines()[-1]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


class Reader(asyncio.Protocol):
    """One connection, one streamed answer, as cheaply as can be: a client that parses would be late itself."""

    def __init__(self, request: bytes, ended: Callable[[Reader], None]) -> None:
        self._request, self._ended = request, ended
        self.read_s, self.tail = 0.0, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.read_s and b"data: " in data:  # the headers come before
            self.read_s = time.monotonic()
        self.tail = data if len(data) > 2000 else self.tail[-2000:] + data

    def connection_lost(self, _error: Exception | None) -> None:
        self._ended(self)

    @property
    def late_s(self) -> float:
        """How long after the model's moment the first token was read."""
        simulated = json.loads(self.tail.split(b"data: ")[-2])["simulated"]
        return self.read_s - float(simulated["first_token_s"])


async def streams(url: str, rate: float, output_tokens: int, requests: int) -> dict[str, Any]:
    """An open loop. Figures are of the requests sent from the moment when 1,000 were in flight."""
    fields = {"model": "instant", "max_tokens": output_tokens, "stream": True}
    fields |= {"stream_options": {"include_usage": True}}
    host, port = url.removeprefix("http://").split(":")
    loop, sent, ended, in_flight = asyncio.get_running_loop(), 0, list[Reader](), list[int]()
    counted: set[Reader] = set()
    begin_s = time.monotonic()
    for number in range(requests):
        await asyncio.sleep(max(0.0, begin_s + number / rate - time.monotonic()))
        prompt = [256 + (number * 31 + token) % 30_000 for token in range(PROMPT_TOKENS)]
        body = msgspec.json.encode(fields | {"prompt": prompt})
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(
            body
        )
        _, reader = await loop.create_connection(partial(Reader, head + body, ended.append), host, int(port))
        sent += 1
        if counted or sent - len(ended) >= 1000:
            counted.add(reader)
            in_flight.append(sent - len(ended))
    while len(ended) < sent:
        await asyncio.sleep(0.1)
    p50, p99, worst = (float(value) for value in np.percentile([one.late_s for one in counted], (50, 99, 100)))
    return {
        "p50_s": p50,
        "p99_s": p99,
        "max_s": worst,
        "counted": len(counted),
        "in_flight": statistics.median(in_flight),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench serve", description="The simulated server's speed.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=3000, help="of the streaming load")
    parser.add_argument("--rate", type=float, default=100.0, help="of the streaming load, per second")
    parser.add_argument("--output-tokens", type=int, default=105, help="of the streaming load")
    parser.add_argument("--streams-against", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.streams_against:
        print(json.dumps(uvloop.run(streams(args.streams_against, args.rate, args.output_tokens, args.requests))))
        return
    print(f"load before the start (1 min): {os.getloadavg()[0]:.2f}")
    with tempfile.TemporaryDirectory() as name:
        with server(Path(name), "quick") as (url, process):
            loop = [sys.executable, str(LOOPS), "ours", url, "--requests", "10000", "--output-tokens", "1"]
            results = [on_client_core(loop) for _ in range(args.rounds)]
            if any(result["failed"] for result in results):
                sys.exit("scripts/bench serve: requests failed")
            rates = [result["requests"] / result["seconds"] for result in results]
            cpu_s = sum(process.cpu_times()[:2]) / sum(result["requests"] for result in results)
        print(f"one-token requests, 64 at once, median (lowest to highest) of {len(rates)} runs:")
        spread = f"({min(rates):,.0f} to {max(rates):,.0f})"
        print(f"  {statistics.median(rates):,.0f} requests/s  {spread}, {cpu_s * 1e6:.0f} us of the server's core each")
        with server(Path(name), "slow-steps") as (url, _):
            load = ["--rate", args.rate, "--output-tokens", args.output_tokens, "--requests", args.requests]
            command = [sys.executable, str(Path(__file__)), "--streams-against", url, *map(str, load)]
            seen = on_client_core(command)
    print(f"first token read later than the model's moment, {args.rate:g} requests/s of {args.output_tokens} tokens,")
    print(f"{seen['in_flight']:,.0f} streams in flight, {seen['counted']:,} first tokens:")
    print("  " + "  ".join(f"{name} {seen[f'{name}_s'] * 1e3:.3f} ms" for name in ("p50", "p99", "max")))
    print(f"load after the end (1 min): {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
