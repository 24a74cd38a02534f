"""The section `engines.fake`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from harness.experiment.fields import Strict
from harness.experiment.units import Seconds


class FakeSettings(Strict):
    """The scripted engine of the tests: how it misbehaves."""

    fail_every: Annotated[int, Field(ge=0)] = 0
    degrade_after: Annotated[int, Field(ge=0)] | None = None
    delay: Seconds = 0.0
    start_error: str | None = None
