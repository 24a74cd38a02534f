"""Cache servers by the name that an engine's `connector` has for them, and which engine can have which.

A new cache server is a module with its CacheServer, and one line here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.caches.kind import CacheKind

if TYPE_CHECKING:
    from harness.caches.base import CachePlan, CacheServer
    from harness.experiment.cache import Cache


def _lmcache(plan: CachePlan) -> CacheServer:
    from harness.caches.lmcache import make_server

    return make_server(plan)


def _check_lmcache(cache: Cache) -> None:
    from harness.errors import PreflightError
    from harness.experiment.units import format_bytes

    if cache.cpu is not None and cache.cpu % 2**30:
        raise PreflightError(f"cache.cpu {format_bytes(cache.cpu)}: LMCache takes whole GiB; use a multiple of 1GiB")


def _in_process(plan: CachePlan) -> CacheServer:
    from harness.caches.lmcache_in_process import InProcessLMCache

    return InProcessLMCache(plan)


def _check_in_process(cache: Cache) -> None:
    from harness.errors import PreflightError

    if cache.eviction is not None:
        raise PreflightError("cache.eviction is the LMCache server's; set engines.vllm.connector to mp, or remove it")


_LMCACHE_PACK = "lmcache-0.5.6-mp"

CACHES: dict[str, CacheKind] = {
    "mp": CacheKind(
        engines=frozenset({"vllm"}), make=_lmcache, check=_check_lmcache, tier_policy=_LMCACHE_PACK, attaches=True
    ),
    "in_process": CacheKind(
        engines=frozenset({"vllm"}), make=_in_process, check=_check_in_process, tier_policy=_LMCACHE_PACK
    ),
}


def caches_of(engine: str) -> list[str]:
    """Names of the cache servers that an engine can have."""
    return [name for name, kind in CACHES.items() if engine in kind.engines]
