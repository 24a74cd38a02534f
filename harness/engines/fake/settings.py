"""The section `engines.fake`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from harness.experiment.fields import FROM_LIST, Strict
from harness.experiment.units import Seconds


class FakeSettings(Strict):
    """The scripted engine of the tests: how it misbehaves. resets: what it empties together; None: each on its own."""

    fail_every: Annotated[int, Field(ge=0)] = 0
    degrade_after: Annotated[int, Field(ge=0)] | None = None
    delay: Seconds = 0.0
    start_error: str | None = None
    resets: Annotated[tuple[Annotated[tuple[str, ...], FROM_LIST], ...] | None, FROM_LIST] = None
