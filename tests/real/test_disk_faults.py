"""A real LMCache server over a disk tier that is full or read-only: told at once in one line with the cure.

No chunk that could not be read counts as a hit. `lmcache bench server` asks in an engine's place."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from harness.caches.base import CachePlan, EngineSide
from harness.caches.files import FilesBackend
from harness.caches.lmcache import LMCacheServer
from harness.collectors.prometheus import Metrics
from harness.errors import EngineError
from harness.experiment.cache import Cache
from harness.processes.child import child_environment
from harness.records import Counters
from tests.contract.cases import PYTHON, REAL
from tests.support.paths import ROOT

pytestmark = [*REAL, pytest.mark.skipif(os.geteuid() != 0, reason="a mount needs root")]
NOTHING = EngineSide(metrics=Metrics(""), read_bytes=None)
# A request is 2 chunks of 256 tokens, 4 MiB each.
SHAPE, TOKENS, CHUNKS = "(2,64,16,8,128):float16:4", 512, 2


class FailingReads(FilesBackend):
    """LMCache finds every chunk, and cannot read the second one of a request."""

    def spec(self) -> dict[str, Any]:
        return {"type": "fault_inject", "inner": super().spec(), "gap_indices": [1]}


def server_over(disk: Path, run: Path, backend: type[FilesBackend]) -> LMCacheServer:
    (run / "logs").mkdir(parents=True)
    cache = Cache.model_validate({"gpu": "64MiB", "cpu": "1GiB", "disk": {"capacity": "64MiB", "path": str(disk)}})
    plan = CachePlan(engine="vllm", python=PYTHON, cache=cache, folder=run)
    return LMCacheServer(plan, backend(plan.disk_folder, "fs"))


async def ask(server: LMCacheServer, requests: int) -> None:
    """Each request twice: stored, and looked up again."""
    extra = json.loads(server.connection().arguments[1])["kv_connector_extra_config"]
    argv = [str(PYTHON), "-m", "lmcache.cli.main", "bench", "server", "--mode", "cpu", "--url", server.url]
    argv += ["--rpc-url", f"tcp://127.0.0.1:{extra['lmcache.mp.port']}", "--num-tokens", str(TOKENS)]
    argv += ["--kvcache-shape-spec", SHAPE, "--interval", "0", "--start", "0", "--end", str(requests)]
    done = await asyncio.to_thread(
        subprocess.run, argv, env=child_environment({}), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


async def counted(server: LMCacheServer) -> dict[str, int]:
    return Counters.of((await server.settle(NOTHING)).counters).named()


async def refusal(work: Awaitable[Any]) -> str:
    try:
        await work
    except EngineError as error:
        return str(error)
    return ""


async def full(server: LMCacheServer, _disk: Path) -> dict[str, Any]:
    await ask(server, 3)
    return {"told": await refusal(server.settle(NOTHING))}


async def read_only(server: LMCacheServer, disk: Path) -> dict[str, Any]:
    await ask(server, 1)
    await server.clear("cpu")
    before = await counted(server)
    await ask(server, 1)
    after = await counted(server)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    moved = {name: after[name] - before[name] for name in ("disk_hit_tokens", "disk_loaded_chunks")}
    return {"told": await refusal(server.clear("disk")), **moved}


FAULTS: dict[str, tuple[Callable[[LMCacheServer, Path], Awaitable[dict[str, Any]]], type[FilesBackend]]] = {
    "full": (full, FilesBackend),
    "read_only": (read_only, FailingReads),
}


async def lived(fault: str, disk: str, run: str) -> None:
    """Prints what the fault led to."""
    work, backend = FAULTS[fault]
    server = server_over(Path(disk), Path(run), backend)
    server.start()
    try:
        await server.ready()
        print(json.dumps(await work(server, Path(disk))))
    finally:
        await server.stop()


def found(fault: str, tmp_path: Path, *mounted: str) -> dict[str, Any]:
    """Runs it in a mount namespace of its own. mounted: what mounts the disk there before it runs the rest."""
    script = "import asyncio, sys; from tests.real.test_disk_faults import lived; asyncio.run(lived(*sys.argv[1:]))"
    disk = tmp_path / "disk"
    disk.mkdir()
    argv = ["unshare", "--mount", "--propagation", "private", *mounted]
    argv += [sys.executable, "-c", script, fault, str(disk), str(tmp_path / "run")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert "\n" not in said["told"] and list(disk.iterdir()) == []
    return said


def tmpfs(tmp_path: Path, size: str) -> list[str]:
    return ["sh", "-c", 'mount -t tmpfs -o size=$1 tmpfs "$0" && shift && exec "$@"', str(tmp_path / "disk"), size]


def test_a_full_disk_is_told_at_once_with_lmcache_s_own_error(tmp_path: Path) -> None:
    told = found("full", tmp_path, *tmpfs(tmp_path, "12m"))["told"]
    assert f"could not store {2 * CHUNKS} of {3 * CHUNKS} objects (" in told and "No space left on device" in told
    assert "; is the disk full, or read-only? see " in told and "lmcache.log" in told


def test_a_chunk_that_cannot_be_read_is_no_hit_and_a_read_only_file_system_is_told(tmp_path: Path) -> None:
    said = found("read_only", tmp_path, *tmpfs(tmp_path, "32m"))
    # Asked twice, one chunk was loaded each time, and not two. The other one was computed anew in between: the second
    # look-up finds it in CPU RAM, which LMCache counts as the disk's, behind a chunk of the disk's.
    assert (said["disk_loaded_chunks"], said["disk_hit_tokens"]) == (2, TOKENS // CHUNKS + TOKENS)
    assert "fails (Read-only file system); is it read-only, full, or its device broken?" in said["told"]
    assert "name another cache.disk.path" in said["told"]
