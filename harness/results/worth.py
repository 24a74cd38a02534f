"""Whether a cache behind the engine is worth it, from the rows of a run that `harness worth` planned.

Every time is compared on its logarithm, sample by sample (stats.ratio_interval). The break-even hit rate is the share
of requests that have to hit before the mean TTFT is what it is without the cache server: a miss may cost more with it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from harness.engines.sim.settings import SimSettings
from harness.experiment.workloads import PrefixWorkload
from harness.records import Sample
from harness.results.manifest import CellEntry, Manifest
from harness.results.provenance import is_simulated
from harness.results.summary import counted, repeats_exactly
from harness.stats import FEWEST_SAMPLES, Ratio, ratio_interval
from traces.request import RequestRecord
from traces.tiers import all_states, from_storage, state_names

# What the name of a run that `harness worth` made begins with.
RUN_NAME = "worth-"
Outcome = Literal["faster", "slower", "no clear difference", "too few to compare"]
# By sample, the TTFTs of its requests.
SampleTimes = dict[int, list[float]]
_DRAWS = 20_000


class ShareInterval(msgspec.Struct, frozen=True, kw_only=True):
    """A share with its 95 % interval; all of them 0 or more, and above 1 where no share is enough."""

    share: float
    low: float
    high: float


class WorthPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One state at one length, against recomputing without the cache server.

    tokens: of the prefix. speedup: None where a side has no row that counts. hit_rate: the break-even one; None where
    the state is not faster, or nothing says what a miss costs without the cache server.
    """

    state: str
    tokens: int
    outcome: Outcome
    speedup: Ratio | None
    hit_rate: ShareInterval | None


class Miss(msgspec.Struct, frozen=True, kw_only=True):
    """What a miss costs with the cache server, at one length. slowdown above 1: slower than without the server.

    Of a simulation, only where the preset's steps take time to store: elsewhere both misses take the same time.
    """

    tokens: int
    slowdown: Ratio


class Onset(msgspec.Struct, frozen=True, kw_only=True):
    """From which length on a state pays.

    from_tokens: the shortest measured length from which on every one is faster; None: there is none. above_tokens: the
    longest one below it that is slower for certain, so that break-even lies between the two; None: there is none.
    estimate_tokens: break-even between these two neighbours, where ratio and length are straight on log axes; None
    where a length between them is not clear. unclear_tokens: lengths that show no clear difference.
    too_few: lengths without samples enough.
    """

    state: str
    from_tokens: int | None
    above_tokens: int | None
    estimate_tokens: int | None
    unclear_tokens: tuple[int, ...]
    too_few_tokens: tuple[int, ...]


class Writes(msgspec.Struct, frozen=True, kw_only=True):
    """What storing costs: the bytes of a token's KV, and how many prompt tokens were stored of those computed.

    stored_share: by the cache server's counters; None where it reports none.
    """

    bytes_per_token: int
    stored_share: float | None


class Worth(msgspec.Struct, frozen=True, kw_only=True):
    """The answer's figures. against: what the states are compared with. preset: the simulator's, None where it is real.

    accelerator: what stood for a real engine's GPU, in words; None: nothing did.

    complete: whether the run measured everything that it planned.
    """

    run_id: str
    engine: str
    simulated: bool
    preset: str | None
    accelerator: str | None
    against: Literal["no cache server", "a miss with the cache server"]
    complete: bool
    points: tuple[WorthPoint, ...]
    misses: tuple[Miss, ...]
    onsets: tuple[Onset, ...]
    writes: Writes | None


def is_worth(manifest: Manifest) -> bool:
    """Whether `harness worth` made the run: by its name, and by cells that `judge` can read."""
    if not manifest.name.startswith(RUN_NAME):
        return False
    planned = all(isinstance(cell.workload, PrefixWorkload) and cell.cache for cell in manifest.cells)
    return planned and any(cell.cache and cell.cache.cpu is not None for cell in manifest.cells)


def judge(manifest: Manifest, rows: Iterable[RequestRecord], samples: Iterable[Sample]) -> Worth:
    """The figures of a run whose cells are worth_cells (harness/experiment/worth.py)."""
    with_cache = {_prefix_tokens(cell): cell for cell in manifest.cells if cell.cache and cell.cache.cpu is not None}
    without = {_prefix_tokens(cell): cell for cell in manifest.cells if cell.cache and cell.cache.cpu is None}
    times = _times(rows)
    [computed] = [state.name for state in all_states() if state.served_by is None]
    points, misses = [], []
    repeats = all(repeats_exactly(manifest.engine, cell) for cell in manifest.cells)
    simulated = is_simulated(manifest.engine)
    for tokens, cell in sorted(with_cache.items()):
        miss = times[cell.key, computed]
        base = times[without[tokens].key, computed] if without else miss
        slowdown = _ratio(miss, base, repeats) if without else None
        known = slowdown is not None and not (simulated and math.isclose(slowdown.ratio, 1.0))
        if slowdown is not None and known:
            misses.append(Miss(tokens=tokens, slowdown=slowdown))
        measured = (state for state in cell.experiment.measure.tiers if state != computed)
        points += [
            _point(state, tokens, base, times[cell.key, state], miss if known else None, repeats) for state in measured
        ]
    states = sorted({point.state for point in points}, key=state_names().index)
    points.sort(key=lambda point: (state_names().index(point.state), point.tokens))
    first = next(iter(with_cache.values()))
    return Worth(
        run_id=manifest.run_id,
        engine=manifest.engine,
        simulated=simulated,
        preset=first.experiment.engines.of(SimSettings).hardware if simulated else None,
        accelerator=str(first.resolved.accelerator) if first.resolved and first.resolved.accelerator else None,
        against="no cache server" if without else "a miss with the cache server",
        complete=manifest.status == "complete",
        points=tuple(points),
        misses=tuple(misses),
        onsets=tuple(onset([point for point in points if point.state == state]) for state in states),
        writes=_writes(with_cache, samples, computed) if any(map(from_storage, states)) else None,
    )


def _prefix_tokens(cell: CellEntry) -> int:
    workload = cell.workload
    assert isinstance(workload, PrefixWorkload), "harness worth plans prefix workloads only"
    return workload.prompt_tokens - 1


def _times(rows: Iterable[RequestRecord]) -> Mapping[tuple[str, str], SampleTimes]:
    """By cell and state, the TTFTs of the rows that count."""
    found: defaultdict[tuple[str, str], SampleTimes] = defaultdict(dict)
    for row in rows:
        if row.phase == "measure" and row.expected_tier and counted(row) and row.ttft_s is not None:
            found[row.cell, row.expected_tier].setdefault(row.sample, []).append(row.ttft_s)
    return found


def _ratio(reference: SampleTimes, compared: SampleTimes, repeats: bool = False) -> Ratio | None:
    return ratio_interval(list(reference.values()), list(compared.values()), repeats=repeats)


def _point(
    state: str, tokens: int, base: SampleTimes, hit: SampleTimes, miss: SampleTimes | None, repeats: bool
) -> WorthPoint:
    """miss None: nothing says what a miss costs more than `base`. repeats: a deterministic simulation."""
    speedup = _ratio(base, hit, repeats)
    outcome = outcome_of(speedup)
    rate = break_even_share(base, miss, hit) if miss and outcome == "faster" else None
    return WorthPoint(state=state, tokens=tokens, outcome=outcome, speedup=speedup, hit_rate=rate)


def outcome_of(speedup: Ratio | None) -> Outcome:
    """What an interval of a speedup says."""
    if speedup is None or speedup.low is None or speedup.high is None:
        return "too few to compare"
    if speedup.low > 1:
        return "faster"
    return "slower" if speedup.high < 1 else "no clear difference"


def onset(points: Sequence[WorthPoint]) -> Onset:
    """points: one state's, by ascending length."""
    first = len(points)
    while first and points[first - 1].outcome == "faster":
        first -= 1
    below = max((n for n in range(first) if points[n].outcome == "slower"), default=None)
    pays = first < len(points)
    estimate = None
    if pays and below is not None and below == first - 1:
        estimate = _crossing(points[below], points[first])
    return Onset(
        state=points[0].state,
        from_tokens=points[first].tokens if pays else None,
        above_tokens=points[below].tokens if pays and below is not None else None,
        estimate_tokens=estimate,
        unclear_tokens=tuple(p.tokens for p in points if p.outcome == "no clear difference"),
        too_few_tokens=tuple(p.tokens for p in points if p.outcome == "too few to compare"),
    )


def _crossing(slower: WorthPoint, faster: WorthPoint) -> int:
    """The length at which the ratio is 1, on a straight line between two points on log axes."""
    assert slower.speedup is not None and faster.speedup is not None
    low, high = math.log(slower.speedup.ratio), math.log(faster.speedup.ratio)
    part = -low / (high - low)
    return round(float(slower.tokens * math.exp(part * math.log(faster.tokens / slower.tokens))))


def break_even_share(base: SampleTimes, miss: SampleTimes, hit: SampleTimes) -> ShareInterval | None:
    """Which share of requests has to hit so that their mean TTFT is that of `base`; None with too few samples.

    Each side's typical time is drawn from Student's t of its logs (one value a sample), and the share's interval is
    that of the draws: 2.5 % of them lie beyond either end.
    """
    if min(len(base), len(miss), len(hit)) < FEWEST_SAMPLES:
        return None
    rng = np.random.default_rng(0)
    drawn, middle = zip(*(_typical(side, rng) for side in (base, miss, hit)), strict=True)
    # Not interpolated: some shares may be infinite.
    shares = np.sort(_share(*drawn))
    low, high = shares[round(0.025 * _DRAWS)], shares[round(0.975 * _DRAWS) - 1]
    return ShareInterval(share=float(_share(*middle)), low=float(low), high=float(high))


def _typical(side: SampleTimes, rng: np.random.Generator) -> tuple[Any, Any]:
    """Draws of a side's typical time in seconds, and that time itself."""
    logs = np.array([np.log(values).mean() for values in side.values()])
    error = logs.std(ddof=1) / math.sqrt(len(logs))
    return np.exp(logs.mean() + error * rng.standard_t(len(logs) - 1, _DRAWS)), np.exp(logs.mean())


def _share(base: Any, miss: Any, hit: Any) -> Any:
    """(miss - base) / (miss - hit): at 0 where a miss costs nothing more; infinite where a hit is no quicker."""
    gain = miss - hit
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.maximum(0.0, np.where(gain > 0, (miss - base) / gain, np.inf))


def _writes(cells: Mapping[int, CellEntry], samples: Iterable[Sample], computed: str) -> Writes | None:
    """From the samples that computed their whole prompt: what they made the cache server store."""
    first = next((cell.resolved for cell in cells.values() if cell.resolved), None)
    if first is None or not first.kv_bytes_per_token:
        return None
    tokens_of = {cell.key: tokens for tokens, cell in cells.items()}
    chunks = tokens = 0
    reported = True
    for sample in samples:
        if sample.tier == computed and sample.cell in tokens_of and sample.verdict == "proven":
            reported &= sample.observed.stores_ended is not None
            chunks += sample.observed.stores_ended or 0
            tokens += sample.observed.computed_tokens or 0
    share = chunks * (first.chunk_tokens or 0) / tokens if reported and tokens else None
    return Writes(bytes_per_token=first.kv_bytes_per_token, stored_share=share)
