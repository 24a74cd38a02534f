"""One timed run of one client loop in a process of its own: prints its figures as a JSON object.

    $ python scripts/bench_lib/client_loops.py ours http://127.0.0.1:43121 --requests 5000 --output-tokens 8
    {"seconds": 0.42, "cpu_s": 0.40, "requests": 5000, "failed": 0}

ours: HttpReplay, closed loop, each record encoded and written to a file as it completes; making the prompts is
within the time. --turns: conversations, whose later prompts hold stand-ins for the answers, or quote them. bare:
aiohttp, a ceiling: its bodies are made before the time starts, it stamps the first chunk, parses nothing and keeps
nothing. open: HttpReplay, open loop; the figures are how late each request was sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import uvloop

from harness.engines.http.clients import Clients
from harness.engines.http.dialect import Completions
from harness.engines.http.replay import HttpReplay
from traces.load import Load
from traces.request import Request, RequestRecord, Segment, TokenSource
from traces.synth import SessionSpec, conversation


def requests(args: argparse.Namespace) -> list[Request]:
    if args.turns > 1:
        spec = SessionSpec(
            sessions=args.requests // args.turns,
            turns=args.turns,
            user_tokens=args.prompt_tokens,
            output_tokens=args.output_tokens,
            answers=args.answers,
        )
        return list(conversation(spec, seed=1))
    step_s = 1 / args.rate if args.rate else None
    return [
        Request(
            id=f"r{number}",
            prompt=(Segment(number, args.prompt_tokens),),
            output_tokens=args.output_tokens,
            at_s=None if step_s is None else number * step_s,
        )
        for number in range(args.requests)
    ]


async def ours(args: argparse.Namespace) -> dict[str, Any]:
    tokens, late_s, failed = TokenSource(1, 32_000), [], 0
    with tempfile.TemporaryFile() as rows, tempfile.TemporaryDirectory() as logs:
        descriptor, encode = rows.fileno(), msgspec.json.Encoder().encode

        def emit(record: RequestRecord) -> None:
            nonlocal failed
            os.write(descriptor, encode(record) + b"\n")
            failed += record.error is not None
            late_s.append(record.sent_s - record.scheduled_s)

        several = None if args.clients == 1 else Clients(args.clients, Path(logs))
        replay = HttpReplay(args.url, Completions("instant"), tokens, time.perf_counter, clients=several)
        async with replay as client:
            await client.replay(Load(requests(args)[:64], concurrency=args.concurrency), lambda _record: None)
            load = Load(requests(args), concurrency=None if args.rate else args.concurrency)
            began_s, cpu_s = time.perf_counter(), time.process_time()
            await client.replay(load, emit)
            took = {"seconds": time.perf_counter() - began_s, "cpu_s": time.process_time() - cpu_s}
    p50, p99, worst = (float(value) for value in np.percentile(late_s, (50, 99, 100)))
    lag = {"late_p50_s": p50, "late_p99_s": p99, "late_max_s": worst} if args.rate else {}
    return {**took, "requests": len(late_s), "failed": failed, **lag}


async def bare(args: argparse.Namespace) -> dict[str, Any]:
    tokens, failed = TokenSource(1, 32_000), 0
    fixed = {"model": "instant", "max_tokens": args.output_tokens, "stream": True, "temperature": 0}
    bodies = [msgspec.json.encode({**fixed, "prompt": tokens.expand(one.prompt)}) for one in requests(args)]
    first_chunk_s: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def worker() -> None:
            nonlocal failed
            while bodies:
                async with session.post(f"{args.url}/v1/completions", data=bodies.pop()) as response:
                    failed += response.status != 200
                    await response.content.readany()
                    first_chunk_s.append(time.perf_counter())
                    while await response.content.readany():
                        pass

        began_s, cpu_s = time.perf_counter(), time.process_time()
        await asyncio.gather(*(worker() for _ in range(args.concurrency)))
        return {
            "seconds": time.perf_counter() - began_s,
            "cpu_s": time.process_time() - cpu_s,
            "requests": len(first_chunk_s),
            "failed": failed,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loop", choices=("ours", "bare", "open"))
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=1)
    parser.add_argument("--turns", type=int, default=1, help="of each conversation, for 'ours'")
    parser.add_argument("--answers", choices=("synthetic", "quoted"), default="synthetic")
    parser.add_argument("--clients", type=int, default=1, help="processes that send, for 'ours' and 'open'")
    parser.add_argument("--rate", type=float, help="requests per second, for 'open'")
    args = parser.parse_args()
    if (args.loop == "open") != (args.rate is not None):
        parser.error("--rate goes with 'open', and 'open' needs it")
    print(json.dumps(uvloop.run(bare(args) if args.loop == "bare" else ours(args))))


if __name__ == "__main__":
    main()
