"""Fits a calibration's constants to measured times. A module of its own, as it needs numpy and scipy.

A time is linear in the constants (bandwidths by their inverse) as long as the same events wait for each other. For a
lone request on a device without a limit that is always so, and `design` says how often each constant counts. For other
points the simulator's derivative is the design; the fit repeats until it no longer changes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.special import stdtrit

from simulator.calibration import (
    BESIDE,
    CONSTANTS,
    LAUNCH,
    RESPONSE_STORE,
    RESPONSE_TOKEN,
    STEP,
    Assumption,
    Calibration,
    FittedOn,
    on_slower_cores,
)  # fmt: skip
from simulator.host_spread import host_spread
from simulator.launches import computed_steps, lone_decoding_s
from simulator.models import load_model
from simulator.point_costs import design, for_each_request, is_linear, lone_s, prefill_steps, slope_of, wakes_server
from simulator.point_noise import relative_noise
from simulator.probing import simulated_s
from traces.tiers import state_named

SIGNIFICANT_DIGITS = 6
_ROUNDS = 12
# Shares of the step that the derivative suggests; the last one does not move at all.
_SHARES = (1.0, 0.5, 0.25, 0.1, 0.0)
# Small against such constants: the derivative is one-sided, and no event changes what it waits for.
_STEPS = {"bytes_per_s": 1e-13, "attention_s": 1e-12, "attention_context_s": 1e-12, "context_s": 1e-10, "token_s": 1e-9}
_STEP_S = 1e-6
# The shares of a lone request's constant costs from which a fit starts; the one step gets the rest.
_PARTS = (
    (0.2, 0.8, 0.0, 0.0), (0.5, 0.5, 0.0, 0.0), (0.2, 0.2, 0.3, 0.3), (0.2, 0.4, 0.2, 0.2), (0.35, 0.15, 0.35, 0.15),
    (0.15, 0.15, 0.15, 0.55), (0.0, 0.0, 0.0, 0.0),
)  # fmt: skip
# Relative: what the model is taken to miss a point by, however precise the measurement, until a fit tells.
_MODEL_ERROR = 0.02
# The least that a fit is believed to miss lone points by: another start of an engine differs by more.
_LEAST_ERROR = 0.005
# Of errors that are spread normally, the standard deviation over the median of their sizes.
_OF_MEDIAN = 1.4826
# Huber's bound, in what a point may be off by: of residuals that spread as assumed, it leaves 95 % of the efficiency.
_HUBER = 1.345 * _MODEL_ERROR
_SOUGHT_LAST = Assumption(value=0.0, why="sought once all else is found")
_AS_PARSING = Assumption(value=0.0, why="no point tells it from request_token_s")
_UNBOUND = Assumption(value=0.0, why="no launch bounds a step")
# From so many of the places that a fit without the host's spread has found, one with it sets out.
_VARIED_STARTS = 3
# So often a fit takes the host's spread anew, until it finds the one before again within this share.
_SPREAD_ROUNDS = 3
_SAME_SPREAD = 0.02

Array = NDArray[np.float64]


class Fit(NamedTuple):
    """Constants; for each point, the predicted time and the relative error of a fit without it; 95 % intervals; how the
    host's times vary (Calibration.host_spread)."""

    constants: dict[str, float | None]
    fitted_s: list[float]
    loo_error: list[float]
    intervals: dict[str, tuple[float, float]]
    host_spread: float = 0.0


def fit(
    fitted_on: FittedOn,
    assumed: Mapping[str, Assumption],
    *,
    host_varies: bool = False,
    **traits: bool,
) -> Fit:
    """Constants by least squares of the relative error, none below 0; null where the points say nothing.

    Relative, because a time to first token of 30 ms has to be as right as one of 3 s; a point weighs what its noise
    allows (`_weights`). A bandwidth is .inf where the fit finds no time per byte, a shared one where nothing showed it.

    host_varies: whatever else a lone hit in the engine's own tier takes repeats, so that the spread of its times is the
    host's. Requests sent together then run in several orders, and points of such are fitted by the middle of them. What
    such a point misses can be an order that the model lacks, so that it pulls no harder than one missed by Huber's
    bound. Then points weigh what a first fit misses their kind by, lone or sent together, so that the latter do not
    bend what lone requests tell.
    traits: what waits for what (Calibration.synchronous_loads and those after it); what is not named is false. Where
    steps are launched, a lone sequence decodes no faster than that: either its steps take launch_s, or no step does.
    """
    asked = Calibration(
        name="fit", source="", date="", machine="", method="", fitted_on=fitted_on, assumed={},
        constants=dict.fromkeys(CONSTANTS),
    )  # fmt: skip
    asked = msgspec.structs.replace(asked, **traits)
    assumed = {LAUNCH: _UNBOUND, RESPONSE_TOKEN: _AS_PARSING, **assumed}
    # Below a bound that is given, nothing tells what steps compute.
    given = assumed[LAUNCH].value and not set(STEP) <= set(assumed)
    found = _fit(asked, {**assumed, LAUNCH: _UNBOUND} if given else assumed, host_varies, {})
    launch_s = lone_decoding_s(fitted_on.points) if asked.launches_steps else None
    if given or launch_s is None or assumed[LAUNCH] is not _UNBOUND:
        return _fit(asked, assumed, host_varies, found.constants) if given else found
    bounding = {**assumed, LAUNCH: Assumption(value=_rounded(launch_s), why="a lone sequence decodes so")}
    bound = _fit(asked, bounding, host_varies, found.constants)
    weights = _MODEL_ERROR / np.hypot(_MODEL_ERROR, relative_noise(fitted_on.points))
    measured = np.array([point.measured_s for point in fitted_on.points])
    return min(found, bound, key=lambda fit: float(np.sum((weights * (fit.fitted_s / measured - 1)) ** 2)))


def _fit(
    asked: Calibration, assumed: Mapping[str, Assumption], host_varies: bool, near: Mapping[str, float | None]
) -> Fit:
    """near: where launches bound steps, it sets out from these constants."""
    problem = _Problem(asked, {RESPONSE_STORE: _SOUGHT_LAST, **assumed})
    # A bound that nothing has reached shows no derivative: it is sought from starts at which it binds as well.
    best = _descend(problem, problem.first(near))
    lone, ends = problem.of_lone(best), [best]
    for parts, bound in itertools.product(_PARTS, problem.bounds()):
        for near_to in (best, lone):
            ends.append(_descend(problem, problem.start(near_to, bound, parts)))
            best = min(best, ends[-1], key=problem.loss)
    problem, ends = _with_stores(asked, assumed, ends)
    best = min(ends, key=problem.loss)
    if host_varies:
        spread = problem.spread_of_host(best)
        # What a fit takes for parsing, waiting and answering follows the spread, and the spread follows that.
        for _ in range(_SPREAD_ROUNDS):
            asked = msgspec.structs.replace(asked, host_spread=spread)
            problem = _Problem(asked, assumed, huber=_HUBER)
            ends = [_descend(problem, end) for end in sorted(ends, key=problem.loss)[:_VARIED_STARTS]]
            best = min(ends, key=problem.loss)
            spread = problem.spread_of_host(best)
            if math.isclose(spread, problem.host_spread, rel_tol=_SAME_SPREAD):
                break
        if (errors := _errors(problem, best)) != (_MODEL_ERROR, _MODEL_ERROR):
            problem = _Problem(asked, assumed, huber=_HUBER, errors=errors)
            ends += [_descend(problem, end) for end in sorted(ends, key=problem.loss)[:_VARIED_STARTS]]
            best = min(ends, key=problem.loss)
    offset, matrix = problem.linear(best)
    around = [_Around(end, problem.relative(end), *problem.linear(end)) for end in ends]
    shown = {name for name, column in zip(problem.free, matrix.T, strict=True) if np.any(column)}
    return Fit(
        constants=problem.stated(best, shown),
        fitted_s=[float(s) for s in problem.relative(best) * problem.measured],
        loo_error=[_left_out(problem, around, index) for index in range(len(offset))],
        intervals=_intervals(problem, offset, matrix, best),
        host_spread=problem.host_spread,
    )


def _with_stores(
    asked: Calibration, assumed: Mapping[str, Assumption], ends: Sequence[Array]
) -> tuple[_Problem, list[Array]]:
    """Goes on from the best ends with what a store adds to a first token: among all else, a descent takes it for a part
    of the step, and stops early."""
    problem = _Problem(asked, assumed)
    if RESPONSE_STORE not in problem.free:
        return problem, list(ends)
    at = problem.free.index(RESPONSE_STORE)
    starts = sorted((np.insert(end, at, 0.0) for end in ends), key=problem.loss)
    return problem, [*starts, *(_descend(problem, start) for start in starts[:_VARIED_STARTS])]


def _errors(problem: _Problem, slopes: Array) -> tuple[float, float]:
    """What the model misses lone points by, and points of requests sent together: by the median, beyond their noise.
    The latter never by less than a first fit assumes, the former never by more.
    """
    missed = np.abs(problem.relative(slopes) - 1)

    def typical(these: NDArray[np.bool_]) -> float:
        if not np.any(these):
            return _MODEL_ERROR
        spread, noise = _OF_MEDIAN * float(np.median(missed[these])), float(np.median(problem.noise[these]))
        return math.sqrt(max(0.0, spread**2 - noise**2))

    lone = min(_MODEL_ERROR, max(_LEAST_ERROR, typical(~problem.together)))
    return lone, max(_MODEL_ERROR, typical(problem.together))


def _descend(problem: _Problem, slopes: Array) -> Array:
    """Gauss-Newton, with other steps where a whole one leads uphill."""
    loss = problem.loss(slopes)
    for _ in range(_ROUNDS):
        offset, matrix = problem.linear(slopes)
        tries = _tries(problem, slopes, offset, matrix, problem.pulls(offset + matrix @ slopes))
        found = next((found for found in tries if problem.loss(found) < loss * (1 - 1e-9)), None)
        if found is None:
            break
        slopes, loss = found, problem.loss(found)
    return slopes


def _tries(problem: _Problem, slopes: Array, offset: Array, matrix: Array, weights: Array) -> list[Array]:
    """Where to look next. With what the front end takes, it changes by jumps what waits for what: all else moves, too,
    while that stays."""
    kept = problem.host
    rest = slopes.copy()
    rest[~kept] = _solve(matrix[:, ~kept], 1 - offset - matrix[:, kept] @ slopes[kept], weights)
    targets = (_solve(matrix, 1 - offset, weights), rest)
    return [slopes + share * (target - slopes) for target in targets for share in _SHARES]


class _Problem:
    """Points and unknowns. A slope is a constant, or the inverse of one that is a bandwidth."""

    def __init__(
        self,
        asked: Calibration,
        assumed: Mapping[str, Assumption],
        huber: float = math.inf,
        errors: tuple[float, float] = (_MODEL_ERROR, _MODEL_ERROR),
    ) -> None:
        fitted_on = asked.fitted_on
        self.host_spread, self.huber = asked.host_spread, huber
        self._asked, self.fitted_on, self.assumed, self.model = asked, fitted_on, assumed, load_model(fitted_on.model)
        self.measured = np.array([point.measured_s for point in fitted_on.points])
        self.noise = relative_noise(fitted_on.points)
        self.together = np.array([point.concurrency > 1 for point in fitted_on.points], dtype=bool)
        # The inverse of what a point may be off by: its noise, and what the model is taken to miss it by (lone ones,
        # and those of requests sent together).
        self.weights: Array = _MODEL_ERROR / np.hypot(np.where(self.together, errors[1], errors[0]), self.noise)
        self.lone = [is_linear(point, fitted_on) for point in fitted_on.points]
        waits = asked.synchronous_loads
        self.rows = [design(point, fitted_on, synchronous_loads=waits) for point in fitted_on.points]
        self.steps = [prefill_steps(point, fitted_on) for point in fitted_on.points]
        self.woken = [wakes_server(point, fitted_on) for point in fitted_on.points]
        self.free = [n for n in CONSTANTS if n not in assumed and any(n in row for row in self.rows)]
        self.telling = [self._telling(index) for index in range(len(self.rows))]
        self.always = for_each_request(fitted_on)
        self.host = np.array([n in self.always or n.startswith("request_") for n in self.free])
        # A descent asks for the same slopes again and again.
        self._simulated_s: dict[tuple[int | float, ...], float] = {}
        self._last: tuple[dict[str, float], Calibration] | None = None

    def by_name(self, slopes: Array) -> dict[str, float]:
        """All slopes; those that nothing tells are 0."""
        named = dict.fromkeys(CONSTANTS, 0.0) | dict(zip(self.free, map(float, slopes), strict=True))
        named |= {n: slope_of(n, a.value) for n, a in self.assumed.items() if a.value is not None}
        return named | {n: named[a.same_as] for n, a in self.assumed.items() if a.same_as is not None}

    def spread_of_host(self, slopes: Array) -> float:
        points = zip(self.fitted_on.points, self.rows, self.lone, strict=True)
        lone = [(point, row) for point, row, alone in points if alone]
        return _rounded(host_spread(lone, self.by_name(slopes), self.fitted_on))

    def relative(self, slopes: Array) -> Array:
        """What the slopes say of each point, over what was measured."""
        named = self.by_name(slopes)
        says = [self._says(index, named) for index in range(len(self.rows))]
        return np.array([s / point.measured_s for s, point in zip(says, self.fitted_on.points, strict=True)])

    def _says(self, index: int, named: dict[str, float]) -> float:
        if self.lone[index]:
            slopes = on_slower_cores(named, self.fitted_on.points[index].host_time)
            return lone_s(self.rows[index], self.steps[index], slopes, woken=self.woken[index])
        asked = (index, *named.values())
        if asked not in self._simulated_s:
            self._simulated_s[asked] = simulated_s(self.fitted_on.points[index], self._with(named), self.model)
        return self._simulated_s[asked]

    def _with(self, named: dict[str, float]) -> Calibration:
        """The calibration that has these slopes, checked once for all points that are asked about it."""
        if self._last is None or self._last[0] is not named:
            constants = {n: _constant(n, slope) for n, slope in named.items()}
            self._last = named, msgspec.structs.replace(self._asked, constants=constants)
        return self._last[1]

    def loss(self, slopes: Array) -> float:
        return float(np.sum(self.losses(self.relative(slopes))))

    def losses(self, relative: Array) -> Array:
        """Of each point: the square of its residual up to Huber's bound, a straight line beyond it."""
        sizes = np.abs(self.weights * (relative - 1))
        if math.isinf(self.huber):
            return sizes**2
        return np.where(sizes <= self.huber, sizes**2, self.huber * (2 * sizes - self.huber))

    def pulls(self, relative: Array) -> Array:
        """The weights by which least squares pull as `losses` do there."""
        sizes = np.abs(self.weights * (relative - 1))
        pulls: Array = self.weights / np.sqrt(np.maximum(1.0, sizes / self.huber))
        return pulls

    def first(self, near: Mapping[str, float | None]) -> Array:
        """Slopes of 0, but for a device whose limit is known: below that limit, its own bandwidth would never show."""
        if near:
            known = self.by_name(np.array([slope_of(n, s) if (s := near[n]) else 0.0 for n in self.free]))
            known |= computed_steps(self.fitted_on.points, self.rows, known)
            return np.array([known[n] for n in self.free])
        limits = [p.device_bytes_per_s for p in self.fitted_on.points if p.device_bytes_per_s]
        return np.array([2 / max(limits) if limits and n == "disk.read.bytes_per_s" else 0.0 for n in self.free])

    def of_lone(self, slopes: Array) -> Array:
        """Slopes that fit lone points alone, which no order of events bends; where those say nothing, as given."""
        lone = np.array(self.lone)
        offset, matrix = self.linear(slopes)
        matrix, target = matrix[lone], 1 - offset[lone]
        told = np.any(matrix != 0, axis=0)
        found = slopes.copy()
        if np.any(told):
            rest = target - matrix[:, ~told] @ slopes[~told]
            found[told] = _solve(matrix[:, told], rest, self.weights[lone])
        return found

    def bounds(self) -> list[tuple[str, ...]]:
        """Which shared bandwidths may bind: none, each alone, all."""
        shared = tuple(name for name in self.free if name.endswith("shared_bytes_per_s"))
        return list(dict.fromkeys([(), *((name,) for name in shared), shared]))

    def start(self, slopes: Array, bound: tuple[str, ...], parts: tuple[float, ...]) -> Array:
        """Slopes changed so that what is bound moves no more than one transfer does alone, and that what every request
        takes is made up otherwise: lone ones cannot tell of what."""
        named = self.by_name(slopes)
        always_s = sum(named[name] * times for name, times in self.always.items())
        shares = zip(self.always.items(), parts, strict=True)
        named |= {name: part * always_s / times for (name, times), part in shares if times}
        named["step_s"] += (1 - sum(parts)) * always_s
        named |= {name: named[name.replace("shared_", "")] for name in bound}
        return np.array([named[name] for name in self.free])

    def linear(self, slopes: Array) -> tuple[Array, Array]:
        """Offset and matrix of `relative` around the slopes: relative = offset + matrix @ slopes."""
        here = self.relative(slopes)
        matrix = np.zeros((len(here), len(slopes)))
        for column, name in enumerate(self.free):
            by_s = next((step for ending, step in _STEPS.items() if name.endswith(ending)), _STEP_S)
            beside = slopes.copy()
            beside[column] += by_s
            named = self.by_name(beside)
            for index, telling in enumerate(self.telling):
                if name not in telling:
                    continue
                matrix[index, column] = (self._says(index, named) / self.measured[index] - here[index]) / by_s
        return here - matrix @ slopes, matrix

    def _telling(self, index: int) -> set[str]:
        """Constants that may move a point's time: of a lone one those in its row, through what is taken to equal them
        too; of others all, but for those of devices where the requests read none."""
        row, point = self.rows[index], self.fitted_on.points[index]
        told = set(row) | {a.same_as for n, a in self.assumed.items() if a.same_as is not None and n in row}
        if self.lone[index]:
            return told
        reads = state_named(point.tier).from_device is not None
        return told | {name for name in self.free if reads or "." not in name}

    def stated(self, slopes: Array, shown: set[str]) -> dict[str, float | None]:
        """The constants that a file states."""
        found: dict[str, float | None] = dict.fromkeys(CONSTANTS) | dict.fromkeys(BESIDE, 0.0)
        found |= {
            n: _rounded(_constant(n, float(s))) for n, s in zip(self.free, slopes, strict=True) if n in shown or s == 0
        }
        found |= {n: None for n in self.free if n not in shown and not n.endswith("shared_bytes_per_s")}
        found |= {n: a.value for n, a in self.assumed.items() if a.value is not None}
        return found | {n: found[a.same_as] for n, a in self.assumed.items() if a.same_as is not None}


def _solve(matrix: Array, target: Array, weights: Array) -> Array:
    if not matrix.shape[1]:
        return np.zeros(0)  # there nnls ends the process (scipy 1.17)
    matrix, target = matrix * weights[:, None], target * weights
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1
    solution, _ = nnls(matrix / scale, target)
    return np.array([float(value) for value in solution / scale])


class _Around(NamedTuple):
    """Where a descent has ended: what the slopes say, and the offset and matrix of that around them."""

    slopes: Array
    relative: Array
    offset: Array
    matrix: Array


def _left_out(problem: _Problem, ends: Sequence[_Around], index: int) -> float:
    """By how much (relative) a fit to all points but one misses that one: it sets out from where that fits the others
    best of all places in which the whole fit looked."""
    others = np.arange(len(problem.measured)) != index

    def loss(relative: Array) -> float:
        return float(np.sum(problem.losses(relative)[others]))

    here = min(ends, key=lambda end: loss(end.relative))
    tries = _tries(problem, here.slopes, here.offset[others], here.matrix[others], problem.pulls(here.relative)[others])
    says = [problem.relative(slopes) for slopes in tries]
    return float(min(says, key=loss)[index] - 1)


def _intervals(problem: _Problem, offset: Array, matrix: Array, slopes: Array) -> dict[str, tuple[float, float]]:
    """95 % by Student's t, of the constants above 0, as constants. Empty without more points than constants; without a
    constant that is 0 but for rounding, whose spread is below 0 by rounding as well."""
    used = slopes > 0
    spare = len(offset) - int(used.sum())
    if spare < 1:
        return {}
    weights = problem.pulls(offset + matrix @ slopes)
    columns = matrix[:, used] * slopes[used] * weights[:, None]
    variance = float(np.sum((weights * (offset + matrix @ slopes - 1)) ** 2)) / spare
    spreads = np.diag(np.linalg.pinv(columns.T @ columns)) * variance
    known = spreads >= 0
    shares = float(stdtrit(spare, 0.975)) * np.sqrt(spreads[known])
    found = {}
    for name, slope, share in zip(np.array(problem.free)[used][known], slopes[used][known], shares, strict=True):
        low, high = float(slope * max(0.0, 1 - share)), float(slope * (1 + share))
        ends = (high, low) if name.endswith("bytes_per_s") else (low, high)
        found[str(name)] = (_rounded(_constant(name, ends[0])), _rounded(_constant(name, ends[1])))
    return found


def _constant(name: str, slope: float) -> float:
    if not name.endswith("bytes_per_s"):
        return slope
    return 1 / slope if slope else math.inf


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
