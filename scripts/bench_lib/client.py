"""`scripts/bench client`: how fast and how punctual is the HTTP load loop? Usage and sample output: scripts/bench."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOOPS = ROOT / "scripts/bench_lib/client_loops.py"
VLLM_PYTHON = ROOT / ".engines/vllm/bin/python"
SERVER_CORE, CLIENT_CORE = 0, 1
OUTPUT_TOKENS = (1, 8)
TURNS = 8
REQUESTS = {"ours": 15_000, "bare": 15_000, "vllm": 3000}
NAMES = {"ours": "HttpReplay, rows written", "bare": "bare aiohttp, nothing parsed", "vllm": "vllm bench serve"}


@contextmanager
def instant_server() -> Iterator[str]:
    command = [sys.executable, "-m", "tests.support.instant_server", "--port", "0"]
    pin = partial(os.sched_setaffinity, 0, {SERVER_CORE})
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=pin) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{server.stdout.readline().split()[1]}"
        finally:
            server.terminate()


def timed(
    command: list[str], environment: dict[str, str], cores: frozenset[int] = frozenset({CLIENT_CORE})
) -> list[dict[str, Any]]:
    """Runs one loop on these cores and returns its JSON lines. Ends if a request failed."""
    pin = partial(os.sched_setaffinity, 0, cores)
    done = subprocess.run(
        command, env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True, preexec_fn=pin
    )
    if done.returncode:
        sys.exit(f"{command[1]} failed: {done.stderr.strip().splitlines()[-1]}")
    results = [json.loads(line) for line in done.stdout.splitlines()]
    if any(result["failed"] for result in results):
        sys.exit(f"{command[1]}: {sum(result['failed'] for result in results)} requests failed")
    return results


def loop(url: str, kind: str, *, cores: frozenset[int] = frozenset({CLIENT_CORE}), **options: object) -> dict[str, Any]:
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return timed([sys.executable, str(LOOPS), kind, url, *words], {"PYTHONPATH": str(ROOT)}, cores)[0]


def vllm(url: str, cache: str) -> list[dict[str, Any]]:
    tokens = [str(count) for count in OUTPUT_TOKENS]
    script = str(ROOT / "scripts/bench_lib/vllm_bench_serve.py")
    command = [str(VLLM_PYTHON), script, url, "--requests", str(REQUESTS["vllm"]), "--output-tokens", *tokens]
    # Byte code is kept from round to round: without it each start compiles every import again.
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return timed(command, {**offline, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": cache})


def closed_loop(url: str, rounds: int) -> None:
    with_vllm = VLLM_PYTHON.exists()
    rates: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(rounds):
            for tokens in OUTPUT_TOKENS:
                for kind in ("ours", "bare"):
                    result = loop(url, kind, requests=REQUESTS[kind], output_tokens=tokens)
                    rates.setdefault((kind, tokens), []).append(result["requests"] / result["seconds"])
            for result in vllm(url, cache) if with_vllm else []:
                key = ("vllm", result["output_tokens"])
                rates.setdefault(key, []).append(result["requests"] / result["seconds"])
    print(f"closed loop, 64 at once, 32-token prompts, median (lowest to highest) of {rounds} interleaved runs")
    print("(HttpReplay makes its prompts within the time, the others before it):")
    for (kind, tokens), seen in sorted(rates.items(), key=lambda item: item[0][1]):
        spread = f"({min(seen):,.0f} to {max(seen):,.0f})"
        print(f"  {tokens} tokens  {NAMES[kind]:30s} {statistics.median(seen):8,.0f} requests/s  {spread}")
    if not with_vllm:
        print("  vllm bench serve: left out, .engines/vllm is not there")


def conversations(url: str, rounds: int) -> None:
    """What quoting the server's answers costs, against stand-ins of as many tokens."""
    rates: dict[str, list[float]] = {"synthetic": [], "quoted": []}
    for _ in range(rounds):
        for answers, seen in rates.items():
            result = loop(url, "ours", requests=REQUESTS["ours"], output_tokens=8, turns=TURNS, answers=answers)
            seen.append(result["requests"] / result["seconds"])
    print(f"conversations of {TURNS} turns, 32 tokens asked and 8 answered in each, 64 at once:")
    for answers, seen in rates.items():
        spread = f"({min(seen):,.0f} to {max(seen):,.0f})"
        print(f"  answers {answers:10s} {statistics.median(seen):8,.0f} requests/s  {spread}")


def several_clients(url: str, rounds: int) -> None:
    """What the load loop reaches when other processes send for it, where server, loop and clients share two cores."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for clients, seen in rates.items():
            cores = frozenset({SERVER_CORE, CLIENT_CORE})
            options = {"requests": REQUESTS["ours"], "output_tokens": 8, "clients": clients}
            result = loop(url, "ours", cores=cores, **options)
            seen.append(result["requests"] / result["seconds"])
    one, two = (f"{statistics.median(seen):,.0f} ({min(seen):,.0f} to {max(seen):,.0f})" for seen in rates.values())
    print(f"clients, 8 tokens, on two cores beside the server: 1: {one} requests/s, 2: {two} requests/s")


def open_loop(url: str) -> None:
    print("open loop, sent later than intended:")
    for rate, prompt_tokens, seconds in ((500, 32, 10), (20, 32_768, 10)):
        seen = loop(url, "open", rate=rate, requests=rate * seconds, prompt_tokens=prompt_tokens)
        late = "  ".join(f"{name} {seen[f'late_{name}_s'] * 1e3:.3f} ms" for name in ("p50", "p99", "max"))
        print(f"  {rate:3d} requests/s of {prompt_tokens:6,d} tokens, {seconds} s:  {late}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench client", description="The HTTP load loop's speed.")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if not {SERVER_CORE, CLIENT_CORE} <= os.sched_getaffinity(0):
        sys.exit("scripts/bench client: needs cores 0 and 1, one for the server and one for the client")
    print(f"load before the start (1 min): {os.getloadavg()[0]:.2f}")
    with instant_server() as url:
        closed_loop(url, args.rounds)
        conversations(url, args.rounds)
        several_clients(url, args.rounds)
        open_loop(url)
    print(f"load after the end (1 min): {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
