"""How many samples each tier gets, and in which order: pure decisions on the values seen so far.

Tiers are interleaved, one sample of each a round, so that drift of the machine falls on all alike. A round goes from
recompute down the tiers, because a prefix is moved down cheaply and up only by computing it again. Where the time is
limited, tiers whose samples take long sit rounds out, so that all get about the same time rather than as many samples;
and the first round, which may be the only one, asks quick tiers several times, and those that read a device twice, but
never for more than `samples`.
A tier whose prefixes are placed several sets at a time is asked for all of them in a row, in every round.
Computing a prefix anew after it was moved down is time of the tier that it was moved down for.

States that restart the engine come after all others have enough, or have had their share of the time: a fresh process
is slower at first, and no other state is to pay for that. One takes half a minute, so where an interval decides they
get `min_samples`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from harness.experiment.measure import Measure
from harness.stats import percentile, relative_half_width
from traces.tiers import State, state_named, state_names

GIVE_UP_AFTER = 5
# So many times the time of the tier that has had least, a tier may have had and still be sampled.
_MOST_OF_LEAST = 2.0
# Of hits in memory, a single one says little, and several cost little. Those that read the page cache vary by a tenth.
_QUICK_AT_FIRST, _PAGE_CACHE_AT_FIRST = 3, 6
# Of reads from a device, one takes twice as long now and then, where the host takes memory back. Of two in each pass,
# the middle leaves that one out.
_DEVICE_AT_FIRST = 2


@dataclass
class _Tier:
    values: list[float] = field(default_factory=list)
    samples: int = 0
    not_proven_in_a_row: int = 0
    spent_s: float = 0.0
    restarts: bool = False


class Sampler:
    """Asks for rounds until every tier has enough. Feed it with `add` after each sample."""

    def __init__(self, measure: Measure, placed_at_once: Mapping[str, int] | None = None) -> None:
        """placed_at_once: sets of prefixes, by tier; 1 where it is silent."""
        self._measure, self._placed_at_once = measure, placed_at_once or {}
        self._tiers: dict[str, _Tier] = {
            tier: _Tier(restarts=state_named(tier).restarted) for tier in state_names() if tier in measure.tiers
        }
        self._last: str | None = None

    def add(self, tier: str, values: list[float], *, proven: bool, placing_s: float = 0.0, took_s: float = 0.0) -> None:
        """One sample of a tier: the metric of its proven rows, of which it gives one value (requests that were sent
        together depend on each other); whether the tier was proven at all, how long it took to
        place the prefix, and how long all else of the sample took."""
        state = self._tiers[tier]
        lower = max(tier, self._last or tier, key=state_names().index)
        self._tiers[lower].spent_s += placing_s
        self._last = tier
        state.spent_s += took_s
        state.samples += 1
        state.values += [sum(values) / len(values)] if values else []
        state.not_proven_in_a_row = 0 if proven else state.not_proven_in_a_row + 1

    def round(self, elapsed_s: float) -> list[str]:
        """Tiers to sample next, in order; empty when all have enough or the budget is spent."""
        budget_s = self._measure.budget
        if budget_s is not None and elapsed_s >= budget_s:
            return []
        wanted = {tier: state.spent_s for tier, state in self._tiers.items() if not self._enough(state)}
        wanted = self._wanted_now(wanted, elapsed_s)
        if budget_s is None:
            return [tier for tier in wanted for _ in range(self._in_a_row(tier, first=False))]
        most_s = _MOST_OF_LEAST * min(wanted.values(), default=0.0)
        due = [tier for tier, spent_s in wanted.items() if spent_s <= most_s]
        first = not any(state.samples for state in self._tiers.values())
        return [tier for tier in due for _ in range(self._in_a_row(tier, first=first))]

    def _in_a_row(self, tier: str, *, first: bool) -> int:
        """Samples of a tier in one round. first: whether it is the first round of a limited time."""
        several = max(_at_first(state_named(tier)) if first else 1, self._placed_at_once.get(tier, 1))
        asked = self._measure.samples
        return several if asked is None else max(1, min(several, asked - self._tiers[tier].samples))

    def _wanted_now(self, wanted: dict[str, float], elapsed_s: float) -> dict[str, float]:
        """Without those that restart the engine, until all others have enough, or as much time as is theirs."""
        others = [tier for tier, state in self._tiers.items() if not state.restarts]
        budget_s = self._measure.budget
        theirs_s = inf if budget_s is None else budget_s * len(others) / len(self._tiers)
        restarted = any(state.restarts and state.samples for state in self._tiers.values())
        now = {} if restarted or elapsed_s >= theirs_s else {tier: wanted[tier] for tier in others if tier in wanted}
        return now or {tier: spent_s for tier, spent_s in wanted.items() if tier not in others}

    def samples_of(self, tier: str) -> int:
        return self._tiers[tier].samples

    def gave_up(self) -> list[str]:
        """Tiers that are sampled no more because their evidence failed again and again."""
        return [tier for tier, state in self._tiers.items() if state.not_proven_in_a_row >= GIVE_UP_AFTER]

    def state(self, tier: str) -> str:
        """For the progress line: the time so far, and how wide its interval is against how wide it may be."""
        state, until = self._tiers[tier], self._measure.until
        words = [f"{tier} #{state.samples + 1}"]
        if (typical_s := percentile(state.values, 0.5)) is not None:
            metric = (until.metric if until else "ttft_s").removesuffix("_s").upper()
            words.append(f"{metric} " + (f"{typical_s:.3g} s" if typical_s >= 1 else f"{typical_s * 1e3:.3g} ms"))
        width = relative_half_width(state.values, until.confidence if until else 0.95)
        if width is not None and len(state.values) > 1:
            words.append(f"±{width:.1%}" + (f" (goal ±{until.half_width:.0%})" if until else ""))
        return " ".join(words)

    def expected(self) -> int | None:
        """Samples of all tiers together; None where an interval decides."""
        samples = self._measure.samples
        return None if samples is None else samples * len(self._tiers)

    def _enough(self, state: _Tier) -> bool:
        until = self._measure.until
        if until is None:
            return state.samples >= (self._measure.samples or 0)
        if state.not_proven_in_a_row >= GIVE_UP_AFTER or state.samples >= until.max_samples:
            return True
        if state.restarts:
            return state.samples >= until.min_samples
        width = relative_half_width(state.values, until.confidence)
        return state.samples >= until.min_samples and width is not None and width <= until.half_width


def _at_first(state: State) -> int:
    if state.quick:
        return _QUICK_AT_FIRST if state.from_device is None else _PAGE_CACHE_AT_FIRST
    return _DEVICE_AT_FIRST if state.from_device and not state.restarted else 1
