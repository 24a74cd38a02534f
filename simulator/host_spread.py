"""How the host's tasks vary, as lone hits in the engine's own tier tell, whose other time repeats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median

from simulator.calibration import ASKING, PARSING, CalibrationPoint, FittedOn
from simulator.point_costs import for_each_request, is_behind_gpu, reading_share
from simulator.point_noise import NORMAL_975, TELLING_SAMPLES
from traces.tiers import state_named

# Of normal times, the variance of a mean over that of the mean of the middle third.
_MIDDLE_EFFICIENCY = 0.77


def host_spread(
    lone: Iterable[tuple[CalibrationPoint, Mapping[str, float]]],
    named: Mapping[str, float],
    fitted_on: FittedOn,
) -> float:
    """The spread of each of the host's tasks that gives the points theirs. Independent tasks add their variances. Of
    the points, the median; 0 where no point tells.

    lone: points of requests sent alone, each with its row of the design. named: slopes.
    """
    found, reading = [], reading_share(fitted_on)
    polls = round(for_each_request(fitted_on)["poll_s"])
    for point, row in lone:
        parsing_s, asking_s = (sum(named[n] * row.get(n, 0.0) for n in names) for names in (PARSING, (ASKING,)))
        tasks = [parsing_s * reading, parsing_s * (1 - reading), asking_s, named["request_wait_s"], named["response_s"]]
        tasks += [named["poll_s"]] * polls
        own_hit = state_named(point.tier).served_by is not None and not is_behind_gpu(point.tier)
        samples, ends = point.samples or 0, (point.low_s, point.high_s)
        if own_hit and samples >= TELLING_SAMPLES and ends[0] is not None and ends[1] is not None and any(tasks):
            spread_s = (ends[1] - ends[0]) / (2 * NORMAL_975) * math.sqrt(samples * _MIDDLE_EFFICIENCY)
            found.append(spread_s / math.hypot(*tasks))
    return median(found) if found else 0.0
