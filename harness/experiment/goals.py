"""Goals of a run, as people write them: `ttft_p90<500ms`, `disk_cold:ttft_mean<0.3s`, `throughput>200tokens/s`."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from harness.experiment.units import parse_seconds
from traces.tiers import state_names

_LATENCY = re.compile(r"(ttft|e2e|tpot)_(mean|p50|p90|p95|p99)\s*<=?\s*(\S+)")
_RATE = re.compile(r"throughput\s*>=?\s*([0-9]+(?:\.[0-9]+)?)\s*(tokens|requests)/s")
_EXAMPLES = "ttft_p90<500ms, tpot_mean<50ms or throughput>200tokens/s (ttft, e2e, tpot; mean, p50, p90, p95, p99)"


class Goal(NamedTuple):
    """state: the warm state that it is for; None: each. metric: a row's time in seconds, or a rate of the whole load.

    statistic: 'mean' or a percentile of a time; None for a rate. bound: the most of a time in seconds, the least of a
    rate per second.
    """

    text: str
    state: str | None
    metric: Literal["ttft_s", "e2e_s", "tpot_s", "output_tokens_per_s", "requests_per_s"]
    statistic: Literal["mean", "p50", "p90", "p95", "p99"] | None
    bound: float

    @property
    def each_request(self) -> bool:
        """Whether one request can keep it: its own time is below the bound."""
        return self.statistic is not None


def parse_goal(text: str) -> Goal:
    """Raises ValueError with the cure."""
    state, colon, rest = text.strip().rpartition(":")
    if colon and state not in state_names():
        raise ValueError(f"goal {text!r}: {state!r} is no state; use one of {', '.join(state_names())}, or none")
    if match := _LATENCY.fullmatch(rest.strip()):
        name, statistic, time = match.groups()
        try:
            bound = parse_seconds(time)
        except ValueError as error:
            raise ValueError(f"goal {text!r}: {error}") from None
        return Goal(text, state or None, f"{name}_s", statistic, bound)  # type: ignore[arg-type]
    if match := _RATE.fullmatch(rest.strip()):
        metric: Literal["output_tokens_per_s", "requests_per_s"]
        metric = "output_tokens_per_s" if match[2] == "tokens" else "requests_per_s"
        return Goal(text, state or None, metric, None, float(match[1]))
    raise ValueError(f"{text!r} is no goal; write it like {_EXAMPLES}")


def checked_goal(text: str) -> str:
    """The text, if it is a goal's. Raises ValueError with the cure."""
    parse_goal(text)
    return text
