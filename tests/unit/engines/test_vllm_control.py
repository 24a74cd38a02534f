"""The vLLM adapter's control calls, against a server that fails where a real one cannot be made to."""

import asyncio
import sys
from pathlib import Path

import psutil
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from harness.caches.files import FilesBackend
from harness.engines.vllm.engine import VllmEngine
from harness.errors import EngineError
from harness.records import SchedulerLimits
from simulator.models import load_model
from tests.unit.measure.test_run_loop import request as run_request

METRICS = 'vllm:cache_config_info{num_gpu_blocks="64",block_size="32"} 1\n'


def hang_up(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()


class CutOff:
    """Answers /server_info with an error, and hangs up on the next request of that connection, as uvicorn does."""

    def __init__(self, resets: int) -> None:
        self.resets, self.cut = resets, set[object]()
        self.app = web.Application(middlewares=[self._hang_up])
        for path, answer in (("health", ""), ("metrics", METRICS), ("v1/models", '{"data": []}'), ("version", "{}")):
            self.app.router.add_get(f"/{path}", self._says(answer))
        self.app.router.add_get("/server_info", self._fails)
        self.app.router.add_post("/reset_prefix_cache", self._reset)

    @web.middleware
    async def _hang_up(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.transport in self.cut:
            hang_up(request)
        return await handler(request)

    def _says(self, answer: str) -> Handler:
        async def handler(_request: web.Request) -> web.Response:
            return web.Response(text=answer, content_type="text/plain")

        return handler

    async def _fails(self, request: web.Request) -> web.Response:
        if request.keep_alive:
            self.cut.add(request.transport)
        return web.Response(status=500)

    async def _reset(self, request: web.Request) -> web.Response:
        self.resets -= 1
        if self.resets < 0:
            hang_up(request)
        return web.Response(text='{"success": true}')


async def reset_after_ready(tmp_path: Path, server: CutOff, times: int) -> SchedulerLimits:
    runner = web.AppRunner(server.app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    vllm = {"attach": {"url": url}}
    cache, measure = {"block_tokens": 32, "gpu": "8MiB"}, {"tiers": ["gpu"], "samples": 1}
    (cell,) = run_request(tmp_path, engine="vllm", engines={"vllm": vllm}, cache=cache, measure=measure).cells
    engine = VllmEngine(cell.experiment, load_model(cell.experiment.model), tmp_path, lambda: 0.0)
    try:
        await engine.start()
        scheduler = (await engine.ready()).scheduler
        for _ in range(times):
            await engine.reset(frozenset({"gpu"}))
        return scheduler
    finally:
        await engine.stop()
        await runner.cleanup()


def test_a_server_that_tells_no_limits_and_hangs_up_is_measured_all_the_same(tmp_path: Path) -> None:
    assert asyncio.run(reset_after_ready(tmp_path, CutOff(resets=2), 2)) == SchedulerLimits()


def test_a_server_that_dies_in_a_reset_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no longer answers .*; see its log"):
        asyncio.run(reset_after_ready(tmp_path, CutOff(resets=1), 2))


def test_a_restart_that_fails_says_so_and_leaves_no_files(tmp_path: Path) -> None:
    """Of a Python without LMCache: the cache server ends before it is ready."""
    (tmp_path / "logs").mkdir()
    engines, measure = {"vllm": {"python": sys.executable}}, {"tiers": ["disk_restart"], "samples": 1}
    (cell,) = run_request(tmp_path, engine="vllm", engines=engines, measure=measure).cells
    engine = VllmEngine(cell.experiment, load_model(cell.experiment.model), tmp_path, lambda: 0.0)
    backend = engine.caches[0].backend
    assert isinstance(backend, FilesBackend) and engine.capabilities.keeps == {"disk"}
    backend.prepare()
    (backend.folder / "chunk.data").write_bytes(b"kv")

    async def restarted() -> None:
        try:
            await engine.restart()
        finally:
            await engine.stop()

    with pytest.raises(EngineError, match=r"LMCache server ended before it was ready"):
        asyncio.run(restarted())
    assert not backend.folder.exists()
    assert not [one for one in psutil.Process().children(recursive=True) if str(tmp_path) in " ".join(one.cmdline())]
