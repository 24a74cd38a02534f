"""The experiment file as strict models. A key nobody knows, a wrong unit, an impossible combination: refused
before anything starts, with file, place and cure on one line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from harness.experiment.cache import Cache
from harness.experiment.deployment import Deployment, upgraded
from harness.experiment.fields import (
    FROM_LIST,
    SHELL_NAME,
    Positive,
    Strict,
    Url,
    without_secrets,
)
from harness.experiment.measure import TIER_STATES, Measure
from harness.experiment.storage import Storage, StorageSettings
from harness.experiment.units import Seconds
from harness.experiment.workloads import PrefixWorkload, SyntheticWorkload, Workload, check_arrivals, hit_tokens

EngineName = Literal["sim", "vllm", "openai", "fake"]


class SimSettings(Strict):
    """The simulator: whose cost constants, whose cache rules; mode storage moves the disk tier's bytes for real."""

    mode: Literal["model", "storage"] = "model"

    hardware: str = "cpu-2core"
    engine_policy: str = "vllm-0.32"
    tier_policy: str = "lmcache-0.5.6-mp"
    max_batched_tokens: Positive = 2048
    max_sequences: Positive = 256
    token_times: bool = False
    storage: StorageSettings = StorageSettings()


class Attach(Strict):
    """A vLLM (and LMCache server) that runs already and is left running.

    disk_path: the folder of its fs adapter; chunk files in it are deleted to bring about `recompute`. lmcache_pid:
    its process, whose reads from the device prove `disk` and `disk_cold`.
    """

    url: Url
    model: str | None = None
    lmcache_url: Url | None = None
    lmcache_pid: Positive | None = None
    disk_path: str | None = None


class Cores(Strict):
    """CPU cores for the engine, and for the cache server and the load loop. None: not pinned."""

    engine: Annotated[tuple[int, ...] | None, FROM_LIST] = None
    client: Annotated[tuple[int, ...] | None, FROM_LIST] = None


class VllmSettings(Strict):
    """A real vLLM, from the environment that the user has.

    model_path None: random weights of the model's shape. transport: how a vLLM without a GPU and the LMCache server
    pass KV to each other; on a GPU they use CUDA IPC.
    """

    python: str = ".engines/vllm/bin/python"
    model_path: str | None = None
    connector: Literal["mp", "in_process"] = "mp"
    device: Literal["cpu", "gpu"] = "cpu"
    transport: Literal["shm", "pickle"] = "shm"
    max_batched_tokens: Positive | None = None
    max_sequences: Positive | None = None
    args: Annotated[tuple[str, ...], FROM_LIST] = ()
    env: dict[str, str] = Field(default_factory=dict)
    lmcache_args: Annotated[tuple[str, ...], FROM_LIST] = ()
    start_timeout: Seconds = 300.0
    cores: Cores = Cores()
    attach: Attach | None = None

    @model_validator(mode="after")
    def _no_secrets(self) -> VllmSettings:
        for name in self.env:
            without_secrets(name, f"env.{name}")
        for argument in (*self.args, *self.lmcache_args):
            without_secrets(argument.split("=")[0] if argument.startswith("--") else argument, "an argument")
        return self


class OpenAISettings(Strict):
    """Any OpenAI-compatible server. The key is read from the environment variable that api_key_env names."""

    url: Url
    model: Annotated[str, Field(min_length=1)]
    api_key_env: str | None = None
    vocab_size: Annotated[int, Field(ge=512, le=10_000_000)] | None = None

    @field_validator("api_key_env")
    @classmethod
    def _a_name_not_a_key(cls, value: str | None) -> str | None:
        if value is not None and not SHELL_NAME.fullmatch(value):
            raise ValueError("api_key_env must name an environment variable, not hold the key itself")
        return value


class FakeSettings(Strict):
    """The scripted engine of the tests: how it misbehaves."""

    fail_every: Annotated[int, Field(ge=0)] = 0
    degrade_after: Annotated[int, Field(ge=0)] | None = None
    delay: Seconds = 0.0
    start_error: str | None = None


class Engines(Strict):
    """Settings by engine; --engine chooses one."""

    sim: SimSettings = SimSettings()
    vllm: VllmSettings = VllmSettings()
    openai: OpenAISettings | None = None
    fake: FakeSettings = FakeSettings()

    def cores(self, name: str) -> Cores:
        """Where the engine of that name and its load are pinned; only vLLM's processes are ours to pin."""
        return self.vllm.cores if name == "vllm" else Cores()


class Experiment(Strict):
    """One experiment, with everything that its result depends on."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]
    description: str = ""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    model: Annotated[str, Field(min_length=1)] = "tiny-llama"
    workload: Workload
    measure: Measure = Measure()
    cache: Cache
    storage: Storage | None = None
    deployment: Deployment = Deployment()
    engines: Engines = Engines()

    @model_validator(mode="before")
    @classmethod
    def _upgraded(cls, config: Any, info: ValidationInfo) -> Any:
        """Manifests may be older than a key's place; an experiment file is corrected by its author."""
        kept = isinstance(info.context, dict) and info.context.get("resolved")
        return upgraded(config) if kept and isinstance(config, dict) else config

    @model_validator(mode="after")
    def _consistent(self) -> Experiment:
        check_workload(self.workload, self.measure, self.cache)
        if self.storage is not None:
            check_device(self.storage, self.cache, self.engines)
        check_storage(self)
        return self


def check_device(storage: Storage, cache: Cache, engines: Engines) -> None:
    """Refuses a device that nothing would use. Raises ValueError with the cure."""
    if cache.disk is None:
        raise ValueError("storage needs cache.disk, the tier that it is about; add it, e.g. {capacity: 2GiB}")
    if storage.device is None:
        return
    if cache.disk.path is not None:
        raise ValueError("storage.device and cache.disk.path exclude each other; keep one")
    if engines.vllm.attach is not None:
        raise ValueError("storage.device: a server that runs already has its own disk; remove it, or remove attach")
    if cache.disk.capacity > storage.device.size:
        raise ValueError(
            f"cache.disk.capacity {cache.disk.capacity} does not fit storage.device.size {storage.device.size}; enlarge"
        )


def check_workload(workload: Workload, measure: Measure, cache: Cache) -> None:
    """Refuses combinations that no single section can see. Raises ValueError with the cure."""
    if isinstance(workload, PrefixWorkload | SyntheticWorkload):
        if workload.prompt_tokens <= cache.chunk_tokens and workload.hit_rate > 0:
            raise ValueError(
                f"workload.prompt_tokens {workload.prompt_tokens} holds no whole chunk of {cache.chunk_tokens} tokens"
                f" before its last token; use at least {cache.chunk_tokens + 1}"
            )
        hit_tokens(workload.prompt_tokens, workload.hit_rate, cache.chunk_tokens)
    if isinstance(workload, PrefixWorkload):
        _check_tiers(measure, cache)
        if measure.must_reach:
            raise ValueError("measure.must_reach is for free loads; a prefix workload names measure.tiers")
        return
    if measure.tiers:
        raise ValueError(f"measure.tiers needs workload.kind prefix, not {workload.kind}; remove it")
    if measure.until or measure.samples:
        raise ValueError(f"measure.samples and until need workload.kind prefix, not {workload.kind}; remove them")
    if measure.must_reach and getattr(cache, measure.must_reach) is None:
        raise ValueError(f"measure.must_reach is {measure.must_reach}, but cache.{measure.must_reach} is not set")
    check_arrivals(workload)


def check_storage(experiment: Experiment) -> None:
    """Refuses what mode storage cannot do, and what only it can. Raises ValueError with the cure."""
    cache, sim = experiment.cache, experiment.engines.sim
    if sim.mode == "storage" and cache.disk is None:
        raise ValueError("engines.sim.mode storage needs cache.disk: its bytes are what moves; add it")
    if sim.mode == "storage" and experiment.deployment.instances > 1:
        raise ValueError("deployment.instances must be 1 with engines.sim.mode storage: one engine has the device")
    if cache.gpu:
        return
    if sim.mode != "storage":
        raise ValueError("cache.gpu is 0: all KV on disk, which only engines.sim.mode storage does; set it")
    if isinstance(experiment.workload, PrefixWorkload):
        raise ValueError("cache.gpu is 0: a prefix workload has no other tier to be in; use a free load")
    if sim.storage.compute != "none":
        raise ValueError("cache.gpu is 0: no engine is simulated; set engines.sim.storage.compute to none")


def _check_tiers(measure: Measure, cache: Cache) -> None:
    if not measure.tiers:
        raise ValueError(f"measure.tiers is empty; name some of {', '.join(TIER_STATES)}")
    if measure.samples is None and measure.until is None:
        raise ValueError("measure says neither samples nor until; add one, e.g. samples: 10")
    if "cpu" in measure.tiers and cache.cpu is None:
        raise ValueError("measure.tiers names cpu, but cache.cpu is not set; give it a size, e.g. 2GiB")
    if {"disk", "disk_cold"} & set(measure.tiers) and cache.disk is None:
        raise ValueError("measure.tiers names disk, but cache.disk is not set; add it, e.g. {capacity: 8GiB}")

    if "disk" in measure.tiers and cache.disk is not None and cache.disk.odirect:
        raise ValueError(
            "measure.tiers names disk (page cache warm), but odirect bypasses the page cache; use disk_cold"
        )


def results_root() -> Path:
    """Where runs go unless told: $HARNESS_RESULTS, else ./results."""
    return Path(os.environ.get("HARNESS_RESULTS", "results"))
