"""What the harness asks of the accelerator: JSON in one variable of the environment, read once a process."""

from __future__ import annotations

import functools
import json
import os

from .pace import Link, Report, StepCost, Steps, link_of

VARIABLE = "KV_ACCELERATOR"


class Pacing:
    """step: constants of StepCost by name. loads, stores: of LinkCost; absent: LMCache copies as it does without us."""

    def __init__(self, settings: dict[str, dict[str, float]], path: str | None) -> None:
        self.report = Report(path)
        self.steps = Steps(StepCost(**settings["step"]), self.report)
        self.loads: Link | None = link_of(settings["loads"]) if "loads" in settings else None
        self.stores: Link | None = link_of(settings["stores"]) if "stores" in settings else None


@functools.cache
def pacing() -> Pacing:
    """The one of this process. Only the engine's own process may ask: it makes the report's file."""
    asked = json.loads(os.environ[VARIABLE])
    return Pacing(asked["constants"], asked["report"])
