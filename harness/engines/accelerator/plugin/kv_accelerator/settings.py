"""What the harness asks of the accelerator: JSON in one variable of the environment, read once a process."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable

from .pace import Link, Report, StepCost, Steps, link_of, sleep_precisely

VARIABLE = "KV_ACCELERATOR"


class Pacing:
    """step: constants of StepCost by name. loads, stores: of LinkCost; absent: KV is copied. sleep: of the steps."""

    def __init__(
        self, settings: dict[str, dict[str, float]], path: str | None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.report = Report(path)
        self.steps = Steps(StepCost(**settings["step"]), self.report, sleep=sleep)
        self.loads: Link | None = link_of(settings["loads"]) if "loads" in settings else None
        self.stores: Link | None = link_of(settings["stores"]) if "stores" in settings else None


@functools.cache
def pacing() -> Pacing:
    """The one of this process. Only the engine's own process may ask: it makes the report's file."""
    asked = json.loads(os.environ[VARIABLE])
    # A scheduler that polls beside its own threads would keep them off the core if it had a real-time share itself.
    sleep = sleep_precisely if asked.get("polls") else time.sleep
    return Pacing(asked["constants"], asked["report"], sleep)
