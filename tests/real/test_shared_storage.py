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
from traces.request import RequestRecord

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not PYTHON.exists(), reason="no engine environment; `scripts/engine_env vllm` makes it"),
    pytest.mark.skipif(redis_program() is None, reason="no redis-server; sudo apt-get install redis-server"),
]

# One user, so rarely that an answer has ended and is stored before the next question, on a busy machine too. Turns
# alternate between the instances, and conversations of three begin on either. Two questions at once would race.
# Nothing is evicted below the GPU: LMCache would evict by the clock.
GENTLE = (
    "workload.users=1", "workload.rounds=3", "workload.rate_per_s=0.5", "workload.duration=25s",
    "workload.output_tokens=2", "cache.gpu=64MiB", "sweep.workload.history_tokens=null", "report.against=null",
)  # fmt: skip
COUNTED = ("computed_tokens", "gpu_hit_tokens", "external_tokens", "cpu_hit_tokens", "remote_hit_tokens",
           "remote_loaded_chunks", "stores_begun", "stores_ended")  # fmt: skip


# Placed states of the same two engines: a shared store's is proven by what the other one stored.
PLACED: dict[str, Any] = {
    "workload": {"kind": "prefix", "prompt_tokens": 1281, "hit_rate": 0.8},
    "measure": {"tiers": ["recompute", "cpu", "remote"], "samples": 2},
}
SWEEP = ("sweep.caches=[cpu_store]", f"sweep.together={{routed: {{}}, placed: {PLACED}}}")
# All cores: the study's own two have a load that this one is not.
CORES = "engines.vllm.cores={}"


def asked(folder: Path, engine: str) -> RunRequest:
    settings = (f"engines.vllm.python={PYTHON}", CORES, *GENTLE, *SWEEP)
    plan = load_experiment(Path("shared_storage"), settings)
    return RunRequest(name="study", cells=plan.cells(), engine=engine, experiment=plan.origin(), folder=folder)


def rows_of(folder: Path) -> tuple[dict[str, RequestRecord], list[RequestRecord]]:
    """Those of the study's load, by their names, and those of the placed states."""
    rows = measured(folder)
    return {row.id: row for row in rows if row.expected_tier is None}, [row for row in rows if row.expected_tier]


def test_what_the_other_instance_stored_is_hit_and_counted_as_the_simulator_says(tmp_path: Path) -> None:
    """The study's load, and each state by itself, in one life of the engines."""
    real, simulated = (run(asked(tmp_path / engine, engine), Quiet()) for engine in ("vllm", "sim"))
    (ours, placed), (theirs, _) = rows_of(real), rows_of(simulated)
    assert len(ours) > 10 and ours.keys() == theirs.keys()
    for name, row in ours.items():
        other = theirs[name]
        assert (row.error, row.instance, row.cached_tokens) == (None, other.instance, other.cached_tokens), name
    [seen], [expected] = (
        [sample.observed for sample in read_samples(folder) if sample.verdict is None] for folder in (real, simulated)
    )
    for here, there in zip((seen, *seen.by_instance), (expected, *expected.by_instance), strict=True):
        assert {name: here.named().get(name) for name in COUNTED} == {name: there.named()[name] for name in COUNTED}
    assert all(one.hit_tokens["remote"] for one in seen.by_instance), "each hit what the other had stored"
    loaded_bytes = seen.loaded_chunks["remote"] * 256 * 24 * 1024
    assert loaded_bytes <= seen.sent_bytes["remote"] < 1.05 * loaded_bytes, "the store says that it sent them, once"
    assert {(row.verdict, row.verdict_reason, row.instance) for row in placed} == {("proven", None, 1)}
    assert {row.expected_tier for row in placed} == {"recompute", "cpu", "remote"} and len(placed) == 6
    assert not left_behind(tmp_path)
