"""One vLLM: a child process that we start, or a server that runs already. Flags and metrics are vLLM 0.32's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from pathlib import Path

import httpx

from harness.caches.base import Connection
from harness.collectors.prometheus import Metrics, scrape
from harness.engines.accelerator import ARCHITECTURE, Accelerator, read_report
from harness.engines.vllm.random_model import write_random_model
from harness.engines.vllm.settings import VllmSettings
from harness.errors import EngineError
from harness.experiment.model import Experiment
from harness.processes.child import Child, child_environment, control_client, free_port
from harness.records import SchedulerLimits
from simulator.models import ModelSpec

SERVED_NAME = "model"
_RESET_TIMEOUT_S = 60.0


class VllmProcess:
    """Lifecycle: start, ready, then any of the others, stop. folder: the run's. number: which of several it is, for
    the name of its log. accelerator: what takes the place of the model's arithmetic."""

    def __init__(
        self,
        experiment: Experiment,
        model: ModelSpec,
        folder: Path,
        number: int = 0,
        accelerator: Accelerator | None = None,
    ) -> None:
        self._experiment, self._model, self._folder, self._number = experiment, model, folder, number
        self._accelerator, self._report = accelerator, Path()
        self._settings = experiment.engines.of(VllmSettings)
        self.url = self._settings.attach.url.rstrip("/") if self._settings.attach else ""
        self.child: Child | None = None
        self._http = control_client(60)

    def start(self, connection: Connection) -> None:
        """connection: how it reaches its cache server. Raises EngineError."""
        if self._settings.attach is not None:
            return
        python = Path(self._settings.python)
        if not python.exists():
            raise EngineError(f"{python}: no such Python; run scripts/engine_env vllm, or set engines.vllm.python")
        port = free_port()
        # In memory: on a disk, a write could wait for a journal that is busy with the cache server's writes.
        self._report = Path("/dev/shm") / f"kv-harness-{os.getpid()}-{port}-pace"
        self.url = f"http://127.0.0.1:{port}"
        # vLLM leaves its sockets behind; a short path, because theirs are limited to 107 characters.
        scratch = Path(tempfile.mkdtemp(prefix="kv-harness-"))
        env = child_environment(
            self._environment()
            | connection.environment
            | self._settings.env
            | {"TMPDIR": str(scratch), "VLLM_RPC_BASE_PATH": str(scratch)}
        )
        argv = [str(python), "-m", "vllm.entrypoints.openai.api_server", *self._flags(port), *connection.arguments]
        argv += self._settings.args
        remains = [scratch, self._report] if self._accelerator else [scratch]
        self.child = Child("vLLM", argv, log=self._log, env=env, cores=self._settings.cores.engine, scratch=remains)
        self.child.start()

    @property
    def _log(self) -> Path:
        return self._folder / "logs" / (f"vllm-{self._number}.log" if self._number else "vllm.log")

    def pace(self) -> dict[str, int | None]:
        """What the accelerator has paced so far; empty without one."""
        return read_report(self._report) if self._accelerator else {}

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
        return env | (self._accelerator.environment(self._report) if self._accelerator else {})

    def _flags(self, port: int) -> list[str]:
        cache, settings = self._experiment.cache, self._settings
        model_path = settings.model_path or str(self._write_model())
        fits = (cache.gpu // self._model.kv_bytes_per_token // cache.block_tokens - 1) * cache.block_tokens
        flags = ["--model", model_path, "--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(port)]
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
        return flags + (self._accelerator.vllm_arguments if self._accelerator else [])

    def _write_model(self) -> Path:
        folder = self._folder / "model"
        if self._accelerator is None:
            return write_random_model(self._model, folder)
        return write_random_model(self._accelerator.shape, folder, ARCHITECTURE)

    async def ready(self) -> None:
        """Waits until it answers. Raises EngineError with the log's last lines."""
        cure = "if memory or a flag is the reason, change cache or engines.vllm"
        if self.child is not None:
            await self.child.wait_until(self._healthy, self._settings.start_timeout, cure)
        elif not await self._healthy():
            raise EngineError(f"no server answers at {self.url}/health; start it, or correct attach.url")

    def read_bytes(self) -> int | None:
        """Bytes that it got from storage devices; None for a process that is not ours."""
        return self.child.storage_read_bytes() if self.child else None

    async def stop(self) -> None:
        if self.child is not None:
            await self.child.stop()
        await self._http.aclose()

    async def reset(self) -> None:
        """vLLM refuses while blocks are held, by stores that go on after the answer for one: asked until it agrees."""
        deadline = time.monotonic() + _RESET_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                response = await self._http.post(f"{self.url}/reset_prefix_cache")
            except httpx.HTTPError as error:
                raise EngineError(f"vLLM at {self.url} no longer answers ({error!r}); {self._see()}") from None
            if response.status_code == 404:
                raise EngineError(f"{self.url} has no /reset_prefix_cache; start vLLM with VLLM_SERVER_DEV_MODE=1")
            if response.status_code == 200 and response.json().get("success", True):
                return
            await asyncio.sleep(0.05)
        raise EngineError(f"{self.url} refused to reset its prefix cache for {_RESET_TIMEOUT_S:g} s; {self._see()}")

    def _see(self) -> str:
        return f"see {self._log}" if self.child else "see its log"

    async def _healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return (await self._http.get(f"{self.url}/health")).status_code == 200
        return False

    async def metrics(self) -> Metrics:
        try:
            return await scrape(self._http, f"{self.url}/metrics")
        except httpx.HTTPError as error:
            raise EngineError(f"vLLM at {self.url} no longer reports its metrics ({error!r}); {self._see()}") from None

    async def max_prompt_tokens(self) -> int | None:
        models = (await self._http.get(f"{self.url}/v1/models")).json()["data"]
        longest = models[0].get("max_model_len") if models else None
        return None if longest is None else int(longest) - 1

    async def scheduler(self) -> SchedulerLimits:
        """The limits of a step, where the server tells its configuration."""
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):
            # A vLLM that finds no pip to list its packages with fails here, and drops the connection after its answer.
            url, close = f"{self.url}/server_info?config_format=json", {"Connection": "close"}
            limits = (await self._http.get(url, headers=close)).json()["vllm_config"]["scheduler_config"]
            return SchedulerLimits(
                max_batched_tokens=int(limits["max_num_batched_tokens"]), max_sequences=int(limits["max_num_seqs"])
            )
        return SchedulerLimits()

    async def version(self) -> str:
        return str((await self._http.get(f"{self.url}/version")).json().get("version"))
