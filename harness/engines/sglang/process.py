"""One SGLang: a child process that we start, or a server that runs already. Flags, metrics and routes are 0.5.23's."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec

from harness.engines.accelerator import Accelerator
from harness.engines.http.process import Program, ServerProcess
from harness.engines.sglang.settings import SglangSettings
from harness.errors import EngineError
from harness.experiment.model import Experiment
from harness.processes import warden
from harness.processes.child import family, tree_read_bytes
from simulator.models import ModelSpec

_FLUSH_S = 60.0
# SGLang waits so long itself until nothing is under way; without it, it refuses right after writes.
_FLUSH_WAITS_S = 30
# SGLang's snapshots of its load: shared memory under names that it draws, and never unlinks.
_SNAPSHOTS = "/dev/shm/sglang_loads_"
# With an accelerator: one process for scheduler and model, whose steps follow one another.
_PACED_FLAGS = [
    "--device",
    "cpu",
    "--sampling-backend",
    "pytorch",
    "--disable-overlap-schedule",
    "--disable-cuda-graph",
]
_PACED = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "kv_accelerator.sglang.models", "OMP_NUM_THREADS": "1"}


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself at /server_info. None: it does not say."""

    version: str
    model_path: str | None = None
    page_size: int
    max_total_num_tokens: int
    max_req_input_len: int | None = None
    chunked_prefill_size: int | None = None
    max_running_requests: int | None = None
    enable_hierarchical_cache: bool = False
    hicache_ratio: float | None = None
    hicache_write_policy: str | None = None
    hicache_io_backend: str | None = None
    hicache_mem_layout: str | None = None
    hicache_storage_backend: str | None = None
    hicache_storage_prefetch_policy: str | None = None
    internal_states: list[InternalState] = []

    @property
    def max_sequences(self) -> int | None:
        """What the scheduler resolved; the argument where it does not say."""
        found = [state.effective_max_running_requests_per_dp for state in self.internal_states]
        return next((each for each in found if each is not None), self.max_running_requests)

    @property
    def hicache(self) -> dict[str, str]:
        """Its settings of HiCache, for the manifest; empty without one."""
        if not self.enable_hierarchical_cache:
            return {}
        named = {name: getattr(self, name) for name in self.__struct_fields__ if name.startswith("hicache_")}
        return {name: str(value) for name, value in named.items() if value is not None}


class InternalState(msgspec.Struct, frozen=True, kw_only=True):
    """Of one scheduler."""

    effective_max_running_requests_per_dp: int | None = None


def accelerator_of(settings: SglangSettings, model: ModelSpec) -> Accelerator | None:
    """What stands for the GPU; None where nothing does. Raises SettingsError."""
    name = settings.paced_by
    return Accelerator(name, settings.link, model, "engines.sglang.accelerator") if name else None


class SglangProcess(ServerProcess):
    """See ServerProcess."""

    program = Program(
        title="SGLang",
        section="sglang",
        module="sglang.launch_server",
        paced_model="SglangPacedForCausalLM",
        reports="start it with --enable-metrics, or ",
    )

    def __init__(
        self,
        experiment: Experiment,
        model: ModelSpec,
        folder: Path,
        accelerator: Accelerator | None = None,
        number: int = 0,
    ) -> None:
        self._settings = experiment.engines.of(SglangSettings)
        super().__init__(experiment, self._settings, model, folder, accelerator, number)

    def _environment(self) -> dict[str, str]:
        env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DO_NOT_TRACK": "1"}
        if self._accelerator is None:
            return env
        return env | self._accelerator.environment(self._report, polls=True) | _PACED

    def _flags(self, port: int) -> list[str]:
        cache, settings, page = self._experiment.cache, self._settings, self._experiment.cache.block_tokens
        tokens = cache.gpu // self._model.kv_bytes_per_token // page * page
        flags = ["--model-path", settings.model_path or str(self._write_model()), "--dtype", self._model.dtype]
        flags += ["--host", "127.0.0.1", "--port", str(port), "--random-seed", "0"]
        flags += ["--page-size", str(page), "--max-total-tokens", str(tokens)]
        flags += ["--context-length", str(min(tokens, self._model.max_position))]
        flags += ["--enable-metrics", "--enable-cache-report", "--sleep-on-idle"]
        # Answers as token ids, each once: the load loop needs no text.
        flags += ["--skip-tokenizer-init", "--incremental-streaming-output"]
        flags += [] if settings.model_path else ["--load-format", "dummy"]
        flags += _PACED_FLAGS if self._accelerator else []
        for flag, value in (
            ("--attention-backend", settings.attention_backend),
            ("--chunked-prefill-size", settings.max_batched_tokens),
            ("--max-running-requests", settings.max_sequences),
        ):
            flags += [] if value is None else [flag, str(value)]
        return flags + self._hicache_flags(tokens)

    def _hicache_flags(self, gpu_tokens: int) -> list[str]:
        """The host pool's size goes by a ratio: --hicache-size takes whole GB. SGLang adds a page to what the ratio
        gives, so one less is asked for, and half a page against rounding."""
        cache, hicache, page = self._experiment.cache, self._settings.hicache, self._experiment.cache.block_tokens
        if cache.cpu is None:
            return []
        pages = cache.cpu // (self._model.kv_bytes_per_token * page)
        flags = ["--enable-hierarchical-cache", "--hicache-ratio", repr((pages - 0.5) * page / gpu_tokens)]
        flags += ["--hicache-write-policy", hicache.write, "--hicache-io-backend", hicache.io_backend]
        flags += ["--hicache-mem-layout", hicache.mem_layout]
        if not cache.tiers - {"gpu", "cpu"}:
            return flags
        # Of any storage: how long a request waits for what it has, and from how many tokens on.
        flags += ["--hicache-storage-prefetch-policy", hicache.prefetch, "--hicache-storage-backend-extra-config"]
        return [*flags, json.dumps({"prefetch_threshold": hicache.prefetch_threshold})]

    async def _healthy(self) -> bool:
        """It answers 503 until its own first request is done."""
        if self.child is not None:
            warden.also_delete(self._scratch, warden.shared_memory(self.child.pids, _SNAPSHOTS))
        return await super()._healthy()

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes, whose I/O is the storage tier's; none where they are not known."""
        if self.child is not None:
            return self.child.pids
        pid = self._settings.attach.pid if self._settings.attach else None
        return family(pid) if pid else ()

    def read_bytes(self) -> int | None:
        """Bytes that it got from storage devices; None for a process that is not known."""
        if self.child is not None:
            return super().read_bytes()
        pid = self._settings.attach.pid if self._settings.attach else None
        return tree_read_bytes(pid) if pid else None

    async def flush(self) -> None:
        """Empties GPU and host pool. SGLang refuses (400) while something is under way: stores to storage, too."""
        deadline, said = time.monotonic() + _FLUSH_S, ""
        while time.monotonic() < deadline:
            try:
                response = await self._http.post(f"{self.url}/flush_cache?timeout={_FLUSH_WAITS_S}")
            except httpx.HTTPError as error:
                raise EngineError(f"SGLang at {self.url} no longer answers ({error!r}); {self._see()}") from None
            if response.status_code == 200:
                return
            said = " ".join(response.text.split())
            await asyncio.sleep(0.1)
        raise EngineError(
            f"{self.url}/flush_cache refused for {_FLUSH_S:g} s ({said}): it waits for stores under way; is the storage"
            f" too slow for them? {self._see()}"
        )

    async def info(self) -> ServerInfo:
        answer: Any = await self._http.get(f"{self.url}/server_info")
        try:
            return msgspec.json.decode(answer.content, type=ServerInfo)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise EngineError(
                f"{self.url}/server_info is not what SGLang 0.5.23 answers ({error}); use that release"
            ) from None
