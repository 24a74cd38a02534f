"""Two real vLLMs: what one stored the other one hits, counted; the simulator counts the same; a kill leaves nothing."""

import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import yaml

from harness.experiment.read import load_experiment
from harness.measure.run import RunRequest, run
from harness.results.folder import read_rows, read_samples
from harness.results.manifest import read_manifest
from tests.real.test_vllm import EXPERIMENT, PYTHON
from tests.support.real_runs import Victim, begun, harness, killed_in_turn, left_behind
from tests.unit.measure.test_run_loop import Quiet, measured
from traces.tiers import state_named

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not PYTHON.exists(), reason="no engine environment; `scripts/engine_env vllm` makes it"),
]

# One request at a time, in one order. Five conversations take turns, so that each turn is asked of the other instance
# than the one before. The pauses let a turn reach the disk before.
ROUTED = {
    "kind": "rounds", "clients": 5, "rounds": 3, "first_tokens": 258, "turn_tokens": 130, "output_tokens": 2,
    "parallel": 1, "order": "fifo", "rate_per_s": 5.0,
}  # fmt: skip
COUNTED = ("computed_tokens", "gpu_hit_tokens", "external_tokens", "cpu_hit_tokens", "disk_hit_tokens",
           "disk_loaded_chunks", "stores_begun", "stores_ended")  # fmt: skip


def written(tmp_path: Path, **changes: Any) -> RunRequest:
    path = tmp_path / "experiment.yaml"
    engines = {"vllm": {"python": str(PYTHON), "accelerator": "rtx-a5000-nfs"}}
    path.write_text(yaml.safe_dump({**EXPERIMENT, "engines": engines, **changes}))
    plan = load_experiment(path)
    return RunRequest(name="real", cells=plan.cells(), engine="vllm", experiment=plan.origin(), folder=tmp_path / "out")


def test_what_one_instance_stored_the_other_hits_and_the_simulator_counts_the_same(tmp_path: Path) -> None:
    """A cache server each, one folder below both."""
    together: dict[str, Any] = {"placed": {}, "routed": {"workload": ROUTED, "measure": {}}}
    deployment = {"instances": 2, "shared": ["disk"]}
    asked = written(
        tmp_path,
        deployment=deployment,
        measure={"tiers": ["recompute", "gpu", "cpu", "disk", "disk_cold"], "samples": 1},
        sweep={"together": together},
    )
    real = run(asked, Quiet())
    placed = [row for row in measured(real) if row.expected_tier is not None]
    assert {(row.verdict, row.verdict_reason, row.instance) for row in placed} == {("proven", None, 1)}
    for row in read_rows(real):
        if row.id.startswith("warm-"):
            served_by = state_named(row.id.split("-")[1]).served_by
            assert row.instance == (0 if served_by == "disk" else 1), row.id
    simulated = run(msgspec.structs.replace(asked, engine="sim", folder=tmp_path / "sim"), Quiet())
    ours, theirs = ({row.id: row for row in measured(folder)} for folder in (real, simulated))
    assert ours.keys() == theirs.keys()
    for name, row in ours.items():
        other = theirs[name]
        assert (row.error, row.instance, row.cached_tokens) == (None, other.instance, other.cached_tokens), name
    [seen], [expected] = (
        [sample.observed for sample in read_samples(folder) if sample.verdict is None] for folder in (real, simulated)
    )
    for here, there in zip((seen, *seen.by_instance), (expected, *expected.by_instance), strict=True):
        assert {name: here.named().get(name) for name in COUNTED} == {name: there.named()[name] for name in COUNTED}
    assert all(one.hit_tokens["disk"] for one in seen.by_instance), "each hit what the other had stored"
    resolved = read_manifest(real).cells[0].resolved
    assert resolved is not None and resolved.cpu_bytes == 2 * 2**30 and resolved.open_to_all == ()
    names = {path.name for path in (real / "logs").iterdir()}
    assert {"vllm.log", "vllm-1.log", "lmcache.log", "lmcache-1.log"} <= names
    assert not left_behind(tmp_path)


def test_one_cache_server_serves_both_and_whoever_is_killed_the_run_ends_and_goes_on(tmp_path: Path) -> None:
    """The cache server, and an instance in the run that resumes that one. Other files kill the harness."""
    written(
        tmp_path,
        deployment={"instances": 2, "shared": ["cpu", "disk"]},
        measure={"tiers": ["cpu"], "samples": 500},
    )
    folder = tmp_path / "out"
    start = [str(tmp_path / "experiment.yaml"), "--engine", "vllm", "--out", str(folder)]
    before = killed_in_turn(start, folder, (Victim("LMCache server", "lmcache.cli.main"),))
    process = harness("run", "--resume", str(folder))
    begun(process, folder / "rows.jsonl", len(before))
    below = psutil.Process(process.pid).children(recursive=True)
    vllms = [one for one in below if "vllm.entrypoints.openai.api_server" in one.cmdline()]
    engines = [one for one in vllms if "warden.py" not in " ".join(one.cmdline())]
    servers = [
        one for one in below if "lmcache.cli.main" in one.cmdline() and "warden.py" not in " ".join(one.cmdline())
    ]
    assert (len(engines), len(servers)) == (2, 1)
    os.kill(engines[1].pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and "Traceback" not in errors
    assert " ended during the run (killed by SIGKILL); " in errors.splitlines()[-1], errors
    gone, left = psutil.wait_procs(below, timeout=20)
    assert gone and not left and not left_behind(tmp_path)
    assert (folder / "rows.jsonl").read_bytes().startswith(before), "no finished row is lost"
    rows = list(read_rows(folder))
    asked = [row for row in rows if row.phase == "measure" and row.error is None]
    assert {(row.instance, row.verdict, row.cached_tokens) for row in asked} == {(1, "proven", 640)}
    assert len({row.sample for row in asked}) == len(asked) and {row.attempt for row in asked} == {0, 1}
    assert {row.instance for row in rows if row.phase == "warm"} == {0}, "the other instance has computed them"
