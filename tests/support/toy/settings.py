"""The section `engines.toy`."""

from __future__ import annotations

from typing import Literal

from harness.experiment.fields import Cores, Strict


class ToySettings(Strict):
    """disk: how its disk tier moves, as its kind says it; real: a process of the cache server's moves files.

    folder: where these files are; None: where the experiment says. packs: whether the simulator has packs for it.
    slowness: its seconds up to the first token, times this. synchronous_loads: what its kind says, though it is not so.
    """

    connector: str = "toy-cache"
    disk: Literal["real", "none"] = "none"
    folder: str | None = None
    packs: bool = True
    slowness: float = 1.0
    synchronous_loads: bool = False
    cores: Cores = Cores()
