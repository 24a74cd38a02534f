"""vLLM's stock scheduler, between whose two calls a step lies: `schedule` begins it, `update_from_output` ends it.

The wait stands at the step's end, where vLLM on a GPU waits for its output. What the step's beginning set off, a load
among it, runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from .pace import wake_precisely
from .settings import pacing


class PacedScheduler(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steps = pacing().steps
        wake_precisely()

    def add_request(self, *args: Any, **kwargs: Any) -> None:
        self._steps.arrived()
        super().add_request(*args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._steps.begin()
        output = super().schedule(*args, **kwargs)
        self._steps.plan(_sequences(output), waiting=self.has_unfinished_requests())
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        self._steps.finish(more=self.has_unfinished_requests())
        return outputs


def _sequences(output: SchedulerOutput) -> Iterator[tuple[int, int]]:
    """(new tokens, context) of each request in the step."""
    for new in output.scheduled_new_reqs:
        yield output.num_scheduled_tokens[new.req_id], new.num_computed_tokens
    running = output.scheduled_cached_reqs
    for request, context in zip(running.req_ids, running.num_computed_tokens, strict=True):
        yield output.num_scheduled_tokens[request], context
