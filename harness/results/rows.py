"""What a set of rows says, of a tier, a load, one of its turns or trials: times, tokens and rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from msgspec import UNSET

from harness.stats import FEWEST_SAMPLES, coefficient_of_variation, mean_interval, samples_needed
from traces.request import RequestRecord
from traces.tiers import sources


class Latency(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One metric of a tier, seconds. n: requests; mean, percentiles, cv: over requests.

    Requests that were sent together depend on each other, so that an interval rests on whole samples; a trial of a free
    load is one sample. sample_means: the mean of each sample, in order; (): a file of an older version. mean_low,
    mean_high: the 95 % interval of the mean; None with fewer than three samples. samples_for_5_percent: how many
    samples would give an interval of ±5 %; None where the samples do not say. p95: None in a file of an older version.
    """

    n: int
    mean: float
    mean_low: float | None
    mean_high: float | None
    p50: float
    p90: float
    p95: float | None = None
    p99: float
    min: float
    max: float
    cv: float | None
    samples_for_5_percent: int | None
    sample_means: tuple[float, ...] = ()

    @property
    def half_width(self) -> float | None:
        """Of the mean's interval; None without one, or where it reaches to 0: too few samples for how they spread."""
        if self.mean_low is None or self.mean_high is None or (self.mean_low <= 0 < self.mean):
            return None
        return (self.mean_high - self.mean_low) / 2

    @property
    def samples(self) -> tuple[tuple[float, ...], ...]:
        """One value a sample, as stats.ratio_interval takes them."""
        return tuple((mean,) for mean in self.sample_means)


class ClientLag(msgspec.Struct, frozen=True, kw_only=True):
    """How late one of several client processes sent: actual minus intended send, seconds, over n requests of a tier."""

    tier: str
    client: int
    n: int
    p50: float
    p99: float


class TokenTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the rows that count. by_source: prompt tokens by where their KV came from. None: not reported.

    In the file the sources stand between `prompt` and `output`, not in a map of their own.
    """

    prompt: int
    by_source: dict[str, int | None]
    output: int | None
    cached: int | None
    expected_hit: int | None
    hit_rate: float | None


class LoadRates(msgspec.Struct, frozen=True, kw_only=True):
    """What a free load completed per second, from the first send to the last token."""

    duration_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float | None
    total_tokens_per_s: float | None = None


def metric_values(rows: Iterable[RequestRecord], name: str) -> list[float]:
    """The metric of every row that has it. send_lag_s is the actual send minus the intended one."""
    values = (row.sent_s - row.scheduled_s if name == "send_lag_s" else getattr(row, name) for row in rows)
    return [value for value in values if value is not None]


def sample_values(rows: Iterable[RequestRecord], name: str) -> list[list[float]]:
    """The metric of the rows of each sample. Requests of a free load wait for each other: a trial is one sample, also
    where several attempts were needed to send it."""
    found: dict[tuple[int, int], list[RequestRecord]] = {}
    for row in rows:
        found.setdefault((row.attempt if row.expected_tier else 0, row.sample), []).append(row)
    samples = [metric_values(group, name) for group in found.values()]
    return [values for values in samples if values]


def latency_figures(samples: Sequence[Sequence[float]]) -> Latency | None:
    """None without values."""
    values = [value for sample in samples for value in sample]
    if not values:
        return None
    means = [sum(sample) / len(sample) for sample in samples]
    interval = mean_interval(means) if len(means) >= FEWEST_SAMPLES else None
    p50, p90, p95, p99 = np.quantile(values, (0.5, 0.9, 0.95, 0.99)).tolist()
    return Latency(
        n=len(values),
        mean=sum(values) / len(values),
        mean_low=interval[0] if interval else None,
        mean_high=interval[1] if interval else None,
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        min=min(values),
        max=max(values),
        cv=coefficient_of_variation(values),
        samples_for_5_percent=samples_needed(means, 0.05),
        sample_means=tuple(means),
    )


def client_lags(tier: str, rows: Iterable[RequestRecord]) -> tuple[ClientLag, ...]:
    """By client; () where one process has sent them all."""
    by_client: dict[int, list[float]] = {}
    for row in rows:
        if row.client is not UNSET:
            by_client.setdefault(row.client, []).append(row.sent_s - row.scheduled_s)
    found = []
    for client, lags_s in sorted(by_client.items()):
        p50, p99 = np.quantile(lags_s, (0.5, 0.99)).tolist()
        found.append(ClientLag(tier=tier, client=client, n=len(lags_s), p50=p50, p99=p99))
    return tuple(found)


def sum_or_none(values: Sequence[int | None]) -> int | None:
    """None without values, or where one of them is None: a sum never mixes the known with the unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def token_totals(rows: Sequence[RequestRecord]) -> TokenTotals:
    """Sums over rows; None where no row has the figure, and a sum never mixes rows that have it with others."""
    prompt = sum(row.prompt_tokens for row in rows)
    cached = sum_or_none([row.cached_tokens for row in rows])
    return TokenTotals(
        prompt=prompt,
        by_source={source: sum_or_none([row.tokens_by_tier.get(source) for row in rows]) for source in sources()},
        output=sum_or_none([row.output_tokens for row in rows]),
        cached=cached,
        expected_hit=sum_or_none([row.expected_hit_tokens for row in rows]),
        hit_rate=cached / prompt if cached is not None and prompt else None,
    )


def load_rates(rows: Sequence[RequestRecord]) -> LoadRates | None:
    """Of a free load: completed work over the time from the first send to the last token, trial by trial."""
    if not rows or rows[0].expected_tier is not None:
        return None
    spans: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for row in rows:
        spans[row.attempt, row.sample] += [row.sent_s, row.last_token_s or row.sent_s]
    duration_s = sum(max(times) - min(times) for times in spans.values())
    if duration_s <= 0:
        return None
    prompt, output = sum(row.prompt_tokens for row in rows), sum_or_none([row.output_tokens for row in rows])
    return LoadRates(
        duration_s=duration_s,
        requests_per_s=len(rows) / duration_s,
        prompt_tokens_per_s=prompt / duration_s,
        output_tokens_per_s=None if output is None else output / duration_s,
        total_tokens_per_s=None if output is None else (prompt + output) / duration_s,
    )
