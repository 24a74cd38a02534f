"""Numbers and sentences for people: units that fit, what the rows show, and what to do where they prove nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from harness.records import HitCeiling
from harness.report.axes import Axis, cell_labels, short_names, value_text, varied_axes
from harness.report.simulated import flat_notes, how_made, in_figures, simulated_notes
from harness.results.rows import Latency
from harness.results.summary import FREE_LOAD, CellFigures, RunRows, Summary, TierFigures
from harness.stats import FEWEST_SAMPLES, TOO_FEW, Ratio, ratio_interval
from traces.tiers import all_states, state_names

UNKNOWN = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
NOT_REPORTED = "not reported"
THIN_MARK = "*"
THIN_NOTE = f"{THIN_MARK} fewer values than this percentile needs: no more than the largest one seen"


class Evidence(msgspec.Struct, frozen=True):
    """level: 'good', 'simulated', 'warn' or 'bad'. counts: (word, number). cures: what to do, one sentence each."""

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
    """'46.7 ± 1.2 ms': the mean and half of its 95 % interval; without one, the mean and range: '46.7 (40–90) ms'."""
    if figures is None:
        return UNKNOWN
    unit, factor = time_unit(figures.mean)
    mean = digits(figures.mean * factor)
    # Samples that all say the same are a simulator's: that is no certainty of 0.
    if half_s := round(figures.half_width or 0.0, 9):
        return f"{mean} ± {digits(half_s * factor, 2)} {unit}"
    low, high = digits(figures.min * factor), digits(figures.max * factor)
    return f"{mean} {unit}" if low == high else f"{mean} ({low}{UNKNOWN}{high}) {unit}"


def with_interval(ratio: Ratio) -> str:
    """'6.0× (5.1–7.2×)'; without the brackets where nothing spreads, as in a simulation."""
    middle = f"{_times(ratio.ratio)}{TIMES}"
    if ratio.low is None or ratio.high is None:
        return middle
    low, high = _times(ratio.low), _times(ratio.high)
    return middle if low == high else f"{middle} ({low}{UNKNOWN}{high}{TIMES})"


def _times(ratio: float) -> str:
    """Two digits, and three near 1: 1.04 is no '1.0 times faster'."""
    return digits(ratio, 3 if 0.9 < ratio < 1.1 else 2)


def digits(value: float, significant: int = 3) -> str:
    """A number with so many significant digits, never as 1e+03, with thousands set apart."""
    rounded = float(f"{value:.{significant}g}")
    whole = len(f"{abs(rounded):.0f}") if abs(rounded) >= 1 else 0
    if not whole:
        return f"{rounded:.{significant}g}" if abs(rounded) >= 1e-4 or not rounded else f"{rounded:.1e}"
    return f"{rounded:,.{max(0, significant - whole)}f}"


def percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share * 100:.1f} %"


def ceiling_words(ceiling: HitCeiling | None) -> str:
    """'at most 80.1 % in any cache of this size, 83.0 % in any at all (computed)'; '' without a ceiling."""
    if ceiling is None:
        return ""
    if ceiling.of_any_size is None:
        return f"ceiling unknown: {ceiling.reason}"
    if ceiling.of_size is None:
        return f"at most {percent(ceiling.of_any_size)} in any cache (computed); of this size unknown: {ceiling.reason}"
    sized, unlimited = percent(ceiling.of_size), percent(ceiling.of_any_size)
    return f"at most {sized} in any cache of this size, {unlimited} in any at all (computed)"


def plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def too_few(n: int, share: float) -> bool:
    """Whether fewer values than one lie beyond a percentile: it is then no more than the largest value seen."""
    return n * (1 - share) < 1 - 1e-9


def percentile_text(value_s: float | None, n: int, share: float) -> str:
    """'46.7 ms', or '46.7 ms*' where the percentile lies beyond what n values can show (THIN_NOTE)."""
    text = duration(value_s)
    return f"{text}{THIN_MARK}" if value_s is not None and too_few(n, share) else text


def tier_order(tiers: Iterable[str]) -> list[str]:
    """Tiers in their fixed order; unknown names last."""
    names, known = set(tiers), (*state_names(), FREE_LOAD)
    return [tier for tier in known if tier in names] + sorted(names.difference(known))


def evidence(summary: Summary) -> Evidence:
    """How far the rows may be believed: from their verdicts, and from whether anybody measured them.

    A request that measure.budget or workload.duration ended is counted apart: the load was longer than its time, and
    nothing is wrong.
    """
    rows, made = summary.rows, how_made(summary)
    cut_off = rows.cut_off or 0
    proven = "as claimed" if made == "simulated" else "proven"
    verdicts = ((proven, rows.proven), ("contradicted", rows.contradicted), ("unproven", rows.unproven))
    counts = [*verdicts, ("error" if rows.errors == 1 else "errors", rows.errors)]
    if cut_off:
        counts.append(("cut off by the time", cut_off))
    if rows.in_incomplete_trials:
        counts.append(("in incomplete trials", rows.in_incomplete_trials))
    claimed = any(tier != FREE_LOAD for cell in summary.cells for tier in cell.tiers)
    ended, used = rows.measured - cut_off, rows.counted
    if not ended:
        longer = "Raise measure.budget or workload.duration, or ask for less."
        cure = longer if cut_off else "Look into logs/ and run it again."
        headline = "No request was finished" if cut_off else "No request was measured"
        return Evidence("bad", headline, tuple(counts), (cure,), ())
    if used == ended:
        served = "each served by the tier it claims" if made == "simulated" else "all proven"
        what = served if claimed else "all answered; a free load claims no tier for a request"
    else:
        what = f"{used:,} in the figures, {ended - used:,} left out"
    verb = "simulated, not measured" if made == "simulated" else made
    good = "good" if made in ("measured", "paced") else "simulated"
    level = good if used == ended else "warn" if used else "bad"
    headline = f"{plural(ended, 'row')} {verb}, {what}"
    return Evidence(level, headline, tuple(counts), tuple(_cures(rows)), _reasons(summary))


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
    known = rows.counted + rows.errors + rows.contradicted + rows.unproven + (rows.cut_off or 0)
    known += rows.in_incomplete_trials
    if rows.in_incomplete_trials:
        cures.append("An incomplete trial is in no figure, also with the requests that it answered.")
    if rows.measured > known:
        cures.append("Some rows claim a tier and carry no verdict: the run ended before their counters were read.")
    return cures


def _reasons(summary: Summary) -> tuple[tuple[str, int], ...]:
    total: Counter[str] = Counter()
    for cell in summary.cells:
        for figures in cell.tiers.values():
            total.update(figures.left_out_reasons)
    return tuple(total.most_common(5))


class _Pair(msgspec.Struct, frozen=True):
    """A tier against the baseline in one cell. ratio above 1: the tier is faster."""

    where: str
    ratio: Ratio

    @property
    def gain(self) -> bool:
        return self.ratio.distinct and round(self.ratio.ratio, 2) != 1

    @property
    def few(self) -> bool:
        return self.ratio.reason is not None


def findings(summary: Summary) -> list[str]:
    """What the figures say, one sentence each, computed from the summary; first, of a simulated run, whose they are."""
    measured = [cell for cell in summary.cells if any(_ttft(tier) for tier in cell.tiers.values())]
    if not measured:
        return ["No row may stand for a tier, so there is no finding."]
    lines = []
    baseline, made = _baseline(measured), in_figures(summary)
    labels = cell_labels(summary.cells)
    for tier in tier_order({tier for cell in measured for tier in cell.tiers} - {baseline, FREE_LOAD}):
        pairs = [pair for cell in measured if (pair := _pair(cell, tier, baseline, labels[cell.key]))]
        if pairs:
            lines.append(f"{_compared(tier, baseline, pairs)} ({_basis(pairs, made)}typical TTFT{_times_of(pairs)}).")
    lines += _between_two(measured, made)
    lines += _free_load(measured, labels, made)
    if not lines:
        lines = [
            f"{baseline}: {made}mean TTFT {mean_with_interval(_ttft(cell.tiers[baseline]))}"
            f"{_at(cell, baseline, labels)}."
            for cell in measured[:3]
            if baseline in cell.tiers
        ]
    return [*simulated_notes(summary), *lines, *flat_notes(summary)]


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
    ratio = ratio_interval(base.samples, own.samples, repeats=cell.repeats) if own and base else None
    return None if ratio is None else _Pair(_at(cell, tier, {cell.key: label}), ratio)


def _at(cell: CellFigures, tier: str, labels: Mapping[str, str]) -> str:
    """' at prompt_tokens=4097' in a sweep, ' at 4,097 prompt tokens' where all prompts have one length."""
    if cell.overrides:
        return f" at {labels[cell.key]}"
    group = cell.tiers[tier]
    each, rest = divmod(group.tokens.prompt, max(1, group.rows.counted))
    return f" at {each:,} prompt tokens" if each and not rest else ""


def _between_two(cells: list[CellFigures], made: str) -> list[str]:
    """The second of a sweep's two names (devices, file systems …) against the first, a sentence for each state that one
    of them serves faster somewhere."""
    found = []
    for axis in varied_axes(cells):
        if len(axis.values) != 2 or not all(isinstance(value, str) for value in axis.values):
            continue
        first, second = ({_others(cell, axis): cell for cell in cells if cell.overrides.get(axis.key) == value}
                         for value in axis.values)  # fmt: skip
        for tier in tier_order({tier for cell in cells for tier in cell.tiers} - {FREE_LOAD}):
            pairs = [
                pair for at, cell in second.items() if (pair := _against(first.get(at), cell, tier, at)) is not None
            ]
            if any(pair.gain for pair in pairs):
                than, this = (f"{axis.name}={value}" for value in axis.values)
                told = _compared(f"{tier}, {this}", than, pairs)
                found.append(f"{told} ({_basis(pairs, made)}typical TTFT{_times_of(pairs)}).")
    return found


def _others(cell: CellFigures, axis: Axis) -> str:
    """What all axes but one have at a cell: ' at concurrency=2', or '' where there is no other."""
    names = short_names(list(cell.overrides))
    others = [f"{names[key]}={value_text(value)}" for key, value in cell.overrides.items() if key != axis.key]
    return f" at {', '.join(others)}" if others else ""


def _against(first: CellFigures | None, second: CellFigures, tier: str, at: str) -> _Pair | None:
    base, own = (_ttft(cell.tiers.get(tier)) if cell else None for cell in (first, second))
    ratio = ratio_interval(base.samples, own.samples, repeats=second.repeats) if own and base else None
    return None if ratio is None else _Pair(at, ratio)


def _compared(tier: str, baseline: str, pairs: list[_Pair]) -> str:
    """Clauses: where there is no gain, up to what there is one, what the samples cannot separate, what has too few."""
    if len(pairs) == 1 and pairs[0].gain:
        return f"{tier}: {_faster(pairs[0].ratio)} than {baseline}{pairs[0].where}"
    clear = sorted((pair for pair in pairs if pair.gain), key=lambda pair: pair.ratio.ratio)
    rest = [pair for pair in pairs if not pair.gain and not pair.few]
    # One with a ratio that every sample repeats is known to be no gain.
    equal = [pair for pair in rest if pair.ratio.low == pair.ratio.high or pair.ratio.distinct]
    open_ = [pair for pair in rest if pair not in equal]
    few = [pair for pair in pairs if pair.few]
    clauses = [f"no gain{_places(equal, pairs)}"] if equal else []
    clauses += _most([pair for pair in clear if pair.ratio.ratio > 1], pairs)
    clauses += _most([pair for pair in reversed(clear) if pair.ratio.ratio < 1], pairs)
    if open_:
        between = f", {with_interval(open_[0].ratio)}" if len(pairs) == 1 else ""
        clauses.append(f"these samples cannot separate them{between}{_places(open_, pairs)}")
    if few:
        clauses.append(f"{TOO_FEW}{_counted(few)}{_places(few, pairs)}")
    return f"{tier} against {baseline}: {'; '.join(clauses)}"


def _most(pairs: list[_Pair], among: Sequence[_Pair]) -> list[str]:
    """The clause of the pairs that are all faster, or all slower, the smallest difference first; none without."""
    if not pairs:
        return []
    least, most = pairs[0], pairs[-1]
    if len(pairs) == 1 or _faster(least.ratio) == _faster(most.ratio):
        return [f"{_faster(most.ratio)}{_places(pairs, among)}"]
    return [f"{_faster(least.ratio)}{least.where}, up to {_faster(most.ratio)}{most.where}"]


def _places(pairs: Sequence[_Pair], among: Sequence[_Pair]) -> str:
    if len(pairs) == len(among) > 1:
        return f" at all {len(pairs)} points"
    return "".join(pair.where for pair in pairs[:1]) if len(pairs) == 1 else f" at {len(pairs)} of {len(among)} points"


def _counted(pairs: Sequence[_Pair]) -> str:
    """' (2 and 9; at least 3 each)' of a single pair: the baseline's samples and the tier's."""
    if len(pairs) > 1:
        return ""
    base, own = pairs[0].ratio.samples
    return f" ({base} and {own}; at least {FEWEST_SAMPLES} each)"


def _times_of(pairs: Sequence[_Pair]) -> str:
    if len(pairs) > 1:
        return f", {len(pairs)} points"
    ratio = pairs[0].ratio
    return f" {duration(ratio.typical_s)} against {duration(ratio.reference_s)}"


def _basis(pairs: Sequence[_Pair], made: str) -> str:
    """What stands in place of an interval, where there is none because nothing spreads."""
    exact = all(pair.ratio.basis == "repeats exactly" for pair in pairs)
    return "simulated, repeats exactly: " if exact else made


def _faster(ratio: Ratio) -> str:
    """'6.0× (5.1–7.2×) faster', or 'slower' by the ratio seen from the other side."""
    return f"{with_interval(ratio)} faster" if ratio.ratio >= 1 else f"{with_interval(ratio.turned)} slower"


def paired_words(ratio: Ratio, name: str) -> str:
    """'4,000 requests paired by request: at cpu=null, TTFT is 1.4× (1.3–1.5×) slower'."""
    requests = f"{plural(ratio.samples[0], 'request')} paired by request: at {name}, TTFT is"
    if ratio.reason is not None:
        return f"{requests} typically {_faster(ratio)}; {ratio.reason}"
    if not ratio.distinct:
        return f"{requests} not shown to differ, {with_interval(ratio)}"
    return f"{requests} {_faster(ratio)}"


def _free_load(cells: list[CellFigures], labels: Mapping[str, str], made: str) -> list[str]:
    loads = [(cell, ttft) for cell in cells if (ttft := _ttft(cell.tiers.get(FREE_LOAD)))]
    if not loads:
        return []
    loads.sort(key=lambda pair: pair[1].p50)
    if len(loads) > 1:
        (fast, low), (slow, high) = loads[0], loads[-1]
        if duration(low.p50) == duration(high.p50):
            return [f"The {made}median TTFT is {duration(low.p50)} at all {len(loads)} points."]
        text = (
            f"The {made}median TTFT goes from {duration(low.p50)} at {labels[fast.key]} to {duration(high.p50)} at"
            f" {labels[slow.key]} ({len(loads)} points)."
        )
        # A run that names a cell to be held against has these ratios for each of its cells.
        if slow.paired is None or any(cell.against for cell in cells):
            return [text]
        return [text, f"Of these two loads, {paired_words(slow.paired.ratio, labels[slow.key])}."]
    cell, ttft = loads[0]
    flow, hit_rate = cell.tiers[FREE_LOAD].throughput, cell.tiers[FREE_LOAD].tokens.hit_rate
    p90 = percentile_text(ttft.p90, ttft.n, 0.9)
    text = f"{made}TTFT: median {duration(ttft.p50)}, p90 {p90} over {plural(ttft.n, 'request')}"
    if flow:
        text += f"; {digits(flow.requests_per_s)} requests/s"
    if hit_rate is not None:
        text += f"; {percent(hit_rate)} of the prompt tokens came from a cache"
    return [f"{text[:1].upper()}{text[1:]}."]
