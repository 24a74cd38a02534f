"""The experiment file as strict models. A key nobody knows, a wrong unit, an impossible combination: refused
before anything starts, with file, place and cure on one line."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from harness.experiment.fields import (
    FROM_LIST,
    Eviction,
    Positive,
    PositiveFloat,
    Share,
    Storage,
    StorageSettings,
    Strict,
)
from harness.experiment.units import Bytes, Seconds

TIER_STATES = ("recompute", "gpu", "cpu", "disk", "disk_cold")
TierState = Literal["recompute", "gpu", "cpu", "disk", "disk_cold"]
WORKLOAD_KINDS = ("prefix", "synthetic", "sessions", "personas", "trace")
EngineName = Literal["sim", "vllm", "openai", "fake"]
SECRET = re.compile(r"api[-_]?key|token$|secret|passw|access[-_]?key|credential", re.IGNORECASE)
SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def without_secrets(text: str, what: str) -> str:
    """The text, unless it seems to hold a secret: configurations are kept in manifests and shown in reports."""
    if SECRET.search(text):
        raise ValueError(f"{what} seems to hold a secret; export it instead: engines inherit our environment")
    return text


def plain_url(url: str) -> str:
    if "@" in url:
        raise ValueError("a URL with a user or password in it; leave them out: URLs are kept in manifests")
    return url


Url = Annotated[str, Field(pattern=r"^https?://"), AfterValidator(plain_url)]


class PrefixWorkload(Strict):
    """One prompt at a time (or `concurrency` different ones together), its prefix put in a named tier first."""

    kind: Literal["prefix"]
    prompt_tokens: Annotated[int, Field(ge=2, le=2**24)]
    hit_rate: Share = 1.0
    output_tokens: Positive = 1
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 1


class SyntheticWorkload(Strict):
    """Many requests over shared prefixes, popularity by Zipf's law."""

    kind: Literal["synthetic"]
    requests: Annotated[int, Field(ge=1, le=10_000_000)]
    prompt_tokens: Annotated[int, Field(ge=2, le=2**24)]
    hit_rate: Share = 0.5
    prefixes: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    zipf: Annotated[float, Field(ge=0.0, le=10.0, strict=False)] = 0.0
    output_tokens: Positive = 16
    arrivals: Literal["closed", "constant", "poisson"] = "closed"
    rate_per_s: PositiveFloat | None = None
    concurrency: Annotated[int, Field(ge=1, le=100_000)] | None = None
    warm: bool = True


class SessionsWorkload(Strict):
    """Conversations: every turn carries all turns before it."""

    kind: Literal["sessions"]
    sessions: Annotated[int, Field(ge=1, le=1_000_000)]
    turns: Annotated[int, Field(ge=1, le=10_000)]
    system_tokens: Annotated[int, Field(ge=0, le=2**24)] = 0
    user_tokens: Positive = 256
    output_tokens: Positive = 64
    think: Seconds = 0.0
    arrivals: Literal["closed", "constant", "poisson"] = "closed"
    rate_per_s: PositiveFloat | None = None
    concurrency: Annotated[int, Field(ge=1, le=100_000)] | None = None


class TraceWorkload(Strict):
    """A recorded trace, replayed at its own times. `block_tokens` scales each of its 512-token blocks."""

    kind: Literal["trace"]
    trace: Annotated[str, Field(min_length=1)]
    start: Annotated[int, Field(ge=0)] = 0
    limit: Positive | None = None
    block_tokens: Annotated[int, Field(ge=1, le=4096)] | None = None
    max_prompt_tokens: Positive | None = None
    max_output_tokens: Positive | None = None
    time_scale: Annotated[float, Field(ge=0.0, le=1e6, strict=False)] = 1.0
    concurrency: Annotated[int, Field(ge=1, le=100_000)] | None = None


class PersonaSettings(Strict):
    """A kind of user; ranges [low, high] are drawn from evenly, turn by turn."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]
    share: PositiveFloat = 1.0
    context_tokens: Annotated[tuple[Positive, Positive], FROM_LIST]
    output_tokens: Annotated[tuple[Positive, Positive], FROM_LIST]
    think: Annotated[tuple[Seconds, Seconds], FROM_LIST] = (0.0, 0.0)


class PersonasWorkload(Strict):
    """Users of different kinds in conversations, all at once: each goes on when it was answered and has thought."""

    kind: Literal["personas"]
    users: Annotated[int, Field(ge=1, le=100_000)]
    turns: Annotated[int, Field(ge=1, le=10_000)]
    personas: Annotated[tuple[PersonaSettings, ...], FROM_LIST]


FreeWorkload = SyntheticWorkload | SessionsWorkload | TraceWorkload | PersonasWorkload
Workload = Annotated[PrefixWorkload | FreeWorkload, Field(discriminator="kind")]


class Until(Strict):
    """Sample until the median's confidence interval is at most ± half_width (relative) wide, in every tier."""

    metric: Literal["ttft_s", "e2e_s", "tpot_s"] = "ttft_s"
    half_width: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.95
    min_samples: Annotated[int, Field(ge=3, le=100_000)] = 5
    max_samples: Annotated[int, Field(ge=3, le=100_000)] = 500

    @model_validator(mode="after")
    def _ordered(self) -> Until:
        if self.max_samples < self.min_samples:
            raise ValueError(f"max_samples {self.max_samples} is below min_samples {self.min_samples}; raise it")
        return self


class Measure(Strict):
    """What to sample: tiers (for `prefix` workloads), how often, for how long at most.

    warm_up: samples of each tier, of a free load passes over it, that come first, count for nothing and are not in the
    budget. The first touch of memory that a tier has just been given costs what no later request pays.
    """

    tiers: Annotated[tuple[TierState, ...], FROM_LIST] = ()
    samples: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    until: Until | None = None
    budget: Seconds | None = None
    warm_up: Annotated[int, Field(ge=0, le=100)] = 0
    must_reach: Literal["cpu", "disk"] | None = None
    request_timeout: Seconds = 600.0

    @model_validator(mode="after")
    def _consistent(self) -> Measure:
        if len(set(self.tiers)) != len(self.tiers):
            raise ValueError("tiers names a tier twice; name each once")
        if self.samples is not None and self.until is not None:
            raise ValueError("samples and until exclude each other; keep one")
        if self.request_timeout <= 0:
            raise ValueError("request_timeout must be longer than 0 s")
        return self


class Disk(Strict):
    """The storage tier: a folder of chunk files. path None: a folder inside the run's own."""

    capacity: Bytes
    path: str | None = None
    adapter: Literal["fs", "fs_native"] = "fs"
    odirect: bool = False


class Cache(Strict):
    """Tiers and their grain. cpu None: no cache server at all; disk None: CPU RAM is the last tier; eviction None: as
    LMCache does by default."""

    block_tokens: Annotated[int, Field(ge=1, le=4096)] = 32
    chunk_tokens: Annotated[int, Field(ge=1, le=65536)] = 256
    gpu: Bytes
    cpu: Bytes | None = None
    disk: Disk | None = None
    eviction: Eviction | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Cache:
        if self.chunk_tokens % self.block_tokens:
            raise ValueError(
                f"chunk_tokens {self.chunk_tokens} is not a multiple of block_tokens {self.block_tokens};"
                " choose a multiple"
            )
        if self.disk is not None and self.cpu is None and self.gpu:
            raise ValueError("disk needs cpu: chunks pass through CPU RAM on their way; give cpu a size, e.g. 1GiB")
        disk_bytes = None if self.disk is None else self.disk.capacity
        storage_only = self.disk is not None and self.cpu is None
        for name, size in (("gpu", None if storage_only else self.gpu), ("cpu", self.cpu), ("disk", disk_bytes)):
            if size is not None and size < 1:
                raise ValueError(f"{name} has capacity 0; give it a size, or leave the tier out (null)")
        return self


class SimSettings(Strict):
    """The simulator: whose cost constants, whose cache rules; mode storage moves the disk tier's bytes for real.

    instances: engines of the same kind behind one router; simulator/cluster.py says what each `routing` does.
    shared: tiers that they have in common; cache gives the size of each instance's own tiers, and of the shared one.
    """

    mode: Literal["model", "storage"] = "model"

    hardware: str = "cpu-2core"
    engine_policy: str = "vllm-0.32"
    tier_policy: str = "lmcache-0.5.6-mp"
    max_batched_tokens: Positive = 2048
    max_sequences: Positive = 256
    token_times: bool = False
    instances: Annotated[int, Field(ge=1, le=100_000)] = 1
    routing: Literal["round-robin", "least-loaded", "prefix-aware"] = "round-robin"
    shared: Annotated[tuple[Literal["cpu", "disk"], ...], FROM_LIST] = ()
    storage: StorageSettings = StorageSettings()

    @model_validator(mode="after")
    def _consistent(self) -> SimSettings:
        if len(set(self.shared)) != len(self.shared):
            raise ValueError("shared names a tier twice; name each once")
        if self.mode == "storage" and self.instances > 1:
            raise ValueError("instances must be 1 with mode storage: one engine moves the bytes of one device")
        return self


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
    engines: Engines = Engines()

    @model_validator(mode="after")
    def _consistent(self) -> Experiment:
        check_workload(self.workload, self.measure, self.cache)
        if self.storage is not None:
            check_device(self.storage, self.cache, self.engines)
        check_storage(self)
        return self


def hit_tokens(prompt_tokens: int, hit_rate: float, chunk_tokens: int) -> int:
    """Tokens of the shared prefix: the hit rate's share of the whole chunks that can hit (the last token never).

    Raises ValueError where the share is not a whole number of chunks: a hit rate is exact or refused.
    """
    chunks = (prompt_tokens - 1) // chunk_tokens
    share = hit_rate * chunks
    if abs(share - round(share)) > 1e-6:
        near = sorted({int(share), int(share) + 1})
        rates = " or ".join(f"{n / chunks:.4g}" for n in near)
        raise ValueError(
            f"hit_rate {hit_rate:g} of {chunks} chunks is not a whole number of chunks; use {rates}, or a prompt of"
            f" k*{chunk_tokens}+1 tokens where {hit_rate:g}*k is whole"
        )
    return round(share) * chunk_tokens


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
    _check_arrivals(workload)


def check_storage(experiment: Experiment) -> None:
    """Refuses what mode storage cannot do, and what only it can. Raises ValueError with the cure."""
    cache, sim = experiment.cache, experiment.engines.sim
    if sim.mode == "storage" and cache.disk is None:
        raise ValueError("engines.sim.mode storage needs cache.disk: its bytes are what moves; add it")
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


def _check_arrivals(workload: FreeWorkload) -> None:
    if isinstance(workload, TraceWorkload | PersonasWorkload):
        return
    if workload.arrivals == "closed":
        if workload.concurrency is None:
            raise ValueError("workload.arrivals closed needs workload.concurrency; add it")
        if workload.rate_per_s is not None:
            raise ValueError("workload.rate_per_s has no meaning with arrivals closed; remove it")
    elif workload.rate_per_s is None:
        raise ValueError(f"workload.arrivals {workload.arrivals} needs workload.rate_per_s; add it")


def results_root() -> Path:
    """Where runs go unless told: $HARNESS_RESULTS, else ./results."""
    return Path(os.environ.get("HARNESS_RESULTS", "results"))
