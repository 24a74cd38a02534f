"""A step of SGLang's stock scheduler: from the moment when it looks for a batch to the end of the model's forward pass.

The model waits for the step's end (models/paced.py). Three functions run before the scheduler's own, which go on as
they are.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ..settings import pacing

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def pace_steps() -> None:
    HookRegistry.register(f"{_SCHEDULER}.handle_generate_request", request_arrives, HookType.BEFORE)
    HookRegistry.register(f"{_SCHEDULER}.get_next_batch_to_run", step_begins, HookType.BEFORE)
    HookRegistry.register(f"{_SCHEDULER}.on_idle", no_step, HookType.BEFORE)


def request_arrives(*_args: Any, **_kwargs: Any) -> None:
    pacing().steps.arrived()


def step_begins(*_args: Any, **_kwargs: Any) -> None:
    pacing().steps.begin()


def no_step(*_args: Any, **_kwargs: Any) -> None:
    """There was nothing to run, or what there is waits for its storage."""
    pacing().steps.rest()
