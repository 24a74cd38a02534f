"""A real vLLM with LMCache behind it, over HTTP: started here as child processes, or attached to.

Flags and metrics are those of vLLM 0.32 and LMCache 0.5.6. Two connectors: multi-process (an LMCache server, which
also runs without a GPU) and in-process (GPU builds of vLLM; on CPU it silently recomputes, which the evidence shows).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml

from harness.caches.lmcache import LMCacheServer, LMCacheSpec, hits, lookups, mp_connector, stores
from harness.collectors.host import file_system
from harness.collectors.prometheus import Metrics, scrape
from harness.engines.base import Emit
from harness.engines.http.replay import OpenAIReplay
from harness.engines.vllm.random_model import write_random_model
from harness.engines.vllm.settings import VllmSettings
from harness.errors import EngineError
from harness.experiment.cache import Eviction
from harness.experiment.model import Experiment
from harness.processes.child import Child, child_environment, control_client, free_port, outlive
from harness.records import Capabilities, Counters, EvictionRules, Resolved, SchedulerLimits
from simulator.models import ModelSpec
from traces.load import Load
from traces.request import RequestRecord, TokenSource

_SERVED_NAME = "model"
_RESET_TIMEOUT_S = 60.0
_COUNTER_LAG_S = 10.0


class VllmEngine:
    """vLLM behind the Engine seam. `folder` is the run's; `clock` gives the run's time in seconds."""

    name = "vllm"

    def __init__(self, experiment: Experiment, model: ModelSpec, folder: Path, clock: Callable[[], float]) -> None:
        self._experiment, self._model, self._folder, self._clock = experiment, model, folder, clock
        self._settings: VllmSettings = experiment.engines.of(VllmSettings)
        self.capabilities = _capabilities(experiment)
        self.cache_server = self._make_cache_server()
        self._child: Child | None = None
        self._url = self._settings.attach.url.rstrip("/") if self._settings.attach else ""
        self._http = control_client(60)
        self._replay: OpenAIReplay | None = None
        self._sent_tokens = self._lookups_due = 0
        self._base_tokens = self._base_lookups = 0

    # ---- lifecycle

    async def start(self) -> None:
        if self.cache_server is not None:
            self.cache_server.start()
            # vLLM registers with the cache server as it comes up, so that one has to answer first.
            await self.cache_server.ready()
        if self._settings.attach is None:
            self._start_vllm()

    def _start_vllm(self) -> None:
        python = Path(self._settings.python)
        if not python.exists():
            raise EngineError(f"{python}: no such Python; run scripts/engine_env vllm, or set engines.vllm.python")
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        # vLLM leaves its sockets behind; a short path, because theirs are limited to 107 characters.
        scratch = Path(tempfile.mkdtemp(prefix="kv-harness-"))
        env = child_environment(self._environment() | {"TMPDIR": str(scratch), "VLLM_RPC_BASE_PATH": str(scratch)})
        argv = [str(python), "-m", "vllm.entrypoints.openai.api_server", *self._flags(port), *self._settings.args]
        self._child = Child("vLLM", argv, log=self._log, env=env, cores=self._settings.cores.engine, scratch=[scratch])
        self._child.start()

    @property
    def _log(self) -> Path:
        return self._folder / "logs" / "vllm.log"

    def _environment(self) -> dict[str, str]:
        env = {
            "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "PYTHONHASHSEED": "0",  # in-process LMCache names chunks by Python's hash
        }
        if self._settings.device == "cpu" and self._settings.cores.engine:
            env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, self._settings.cores.engine))
        if self._settings.connector == "in_process" and self._experiment.cache.cpu is not None:
            env["LMCACHE_CONFIG_FILE"] = str(self._in_process_config())
        return env | self._settings.env

    def _flags(self, port: int) -> list[str]:
        cache, settings = self._experiment.cache, self._settings
        model_path = settings.model_path or str(write_random_model(self._model, self._folder / "model"))
        fits = (cache.gpu // self._model.kv_bytes_per_token // cache.block_tokens - 1) * cache.block_tokens
        flags = ["--model", model_path, "--served-model-name", _SERVED_NAME, "--host", "127.0.0.1", "--port", str(port)]
        flags += ["--dtype", self._model.dtype, "--block-size", str(cache.block_tokens)]
        flags += [
            "--kv-cache-memory-bytes",
            str(cache.gpu),
            "--max-model-len",
            str(min(fits, self._model.max_position)),
        ]
        flags += ["--enable-prompt-tokens-details", "--no-enable-log-requests", "--seed", "0"]
        flags += [] if settings.model_path else ["--load-format", "dummy"]
        flags += ["--enforce-eager"] if settings.device == "cpu" else []
        if settings.max_batched_tokens:
            flags += ["--max-num-batched-tokens", str(settings.max_batched_tokens)]
        if settings.max_sequences:
            flags += ["--max-num-seqs", str(settings.max_sequences)]
        return flags + self._connector_flags()

    def _connector_flags(self) -> list[str]:
        if self._experiment.cache.cpu is None and self._experiment.cache.disk is None:
            return []
        if self.cache_server is not None:
            return ["--kv-transfer-config", mp_connector(self.cache_server.port)]
        return ["--kv-transfer-config", json.dumps({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"})]

    def _in_process_config(self) -> Path:
        cache = self._experiment.cache
        config: dict[str, Any] = {"chunk_size": cache.chunk_tokens, "local_cpu": cache.disk is None}
        config["max_local_cpu_size"] = (cache.cpu or 0) / 2**30
        if cache.disk is not None:
            config |= {"local_disk": f"file://{self._disk_folder().absolute()}/"}
            config |= {"max_local_disk_size": cache.disk.capacity / 2**30}
        path = self._folder / "lmcache.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def _make_cache_server(self) -> LMCacheServer | None:
        cache, settings = self._experiment.cache, self._settings
        if settings.attach is not None:
            attach = settings.attach
            disk = Path(attach.disk_path) if attach.disk_path else None
            return (
                LMCacheServer(None, url=attach.lmcache_url.rstrip("/"), pid=attach.lmcache_pid, disk=disk)
                if attach.lmcache_url
                else None
            )
        if settings.connector != "mp" or cache.cpu is None:
            return None
        return LMCacheServer(
            LMCacheSpec(
                python=Path(settings.python),
                chunk_tokens=cache.chunk_tokens,
                cpu_bytes=cache.cpu,
                disk_path=self._disk_folder() if cache.disk else None,
                adapter=cache.disk.adapter if cache.disk else "fs",
                odirect=cache.disk.odirect if cache.disk else False,
                log=self._folder / "logs" / "lmcache.log",
                cores=settings.cores.client,
                shared_memory=settings.device == "cpu" and settings.transport == "shm",
                eviction=cache.eviction or Eviction(),
                args=settings.lmcache_args,
                start_timeout_s=settings.start_timeout,
            )
        )

    def _disk_folder(self) -> Path:
        """A folder of our own below the configured path: it is deleted at the end."""
        disk = self._experiment.cache.disk
        assert disk is not None
        return (Path(disk.path) if disk.path else self._folder) / f"kv-harness-{self._folder.name}"

    def _disk_file_system(self) -> str | None:
        if self._settings.attach is None:
            return file_system(self._disk_folder()) if self._experiment.cache.disk else None
        return file_system(Path(self._settings.attach.disk_path)) if self._settings.attach.disk_path else None

    async def ready(self) -> Resolved:
        cure = "if memory or a flag is the reason, change cache or engines.vllm"
        if self._child is not None:
            await self._child.wait_until(self._healthy, self._settings.start_timeout, cure)
        elif not await self._healthy():
            raise EngineError(f"no server answers at {self._url}/health; start it, or correct attach.url")
        metrics = await self._metrics()
        info = metrics.labels("vllm:cache_config_info")
        blocks, block_tokens = int(info["num_gpu_blocks"]), int(info["block_size"])
        cache = self._experiment.cache
        cpu_bytes, chunk_tokens, evicts = (
            await self.cache_server.resolved() if self.cache_server else (None, None, None)
        )
        if block_tokens != cache.block_tokens or chunk_tokens not in (None, cache.chunk_tokens):
            raise EngineError(
                f"the engine at {self._url} has blocks of {block_tokens} and chunks of {chunk_tokens} tokens, the"
                f" experiment {cache.block_tokens} and {cache.chunk_tokens}; correct the experiment"
            )
        wanted = None if cache.eviction is None else EvictionRules(**cache.eviction.model_dump())
        if None not in (evicts, wanted) and evicts != wanted:
            raise EngineError(
                f"the LMCache server behind {self._url} evicts by {evicts}, the experiment's cache.eviction is"
                f" {wanted}; correct it, or what the server is started with"
            )
        per_token = self._model.kv_bytes_per_token
        self._base_tokens = metrics.total("vllm:prompt_tokens_total") or 0
        self._base_lookups = lookups(await self.cache_server.metrics()) if self.cache_server else 0
        await self._open_replay()
        return Resolved(
            gpu_bytes=blocks * block_tokens * per_token,
            cpu_bytes=cpu_bytes,
            disk_bytes=cache.disk.capacity if cache.disk else None,
            gpu_blocks=blocks,
            block_tokens=block_tokens,
            chunk_tokens=cache.chunk_tokens,
            kv_bytes_per_token=per_token,
            max_prompt_tokens=await self._max_prompt_tokens(),
            vocab_size=self._model.vocab_size,
            io_pids=self.cache_server.pids if self.cache_server else (),
            versions=await self._versions(),
            cache_config=info,
            url=self._url,
            connector=self._settings.connector,
            eviction=evicts,
            disk_file_system=self._disk_file_system(),
            scheduler=await self._scheduler(),
        )

    async def _open_replay(self) -> None:
        attach = self._settings.attach
        self._replay = OpenAIReplay(
            self._url,
            (attach.model if attach else None) or _SERVED_NAME,
            TokenSource(self._experiment.seed, self._model.vocab_size),
            self._clock,
            request_timeout_s=self._experiment.measure.request_timeout,
            count_tokens=True,
        )
        await self._replay.open()

    async def stop(self) -> None:
        if self._replay is not None:
            await self._replay.close()
        if self._child is not None:
            await self._child.stop()
        if self.cache_server is not None:
            await self.cache_server.stop()
        await self._http.aclose()

    # ---- work

    async def replay(self, load: Load, emit: Emit) -> None:
        assert self._replay is not None, "replay before ready"

        def count_and_emit(record: RequestRecord) -> None:
            if record.error is None:
                self._sent_tokens += record.prompt_tokens
                self._lookups_due += record.prompt_tokens > self._experiment.cache.chunk_tokens
            emit(record)

        await outlive(self._children, self._replay.replay(load, count_and_emit), self._replay.give_up)

    @property
    def _children(self) -> tuple[Child, ...]:
        """The cache server first: without it vLLM waits a minute for each load, and then goes on without."""
        cache = self.cache_server.children if self.cache_server else ()
        return (*cache, self._child) if self._child else cache

    async def reset(self, what: frozenset[str]) -> None:
        await outlive(self._children, self._reset(what))

    async def _reset(self, what: frozenset[str]) -> None:
        if "gpu" in what:
            await self._reset_gpu()
        if self.cache_server is not None:
            if "cpu" in what:
                await self.cache_server.clear_cpu()
            if "disk" in what:
                await self.cache_server.clear_disk()
            elif "page_cache" in what:
                await self.cache_server.drop_page_cache()

    async def _reset_gpu(self) -> None:
        """vLLM refuses while blocks are held, by stores that go on after the answer for one: asked until it agrees."""
        deadline = time.monotonic() + _RESET_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                response = await self._http.post(f"{self._url}/reset_prefix_cache")
            except httpx.HTTPError as error:
                raise EngineError(f"vLLM at {self._url} no longer answers ({error!r}); {self._see()}") from None
            if response.status_code == 404:
                raise EngineError(f"{self._url} has no /reset_prefix_cache; start vLLM with VLLM_SERVER_DEV_MODE=1")
            if response.status_code == 200 and response.json().get("success", True):
                return
            await asyncio.sleep(0.05)
        raise EngineError(f"{self._url} refused to reset its prefix cache for {_RESET_TIMEOUT_S:g} s; {self._see()}")

    def _see(self) -> str:
        return f"see {self._log}" if self._child else "see its log"

    def now_s(self) -> float:
        return self._clock()

    async def metrics(self) -> Counters:
        """Both sides' counters, once they account for every request that was answered: they lag the responses."""
        return await outlive(self._children, self._settled())

    async def _settled(self) -> Counters:
        deadline = time.monotonic() + _COUNTER_LAG_S
        while True:
            engine = await self._metrics()
            cache = await self.cache_server.settle() if self.cache_server else None
            sent = (engine.total("vllm:prompt_tokens_total") or 0) - self._base_tokens
            looked = lookups(cache) - self._base_lookups if cache else self._lookups_due
            if (sent >= self._sent_tokens and looked >= self._lookups_due) or time.monotonic() > deadline:
                return self._counters(engine, cache)
            await asyncio.sleep(0.02)

    def _counters(self, engine: Metrics, cache: Metrics | None) -> Counters:
        # A source that served nothing yet has no sample: the metric itself is there from the first request on.
        def by_source(source: str) -> int:
            return engine.total("vllm:prompt_tokens_by_source_total", source=source) or 0

        fields: dict[str, int | None] = {
            "computed_tokens": by_source("local_compute"),
            "gpu_hit_tokens": by_source("local_cache_hit"),
            "external_tokens": by_source("external_kv_transfer"),
        }
        if cache is not None and self.cache_server is not None:
            # It counts stores to storage only, which there may be none of.
            begun, ended = stores(cache) if self._experiment.cache.disk else (None, None)
            fields |= {**hits(cache), "stores_begun": begun, "stores_ended": ended}
            fields["disk_device_read_bytes"] = self.cache_server.storage_read_bytes()
        elif self._settings.connector == "in_process":
            tier = "disk_hit_tokens" if self._experiment.cache.disk else "cpu_hit_tokens"
            fields[tier] = engine.total("lmcache:num_hit_tokens_total")
            fields["disk_device_read_bytes"] = self._child.storage_read_bytes() if self._child else None
        return Counters.of(fields)

    # ---- what it says of itself

    async def _healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return (await self._http.get(f"{self._url}/health")).status_code == 200
        return False

    async def _metrics(self) -> Metrics:
        try:
            return await scrape(self._http, f"{self._url}/metrics")
        except httpx.HTTPError as error:
            raise EngineError(f"vLLM at {self._url} no longer tells its metrics ({error!r}); {self._see()}") from None

    async def _max_prompt_tokens(self) -> int | None:
        models = (await self._http.get(f"{self._url}/v1/models")).json()["data"]
        longest = models[0].get("max_model_len") if models else None
        return None if longest is None else int(longest) - 1

    async def _scheduler(self) -> SchedulerLimits:
        """The limits of a step, where the server tells its configuration."""
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
            # A vLLM that finds no pip to list its packages with fails here, and drops the connection after its answer.
            url, close = f"{self._url}/server_info?config_format=json", {"Connection": "close"}
            limits = (await self._http.get(url, headers=close)).json()["vllm_config"]["scheduler_config"]
            return SchedulerLimits(
                max_batched_tokens=int(limits["max_num_batched_tokens"]), max_sequences=int(limits["max_num_seqs"])
            )
        return SchedulerLimits()

    async def _versions(self) -> dict[str, str]:
        versions = {"vllm": str((await self._http.get(f"{self._url}/version")).json().get("version"))}
        if self.cache_server is not None:
            with contextlib.suppress(httpx.HTTPError, ValueError):
                versions["lmcache"] = str((await self._http.get(f"{self.cache_server.url}/version")).json())
        return versions


def _capabilities(experiment: Experiment) -> Capabilities:
    """What can be emptied and proven follows from what stands behind vLLM."""
    cache, settings = experiment.cache, experiment.engines.of(VllmSettings)
    resets, proves = {"gpu"}, {"recompute", "gpu"}
    if settings.attach is not None:
        has_cpu = settings.attach.lmcache_url is not None
        has_disk = has_cpu and settings.attach.disk_path is not None
    elif settings.connector == "mp":
        has_cpu, has_disk = cache.cpu is not None, cache.cpu is not None and cache.disk is not None
    else:
        # In-process LMCache tells hits in total only, so it can prove one tier at a time: disk where there is one.
        return Capabilities(
            resets=frozenset(resets),
            proves=frozenset(proves | ({"disk"} if cache.disk else {"cpu"} if cache.cpu else set())),
        )
    if has_cpu:
        resets, proves = resets | {"cpu"}, proves | {"cpu"}
    if has_disk:
        resets, proves = resets | {"disk", "page_cache"}, proves | {"disk", "disk_cold"}
    return Capabilities(resets=frozenset(resets), proves=frozenset(proves))
