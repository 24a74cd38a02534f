"""The section `engines.toy`."""

from __future__ import annotations

from typing import Literal

from harness.experiment.fields import Cores, Strict


class ToySettings(Strict):
    """disk: how its disk tier moves, as its kind says it."""

    connector: str = "toy-cache"
    disk: Literal["real", "none"] = "none"
    packs: bool = True
    cores: Cores = Cores()
