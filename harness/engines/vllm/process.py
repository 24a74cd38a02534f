"""One vLLM: a child process that we start, or a server that runs already. Flags and metrics are vLLM 0.32's."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import httpx

from harness.engines.accelerator import Accelerator
from harness.engines.http.process import Program, ServerProcess
from harness.engines.vllm.settings import VllmSettings
from harness.errors import EngineError
from harness.experiment.model import Experiment
from harness.records import SchedulerLimits
from simulator.models import ModelSpec

SERVED_NAME = "model"
_RESET_TIMEOUT_S = 60.0
# With an accelerator: one process for scheduler and model, as vLLM has it on one GPU.
_PACED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
_PACED_FLAGS = ["--scheduler-cls", "kv_accelerator.scheduler.PacedScheduler", "--distributed-executor-backend", "uni"]


class VllmProcess(ServerProcess):
    """See ServerProcess."""

    program = Program(
        title="vLLM",
        section="vllm",
        module="vllm.entrypoints.openai.api_server",
        paced_model="PacedForCausalLM",
        scratch=("TMPDIR", "VLLM_RPC_BASE_PATH"),
    )

    def __init__(
        self,
        experiment: Experiment,
        model: ModelSpec,
        folder: Path,
        accelerator: Accelerator | None = None,
        number: int = 0,
    ) -> None:
        self._settings = experiment.engines.of(VllmSettings)
        super().__init__(experiment, self._settings, model, folder, accelerator, number)

    def _environment(self) -> dict[str, str]:
        env = {
            "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "PYTHONHASHSEED": "0",  # in-process LMCache names chunks by Python's hash
        }
        if self._settings.device == "cpu" and self._cores:
            env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, self._cores))
        return env | (self._accelerator.environment(self._report) | _PACED if self._accelerator else {})

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
        return flags + (_PACED_FLAGS if self._accelerator else [])

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
