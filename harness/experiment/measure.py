"""What to sample, how often, and for how long at most."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from harness.experiment.fields import FROM_LIST, Strict
from harness.experiment.goals import checked_goal
from harness.experiment.units import Seconds
from traces.tiers import all_tiers, state_names


def _state(name: str) -> str:
    if name not in state_names():
        raise ValueError(f"{name!r} is no state; use one of {', '.join(state_names())}")
    return name


def _offload_tier(name: str) -> str:
    tiers = [tier.name for tier in all_tiers() if tier.offload]
    if name not in tiers:
        raise ValueError(f"{name!r} is no tier behind the engine's own; use one of {', '.join(tiers)}")
    return name


StateName = Annotated[str, AfterValidator(_state)]
OffloadTier = Annotated[str, AfterValidator(_offload_tier)]


class Until(Strict):
    """Sample until the median's confidence interval is at most ± half_width (relative) wide, in every tier.

    metric: the time whose interval has to be narrow.
    half_width: the interval's half, relative to the median.
    confidence: the interval's confidence.
    min_samples: samples of each tier at least.
    max_samples: samples of each tier at most.
    """

    metric: Literal["ttft_s", "e2e_s", "tpot_s"] = "ttft_s"
    half_width: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.95
    min_samples: Annotated[int, Field(ge=3, le=100_000)] = 5
    max_samples: Annotated[int, Field(ge=3, le=100_000)] = 500

    @model_validator(mode="after")
    def _ordered(self) -> Until:
        if self.max_samples < self.min_samples:
            raise ValueError(f"max_samples {self.max_samples} is below min_samples {self.min_samples}; raise it")
        return self


class Measure(Strict):
    """What to sample: the warm states in `tiers` (for `prefix` workloads), how often, for how long at most. Engine and
    cache server restart before each sample of `disk_restart`, which comes after the other states.

    warm_up: samples of each tier, of a free load passes over it, that come first, count for nothing and are not in the
    budget. The first touch of memory that a tier has just been given costs what no later request pays. A state that
    restarts the engine has none.

    tiers: the warm states that are measured; a prefix workload needs them.
    samples: exactly so many samples of each tier; fewer only where `budget` ends first.
    trials: how often a free load is sent, each time from fresh caches and with the same seed. A trial that failed in
    part, or did not end, is left out. A simulation that repeats exactly is made once.
    until: sample until an interval is narrow enough; of disk_restart, so many samples as `min_samples`.
    budget: no new sample begins after this time.
    steady: the most that a hit in memory waits until the first cores of engine and client, where it names them, are
    about as quick as they often are: another guest of the same host may slow them for seconds. It is in the budget.
    must_reach: a free load that nothing of this tier serves is refused.
    request_timeout: a request without an end by then is an error row.
    goals: what the figures have to keep, e.g. `ttft_p90<500ms` or `disk_cold:ttft_mean<0.3s`; exit code 3 where they do
    not.
    """

    tiers: Annotated[tuple[StateName, ...], FROM_LIST] = ()
    samples: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    trials: Annotated[int, Field(ge=1, le=1000)] = 1
    until: Until | None = None
    budget: Seconds | None = None
    warm_up: Annotated[int, Field(ge=0, le=100)] = 0
    steady: Seconds | None = None
    must_reach: OffloadTier | None = None
    request_timeout: Seconds = 600.0
    goals: Annotated[tuple[Annotated[str, AfterValidator(checked_goal)], ...], FROM_LIST] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Measure:
        if len(set(self.tiers)) != len(self.tiers):
            raise ValueError("tiers names a tier twice; name each once")
        if self.samples is not None and self.until is not None:
            raise ValueError("samples and until exclude each other; keep one")
        if self.request_timeout <= 0:
            raise ValueError("request_timeout must be longer than 0 s")
        return self
