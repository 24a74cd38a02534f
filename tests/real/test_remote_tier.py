"""Redis, an S3 store and a Mooncake pool below a real vLLM and LMCache, in one sweep: each row proven by both sides'
counters.

A store that dies in mid-run, or while warming, ends the run, which then goes on. No secret is in the run's folder."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import redis
import yaml

from harness.caches.stores.redis import redis_program
from harness.caches.stores.s3 import s3_program
from harness.errors import PreflightError
from harness.experiment.read import load_experiment
from harness.measure.run import RunRequest, run
from harness.processes.child import free_port
from harness.results.folder import read_rows, read_samples
from harness.results.manifest import read_manifest
from tests.real.test_remote_stores import NETWORK, listening, listens
from tests.real.test_vllm import EXPERIMENT, PYTHON
from tests.support.real_runs import harness, left_behind, until
from tests.unit.measure.test_run_loop import Quiet, measured

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not PYTHON.exists(), reason="no engine environment; `scripts/engine_env vllm` makes it"),
    pytest.mark.skipif(
        redis_program() is None or s3_program() is None,
        reason="no Redis or no S3 server; `scripts/store_env` makes them",
    ),
]

WORD = "hush-of-a-store-4711"
STATES = ["recompute", "gpu", "cpu", "remote"]
COLD = [*STATES, "remote_cold"]
SAMPLES, FEW, TOKENS, CHUNKS, BYTES = 6, 2, 640, 10, 640 * 32768
REDIS, S3, MOONCAKE = "store=redis", "store=s3", "store=mooncake"


def written(tmp_path: Path, port: int) -> Path:
    """A user's Redis with a password, an S3 store of the run's own behind a reference network, a pool of its own."""
    word = {"secret": "A_STORES_WORD"}
    theirs = {"capacity": "1GiB", "adapter": "resp", "endpoint": f"127.0.0.1:{port}", "credentials": word}
    ours = {"capacity": "1GiB", "adapter": "s3", "network": NETWORK}
    s3 = {"cache.remote": ours, "measure.tiers": COLD, "measure.warm_up": 5}
    pool = {"cache.remote": {"capacity": "1GiB", "adapter": "mooncake"}, "measure.samples": FEW}
    config = {
        **EXPERIMENT,
        "measure": {"tiers": STATES, "samples": SAMPLES},
        "cache": {"block_tokens": 32, "chunk_tokens": 64, "gpu": "512MiB", "cpu": "1GiB", "remote": theirs},
        "engines": {"vllm": {"python": str(PYTHON), "accelerator": "rtx-a5000-nfs"}},
        "sweep": {"store": {"redis": {"cache.remote": theirs}, "s3": s3, "mooncake": pool}},
    }
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


@contextlib.contextmanager
def redis_at(port: int) -> Iterator[psutil.Process]:
    argv = [redis_program() or "", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--requirepass", WORD]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        listens(port)
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait(10)


def gateway(process: subprocess.Popen[str]) -> psutil.Process:
    [found] = [each for each in psutil.Process(process.pid).children(recursive=True) if each.name() == "versitygw"]
    return found


def secret_of(store: psutil.Process) -> str:
    return str(store.environ()["ROOT_SECRET_ACCESS_KEY"])


def ports(processes: Sequence[psutil.Process]) -> set[int | None]:
    return {listening(each) for one in processes for each in one.net_connections()} - {None}


def ended_by(victim: psutil.Process, process: subprocess.Popen[str], folder: Path) -> str:
    """The last line of the run that ends by itself when the store is killed; nothing of it runs or listens."""
    below = psutil.Process(process.pid).children(recursive=True)
    listened = ports(below)
    victim.kill()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and "Traceback" not in errors, errors
    _, alive = psutil.wait_procs(below, timeout=20)
    assert listened and not alive and not left_behind(folder.parent)
    assert not any(listening(each) in listened for each in psutil.net_connections())
    manifest, last = read_manifest(folder), errors.splitlines()[-1]
    assert manifest.status == "failed" and last == f"harness: {manifest.error}"
    return last


def holding(folder: Path, secrets: Sequence[str]) -> list[Path]:
    """Files in which one of the secrets stands."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if any(secret.encode() in path.read_bytes() for secret in secrets)]


def test_all_stores_are_proven_the_run_outlives_their_ends_and_keeps_their_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_STORES_WORD", WORD)
    port, folder = free_port(), tmp_path / "out"
    rows, path = folder / "rows.jsonl", written(tmp_path, port)
    with redis_at(port) as store:
        process = harness("sweep", str(path), "--engine", "vllm", "--out", str(folder))
        until(process, lambda: len(measured(folder)) >= len(STATES))
        told = ended_by(store, process, folder)
    assert told.startswith(f"harness: the store (redis at 127.0.0.1:{port}) no longer answers: ")
    assert told.endswith("; is it running?")
    before = rows.read_bytes()
    with redis_at(port):
        process = harness("run", "--resume", str(folder))
        until(process, lambda: any(row.cell == S3 for row in read_rows(folder)))
        secrets = [WORD, secret_of(gateway(process))]
        told = ended_by(gateway(process), process, folder)
        assert told.startswith("harness: S3 server ended during the run (killed by SIGKILL); ")
        assert rows.read_bytes().startswith(before)
        assert {row.phase for row in read_rows(folder) if row.cell == S3} == {"warm"}
        before = rows.read_bytes()
        process = harness("run", "--resume", str(folder))
        until(process, lambda: any(row.cell == S3 for row in measured(folder)))
        secrets.append(secret_of(gateway(process)))
        _, errors = process.communicate(timeout=480)
        assert process.returncode == 0 and rows.read_bytes().startswith(before), errors
        with redis.Redis(port=port, password=WORD) as client:
            assert client.dbsize() == 0, "a run empties the store that it was given"
    found = measured(folder)
    assert len(found) == SAMPLES * (len(STATES) + len(COLD)) + FEW * len(STATES)
    assert len({(row.cell, row.expected_tier, row.sample) for row in found}) == len(found)
    assert {(row.verdict, row.error) for row in found} == {("proven", None)}
    assert {(row.cell, row.attempt) for row in found} == {(REDIS, 0), (REDIS, 1), (S3, 2), (MOONCAKE, 2)}
    assert_from_stores(folder)
    assert len(set(secrets)) == 3 and holding(folder, secrets) == [] and not left_behind(tmp_path)


def test_a_store_that_cannot_serve_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, dead = free_port(), f"127.0.0.1:{free_port()}"

    def told(*overrides: str) -> str:
        plan = load_experiment(written(tmp_path, port), [*overrides, "sweep.store=null"])
        cells, origin = plan.cells(), plan.origin()
        asked = RunRequest(name="real", cells=cells, engine="vllm", experiment=origin, folder=tmp_path / "out")
        with pytest.raises(PreflightError) as refused:
            run(asked, Quiet())
        assert not asked.folder.exists() and "\n" not in str(refused.value) and WORD not in str(refused.value)
        return str(refused.value)

    monkeypatch.delenv("A_STORES_WORD", raising=False)
    assert "the environment variable A_STORES_WORD is not set; export it" in told()
    monkeypatch.setenv("A_STORES_WORD", "wrong")
    with redis_at(port):
        assert "the server refuses the credentials" in told()
    monkeypatch.setenv("A_STORES_WORD", WORD)
    assert "no Redis answers" in told()
    s3 = {"capacity": "1GiB", "endpoint": dead, "credentials": {"user": "A_STORES_WORD", "secret": "A_STORES_WORD"}}
    assert f"cache.remote.endpoint {dead}: no S3 store answers" in told(f"cache.remote={json.dumps(s3)}")


def assert_from_stores(folder: Path) -> None:
    """What LMCache loaded is what the store says that it has sent, and neither GPU nor CPU RAM served a token."""
    rows = [row for row in measured(folder) if (row.expected_tier or "").startswith("remote")]
    assert {(row.tokens_by_tier["remote"], row.tokens_by_tier["cpu"], row.tokens_by_tier["gpu"]) for row in rows} == {
        (TOKENS, 0, 0)
    }
    samples = [sample for sample in read_samples(folder) if sample.tier.startswith("remote")]
    assert {(sample.cell, sample.tier) for sample in samples} == {
        (REDIS, "remote"),
        (S3, "remote"),
        (S3, "remote_cold"),
        (MOONCAKE, "remote"),
    }
    for moved in (sample.observed for sample in samples):
        assert moved.hit_tokens == {"gpu": 0, "cpu": 0, "remote": TOKENS}
        assert (moved.computed_tokens, moved.external_tokens) == (1, TOKENS)
        assert moved.loaded_chunks == moved.reads == {"remote": CHUNKS}
        assert BYTES <= moved.sent_bytes["remote"] < 1.01 * BYTES + 65536
