"""The answer of `harness worth`, as sentences and as a table: worth it from where on, by how much, and at what cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.experiment.units import format_bytes
from harness.report.words import UNKNOWN, duration, with_interval
from harness.results.worth import Onset, ShareInterval, Worth, WorthPoint, outcome_of
from harness.stats import FEWEST_SAMPLES
from traces.tiers import state_named

_EXACT = "simulated, repeats exactly"


def answer(worth: Worth) -> list[str]:
    """Sentences: the last state, which is the slowest to load from, comes first and in full."""
    lines = [warning] if (warning := _warning(worth)) else []
    onsets = list(reversed(worth.onsets))
    for onset in onsets:
        points = [point for point in worth.points if point.state == onset.state]
        lines.append(" ".join([_onset(onset, points), *_by_how_much(points), *_hit_rate(points)]))
    return [*lines, *_miss(worth), *_writes(worth)]


def headings(worth: Worth) -> tuple[str, ...]:
    speedup = f"speedup ({_EXACT if _is_exact(worth) else '95 %'})"
    return ("from", "tokens", "without", "with", speedup, "break-even hit rate", "samples")


def _is_exact(worth: Worth) -> bool:
    return any(point.speedup and point.speedup.basis == "repeats exactly" for point in worth.points)


def table(worth: Worth) -> list[tuple[str, ...]]:
    """A row a point, in the order of `headings`; the last two may be left out where there is no room."""
    return [
        (
            label(point.state),
            f"{point.tokens:,}",
            duration(ratio.reference_s if (ratio := point.speedup) else None),
            duration(ratio.typical_s if ratio else None),
            point.outcome if point.outcome == "too few to compare" or ratio is None else with_interval(ratio),
            UNKNOWN if point.hit_rate is None else _share(point.hit_rate),
            " / ".join(f"{number}" for number in ratio.samples) if ratio else "0",
        )
        for point in worth.points
    ]


def label(state: str) -> str:
    return state_named(state).label


def _warning(worth: Worth) -> str | None:
    unfinished = "" if worth.complete else "The run is not complete: harness worth --resume goes on. "
    if worth.simulated:
        exact = " Ratios have no interval: a simulation repeats exactly." if _is_exact(worth) else ""
        return (
            f"{unfinished}Simulated with {worth.preset}: a prediction for that machine, not a measurement of"
            f" yours.{exact}"
        )
    if worth.accelerator:
        return f"{unfinished}Paced by {worth.accelerator}: real cache server and storage, at that GPU's pace."
    return unfinished.strip() or None


def _onset(onset: Onset, points: Sequence[WorthPoint]) -> str:
    """'disk, page cache cold: worth it from 512 tokens on, the shortest length measured.'"""
    where, shortest = label(onset.state), points[0].tokens
    if onset.from_tokens is None:
        return f"{where}: {_never(onset, points)}"
    if onset.above_tokens is not None:
        between = f"between {onset.above_tokens:,} and {onset.from_tokens:,} tokens"
        if onset.estimate_tokens is not None:
            return f"{where}: worth it from about {onset.estimate_tokens:,} tokens on; break-even lies {between}."
        return (
            f"{where}: worth it from {onset.from_tokens:,} tokens on; break-even lies {between}, not resolved further."
        )
    if onset.from_tokens == shortest:
        return f"{where}: worth it from {shortest:,} tokens on, the shortest length measured."
    below = [p for p in points if p.tokens < onset.from_tokens]
    return f"{where}: worth it from {onset.from_tokens:,} tokens on; {_open(below)}."


def _never(onset: Onset, points: Sequence[WorthPoint]) -> str:
    longest = points[-1].tokens
    if onset.too_few_tokens:
        return f"{_open(points)}."
    if all(point.outcome == "slower" for point in points):
        return f"not worth it up to {longest:,} tokens, the longest length measured."
    return f"not shown to be worth it at {longest:,} tokens, the longest length measured; {_open(points)}."


def _open(points: Sequence[WorthPoint]) -> str:
    """What lengths without a gain say; below three samples that is nothing, and never 'no difference'."""
    parts = []
    for outcome, text in (
        ("too few to compare", f"too few to compare (fewer than {FEWEST_SAMPLES} samples a side)"),
        ("no clear difference", "these samples show no clear difference"),
        ("slower", "slower"),
        ("faster", "faster"),
    ):
        found = [f"{point.tokens:,}" for point in points if point.outcome == outcome]
        if found:
            parts.append(f"{text} at {', '.join(found)} tokens")
    return "; ".join(parts)


def _by_how_much(points: Sequence[WorthPoint]) -> Iterator[str]:
    """The longest length whose sides can be compared."""
    known = [point for point in points if point.outcome != "too few to compare"]
    if not known or (ratio := known[-1].speedup) is None:
        return
    times = f"{duration(ratio.typical_s)} against {duration(ratio.reference_s)}"
    if known[-1].outcome == "no clear difference":
        yield f"At {known[-1].tokens:,} tokens {with_interval(ratio)}: {times}."
    elif ratio.ratio >= 1:
        yield f"At {known[-1].tokens:,} tokens {with_interval(ratio)} faster: {times}."
    else:
        yield f"At {known[-1].tokens:,} tokens {with_interval(ratio.turned)} slower: {times}."


def _hit_rate(points: Sequence[WorthPoint]) -> Iterator[str]:
    found = [point for point in points if point.hit_rate is not None]
    if found and (share := found[-1].hit_rate) is not None:
        yield f"It breaks even once {_share(share)} of such requests hit."


def _share(share: ShareInterval) -> str:
    """'3.1 % (0.0–5.2 %)'."""
    low, middle, high = (f"{min(value, 9.99) * 100:.1f}" for value in (share.low, share.share, share.high))
    return f"{middle} %" if low == high else f"{middle} % ({low}{UNKNOWN}{high} %)"


def _miss(worth: Worth) -> Iterator[str]:
    """What a request that hits nothing pays for the cache server."""
    if worth.against != "no cache server":
        yield (
            "Every time is against a miss on the running cache server, which cannot be left out: what the server costs"
            " a miss, and so the break-even hit rate, is not known."
        )
        return
    if worth.simulated and not worth.misses:
        yield (
            "What the cache server costs a miss, and so the break-even hit rate, is not modelled: the preset's steps"
            " take no time to store."
        )
        return
    known = [miss for miss in worth.misses if miss.slowdown.low is not None]
    if not known:
        yield "What a miss costs with the cache server: too few to compare."
        return
    miss = known[-1]
    # The ratio is that of a speedup of the miss with the server, seen from the side without one.
    what = f"at {miss.tokens:,} tokens a miss with the cache server takes {with_interval(miss.slowdown)} of one without"
    says = {
        "faster": "The cache server slows misses",
        "slower": "The cache server does not slow misses",
        "no clear difference": "These samples do not show that the cache server slows misses",
    }[outcome_of(miss.slowdown)]
    yield f"{says}: {what}."


def _writes(worth: Worth) -> Iterator[str]:
    if worth.writes is None:
        return
    each, longest = worth.writes.bytes_per_token, max(point.tokens for point in worth.points)
    share = worth.writes.stored_share
    stored = "" if share is None else f" {share * 100:.1f} % of the computed tokens were stored."
    yield (
        f"Cost in writes: {format_bytes(each)} for each token stored, {format_bytes(each * longest)} for a new prompt"
        f" of {longest:,} tokens.{stored}"
    )
