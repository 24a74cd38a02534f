"""What tracing costs: TTFT of the disk tier on one running vLLM with LMCache, with and without bpftrace, interleaved.

    .venv/bin/python scripts/bench_lib/tracing.py [ROUNDS [SAMPLES]]      (root; takes the engine environment)

A reference device of 100 MiB/s, 16 chunks of 2 MiB read cold. Prints both medians and means, and what the trace adds.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import yaml

from harness.blockio.session import device_numbers, run_device
from harness.collectors.bpf import BpfTrace
from harness.engines import make_engine
from harness.experiments import load_experiment
from harness.results import RunFolder
from harness.warmup import Probe, after_sample, place
from simulator.models import load_model
from traces.load import Load
from traces.request import RequestRecord

EXPERIMENT = {
    "name": "tracing",
    "workload": {"kind": "prefix", "prompt_tokens": 1025},
    "measure": {"tiers": ["disk_cold"], "samples": 1},
    "cache": {"block_tokens": 32, "chunk_tokens": 64, "gpu": "512MiB", "cpu": "1GiB", "disk": {"capacity": "1GiB"}},
    "storage": {"device": {"bandwidth": "100MiB/s", "size": "1500MiB"}},
    "engines": {"vllm": {"cores": {"engine": [0], "client": [1]}}},
}


async def main(rounds: int, samples: int) -> None:
    with tempfile.TemporaryDirectory(prefix="kv-bench-") as own:
        (Path(own) / "e.yaml").write_text(yaml.safe_dump(EXPERIMENT))
        cells = load_experiment(Path(own) / "e.yaml").cells()
        folder = RunFolder.create(Path(own) / "run", {"cells": [{"key": cells[0].key}], "attempts": [{}]})
        async with run_device(cells, "vllm", folder) as [cell]:
            engine = make_engine("vllm", cell.experiment, load_model("tiny-llama"), folder.path, time.perf_counter)
            try:
                await engine.start()
                resolved = await engine.ready()
                probe = Probe("base", cell.experiment, cell.experiment.workload, resolved)
                assert cell.experiment.cache.disk is not None and cell.experiment.cache.disk.path is not None
                device, system = device_numbers(Path(cell.experiment.cache.disk.path))
                found: dict[bool, list[float]] = {False: [], True: []}
                index = 0
                for turn in range(rounds):
                    for traced in (False, True) if turn % 2 else (True, False):
                        trace = BpfTrace(Path(own) / f"{turn}", device_number=device, file_system_number=system,
                                         pids=resolved.io_pids)  # fmt: skip
                        if traced:
                            await trace.start()
                        for _ in range(samples + 1):
                            rows: list[RequestRecord] = []
                            await place(engine, probe, "disk_cold", index, rows.append)
                            rows.clear()
                            await engine.replay(Load(probe.requests("disk_cold", index)), rows.append)
                            after_sample(probe, "disk_cold", "proven", fresh_prefix=False)
                            found[traced].append(rows[0].ttft_s or 0.0)
                            index += 1
                        del found[traced][-samples - 1]  # the first after a change
                        await trace.stop()
                tell(found)
            finally:
                await engine.stop()


def tell(found: dict[bool, list[float]]) -> None:
    for traced, values in found.items():
        name, middle = "traced" if traced else "not traced", statistics.median(values)
        mean, spread = statistics.mean(values), statistics.stdev(values)
        print(f"{name:12} n {len(values)}  median {middle:.4f} s  mean {mean:.4f} s  standard deviation {spread:.4f} s")
    print(f"trace adds {statistics.median(found[True]) / statistics.median(found[False]) - 1:+.2%} to the median")
    rng = random.Random(0)
    ratios = sorted(
        statistics.median(rng.choices(found[True], k=len(found[True])))
        / statistics.median(rng.choices(found[False], k=len(found[False]))) - 1
        for _ in range(2000)
    )  # fmt: skip
    print(f"95 % interval {ratios[50]:+.2%} to {ratios[-51]:+.2%}")


if __name__ == "__main__":
    arguments = [int(word) for word in sys.argv[1:]] + [8, 6][len(sys.argv) - 1 :]
    asyncio.run(main(arguments[0], arguments[1]))
