"""The implementations that the contracts are held against: experiments for engines, plans for cache servers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from harness.engines import ENGINES
from harness.engines.base import Engine
from harness.experiment.read import Plan, load_experiment
from simulator.models import load_model
from tests.support.paths import ROOT

PYTHON = ROOT / ".engines/vllm/bin/python"
SGLANG_PYTHON = ROOT / ".engines/sglang/bin/python"


def needs(name: str, python: Path) -> list[pytest.MarkDecorator]:
    why = f"no engine environment; `scripts/engine_env {name}` makes it"
    return [pytest.mark.real, pytest.mark.skipif(not python.exists(), reason=why)]


REAL = needs("vllm", PYTHON)
# vLLM's scheduler and its model in one process: a quarter of its start goes by until a second one has imported all that
# the first one has. Its default, which is two on a CPU, is what the contract and the tests of a run's ends start.
ONE_PROCESS: dict[str, Any] = {
    "args": ["--distributed-executor-backend", "uni"],
    "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
}
CACHE: dict[str, Any] = {"gpu": "64MiB", "cpu": "1GiB", "disk": {"capacity": "512MiB"}}
STORAGE: dict[str, Any] = {"mode": "storage", "storage": {"reserve": "0B", "compute": "none", "io": "threads"}}
FILES: dict[str, Any] = {"mode": "storage", "storage": {"reserve": "0B", "compute": "none", "layout": "files"}}
FREE: dict[str, Any] = {
    "kind": "synthetic",
    "requests": 4,
    "concurrency": 1,
    "prompt_tokens": 1025,
    "hit_rate": 0.5,
    "output_tokens": 3,
}


class Case(NamedTuple):
    """engine: its name. config: the keys of an experiment by which this implementation differs from others."""

    engine: str
    config: dict[str, Any]

    def plan(self, folder: Path, **more: Any) -> Plan:
        base: dict[str, Any] = {"name": "contract", "workload": FREE, "cache": CACHE}
        path = folder / "experiment.yaml"
        path.write_text(yaml.safe_dump({**base, **more, **self.config}))
        return load_experiment(path)

    def make(self, folder: Path) -> Engine:
        """A fresh engine, nothing of it started."""
        experiment, started_s = self.plan(folder).experiment, time.perf_counter()
        model = load_model(experiment.model)
        (folder / "logs").mkdir(exist_ok=True)
        return ENGINES[self.engine].make(experiment, model, folder, lambda: time.perf_counter() - started_s)


ENGINE_CASES = {
    "fake": Case("fake", {}),
    "sim": Case("sim", {}),
    "sim-cluster": Case("sim", {"deployment": {"instances": 2, "routing": "round-robin"}}),
    "sim-storage": Case("sim", {"engines": {"sim": STORAGE}}),
    "sim-files": Case("sim", {"engines": {"sim": FILES}}),
    "sim-storage-alone": Case(
        "sim", {"engines": {"sim": STORAGE | {"mode": "tiers"}}, "cache": {"gpu": "0B", "disk": {"capacity": "512MiB"}}}
    ),
}
_PYTHONS = {"vllm": PYTHON, "sglang": SGLANG_PYTHON}
REAL_ENGINE_CASES = {
    "vllm": Case("vllm", {"engines": {"vllm": {"python": str(PYTHON)}}}),
    "sglang": Case("sglang", {"engines": {"sglang": {"python": str(SGLANG_PYTHON)}}}),
}
REAL_ENGINE_PARAMS = [
    pytest.param(case, id=name, marks=needs(case.engine, _PYTHONS[case.engine]))
    for name, case in REAL_ENGINE_CASES.items()
]
