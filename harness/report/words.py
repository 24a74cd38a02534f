"""Numbers and sentences for people: units that fit, what the rows show, and what to do where they prove nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from harness.report.axes import cell_labels
from harness.results.summary import FREE_LOAD, CellFigures, Latency, RunRows, Summary, TierFigures
from traces.tiers import all_states, state_names

UNKNOWN = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
NOT_REPORTED = "not reported"


class Evidence(msgspec.Struct, frozen=True):
    """level: 'good', 'warn' or 'bad'. counts: (word, number). cures: what to do, one sentence each."""

    level: str
    headline: str
    counts: tuple[tuple[str, int], ...]
    cures: tuple[str, ...]
    reasons: tuple[tuple[str, int], ...]


def time_unit(value_s: float) -> tuple[str, float]:
    """The unit that fits a time, and how many of it a second holds."""
    if abs(value_s) >= 1:
        return "s", 1.0
    return ("ms", 1e3) if abs(value_s) >= 1e-3 or value_s == 0 else ("µs", 1e6)


def fitting_unit(values_s: Sequence[float]) -> tuple[str, float]:
    """One unit for an axis: that of the middle, as a logarithmic axis has it."""
    return time_unit(math.sqrt(max(0.0, min(values_s)) * max(values_s))) if values_s else ("s", 1.0)


def duration(value_s: float | None) -> str:
    """0.0467 → '46.7 ms'; three digits."""
    if value_s is None:
        return UNKNOWN
    # Below a nanosecond there is only the noise of subtracting two times.
    rounded_s = round(value_s, 9) + 0.0
    unit, factor = time_unit(rounded_s)
    return f"{digits(rounded_s * factor)} {unit}"


def mean_with_interval(figures: Latency | None) -> str:
    """'46.7 ± 1.2 ms': the mean and half of its 95 % interval; without ± where there is no interval."""
    if figures is None:
        return UNKNOWN
    unit, factor = time_unit(figures.mean)
    if figures.mean_high is None:
        return f"{digits(figures.mean * factor)} {unit}"
    half_s = round(figures.mean_high - figures.mean, 9) + 0.0
    return f"{digits(figures.mean * factor)} ± {digits(half_s * factor, 2)} {unit}"


def digits(value: float, significant: int = 3) -> str:
    """A number with so many significant digits, never as 1e+03, with thousands set apart."""
    rounded = float(f"{value:.{significant}g}")
    whole = len(f"{abs(rounded):.0f}") if abs(rounded) >= 1 else 0
    if not whole:
        return f"{rounded:.{significant}g}" if abs(rounded) >= 1e-4 or not rounded else f"{rounded:.1e}"
    return f"{rounded:,.{max(0, significant - whole)}f}"


def percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share * 100:.1f} %"


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def too_few(n: int, share: float) -> bool:
    """Whether fewer values than one lie beyond a percentile: it is then no more than the largest value seen."""
    return n * (1 - share) < 1 - 1e-9


def tier_order(tiers: Iterable[str]) -> list[str]:
    """Tiers in their fixed order; unknown names last."""
    names, known = set(tiers), (*state_names(), FREE_LOAD)
    return [tier for tier in known if tier in names] + sorted(names.difference(known))


def evidence(summary: Summary) -> Evidence:
    """How far the rows may be believed, from their verdicts."""
    rows = summary.rows
    verdicts = (("proven", rows.proven), ("contradicted", rows.contradicted), ("unproven", rows.unproven))
    counts = (*verdicts, ("error" if rows.errors == 1 else "errors", rows.errors))
    claimed = any(tier != FREE_LOAD for cell in summary.cells for tier in cell.tiers)
    measured, used = rows.measured, rows.counted
    if not measured:
        return Evidence("bad", "No request was measured", counts, ("Look into logs/ and run it again.",), ())
    if used == measured:
        how = "all proven" if claimed else "all answered; a free load claims no tier for a request"
        headline = f"{plural(measured, 'row')} measured, {how}"
    else:
        headline = f"{plural(measured, 'row')} measured, {used:,} in the figures, {measured - used:,} left out"
    level = "good" if used == measured else "warn" if used else "bad"
    return Evidence(level, headline, counts, tuple(_cures(rows)), _reasons(summary))


def _cures(rows: RunRows) -> list[str]:
    cures = []
    if rows.contradicted:
        cures.append(
            "Contradicted rows were served from elsewhere than the tier under test, and are in no figure. Compare the"
            " report's resolved cache sizes with the configured ones: make room in that tier, or see the engine's log"
            " for a connector that gave up."
        )
    if rows.unproven:
        cures.append(
            "For unproven rows the counters do not say who served them. Let nothing else use the engine meanwhile,"
            " and use a version that reports tokens by source (harness doctor lists what is missing)."
        )
    if rows.errors:
        cures.append("Failed requests are in no figure: see logs/, lower the load or raise measure.request_timeout.")
    if rows.measured - rows.counted - rows.errors - rows.contradicted - rows.unproven > 0:
        cures.append("Some rows claim a tier and carry no verdict: the run ended before their counters were read.")
    return cures


def _reasons(summary: Summary) -> tuple[tuple[str, int], ...]:
    total: Counter[str] = Counter()
    for cell in summary.cells:
        for figures in cell.tiers.values():
            total.update(figures.left_out_reasons)
    return tuple(total.most_common(5))


class _Pair(msgspec.Struct, frozen=True):
    """A tier against the baseline in one cell. ratio > 1: the tier is faster. distinct: their intervals are apart."""

    where: str
    ratio: float
    distinct: bool
    tier_s: float
    baseline_s: float


def findings(summary: Summary) -> list[str]:
    """What the figures say, one sentence each, computed from the summary."""
    measured = [cell for cell in summary.cells if any(_ttft(tier) for tier in cell.tiers.values())]
    if not measured:
        return ["No row may stand for a tier, so there is no finding."]
    lines = []
    baseline = _baseline(measured)
    labels = cell_labels(summary.cells)
    for tier in tier_order({tier for cell in measured for tier in cell.tiers} - {baseline, FREE_LOAD}):
        pairs = [pair for cell in measured if (pair := _pair(cell, tier, baseline, labels[cell.key]))]
        if pairs:
            lines.append(_compare(tier, baseline, pairs))
    lines += _free_load(measured, labels)
    if not lines:
        lines = [
            f"{baseline}: mean TTFT {mean_with_interval(_ttft(cell.tiers[baseline]))}{_at(cell, baseline, labels)}."
            for cell in measured[:3]
            if baseline in cell.tiers
        ]
    return lines


def _ttft(tier: TierFigures | None) -> Latency | None:
    return tier.metrics["ttft_s"] if tier else None


def _baseline(cells: list[CellFigures]) -> str:
    """What tiers are compared with: recompute, or else the slowest."""
    means: dict[str, float] = {}
    for cell in cells:
        for tier, group in cell.tiers.items():
            if figures := _ttft(group):
                means[tier] = max(means.get(tier, 0.0), figures.mean)
    computed = next((state.name for state in all_states() if state.served_by is None and state.name in means), None)
    return computed or max(sorted(means), key=means.__getitem__)


def _pair(cell: CellFigures, tier: str, baseline: str, label: str) -> _Pair | None:
    own, base = _ttft(cell.tiers.get(tier)), _ttft(cell.tiers.get(baseline))
    if own is None or base is None or own.mean <= 0 or base.mean <= 0:
        return None
    distinct = _apart(own, base) or _apart(base, own)
    where = _at(cell, tier, {cell.key: label})
    return _Pair(where, base.mean / own.mean, distinct, own.mean, base.mean)


def _apart(low: Latency, high: Latency) -> bool:
    """Whether one interval ends below the other; not without two of them."""
    return low.mean_high is not None and high.mean_low is not None and low.mean_high < high.mean_low


def _at(cell: CellFigures, tier: str, labels: Mapping[str, str]) -> str:
    """' at prompt_tokens=4097' in a sweep, ' at 4,097 prompt tokens' where all prompts have one length."""
    if cell.overrides:
        return f" at {labels[cell.key]}"
    group = cell.tiers[tier]
    each, rest = divmod(group.tokens.prompt, max(1, group.rows.counted))
    return f" at {each:,} prompt tokens" if each and not rest else ""


def _compare(tier: str, baseline: str, pairs: list[_Pair]) -> str:
    if len(pairs) == 1:
        pair = pairs[0]
        against = f"mean TTFT {duration(pair.tier_s)} against {duration(pair.baseline_s)}{pair.where}"
        if not pair.distinct:
            return f"{tier}: no difference from {baseline} that these samples can show ({against})."
        return f"{tier}: {_times(pair.ratio)} than {baseline} ({against})."
    least, most = (choose(pairs, key=lambda pair: pair.ratio) for choose in (min, max))
    text = (
        f"{tier}: from {_times(least.ratio)}{least.where} to {_times(most.ratio)}{most.where} than {baseline}"
        f" (mean TTFT, {len(pairs)} cells)"
    )
    unclear = sum(not pair.distinct for pair in pairs)
    return text + (f"; {unclear} of them show no difference with these samples." if unclear else ".")


def _times(ratio: float) -> str:
    return f"{digits(ratio, 2)}{TIMES} faster" if ratio >= 1 else f"{digits(1 / ratio, 2)}{TIMES} slower"


def _free_load(cells: list[CellFigures], labels: Mapping[str, str]) -> list[str]:
    loads = [(cell, ttft) for cell in cells if (ttft := _ttft(cell.tiers.get(FREE_LOAD)))]
    if not loads:
        return []
    loads.sort(key=lambda pair: pair[1].p50)
    if len(loads) > 1:
        (fast, low), (slow, high) = loads[0], loads[-1]
        return [
            f"Median TTFT from {duration(low.p50)} at {labels[fast.key]} to"
            f" {duration(high.p50)} at {labels[slow.key]} ({len(loads)} cells)."
        ]
    cell, ttft = loads[0]
    flow, hit_rate = cell.tiers[FREE_LOAD].throughput, cell.tiers[FREE_LOAD].tokens.hit_rate
    text = f"TTFT: median {duration(ttft.p50)}, p90 {duration(ttft.p90)} over {plural(ttft.n, 'request')}"
    if flow:
        text += f"; {digits(flow.requests_per_s)} requests/s"
    if hit_rate is not None:
        text += f"; {percent(hit_rate)} of the prompt tokens came from a cache"
    return [f"{text}."]
