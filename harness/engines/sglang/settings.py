"""The section `engines.sglang`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from harness.caches import caches_of
from harness.experiment.fields import FROM_LIST, Cores, LoadClients, Positive, Strict, Url, without_secrets
from harness.experiment.units import Seconds


def _known(storage: str) -> str:
    if storage not in (names := caches_of("sglang")):
        raise ValueError(f"no storage {storage!r}; HiCache has {', '.join(names)}")
    return storage


class SglangAttach(Strict):
    """An SGLang that runs already and is left running.

    disk_path: the folder of HiCache's file backend; page files in it are deleted to bring about `recompute`. pid: the
    server's process, whose reads from the device prove `disk` and `disk_cold`.

    url: SGLang's address.
    """

    url: Url
    pid: Positive | None = None
    disk_path: str | None = None


class HiCache(Strict):
    """SGLang's tiers below the GPU. cache.cpu is the size of its host pool, cache.block_tokens of its pages.

    SGLang's own default of prefetch is timeout: it then computes what storage has not brought within 1 s and 0.25 s for
    each 1,024 tokens. best_effort waits for nothing.

    storage: what lies below CPU RAM where the experiment has a tier there, by its name in CACHES (harness/caches).
    write: when pages go down; with another policy than write_through, only free loads can be measured below the GPU.
    prefetch: how long a request waits for what storage has.
    prefetch_threshold: fewer tokens than these are not fetched from storage.
    mem_layout: the layout of pages in CPU RAM.
    io_backend: what copies between GPU and CPU RAM.
    """

    storage: Annotated[str, AfterValidator(_known)] = "file"
    write: Literal["write_through", "write_through_selective", "write_back"] = "write_through"
    prefetch: Literal["wait_complete", "timeout", "best_effort"] = "wait_complete"
    prefetch_threshold: Positive = 256
    mem_layout: Literal["page_first_direct", "page_first", "layer_first"] = "page_first_direct"
    io_backend: Literal["direct", "kernel"] = "direct"


class SglangSettings(Strict):
    """A real SGLang with its own HiCache, from the environment that the user has.

    model_path None: random weights of the model's shape. Without a GPU SGLang has no arithmetic here: an accelerator
    stands for it, and what is replaced in SGLang stands in docs/engines.md and in every run's manifest.

    python: the interpreter of the environment that holds SGLang.
    model_path: a folder of weights.
    device: cpu with an accelerator, or gpu with SGLang as it is installed.
    attention_backend: SGLang's attention-backend; null leaves its default.
    max_batched_tokens: SGLang's chunked-prefill-size; null leaves its default.
    max_sequences: SGLang's max-running-requests; null leaves its default.
    hicache: the tiers below the GPU.
    args: more arguments for sglang.launch_server.
    mooncake_args: more arguments for Mooncake's master.
    env: environment variables of the server; secrets are refused, since servers inherit the shell's.
    start_timeout: how long a start may take.
    cores: CPU cores that processes are pinned to.
    clients: processes that send the load, where one is too slow for it; a session is all one's.
    accelerator: the GPU whose pace the engine keeps without it, of `harness list presets`.
    link: with an accelerator, KV goes to CPU RAM and back at the GPU's pace, or is copied by the CPU.
    attach: measure a server that runs already.
    """

    python: str = ".engines/sglang/bin/python"
    model_path: str | None = None
    device: Literal["cpu", "gpu"] = "cpu"
    attention_backend: str | None = None
    max_batched_tokens: Positive | None = None
    max_sequences: Positive | None = None
    hicache: HiCache = HiCache()
    args: Annotated[tuple[str, ...], FROM_LIST] = ()
    mooncake_args: Annotated[tuple[str, ...], FROM_LIST] = ()
    env: dict[str, str] = Field(default_factory=dict)
    start_timeout: Seconds = 300.0
    cores: Cores = Cores()
    clients: LoadClients = 1
    accelerator: str | None = "rtx-a5000-nfs"
    link: Literal["paced", "copied"] = "paced"
    attach: SglangAttach | None = None

    @property
    def paced_by(self) -> str | None:
        """The accelerator that stands for a GPU; None where a GPU, or a server that runs already, needs none."""
        return self.accelerator if self.device == "cpu" and self.attach is None else None

    @model_validator(mode="after")
    def _possible(self) -> SglangSettings:
        if self.device == "gpu" or self.attach is not None:
            return self
        if self.accelerator is None:
            raise ValueError("device cpu needs an accelerator: SGLang computes on GPUs; name one, or set device: gpu")
        if self.model_path is not None:
            raise ValueError("accelerator computes with no weights; remove model_path: model gives the shape")
        if (self.hicache.mem_layout, self.hicache.io_backend) != ("page_first_direct", "direct"):
            raise ValueError("hicache: without a GPU only page_first_direct with io_backend: direct is there; use them")
        return self

    @model_validator(mode="after")
    def _no_secrets(self) -> SglangSettings:
        for name in self.env:
            without_secrets(name, f"env.{name}")
        for argument in (*self.args, *self.mooncake_args):
            without_secrets(argument.split("=")[0] if argument.startswith("--") else argument, "an argument")
        return self
