"""Validation against real vLLM + LMCache: the same counts on both sides."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.commands.validate import planned_cells
from harness.experiment.read import load_experiment
from harness.validation.validate import Validation, validate
from tests.contract.cases import ONE_PROCESS
from tests.real.test_vllm import PYTHON
from tests.support.real_runs import left_behind
from tests.unit.measure.test_run_loop import Quiet

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not PYTHON.exists(), reason="no engine environment; `scripts/engine_env vllm` makes it"),
]

EXPERIMENT: dict[str, Any] = {
    "name": "real",
    "seed": 5,
    "workload": {"kind": "prefix", "prompt_tokens": 705, "hit_rate": 1.0},
    "measure": {"tiers": ["recompute", "gpu", "cpu", "disk_cold"], "samples": 3},
    "cache": {"block_tokens": 32, "chunk_tokens": 64, "gpu": "256MiB", "cpu": "1GiB", "disk": {"capacity": "2GiB"}},
    "engines": {"vllm": {"python": str(PYTHON), **ONE_PROCESS}},
    "sizes": {
        "single": {},
        "pairs": {"workload.concurrency": 2},
        "load": {
            "workload": {"kind": "trace", "trace": "tiny_conversation", "limit": 30, "block_tokens": 32,
                         "max_prompt_tokens": 1000, "max_output_tokens": 2, "time_scale": 0.001, "concurrency": 1},
            "measure": {},
        },
    },
}  # fmt: skip


def request(tmp_path: Path, config: dict[str, Any], sizes: tuple[str, ...]) -> Validation:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(config))
    plans: dict[str | None, Any] = {size: load_experiment(path, size=size) for size in sizes}
    return Validation(
        name="real",
        cells=planned_cells(plans),
        engine="vllm",
        calibration="cpu-2core",
        experiment=plans[sizes[0]].origin(),
        folder=tmp_path / "out",
    )


def test_hit_tokens_and_bytes_are_the_same_on_both_sides(tmp_path: Path) -> None:
    document = validate(request(tmp_path, EXPERIMENT, ("single", "pairs", "load")), Quiet()).document
    counts = [(p.cell, p.tier, f) for p in document.points for f in p.counts]
    assert len(document.points) == 9 and len(counts) > 40
    assert [(cell, tier, f) for cell, tier, f in counts if f.verdict != "pass"] == []
    assert document.reference.gpu_blocks == document.candidate.gpu_blocks == 256
    load = next(p for p in document.points if p.tier == "load")
    assert load.noise and load.wasserstein_s is not None
    assert not left_behind(tmp_path)
