"""`harness capacity` on a real vLLM at a reference accelerator's pace, and on the simulator: the same answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.commands.capacity import capacity
from harness.commands.output import OutputChoice
from harness.results.capacity import read_capacity
from harness.results.manifest import read_manifest
from tests.real.test_accelerator import PACED, engines, step_us
from tests.real.test_vllm import PYTHON
from tests.support.real_runs import left_behind

pytestmark = [
    pytest.mark.real,
    pytest.mark.alone,  # its answer is a matter of times
    pytest.mark.skipif(not PYTHON.exists(), reason="no engine environment; `scripts/engine_env vllm` makes it"),
]

# One prompt is prefilled after another: the last of n waits n times as long as one's steps take, and a tenth of one
# more for what surrounds them. The target is a sixth away from both 2 and 3 of them.
FITS, AROUND = 2, 1.07


def experiment(folder: Path) -> Path:
    content: dict[str, Any] = PACED | {
        "name": "users",
        "seed": 3,
        "workload": {
            "kind": "synthetic", "requests": 12, "prompt_tokens": 1025, "hit_rate": 0.0, "output_tokens": 1,
            "concurrency": 2,
        },
        "measure": {},
        "cache": {"block_tokens": 32, "chunk_tokens": 256, "gpu": "2GiB", "cpu": "1GiB"},
        "engines": engines() | {"sim": {"hardware": "rtx-a5000-nfs", "max_batched_tokens": 1024}},
    }  # fmt: skip
    path = folder / "users.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_vllm_and_the_simulator_find_the_same_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one_s = (step_us((1024, 0)) + step_us((1, 1024))) / 1e6
    path, goal = experiment(tmp_path), f"ttft_p90<{(FITS + 0.5) * AROUND * one_s * 1000:.0f}ms"
    words: dict[str, Any] = {"goals": [goal], "key": "workload.concurrency", "most": 8, "repeats": 3}
    assert capacity(path, engine="sim", out=tmp_path / "sim", **words) == 0
    capsys.readouterr()
    out = tmp_path / "vllm"
    code = capacity(path, engine="vllm", out=out, against=tmp_path / "sim", answer=OutputChoice(as_json=True), **words)
    told = json.loads(capsys.readouterr().out)
    assert code == 0
    found = read_capacity(out)
    assert found is not None and found.complete and found.answer.load == FITS, told
    assert "within 5%" in told["against"]
    assert all(step.found.requests == 12 and step.found.failed == 0 for step in found.steps)
    # The loads at the edge were measured until their interval left the target out, on one engine.
    counts = {load: len(found.of(load)) for load in found.loads()}
    assert {load for load, count in counts.items() if count > 1} <= {FITS, FITS + 1} and max(counts.values()) <= 3
    assert len(list((out / "logs").glob("vllm*.log"))) == 1
    manifest = read_manifest(out)
    assert manifest.status == "complete" and [cell.status for cell in manifest.cells] == ["complete"] * len(counts)
    assert not left_behind(tmp_path)
