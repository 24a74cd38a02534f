"""The tiers and their grain."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from harness.experiment.fields import Positive, Strict
from harness.experiment.units import Bytes, BytesPerS, Seconds
from traces.tiers import tier_names

# HOST:PORT; a user or a password has no place in it.
HOST_AND_PORT = r"^[A-Za-z0-9.-]+:[0-9]{1,5}$"
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


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
    buffer: RAM through which Mooncake moves KV from its pool to the files and back; null: its own default, 1.25 GiB.
    """

    capacity: Bytes
    path: str | None = None
    adapter: Literal["fs", "fs_native"] = "fs"
    odirect: bool = False
    buffer: Bytes | None = None


class Credentials(Strict):
    """Names of environment variables that hold what a store asks for; their values never reach a file.

    user: of the variable with the user's name, or the access key.
    secret: of the variable with the password, or the secret key.
    """

    user: EnvironmentName | None = None
    secret: EnvironmentName


class Network(Strict):
    """The reference network: a proxy of ours between cache server and store that is as slow as a link of these figures.

    bandwidth: of the link, in each direction, for all connections together.
    latency: what the link adds to a round trip; half of it each way.
    """

    bandwidth: BytesPerS
    latency: Seconds = 0.0

    @model_validator(mode="after")
    def _moves(self) -> Network:
        if not self.bandwidth:
            raise ValueError("a bandwidth of 0 would never answer; give it one, e.g. 1.25GB/s")
        return self


class Remote(Strict):
    """A store behind a network, below LMCache's server. endpoint None: the harness starts the store, on loopback, and
    ends it with the run.

    capacity: the store's size.
    adapter: LMCache's storage adapter; resp speaks with Redis and Valkey, s3 with an object store, mooncake with a
    Mooncake pool.
    endpoint: HOST:PORT of a store that runs already, and is empty; a run empties it again.
    bucket: of s3; LMCache asks for it as BUCKET.HOST.
    region: of s3, as signatures name it.
    tls: whether s3 answers by https.
    threads: LMCache's connections (resp) or threads (s3, mooncake); null leaves its default.
    credentials: what the store asks for, by names of environment variables.
    network: a reference network before the store; null: the network that there is. The simulator takes its times from
    it unless engines.sim.devices.remote names others.
    """

    capacity: Bytes
    adapter: Literal["resp", "s3", "mooncake"] = "s3"
    endpoint: Annotated[str, Field(pattern=HOST_AND_PORT)] | None = None
    bucket: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$")] = "kv-harness"
    region: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,32}$")] = "us-east-1"
    tls: bool = False
    threads: Positive | None = None
    credentials: Credentials | None = None
    network: Network | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Remote:
        if self.adapter == "mooncake" and self.endpoint is not None:
            raise ValueError("mooncake: the harness starts the pool, whose master proves the tier; remove endpoint")
        if self.adapter == "mooncake" and self.network is not None:
            raise ValueError(
                "mooncake's data takes ports of its own, before which no reference network can stand; remove network"
                " (engines.sim.devices.remote gives the simulator its times)"
            )
        if self.endpoint is None and (self.credentials is not None or self.tls):
            raise ValueError("credentials and tls are for a store that runs already; add endpoint, or remove them")
        if self.tls and (self.network is not None or self.adapter != "s3"):
            raise ValueError("tls is for s3 without a reference network; remove one of them")
        if self.endpoint is not None and self.adapter == "s3" and self.credentials is None:
            raise ValueError("s3 needs credentials; name the variables, e.g. {user: AWS_KEY_NAME, secret: AWS_KEY}")
        if self.adapter == "s3" and self.credentials is not None and self.credentials.user is None:
            raise ValueError("credentials.user is missing: s3 has an access key and a secret key; name its variable")
        return self


class Cache(Strict):
    """Tiers and their grain. cpu None: no RAM of that kind; disk None: RAM is the last tier; eviction None: as LMCache
    does by default.

    block_tokens: tokens in a block of the engine's GPU cache.
    chunk_tokens: tokens in a chunk of the cache server; whole blocks.
    gpu: the engine's KV cache; 0B: there is none, which only the simulator's mode tiers does.
    cpu: RAM of the engine's own machine behind it: LMCache's, or HiCache's host pool.
    pool: RAM that a memory pool, such as Mooncake's, lends over a network. pool None: there is none.
    disk: the storage tier.
    remote: a store behind a network.
    eviction: how the CPU tier is emptied.
    save_decode_cache: the cache server keeps chunks with tokens of replies, too; LMCache's setting of that name.
    """

    block_tokens: Annotated[int, Field(ge=1, le=4096)] = 32
    chunk_tokens: Annotated[int, Field(ge=1, le=65536)] = 256
    gpu: Bytes
    cpu: Bytes | None = None
    pool: Bytes | None = None
    disk: Disk | None = None
    remote: Remote | None = None
    eviction: Eviction | None = None
    save_decode_cache: bool = False

    def bytes_of(self, tier: str) -> int | None:
        """The capacity of a tier; None: there is no such tier."""
        size = getattr(self, tier, None)
        return size.capacity if isinstance(size, Disk | Remote) else size

    @property
    def sizes(self) -> dict[str, Any]:
        """Capacities as Resolved names them: 'TIER_bytes'."""
        return {f"{tier}_bytes": self.bytes_of(tier) for tier in tier_names() if tier in Cache.model_fields}

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
        for name in tier_names():
            size = self.bytes_of(name)
            if size is not None and size < 1 and name != "gpu":
                raise ValueError(f"{name} has capacity 0; give it a size, or leave the tier out (null)")
        return self
