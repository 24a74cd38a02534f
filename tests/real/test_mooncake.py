"""Mooncake's master and client, alone and behind vLLM: what each tier holds, what is counted, what remains."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from harness.caches.base import CachePlan, EngineSide
from harness.caches.mooncake import MooncakeServer, make_mooncake
from harness.collectors.prometheus import Metrics
from harness.experiment.cache import Cache
from harness.measure.run import RunRequest, run
from harness.processes.child import child_environment
from harness.records import Counters
from harness.results.folder import read_samples
from harness.results.manifest import read_manifest
from simulator.models import load_model
from tests.contract.cases import PYTHON as VLLM_PYTHON
from tests.contract.cases import Case
from tests.support.paths import ROOT
from tests.support.real_runs import Served, left_behind
from tests.unit.measure.test_run_loop import Quiet, measured
from traces.tiers import state_named

PYTHON = next(
    (path for engine in ("sglang", "vllm") if (path := ROOT / f".engines/{engine}/bin/python").exists()
     and path.with_name("mooncake_master").exists()),
    ROOT / ".engines/sglang/bin/python",
)  # fmt: skip
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not PYTHON.exists(), reason="no engine environment; `scripts/engine_env sglang` makes it"),
]
MIB = 2**20
OBJECTS, OBJECT_BYTES = 24, 4 * MIB
TOTAL_BYTES = OBJECTS * OBJECT_BYTES
NOTHING = EngineSide(metrics=Metrics(""), read_bytes=None)
SHORT_LEASE = ("--default_kv_lease_ttl=500ms",)


def plan(folder: Path, *, disk: dict[str, Any] | None = None) -> CachePlan:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    cache = {"gpu": "64MiB", "pool": "256MiB", "chunk_tokens": 32, "disk": disk}
    return CachePlan(
        engine="sglang", python=PYTHON, cache=Cache.model_validate(cache), folder=folder, args=SHORT_LEASE,
        kv_bytes_per_token=1024, start_timeout_s=60.0,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def started(asked: CachePlan) -> AsyncIterator[MooncakeServer]:
    server = make_mooncake(asked)
    server.start()
    try:
        await server.ready()
        yield server
    finally:
        await server.stop()


async def objects(server: MooncakeServer, what: str) -> dict[str, int]:
    master = server.connection().environment["MOONCAKE_MASTER"]
    argv = [str(PYTHON), str(ROOT / "tests/oracle/mooncake_objects.py"), master, what, str(OBJECTS), str(OBJECT_BYTES)]
    env = child_environment({"MC_TCP_BIND_ADDRESS": "127.0.0.1"})
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, env=env)
    said, _ = await asyncio.wait_for(process.communicate(), 120)
    [line] = [line for line in said.decode().splitlines() if line.startswith("RESULT ")]
    found: dict[str, int] = json.loads(line.removeprefix("RESULT "))
    return found


async def counted(server: MooncakeServer) -> Counters:
    return Counters.of((await server.settle(NOTHING)).counters)


async def moved_by_get(server: MooncakeServer) -> tuple[int, int, int]:
    """Tokens served from RAM and from files, and bytes that the device gave, while all objects are got unharmed."""
    before = await counted(server)
    assert await objects(server, "get") == {"right": OBJECTS, "wrong": 0, "missing": 0}
    moved = (await counted(server)).since(before)
    return moved.hit_tokens["pool"], moved.hit_tokens["disk"], moved.device_read_bytes.get("disk", 0)


def test_objects_are_served_from_ram_then_from_files_then_from_the_device(tmp_path: Path) -> None:
    async def live() -> None:
        async with started(plan(tmp_path, disk={"capacity": "1GiB", "buffer": "256MiB"})) as server:
            resolved = await server.resolved()
            assert resolved.pool_bytes == 256 * MIB and resolved.versions["mooncake"]
            assert await objects(server, "put") == {"stored": OBJECTS}
            tokens = TOTAL_BYTES // 1024
            assert await moved_by_get(server) == (tokens, 0, 0)
            await server.clear("pool")
            ram, files, device_bytes = await moved_by_get(server)
            assert (ram, files) == (0, tokens) and device_bytes < 0.01 * TOTAL_BYTES
            await server.clear("page_cache")
            ram, files, device_bytes = await moved_by_get(server)
            assert (ram, files) == (0, tokens) and device_bytes > 0.99 * TOTAL_BYTES
            await server.clear("disk")
            assert await objects(server, "get") == {"right": 0, "wrong": 0, "missing": OBJECTS}

    asyncio.run(live())
    assert [path for path in tmp_path.iterdir() if path.name != "logs"] == []


def test_a_pool_without_an_ssd_is_emptied_at_once(tmp_path: Path) -> None:
    async def live() -> dict[str, int]:
        async with started(plan(tmp_path)) as server:
            assert await objects(server, "put") == {"stored": OBJECTS}
            await server.clear("pool")
            return await objects(server, "get")

    assert asyncio.run(live())["missing"] == OBJECTS


@pytest.mark.skipif(not VLLM_PYTHON.with_name("mooncake_master").exists(), reason="`scripts/engine_env vllm` makes it")
def test_behind_vllm_every_state_is_proven_by_the_master_s_bytes_and_the_device_s(tmp_path: Path) -> None:
    """vLLM's own connector; half of each prompt is stored, in RAM, then in files, then on the device alone."""
    states = ["recompute", "gpu", "pool", "disk", "disk_cold"]
    config: dict[str, Any] = {
        "name": "pool",
        "workload": {"kind": "prefix", "prompt_tokens": 1281, "hit_rate": 0.5},
        "measure": {"tiers": states, "samples": 2},
        "cache": {"block_tokens": 32, "chunk_tokens": 32, "gpu": "128MiB", "pool": "256MiB"},
    }
    config["cache"]["disk"] = {"capacity": "1GiB", "buffer": "256MiB"}
    settings = {"python": str(VLLM_PYTHON), "connector": "mooncake", "mooncake_args": list(SHORT_LEASE)}
    case = Case("vllm", {**config, "engines": {"vllm": settings}})
    made = case.plan(tmp_path)
    asked = RunRequest(
        name="pool", cells=made.cells(), engine="vllm", experiment=made.origin(), folder=tmp_path / "out"
    )
    folder = run(asked, Quiet())
    rows = measured(folder)
    assert {row.expected_tier for row in rows} == set(states) and len(rows) == 2 * len(states)
    assert {(row.verdict, row.verdict_reason, row.error) for row in rows} == {("proven", None, None)}
    assert {row.cached_tokens for row in rows if row.expected_tier != "recompute"} == {640}
    resolved = read_manifest(folder).cells[0].resolved
    assert resolved is not None and (resolved.connector, resolved.pool_bytes) == ("mooncake", 256 * MIB)
    token_bytes = load_model(made.experiment.model).kv_bytes_per_token
    for sample in read_samples(folder):
        hits = {tier: tokens for tier, tokens in sample.observed.hit_tokens.items() if tokens}
        tier = state_named(sample.tier).served_by
        assert hits == ({tier: 640} if tier else {})
        if sample.tier == "disk_cold":
            assert sample.observed.device_read_bytes["disk"] >= 640 * token_bytes
    assert not left_behind(tmp_path) and not [*tmp_path.glob("**/kv-harness-*")]


SERVES = """
import asyncio, sys
from pathlib import Path
from harness.errors import EngineError
from harness.processes.child import outlive
from tests.real.test_mooncake import objects, plan, started

async def live():
    async with started(plan(Path(sys.argv[1]), disk={"capacity": "1GiB", "buffer": "256MiB"})) as server:
        await objects(server, "put")
        await server.clear("pool")
        print(*(child.pid for child in server.children), flush=True)
        await outlive(server.children, asyncio.sleep(600))

try:
    asyncio.run(live())
except EngineError as error:
    sys.exit(f"harness: {error}")
"""


@pytest.mark.parametrize("victim", ["master", "client", "harness"])
def test_whoever_is_killed_nothing_stays_running_listening_or_on_disk(victim: str, tmp_path: Path) -> None:
    with Served(SERVES, str(tmp_path)) as served:
        assert any(path.is_file() for path in tmp_path.glob("kv-harness-*/**/*"))
        errors = served.kill({"master": 0, "client": 1, "harness": None}[victim], tmp_path)
    if victim != "harness":
        assert errors.splitlines()[-1].startswith(
            f"harness: Mooncake {victim} ended during the run (killed by SIGKILL)"
        )
