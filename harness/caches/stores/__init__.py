"""Stores behind a network, by the adapter of LMCache's that reaches them.

A new store is a module with its RemoteStore, and one line here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.caches.stores.kind import StoreKind

if TYPE_CHECKING:
    from pathlib import Path

    from harness.caches.stores.base import RemoteStore, StorePlan
    from harness.experiment.cache import Cache, Remote


def _redis(plan: StorePlan) -> RemoteStore:
    from harness.caches.stores.redis import RedisStore

    return RedisStore(plan)


def _check_redis(remote: Remote, _python: Path) -> None:
    from harness.caches.stores.redis import check_redis

    check_redis(remote)


def _s3(plan: StorePlan) -> RemoteStore:
    from harness.caches.stores.s3 import S3Store

    return S3Store(plan)


def _check_s3(remote: Remote, python: Path) -> None:
    from harness.caches.stores.s3 import check_s3

    check_s3(remote, python)


def _mooncake(plan: StorePlan) -> RemoteStore:
    from harness.caches.stores.mooncake import MooncakeStore

    return MooncakeStore(plan)


def _check_mooncake(_remote: Remote, python: Path) -> None:
    from harness.caches.stores.mooncake import check_mooncake

    check_mooncake(python)


STORES: dict[str, StoreKind] = {
    "resp": StoreKind(make=_redis, check=_check_redis),
    "s3": StoreKind(make=_s3, check=_check_s3, has_disk=True),
    "mooncake": StoreKind(make=_mooncake, check=_check_mooncake),
}


def uncounted(cache: Cache) -> frozenset[str]:
    """Counters that nothing gives for the remote tier: the processes of a store that runs already are not ours."""
    remote = cache.remote
    return frozenset() if remote is None or remote.endpoint is None else frozenset({"remote_device_read_bytes"})


def unreachable(cache: Cache) -> frozenset[str]:
    """States of the remote tier that its store cannot be brought into."""
    remote = cache.remote
    cold = remote is not None and remote.endpoint is None and STORES[remote.adapter].has_disk
    return frozenset() if cold else frozenset({"remote_cold"})
