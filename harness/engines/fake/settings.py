"""The section `engines.fake`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from harness.experiment.fields import FROM_LIST, Strict
from harness.experiment.units import Seconds


class FakeSettings(Strict):
    """The scripted engine of the tests: how it misbehaves.

    fail_every: every n-th request fails; 0: none.
    degrade_after: from this request on, tiers serve nothing.
    delay: the time of each request.
    start_error: the start fails with this text.
    resets: what it empties together; null: each on its own.
    keeps: the tiers that a restart leaves as they are; null: those of storage; an empty list: it is not restarted.
    """

    fail_every: Annotated[int, Field(ge=0)] = 0
    degrade_after: Annotated[int, Field(ge=0)] | None = None
    delay: Seconds = 0.0
    start_error: str | None = None
    keeps: Annotated[tuple[str, ...], FROM_LIST] | None = None
    resets: Annotated[tuple[Annotated[tuple[str, ...], FROM_LIST], ...] | None, FROM_LIST] = None
