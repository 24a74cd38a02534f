"""A real vLLM and its LMCache server restarted: what survives on disk, who reads it, and what is left."""

import re
from pathlib import Path

import pytest

from harness.measure.run import run
from harness.report.refresh import seal
from harness.results.folder import read_samples
from harness.results.manifest import read_manifest
from tests.real.test_vllm import PYTHON, request
from tests.support.real_runs import left_behind
from tests.unit.measure.test_run_loop import Quiet, measured

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not PYTHON.exists(), reason="no engine environment; `scripts/engine_env vllm` makes it"),
]

HIT, TOKEN_BYTES, CHUNK = 640, 32768, 64


def pids(log: Path) -> list[str]:
    """Of the servers that wrote the log, in their order."""
    return re.findall(r"Started server process \[(\d+)\]", log.read_text())


def test_a_prefix_on_disk_survives_a_restart_and_is_read_from_the_device(tmp_path: Path) -> None:
    """The first of a new vLLM's requests, with counters that begin at 0 in both processes."""
    states = ["cpu", "disk_cold", "disk_restart"]
    folder = run(request(tmp_path, measure={"tiers": states, "samples": 1}), Quiet())
    rows = measured(folder)
    assert [(row.expected_tier, row.verdict, row.verdict_reason) for row in rows] == [
        (state, "proven", None) for state in states
    ]
    assert {(row.cached_tokens, row.tokens_by_tier["disk"]) for row in rows[1:]} == {(HIT, HIT)}
    [after] = [sample.observed for sample in read_samples(folder) if sample.tier == "disk_restart"]
    assert after.named() | {"disk_device_read_bytes": 0} == {
        "computed_tokens": 1,
        "gpu_hit_tokens": 0,
        "external_tokens": HIT,
        "cpu_hit_tokens": 0,
        "disk_hit_tokens": HIT,
        "disk_loaded_chunks": HIT // CHUNK,
        "disk_device_read_bytes": 0,
        "stores_begun": 0,
        "stores_ended": 0,
    }
    assert after.device_read_bytes["disk"] >= HIT * TOKEN_BYTES
    servers = {name: pids(folder / "logs" / f"{name}.log") for name in ("vllm", "lmcache")}
    assert all(len(set(found)) == 2 for found in servers.values()), servers
    assert read_manifest(folder).status == "complete" and not left_behind(tmp_path)
    seal(folder)
    assert "disk_restart" in (folder / "report.html").read_text()
