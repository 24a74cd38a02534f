"""The section `engines.vllm`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from harness.caches import caches_of
from harness.experiment.fields import FROM_LIST, Cores, LoadClients, Positive, Strict, Url, without_secrets
from harness.experiment.units import Seconds


def _known(connector: str) -> str:
    if connector not in (names := caches_of("vllm")):
        raise ValueError(f"no connector {connector!r}; vLLM has {', '.join(names)}")
    return connector


class Attach(Strict):
    """A vLLM (and LMCache server) that runs already and is left running.

    disk_path: the folder of its fs adapter; chunk files in it are deleted to bring about `recompute`. lmcache_pid:
    its process, whose reads from the device prove `disk` and `disk_cold`.

    url: vLLM's address.
    model: its name there; null asks the server.
    lmcache_url: the LMCache server's address.
    """

    url: Url
    model: str | None = None
    lmcache_url: Url | None = None
    lmcache_pid: Positive | None = None
    disk_path: str | None = None


class VllmSettings(Strict):
    """A real vLLM, from the environment that the user has.

    model_path None: random weights of the model's shape. connector: the cache server, by its name in CACHES
    (harness/caches). transport: how a vLLM without a GPU and the LMCache server pass KV to each other; on a GPU they
    use CUDA IPC.

    python: the interpreter of the environment that holds vLLM and LMCache.
    model_path: a folder of weights.
    connector: LMCache as a server of its own (mp), or inside vLLM (in_process); or Mooncake's pool (mooncake).
    device: vLLM's build.
    max_batched_tokens: vLLM's max-num-batched-tokens; null leaves its default.
    max_sequences: vLLM's max-num-seqs; null leaves its default.
    args: more arguments for vllm serve.
    env: environment variables of both servers; secrets are refused, since servers inherit the shell's.
    lmcache_args: more arguments for the LMCache server.
    mooncake_args: more arguments for Mooncake's master.
    start_timeout: how long a start may take.
    cores: CPU cores that processes are pinned to.
    clients: processes that send the load, where one is too slow for it; a session is all one's.
    accelerator: the GPU whose pace the engine keeps without it, of `harness list presets`; null: its own arithmetic.
    link: with an accelerator, KV goes to CPU RAM and back at the GPU's pace, or is copied by LMCache.
    attach: measure a server that runs already.
    """

    python: str = ".engines/vllm/bin/python"
    model_path: str | None = None
    connector: Annotated[str, AfterValidator(_known)] = "mp"
    device: Literal["cpu", "gpu"] = "cpu"
    transport: Literal["shm", "pickle"] = "shm"
    max_batched_tokens: Positive | None = None
    max_sequences: Positive | None = None
    args: Annotated[tuple[str, ...], FROM_LIST] = ()
    env: dict[str, str] = Field(default_factory=dict)
    lmcache_args: Annotated[tuple[str, ...], FROM_LIST] = ()
    mooncake_args: Annotated[tuple[str, ...], FROM_LIST] = ()
    start_timeout: Seconds = 300.0
    cores: Cores = Cores()
    clients: LoadClients = 1
    accelerator: str | None = None
    link: Literal["paced", "copied"] = "paced"
    attach: Attach | None = None

    @model_validator(mode="after")
    def _one_gpu(self) -> VllmSettings:
        """An accelerator stands for a GPU, in a vLLM of our own, with a model of its own."""
        if self.accelerator is None:
            return self
        if self.attach is not None:
            raise ValueError("accelerator: a server that runs already keeps its own pace; remove it, or remove attach")
        if self.device != "cpu":
            raise ValueError(f"accelerator stands for a GPU, and device is {self.device}; remove one of them")
        if self.model_path is not None:
            raise ValueError("accelerator computes with no weights; remove model_path: model gives the shape")
        if self.connector == "in_process":
            raise ValueError("accelerator: without a GPU, connector in_process transfers nothing; use mp")
        if self.link == "paced" and self.connector != "mp":
            raise ValueError(f"link: paced is for LMCache's transfers; with connector {self.connector} use copied")
        if self.link == "paced" and self.transport != "shm":
            raise ValueError("link: paced needs transport: shm; use it, or link: copied")
        return self

    @model_validator(mode="after")
    def _no_secrets(self) -> VllmSettings:
        for name in self.env:
            without_secrets(name, f"env.{name}")
        for argument in (*self.args, *self.lmcache_args, *self.mooncake_args):
            without_secrets(argument.split("=")[0] if argument.startswith("--") else argument, "an argument")
        return self
