"""The shared-storage study's load on two real vLLMs, each with an LMCache server of its own over one Redis: what one
stored the other one hits, counted by instance and tier, and the simulator counts the same."""

from pathlib import Path
from typing import Any

import pytest

from harness.caches.stores.redis import redis_program
from harness.experiment.read import load_experiment
from harness.measure.run import RunRequest, run
from harness.results.folder import read_samples
from tests.real.test_vllm import PYTHON
from tests.support.real_runs import left_behind
from tests.unit.measure.test_run_loop import Quiet, measured

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not PYTHON.exists(), reason="no engine environment; `scripts/engine_env vllm` makes it"),
    pytest.mark.skipif(redis_program() is None, reason="no redis-server; sudo apt-get install redis-server"),
]

# So few users, so rarely, that one answer has ended and is stored before the next question; an odd number, so that
# turns alternate between the instances. Nothing is evicted below the GPU: LMCache would evict by the clock.
GENTLE = (
    "workload.users=3", "workload.rounds=4", "workload.rate_per_s=1", "workload.duration=10s",
    "workload.output_tokens=2", "cache.gpu=64MiB", "sweep.workload.history_tokens=[1000]",
)  # fmt: skip
COUNTED = ("computed_tokens", "gpu_hit_tokens", "external_tokens", "cpu_hit_tokens", "remote_hit_tokens",
           "remote_loaded_chunks", "stores_begun", "stores_ended")  # fmt: skip


def asked(folder: Path, engine: str, *overrides: str) -> RunRequest:
    settings = (f"engines.vllm.python={PYTHON}", *GENTLE, *overrides)
    plan = load_experiment(Path("shared_storage"), settings)
    return RunRequest(name="study", cells=plan.cells(), engine=engine, experiment=plan.origin(), folder=folder)


def test_the_study_s_load_hits_what_the_other_instance_stored_and_the_simulator_counts_the_same(
    tmp_path: Path,
) -> None:
    chosen = "sweep.caches=[cpu_store]"
    real, simulated = (run(asked(tmp_path / engine, engine, chosen), Quiet()) for engine in ("vllm", "sim"))
    ours, theirs = ({row.id: row for row in measured(folder)} for folder in (real, simulated))
    assert len(ours) > 10 and ours.keys() == theirs.keys()
    for name, row in ours.items():
        other = theirs[name]
        assert (row.error, row.instance, row.cached_tokens) == (None, other.instance, other.cached_tokens), name
    [seen], [expected] = ([sample.observed for sample in read_samples(folder)] for folder in (real, simulated))
    for here, there in zip((seen, *seen.by_instance), (expected, *expected.by_instance), strict=True):
        assert {name: here.named().get(name) for name in COUNTED} == {name: there.named()[name] for name in COUNTED}
    assert all(one.hit_tokens["remote"] for one in seen.by_instance), "each hit what the other had stored"
    loaded_bytes = seen.loaded_chunks["remote"] * 256 * 24 * 1024
    assert loaded_bytes <= seen.sent_bytes["remote"] < 1.05 * loaded_bytes, "the store says that it sent them, once"
    assert not left_behind(tmp_path)


def test_a_shared_store_s_state_is_proven_by_what_another_instance_stored(tmp_path: Path) -> None:
    prefix: dict[str, Any] = {"kind": "prefix", "prompt_tokens": 641, "hit_rate": 0.8}
    plan = load_experiment(
        Path("remote_tier"),
        [
            f"engines.vllm.python={PYTHON}", "model=tiny-llama", "engines.vllm.accelerator=rtx-a5000-nfs",
            "deployment={instances: 2, shared: [remote]}", f"workload={prefix}", "cache.chunk_tokens=128",
            "measure={tiers: [recompute, cpu, remote], samples: 2}", "sweep.store=[redis]",
            "cache.remote.capacity=512MiB",
        ],
    )  # fmt: skip
    request = RunRequest(
        name="placed", cells=plan.cells(), engine="vllm", experiment=plan.origin(), folder=tmp_path / "out"
    )
    rows = measured(run(request, Quiet()))
    assert {(row.verdict, row.verdict_reason, row.instance) for row in rows} == {("proven", None, 1)}
    assert {row.expected_tier for row in rows} == {"recompute", "cpu", "remote"}
    assert not left_behind(tmp_path)
