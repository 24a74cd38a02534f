"""The tiers and their grain."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from harness.experiment.fields import Strict
from harness.experiment.units import Bytes
from traces.tiers import tier_names


class Eviction(Strict):
    """How the LMCache server empties its CPU RAM: once a second, from `watermark` on, it drops `ratio` of its chunks in
    the order of `policy`. The server's own defaults.

    policy: the order in which chunks are dropped.
    watermark: the share of the tier from which on it drops.
    ratio: the share of its chunks that it drops.
    """

    policy: Literal["lru", "arc"] = "lru"
    watermark: Annotated[float, Field(gt=0.0, le=1.0, strict=False)] = 0.8
    ratio: Annotated[float, Field(gt=0.0, le=1.0, strict=False)] = 0.2


class Disk(Strict):
    """The storage tier: a folder of chunk files. path None: a folder inside the run's own.

    capacity: the tier's size.
    path: the folder of the chunk files.
    adapter: LMCache's storage adapter.
    odirect: reads and writes bypass the page cache.
    """

    capacity: Bytes
    path: str | None = None
    adapter: Literal["fs", "fs_native"] = "fs"
    odirect: bool = False


class Cache(Strict):
    """Tiers and their grain. cpu None: no cache server at all; disk None: CPU RAM is the last tier; eviction None: as
    LMCache does by default.

    block_tokens: tokens in a block of the engine's GPU cache.
    chunk_tokens: tokens in a chunk of the cache server; whole blocks.
    gpu: the engine's KV cache.
    cpu: the cache server's RAM.
    disk: the storage tier.
    eviction: how the CPU tier is emptied.
    """

    block_tokens: Annotated[int, Field(ge=1, le=4096)] = 32
    chunk_tokens: Annotated[int, Field(ge=1, le=65536)] = 256
    gpu: Bytes
    cpu: Bytes | None = None
    disk: Disk | None = None
    eviction: Eviction | None = None

    def bytes_of(self, tier: str) -> int | None:
        """The capacity of a tier; None: there is no such tier."""
        size = getattr(self, tier, None)
        return size.capacity if isinstance(size, Disk) else size

    @property
    def tiers(self) -> frozenset[str]:
        """The tiers that it has."""
        return frozenset(tier for tier in tier_names() if self.bytes_of(tier))

    @model_validator(mode="after")
    def _consistent(self) -> Cache:
        if self.chunk_tokens % self.block_tokens:
            raise ValueError(
                f"chunk_tokens {self.chunk_tokens} is not a multiple of block_tokens {self.block_tokens};"
                " choose a multiple"
            )
        if self.disk is not None and self.cpu is None and self.gpu:
            raise ValueError("disk needs cpu: chunks pass through CPU RAM on their way; give cpu a size, e.g. 1GiB")
        storage_only = self.disk is not None and self.cpu is None
        for name in tier_names():
            size = self.bytes_of(name)
            if size is not None and size < 1 and not (storage_only and name == "gpu"):
                raise ValueError(f"{name} has capacity 0; give it a size, or leave the tier out (null)")
        return self
