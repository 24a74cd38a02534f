"""Tiers, which hold KV, and warm states, which say where a request's prefix is. Both are data: one entry each.

A new tier or state is one more entry here. The experiment file, the order of sampling, placing, proof, preflight, the
reports and the calibration read these two lists.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

# What a prompt token costs without any tier: the engine computes it.
COMPUTED = "computed"
# Not a tier: RAM in which the kernel keeps what it read from a tier's device.
PAGE_CACHE = "page_cache"


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """A place that holds KV.

    name: its key in rows, counters, capacities and in the experiment's section `cache`. label: what people call it.
    kind: 'engine', the engine's own memory; 'memory', RAM behind a connector; 'storage', chunks on a device behind one;
    'store', chunks in another machine's store, which counts what it sends.
    """

    name: str
    label: str
    kind: Literal["engine", "memory", "storage", "store"]

    @property
    def offload(self) -> bool:
        """Whether the engine gets its KV through a connector."""
        return self.kind != "engine"


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A warm state: where the prefix of a measured request is before the engine gets the request.

    served_by: the tier that serves the prefix; None: the engine computes it.
    from_device: of a storage tier or a store, whether the bytes come from its device (True) or from RAM before it
    (False); None: there is no device. restarted: engine and cache server are restarted before the request, so that it
    is the first one that they get. quick: one sample takes tens of milliseconds, so that several cost little.
    symbol: plotly's name of its mark in figures.
    """

    name: str
    label: str
    served_by: str | None
    from_device: bool | None = None
    restarted: bool = False
    quick: bool = False
    symbol: str = "circle"

    @property
    def must_not_have(self) -> frozenset[str]:
        """What must not hold the prefix: the tiers that the engine asks first, and the page cache where it would
        answer for the device."""
        names = tier_names()
        above = names if self.served_by is None else names[: names.index(self.served_by)]
        return frozenset(above) | ({PAGE_CACHE} if self.from_device else set())

    @property
    def needs(self) -> frozenset[str]:
        """The tiers without which the state does not exist."""
        return frozenset() if self.served_by is None else frozenset({self.served_by})


# In the order in which a request asks them.
TIERS: tuple[Tier, ...] = (
    Tier(name="gpu", label="GPU", kind="engine"),
    Tier(name="cpu", label="CPU RAM", kind="memory"),
    Tier(name="pool", label="memory pool", kind="memory"),
    Tier(name="disk", label="disk", kind="storage"),
    Tier(name="remote", label="remote store", kind="store"),
)

# In the order of sampling: a prefix moves down cheaply, and up only when the engine computes it again.
STATES: tuple[State, ...] = (
    State(name="recompute", label="recompute", served_by=None, symbol="circle"),
    State(name="gpu", label="GPU", served_by="gpu", quick=True, symbol="square"),
    State(name="cpu", label="CPU RAM", served_by="cpu", quick=True, symbol="diamond"),
    State(name="pool", label="memory pool", served_by="pool", quick=True, symbol="star"),
    State(
        name="disk",
        label="disk, page cache warm",
        served_by="disk",
        from_device=False,
        quick=True,
        symbol="triangle-up",
    ),
    State(name="disk_cold", label="disk, page cache cold", served_by="disk", from_device=True, symbol="cross"),
    State(
        name="disk_restart",
        label="disk, page cache cold, first request after a restart",
        served_by="disk",
        from_device=True,
        restarted=True,
        symbol="hourglass",
    ),
    State(name="remote", label="remote store", served_by="remote", from_device=False, quick=True, symbol="pentagon"),
    State(
        name="remote_cold", label="remote store, its disk read", served_by="remote", from_device=True, symbol="hexagram"
    ),
)


def all_tiers() -> tuple[Tier, ...]:
    return TIERS


def all_states() -> tuple[State, ...]:
    return STATES


def tier_names() -> tuple[str, ...]:
    return tuple(tier.name for tier in TIERS)


def state_names() -> tuple[str, ...]:
    return tuple(state.name for state in STATES)


def states_in(tiers: Collection[str]) -> list[str]:
    """Names of the states that these tiers can have, without those that take a restart: who wants one names it."""
    return [state.name for state in STATES if state.needs <= set(tiers) and not state.restarted]


def from_storage(state: str) -> bool:
    """Whether a storage tier serves the state of that name; False for a name that is no state's."""
    return any(
        each.name == state and each.served_by is not None and tier_named(each.served_by).kind == "storage"
        for each in STATES
    )


def sources() -> tuple[str, ...]:
    """Where a prompt token's KV can come from: computed, or one of the tiers."""
    return (COMPUTED, *tier_names())


def tier_named(name: str) -> Tier:
    """Raises KeyError for a name that is no tier's."""
    return {tier.name: tier for tier in TIERS}[name]


def state_named(name: str) -> State:
    """Raises KeyError for a name that is no state's."""
    return {state.name: state for state in STATES}[name]
