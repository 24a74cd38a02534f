"""What the harness knows of a store before it makes one, as data: one StoreKind an adapter, in STORES."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from harness.caches.stores.base import RemoteStore, StorePlan
    from harness.experiment.cache import Remote


@dataclass(frozen=True, kw_only=True)
class StoreKind:
    """make: the store, nothing of it started. check: refuses a store that is not there, or not as asked
    (PreflightError with the cure); it gets the engine's Python. has_disk: the one that we start keeps files, which can
    be dropped from the page cache."""

    make: Callable[[StorePlan], RemoteStore]
    check: Callable[[Remote, Path], None]
    has_disk: bool = False
