"""Real vLLM and LMCache: tiers proven, hits exact, nothing left behind."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from harness.caches.files import FilesBackend
from harness.caches.lmcache import LMCacheServer
from harness.engines.vllm.engine import VllmEngine
from harness.engines.vllm.settings import VllmSettings
from harness.errors import NotComparable
from harness.experiment.read import load_experiment
from harness.measure.run import RunRequest, run
from harness.report.refresh import seal
from harness.results.folder import read_samples
from harness.results.manifest import read_manifest
from harness.validation.validate import Validation, validate
from simulator.models import load_model
from tests.contract.cases import ONE_PROCESS
from tests.support.paths import ROOT
from tests.support.real_runs import harness, left_behind
from tests.unit.measure.test_run_loop import Quiet, measured
from traces.request import RequestRecord
from traces.tiers import state_named

PYTHON = ROOT / ".engines" / "vllm" / "bin" / "python"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not PYTHON.exists(), reason="no engine environment; `scripts/engine_env vllm` makes it"),
]

EXPERIMENT: dict[str, Any] = {
    "name": "real",
    "seed": 5,
    "workload": {"kind": "prefix", "prompt_tokens": 641, "hit_rate": 1.0},
    "measure": {"tiers": ["recompute", "gpu", "cpu", "disk", "disk_cold"], "samples": 2},
    "cache": {"block_tokens": 32, "chunk_tokens": 64, "gpu": "512MiB", "cpu": "1GiB", "disk": {"capacity": "2GiB"}},
    "engines": {"vllm": {"python": str(PYTHON), **ONE_PROCESS}},
}


def request(tmp_path: Path, **changes: Any) -> RunRequest:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump({**EXPERIMENT, **changes}))
    plan = load_experiment(path)
    return RunRequest(name="real", cells=plan.cells(), engine="vllm", experiment=plan.origin(), folder=tmp_path / "out")


def test_every_tier_that_it_claims_to_prove_at_exact_hit_rates_and_concurrency(tmp_path: Path) -> None:
    together = {"1": 0.0, "3": 0.5, "2": 1.0}
    sets = {key: {"workload.concurrency": int(key), "workload.hit_rate": rate} for key, rate in together.items()}
    folder = run(request(tmp_path, sweep={"together": sets}), Quiet())
    rows = measured(folder)
    experiment = load_experiment(tmp_path / "experiment.yaml").experiment
    claims = VllmEngine(experiment, load_model("tiny-llama"), tmp_path, time.perf_counter).capabilities.evidence
    # tests/real/test_restart.py has what takes a restart.
    assert {row.expected_tier for row in rows} == {name for name in claims if not state_named(name).restarted}
    assert len(rows) == (1 + 3 + 2) * 5 * 2
    assert {(row.verdict, row.verdict_reason) for row in rows} == {("proven", None)}
    assert {(row.error, row.prompt_tokens, row.output_tokens) for row in rows} == {(None, 641, 1)}
    for row in rows:
        hits = round(640 * together[row.cell.rsplit("=", 1)[1]])
        assert row.cached_tokens == (0 if row.expected_tier == "recompute" else hits)
    manifest = read_manifest(folder)
    resolved = manifest.cells[0].resolved
    assert resolved is not None and resolved.gpu_blocks is not None
    assert resolved.gpu_blocks * 32 * 32768 == 512 * 2**20 and resolved.cpu_bytes == 2**30
    assert resolved.versions["vllm"].startswith("0.") and manifest.status == "complete"
    for sample in read_samples(folder):
        assert sample.host.busy_share is not None and 0 <= sample.host.busy_share <= 1
    assert (folder / "logs" / "vllm.log").stat().st_size and not left_behind(tmp_path)
    seal(folder)
    assert (folder / "report.html").stat().st_size > 100_000


def test_in_process_lmcache_recomputes_silently_and_evidence_and_validation_say_so(tmp_path: Path) -> None:
    """Without a GPU LMCache's in-process connector transfers nothing; requests succeed all the same."""
    engines = {"vllm": {"python": str(PYTHON), "connector": "in_process"}}
    cache = {key: value for key, value in EXPERIMENT["cache"].items() if key != "disk"}
    measure = {"tiers": ["recompute", "gpu", "cpu"], "samples": 1}
    asked = request(tmp_path, engines=engines, cache=cache, measure=measure)
    folder = run(asked, Quiet())
    rows = measured(folder)
    verdicts: dict[str | None, RequestRecord] = {row.expected_tier: row for row in rows}
    assert all(row.error is None for row in rows)
    assert verdicts["recompute"].verdict == verdicts["gpu"].verdict == "proven"
    assert verdicts["cpu"].verdict == "contradicted"
    assert verdicts["cpu"].verdict_reason == "computed_tokens moved by 641, cpu needs 1"
    words = "computed_tokens moved by 641, cpu needs 1.*silently recomputing"
    with pytest.raises(NotComparable, match=f"proves its tier .*{words}"):
        validate(
            Validation(
                name="real",
                cells=asked.cells,
                engine="vllm",
                calibration="cpu-2core",
                experiment=asked.experiment,
                folder=tmp_path / "validation",
                real=(folder,),
            ),
            Quiet(),
        )
    assert not (tmp_path / "validation" / "validation.json").exists()


TRACE = {"kind": "trace", "trace": "tiny_conversation", "limit": 25, "block_tokens": 32,
         "max_prompt_tokens": 1000, "max_output_tokens": 4, "time_scale": 0.05}  # fmt: skip
# More KV than the GPU holds, and less than the share of CPU RAM from which on LMCache evicts.
ROUNDS = {"kind": "rounds", "clients": 8, "rounds": 4, "first_tokens": 640, "parallel": 1, "order": "fifo",
          "answers": "none"}  # fmt: skip
QUOTED = ROUNDS | {"clients": 2, "rounds": 3, "first_tokens": 160, "output_tokens": 48, "answers": "quoted"}


def test_servers_that_run_already_are_measured_and_left_running(tmp_path: Path) -> None:
    """Also by the way of docs/worth.md: `init` finds process, folder and model, and `worth` answers."""
    experiment = load_experiment(written(tmp_path, EXPERIMENT["engines"])).experiment
    (tmp_path / "ours" / "logs").mkdir(parents=True)
    said: list[str] = []

    async def scenario() -> tuple[int, int]:
        engine = VllmEngine(experiment, load_model("tiny-llama"), tmp_path / "ours", time.perf_counter)
        try:
            await engine.start()
            server = (await engine.ready()).url or "no URL"
            (cache,) = engine.caches
            assert isinstance(cache, LMCacheServer) and isinstance(cache.backend, FilesBackend)
            url = cache.url or "no URL"
            attach = {"url": server, "lmcache_url": cache.url, "lmcache_pid": cache.pids[0]}
            attach["disk_path"] = str(cache.backend.folder)
            engines = {"vllm": {"attach": attach}}
            path = written(tmp_path, engines)

            def exit_code(experiment: Path, out: Path) -> int:
                return harness("run", str(experiment), "--engine", "vllm", "--out", str(out)).wait(timeout=200)

            done = await asyncio.to_thread(exit_code, path, tmp_path / "out")
            also = 0
            for name, load in {"slice": TRACE, "rounds": ROUNDS, "quoted": QUOTED}.items():
                free = tmp_path / f"{name}.yaml"
                free.write_text(yaml.safe_dump({**EXPERIMENT, "engines": engines, "workload": load, "measure": {}}))
                also |= await asyncio.to_thread(exit_code, free, tmp_path / name)
            mine = str(tmp_path / "mine.yaml")
            said.append(await asked("init", mine, "--attach", server, "--lmcache-url", url))
            few = ("--tokens", "256", "--tokens", "1024", "--set", "measure.samples=3")
            said.append(await asked("worth", mine, "--engine", "vllm", *few, "--out", str(tmp_path / "worth")))
            found = load_experiment(Path(mine)).experiment.engines.of(VllmSettings).attach
            assert found is not None and found.model_dump() == {**attach, "model": None}
            assert (await asyncio.to_thread(httpx.get, f"{server}/health")).status_code == 200
            return done, also
        finally:
            await engine.stop()

    assert asyncio.run(scenario()) == (0, 0)
    rows = measured(tmp_path / "out")
    assert len(rows) == 10 and {row.verdict for row in rows} == {"proven"}
    sends_what_the_simulator_is_sent(tmp_path / "slice", tmp_path / "sim")
    assert hits_of_both(tmp_path / "rounds", tmp_path / "sim_rounds", gpu_alone=False) == [
        8 * 640 * n for n in range(4)
    ]
    # The answer's tokens hit, too, all but its last one: in blocks of 32 tokens, (160 + 47) and (160 + 48 + 160 + 47).
    assert hits_of_both(tmp_path / "quoted", tmp_path / "sim_quoted", gpu_alone=True) == [0, 2 * 192, 2 * 384]
    assert "recompute, gpu, cpu, disk, disk_cold" in said[0] and "cannot run here yet" not in said[0]
    worth = json.loads((tmp_path / "worth" / "worth.json").read_text())
    assert worth["against"] == "a miss with the cache server" and not worth["simulated"]
    assert {(p["state"], p["tokens"]) for p in worth["points"]} == {
        (state, tokens) for state in ("cpu", "disk", "disk_cold") for tokens in (256, 1024)
    }
    assert all(point["speedup"]["samples"] == [3, 3] for point in worth["points"]), worth["points"]
    assert worth["writes"]["bytes_per_token"] == 32768 and worth["writes"]["stored_share"] > 0.9
    assert "Cost in writes: 32KiB for each token stored" in said[1]
    assert {row.verdict for row in measured(tmp_path / "worth")} == {"proven"}
    assert not left_behind(tmp_path)


async def asked(*arguments: str | Path | None) -> str:
    """What the command prints; it has to succeed."""
    process = harness(*map(str, arguments))
    out, errors = await asyncio.to_thread(process.communicate, timeout=300)
    assert process.returncode == 0, errors
    return out


def sends_what_the_simulator_is_sent(folder: Path, simulated: Path) -> None:
    """A slice of a trace that vLLM served: the same prompts at the same times, and counters that add up to them."""
    plan = load_experiment(folder.with_suffix(".yaml"))
    asked = RunRequest(name="real", cells=plan.cells(), engine="sim", experiment=plan.origin(), folder=simulated)
    modelled = {row.id: row for row in measured(run(asked, Quiet()))}
    rows = {row.id: row for row in measured(folder)}
    assert rows.keys() == modelled.keys() and len(rows) > 15
    first_s = min(row.scheduled_s for row in rows.values())
    for name, row in rows.items():
        assert row.error is None and row.prompt_tokens == modelled[name].prompt_tokens
        assert abs(row.scheduled_s - first_s - modelled[name].scheduled_s) < 1e-6
    [sample] = read_samples(folder)
    moved = sample.observed
    gpu_tokens = moved.hit_tokens["gpu"]
    assert moved.computed_tokens is not None and gpu_tokens and moved.external_tokens is not None
    assert moved.computed_tokens + gpu_tokens + moved.external_tokens == sum(row.prompt_tokens for row in rows.values())


def hits_of_both(folder: Path, simulated: Path, *, gpu_alone: bool) -> list[int]:
    """Hit tokens of each round of conversations: vLLM's and the simulator's are equal, request for request, and so is
    the GPU's share of them."""
    plan = load_experiment(folder.with_suffix(".yaml"))
    asked = RunRequest(name="real", cells=plan.cells(), engine="sim", experiment=plan.origin(), folder=simulated)
    modelled = {row.id: row for row in measured(run(asked, Quiet()))}
    rows = {row.id: row for row in measured(folder)}
    assert {row.error for row in rows.values()} == {None} and rows
    assert {name: (row.prompt_tokens, row.cached_tokens) for name, row in rows.items()} == {
        name: (row.prompt_tokens, row.cached_tokens) for name, row in modelled.items()
    }
    cached = sum(row.cached_tokens or 0 for row in rows.values())
    gpu_tokens = sum(row.tokens_by_tier["gpu"] or 0 for row in modelled.values())
    [sample] = read_samples(folder)
    assert sample.observed.hit_tokens["gpu"] == gpu_tokens and sample.observed.external_tokens == cached - gpu_tokens
    assert gpu_tokens > 0 and (gpu_tokens == cached) is gpu_alone
    turns = {row.turn for row in rows.values()}
    return [sum(row.cached_tokens or 0 for row in rows.values() if row.turn == turn) for turn in sorted(turns)]


def written(tmp_path: Path, engines: dict[str, Any]) -> Path:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump({**EXPERIMENT, "engines": engines}))
    return path
