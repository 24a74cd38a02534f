"""Cache servers by the name that an engine's section has for them, and which engine can have which.

A new cache server is a module with its CacheServer, and one line here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from harness.caches.kind import CacheKind
from traces.tiers import all_tiers, tier_named

if TYPE_CHECKING:
    from harness.caches.base import CachePlan, CacheServer
    from harness.experiment.cache import Cache
    from harness.experiment.deployment import Deployment


def _lmcache(plan: CachePlan) -> CacheServer:
    from harness.caches.lmcache import make_server

    return make_server(plan)


def _check_memory(cache: Cache) -> None:
    from harness.errors import PreflightError

    below = [tier for tier in ("disk", "remote") if cache.bytes_of(tier)]
    if below and cache.cpu is None:
        raise PreflightError(
            f"cache.{below[0]} needs cache.cpu: chunks pass through CPU RAM on their way; give cpu a size, e.g. 1GiB"
        )


def _check_replies(cache: Cache) -> None:
    from harness.errors import PreflightError

    if cache.save_decode_cache:
        raise PreflightError("cache.save_decode_cache is LMCache's setting; the engine decides it here; remove it")


def _check_lmcache(cache: Cache) -> None:
    from harness.errors import PreflightError
    from harness.experiment.units import format_bytes

    _check_memory(cache)
    if cache.cpu is not None and cache.cpu % 2**30:
        raise PreflightError(f"cache.cpu {format_bytes(cache.cpu)}: LMCache takes whole GiB; use a multiple of 1GiB")
    if cache.disk is not None and cache.remote is not None:
        raise PreflightError(
            "cache.disk and cache.remote: LMCache counts hits of all storage in one number, which would prove neither;"
            " remove one"
        )


def _in_process(plan: CachePlan) -> CacheServer:
    from harness.caches.lmcache_in_process import InProcessLMCache

    return InProcessLMCache(plan)


def _check_in_process(cache: Cache) -> None:
    from harness.errors import PreflightError

    _check_memory(cache)
    if cache.eviction is not None:
        raise PreflightError("cache.eviction is the LMCache server's; set engines.vllm.connector to mp, or remove it")


def _mooncake(plan: CachePlan) -> CacheServer:
    from harness.caches.mooncake import make_mooncake

    return make_mooncake(plan)


def _check_mooncake(cache: Cache) -> None:
    from harness.errors import PreflightError

    _check_replies(cache)
    if cache.eviction is not None:
        raise PreflightError("cache.eviction is the LMCache server's; give Mooncake's master its flags, or remove it")
    if cache.disk is not None and cache.pool is None:
        raise PreflightError("cache.disk: Mooncake's SSD holds what its RAM drops; give cache.pool a size, e.g. 1GiB")
    if cache.pool is not None and cache.chunk_tokens != cache.block_tokens:
        raise PreflightError(
            f"cache.chunk_tokens {cache.chunk_tokens}: engines put one block of {cache.block_tokens} tokens into an"
            " object of Mooncake's; set both keys to one value"
        )


def _mooncake_lease_s(args: Sequence[str]) -> float:
    from harness.caches.mooncake import lease_s

    return lease_s(args)


def _hicache_file(plan: CachePlan) -> CacheServer:
    from harness.caches.hicache import HiCacheFile

    return HiCacheFile(plan)


def _check_hicache_file(cache: Cache) -> None:
    from harness.errors import PreflightError

    _check_memory(cache)
    _check_replies(cache)
    if cache.disk is not None and cache.disk.odirect:
        raise PreflightError("cache.disk.odirect: HiCache's file backend reads through the page cache; remove it")


# What no flag of Mooncake's 0.3.13 changes, for the doctor.
MOONCAKE_LISTENS = "some of its ports listen on every network, for anyone: use it behind a firewall"
_LMCACHE_PACK = "lmcache-0.5.6-mp"

CACHES: dict[str, CacheKind] = {
    "mp": CacheKind(
        engines=frozenset({"vllm"}),
        tiers=frozenset({"cpu", "disk", "remote"}),
        make=_lmcache,
        check=_check_lmcache,
        shares=frozenset({"cpu", "disk", "remote"}),
        tier_policy=_LMCACHE_PACK,
        attaches=True,
        keeps=frozenset({"disk"}),
    ),
    "in_process": CacheKind(
        engines=frozenset({"vllm"}),
        tiers=frozenset({"cpu", "disk"}),
        make=_in_process,
        check=_check_in_process,
        within_engine=True,
        tier_policy=_LMCACHE_PACK,
        no_restart="LMCache within vLLM knows only files that its own process wrote; set engines.vllm.connector to mp",
    ),
    "mooncake": CacheKind(
        engines=frozenset({"vllm", "sglang"}),
        tiers=frozenset({"pool", "disk"}),
        make=_mooncake,
        check=_check_mooncake,
        shares=frozenset({"pool", "disk"}),
        tier_policy="mooncake-0.3.13-offload-on-evict",
        lease_s=_mooncake_lease_s,
        empties_with={"disk": frozenset({"pool"})},
        uncounted=frozenset({"disk_loaded_chunks"}),
        no_restart="Mooncake's SSD lacks what its RAM has not evicted; use LMCache's server or HiCache's files",
    ),
    "file": CacheKind(
        engines=frozenset({"sglang"}),
        tiers=frozenset({"disk"}),
        make=_hicache_file,
        check=_check_hicache_file,
        shares=frozenset({"disk"}),
        within_engine=True,
        tier_policy="sglang-0.5.23-hicache",
        attaches=True,
        keeps=frozenset({"disk"}),
    ),
}


def check_tiers(cache: Cache, engine: str, key: str, name: str, own: frozenset[str] = frozenset()) -> None:
    """Refuses a tier that neither the engine (own) nor the cache server of that name can hold. key: what names the
    server in the experiment. Raises PreflightError with the cure."""
    from harness.errors import PreflightError

    behind = [tier.name for tier in all_tiers() if tier.offload and tier.name not in own and cache.bytes_of(tier.name)]
    for tier in behind:
        if tier not in CACHES[name].tiers:
            can = [other for other in caches_of(engine) if CACHES[other].tiers.issuperset(behind)]
            cure = f"set it to {' or '.join(can)}, or remove cache.{tier}" if can else f"remove cache.{tier}"
            raise PreflightError(f"cache.{tier}: {key} {name} has none; {cure}")


def check_shared(cache: Cache, deployment: Deployment, name: str) -> None:
    """Refuses a tier in deployment.shared that the cache server of that name cannot share. PreflightError."""
    from harness.errors import PreflightError

    kind, shared = CACHES[name], set(deployment.shared)
    if deployment.instances == 1:
        return
    there = [tier.name for tier in all_tiers() if tier.name in kind.tiers and cache.bytes_of(tier.name)]
    for tier in deployment.shared:
        if tier not in kind.shares:
            can = f"of {name}, instances can share {' and '.join(sorted(kind.shares))}" if kind.shares else "none can"
            raise PreflightError(f"deployment.shared {tier}: instances cannot share it ({can}); remove it there")
        if tier not in there:
            raise PreflightError(f"deployment.shared {tier}: cache has no such tier; give it a size, or leave it out")
    if apart := [tier for tier in there if tier_named(tier).kind == "store" and tier not in shared]:
        raise PreflightError(
            f"cache.{apart[0]}: the harness starts one store, which all instances reach; name {apart[0]} in"
            " deployment.shared"
        )
    for above, below in pairwise(there):
        if above in shared and below not in shared:
            raise PreflightError(f"deployment.shared: what is behind a shared tier is shared too; name {below} as well")


def make_servers(name: str, plan: CachePlan, deployment: Deployment) -> list[CacheServer]:
    """Nothing of them started: one for all instances where they share its first tier; else one for each, over one
    folder or store where they share that."""
    kind, shared = CACHES[name], set(deployment.shared)
    held = [tier.name for tier in all_tiers() if tier.name in kind.tiers and plan.cache.bytes_of(tier.name)]
    if deployment.instances == 1 or (shared.issuperset(held[:1]) and not kind.within_engine):
        return [kind.make(plan)]
    in_common = shared.issuperset(held[-1:])
    servers: list[CacheServer] = []
    for number in range(deployment.instances):
        below = {"beside": tuple(servers)} if in_common else {"folder_number": number}
        servers.append(kind.make(msgspec.structs.replace(plan, number=number, **below)))
    return servers


def caches_of(engine: str) -> list[str]:
    """Names of the cache servers that an engine can have."""
    return [name for name, kind in CACHES.items() if engine in kind.engines]


def attaching(engine: str) -> str:
    """The cache server of that engine that can be one that runs already."""
    return next(name for name in caches_of(engine) if CACHES[name].attaches)
