"""One load on two unlike set-ups (A and B): by what factor B is faster, and what differs. Never a verdict of equality.

    sides = read_side([a]), read_side([b])
    if are_unlike(*sides):
        found = contrast(*sides, command="harness compare a b")
        write_contrast(folder, found)              # contrast.json

Points are matched by what was asked: the load (without it, times mean nothing) and the warm state. A side that has
several points of one load and state is matched by the settings that both sides varied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.errors import NotComparable
from harness.experiment.workloads import PrefixWorkload
from harness.results import provenance
from harness.results.folder import write_atomically
from harness.results.paired import paired_times
from harness.results.provenance import Made, is_simulated
from harness.results.rows import metric_values
from harness.results.summary import repeats_exactly
from harness.stats import Ratio, paired_ratio, ratio_interval
from harness.validation.comparable import defects, is_paced, name
from harness.validation.document import SideFacts, side_facts
from harness.validation.points import Point, PointKey, Side
from harness.validation.setups import Difference, differences, setup_of
from traces.tiers import state_named

SCHEMA = 1
NAME = "contrast.json"
# Of two times of one request, the factor from which they count as unlike.
_SAME = 1.01
_METRICS = ("ttft_s", "e2e_s", "tpot_s")


class TimeRatio(msgspec.Struct, frozen=True, kw_only=True):
    """One time of a pair of points. ratio above 1: B is faster."""

    metric: str
    ratio: Ratio


class MatchedPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A point of A and the one of B that was asked the same.

    differences: beyond those that all pairs have. notes: what to know before believing the ratio.
    """

    reference: str
    candidate: str
    tier: str
    figures: tuple[TimeRatio, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A point that has no ratio, and why. side: 'A', 'B', or 'A and B'."""

    side: str
    point: str
    reason: str


class Contrast(msgspec.Struct, frozen=True, kw_only=True):
    """made: how the times of both sides came to be. differences: those of all pairs. resolved: a ratio has an interval,
    or needs none."""

    schema: int
    created_at: str
    git: provenance.Git | None
    command: str
    reference: SideFacts
    candidate: SideFacts
    made: Made
    differences: tuple[Difference, ...]
    pairs: tuple[MatchedPoint, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def resolved(self) -> bool:
        return any(figure.ratio.low is not None for pair in self.pairs for figure in pair.figures)


def are_unlike(ours: Side, theirs: Side) -> bool:
    """Whether two sides are set-ups of their own, so that the question is 'by how much', and not 'are they equal'.

    Sides whose times came to be in unlike ways (simulated, paced, measured) are never that: it is the model that is
    judged there.
    """
    if _made(ours) != _made(theirs):
        return False
    shared = [key for key in ours.points if key in theirs.points]
    return not shared or any(
        _load(ours.points[key]) == _load(theirs.points[key])
        and any(each.of_setup for each in _differences(ours, theirs, (key, key)))
        for key in shared
    )


def _made(side: Side) -> Made:
    cells = [point.cell for point in side.points.values()]
    if not is_simulated(side.engine):
        return "paced" if is_paced(side) else "measured"
    found = [cell.record.storage for cell in cells if cell.record and cell.record.storage]
    if found and all(each.kv for each in found):
        return "measured"
    return "device measured, engine simulated" if found else "simulated"


def contrast(ours: Side, theirs: Side, command: str = "") -> Contrast:
    """B against A.

    Raises NotComparable where no point of one was asked what a point of the other was, and where their times came to be
    in unlike ways.
    """
    if _made(ours) != _made(theirs):
        raise NotComparable(
            f"not comparable: one side is {_made(ours)}, the other {_made(theirs)}: a ratio would hold the model's"
            " error as well; harness compare and harness validate judge the model"
        )
    matched, left_out = _matched(ours, theirs)
    pairs: list[tuple[MatchedPoint, tuple[Difference, ...]]] = []
    for left, right in matched:
        a, b = ours.points[left], theirs.points[right]
        reasons = [*defects(a, b), *_unequal_tokens(a, b)]
        figures = () if reasons else tuple(_figures(a, b, _repeats(ours, a) and _repeats(theirs, b)))
        if not figures:
            reason = reasons[0] if reasons else "no request was answered on both sides"
            left_out.append(LeftOut(side="A and B", point=_both(left, right), reason=reason))
            continue
        pair = MatchedPoint(
            reference=left[0], candidate=right[0], tier=left[1], figures=figures, differences=(), notes=_notes(a, b)
        )
        pairs.append((pair, _differences(ours, theirs, (left, right))))
    if not pairs:
        if not left_out:
            raise NotComparable("not comparable: neither side has a measured row; look into their reports")
        first = left_out[0]
        raise NotComparable(f"not comparable: {first.side}: {first.point}: {first.reason}")
    common = tuple(each for each in pairs[0][1] if all(each in found for _, found in pairs))
    return Contrast(
        schema=SCHEMA,
        created_at=provenance.now(),
        git=provenance.git(),
        command=command,
        reference=side_facts(ours),
        candidate=side_facts(theirs),
        made=_made(ours),
        differences=common,
        pairs=tuple(
            msgspec.structs.replace(pair, differences=tuple(each for each in found if each not in common))
            for pair, found in pairs
        ),
        left_out=tuple(left_out),
    )


def write_contrast(folder: Path, found: Contrast) -> None:
    write_atomically(folder / NAME, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


# ---- matching


def _load(point: Point) -> str:
    """The same text for points that were asked the same. A prefix's seed changes its tokens, and no figure."""
    cell = point.cell
    seed = None if isinstance(cell.workload, PrefixWorkload) else cell.config.get("seed", 0)
    return msgspec.json.encode([cell.config.get("workload"), seed, cell.trace], order="sorted").decode()


def _matched(ours: Side, theirs: Side) -> tuple[list[tuple[PointKey, PointKey]], list[LeftOut]]:
    """Pairs of points that were asked the same, and the points that have no partner."""
    left, right = _by_question(ours), _by_question(theirs)
    varied = _varied(ours) & _varied(theirs)
    pairs: list[tuple[PointKey, PointKey]] = []
    left_out: list[LeftOut] = []
    for question in dict.fromkeys([*left, *right]):
        a, b = left.get(question, []), right.get(question, [])
        if not a or not b:
            side, keys, own, other = ("A", a, ours, theirs) if a else ("B", b, theirs, ours)
            left_out += [_alone(side, key, own.points[key], other) for key in keys]
        elif min(len(a), len(b)) == 1:
            pairs += [(x, y) for x in a for y in b]
        else:
            here, there = ({key: _place(side, key, varied) for key in keys} for side, keys in ((ours, a), (theirs, b)))
            found = [(x, y) for x in a for y in b if here[x] == there[y]]
            unique = [(x, y) for x, y in found if [p for p, _ in found].count(x) == [q for _, q in found].count(y) == 1]
            pairs += unique
            reason = "several points have this load, and no setting that both runs varied tells which belong together"
            for side_name, keys, used in (("A", a, [x for x, _ in unique]), ("B", b, [y for _, y in unique])):
                left_out += [
                    LeftOut(side=side_name, point=name(key), reason=f"{reason}; compare runs of one point each")
                    for key in keys
                    if key not in used
                ]
    return pairs, left_out


def _by_question(side: Side) -> dict[tuple[str, str], list[PointKey]]:
    found: dict[tuple[str, str], list[PointKey]] = {}
    for key, point in side.points.items():
        found.setdefault((_load(point), point.tier), []).append(key)
    return found


def _varied(side: Side) -> set[str]:
    return {key for point in side.points.values() for key in point.cell.overrides if not key.startswith("workload.")}


def _place(side: Side, key: PointKey, varied: set[str]) -> str:
    overrides = side.points[key].cell.overrides
    return msgspec.json.encode({axis: overrides.get(axis) for axis in sorted(varied)}).decode()


def _alone(side: str, key: PointKey, point: Point, other: Side) -> LeftOut:
    """A point whose question the other side was not asked: the reason that a person can act on."""
    there = "B" if side == "A" else "A"
    loads = [each for each in other.points.values() if _load(each) == _load(point)]
    if loads:
        cache = loads[0].cell.cache
        lacks = not point.free and cache is not None and sorted(state_named(point.tier).needs - cache.tiers)
        what = f"has no tier {' and '.join(lacks)}" if lacks else f"did not measure the state {point.tier}"
        reason = f"{there} {what} under this load"
    else:
        nearest = next(iter(other.points.values()), None)
        unlike = _first_unlike(point, nearest) if nearest else "it has no rows"
        reason = f"{there} was not asked this load: {unlike}"
    return LeftOut(side=side, point=name(key), reason=reason)


def _first_unlike(point: Point, other: Point) -> str:
    ours, theirs = ({"seed": p.cell.config.get("seed")} | (p.cell.config.get("workload") or {}) for p in (point, other))
    keys = [key for key in dict.fromkeys([*ours, *theirs]) if ours.get(key) != theirs.get(key) and key != "seed"]
    key = "kind" if "kind" in keys else keys[0] if keys else "seed"
    return f"its workload.{key} is {theirs.get(key)}, here it is {ours.get(key)}"


# ---- figures


def _differences(ours: Side, theirs: Side, keys: tuple[PointKey, PointKey]) -> tuple[Difference, ...]:
    return differences(
        setup_of(ours.manifest, ours.points[keys[0]].cell), setup_of(theirs.manifest, theirs.points[keys[1]].cell)
    )


def _repeats(side: Side, point: Point) -> bool:
    return repeats_exactly(side.engine, point.cell)


def _both(left: PointKey, right: PointKey) -> str:
    return name(left) if left == right else f"{name(left)} and {name(right)}"


def _unequal_tokens(a: Point, b: Point) -> Iterator[str]:
    """Of a warm state: prompts and outputs have to be equal. A free load is matched request by request."""
    for field in ("prompt_tokens", "output_tokens") if not a.free else ():
        seen = [sorted({getattr(row, field) for row in point.rows}) for point in (a, b)]
        if seen[0] != seen[1]:
            yield f"different token counts: {field} is {seen[0]} in A, {seen[1]} in B"


def _figures(a: Point, b: Point, repeats: bool) -> Iterator[TimeRatio]:
    for metric in _METRICS:
        if metric != "ttft_s" and all((row.output_tokens or 0) <= 1 for row in a.rows):
            continue
        if a.free:
            pairs = paired_times(a.rows, b.rows, metric)
            ratio = paired_ratio([x for x, _ in pairs], [y for _, y in pairs])
        else:
            ratio = ratio_interval(_samples(a, metric), _samples(b, metric), repeats=repeats)
        if ratio is not None:
            yield TimeRatio(metric=metric, ratio=ratio)


def _samples(point: Point, metric: str) -> list[list[float]]:
    return [metric_values(rows, metric) for turn in point.turns() for rows in turn]


def _notes(a: Point, b: Point) -> tuple[str, ...]:
    found = []
    if a.free:
        asked = {row.id for point in (a, b) for row in (*point.rows, *point.left_out)}
        both = {row.id for row in a.rows} & {row.id for row in b.rows}
        pairs = paired_times(a.rows, b.rows, "ttft_s")
        faster, slower = sum(x > y * _SAME for x, y in pairs), sum(y > x * _SAME for x, y in pairs)
        found.append(f"TTFT of {faster:,} requests is shorter in B, of {slower:,} longer (by more than 1 %)")
        if len(both) < len(asked):
            found.append(f"only {len(both):,} of {len(asked):,} requests were answered on both sides")
    else:
        hits = [sorted({row.expected_hit_tokens or 0 for row in point.rows}) for point in (a, b)]
        if hits[0] != hits[1]:
            found.append(f"the tier serves {_listed(hits[0])} tokens of the prompt in A, {_listed(hits[1])} in B")
        failed = [len(point.left_out) for point in (a, b)]
        if any(failed):
            found.append(f"{failed[0]} rows of A and {failed[1]} of B prove nothing and are left out")
    return tuple(found)


def _listed(values: Sequence[Any]) -> str:
    return " or ".join(f"{value:,}" for value in values)
