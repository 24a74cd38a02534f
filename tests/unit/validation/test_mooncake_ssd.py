"""Mooncake's multi-turn study against its plotted times and printed figures, over random orders of the clients.

The plotted hit rates are those of one order; test_mooncake_orders.py holds them against many.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from harness.experiment.read import Cell, load_experiment
from harness.measure.run import RunRequest, run
from harness.results.turns import TurnFigures, turn_figures
from simulator.calibration import load_calibration
from tests.unit.measure.test_run_loop import Quiet, measured
from traces.request import RequestRecord

STUDY, PLOTS = Path("mooncake_ssd"), Path("configs/validation/mooncake_rounds.csv")
ORDERS, ROUNDS, CLIENTS = 40, 9, 20
SETUPS = ("gpu_only", "l1_l2")
POINTS = len(SETUPS) * ROUNDS
Rounds = NDArray[np.float64]


def rows_of(
    folder: Path, *overrides: str, size: str | None = None, seeds: Iterable[int] = ()
) -> dict[str, list[RequestRecord]]:
    """By setup and, with seeds, by seed ('gpu_only/3'): the rows of the study on the simulator."""
    plan = load_experiment(STUDY, overrides, size)
    cells, several = [], tuple(seeds)
    for cell in plan.cells():
        for seed in several or (cell.experiment.seed,):
            experiment = cell.experiment.model_copy(update={"seed": seed})
            cells.append(Cell(f"{cell.overrides['caches']}{f'/{seed}' if several else ''}", {}, experiment))
    made = RunRequest(name="m", cells=cells, engine="sim", experiment=plan.origin(), folder=folder)
    rows: dict[str, list[RequestRecord]] = {cell.key: [] for cell in cells}
    for row in measured(run(made, Quiet())):
        rows[row.cell].append(row)
    return rows


def by_round(rows: list[RequestRecord]) -> tuple[TurnFigures, ...]:
    assert all(row.error is None for row in rows)
    return turn_figures(rows)


class Study(NamedTuple):
    """By setup, an array of orders x rounds: mean TTFT in s; and input tokens/s by order."""

    ttft_s: dict[str, Rounds]
    input_per_s: dict[str, Rounds]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    only = f"sweep.caches=[{', '.join(SETUPS)}]"
    rows = rows_of(tmp_path_factory.mktemp("study") / "sim", only, size="paper", seeds=range(1, ORDERS + 1))
    figures = {key: by_round(of) for key, of in rows.items()}

    def times(setup: str) -> Rounds:
        orders = [figures[f"{setup}/{seed}"] for seed in range(1, ORDERS + 1)]
        return np.array([[turn.ttft_s.mean for turn in order if turn.ttft_s] for order in orders])

    def throughput(setup: str) -> Rounds:
        found = []
        for seed in range(1, ORDERS + 1):
            own = rows[f"{setup}/{seed}"]
            took_s = max(row.last_token_s or 0.0 for row in own) - min(row.sent_s or 0.0 for row in own)
            found.append(sum(row.prompt_tokens for row in own) / took_s)
        return np.array(found)

    return Study({setup: times(setup) for setup in SETUPS}, {setup: throughput(setup) for setup in SETUPS})


def plotted(setup: str, metric: str) -> Rounds:
    with PLOTS.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if (row["cell"], row["metric"]) == (setup, metric)]
    values = {int(row["round"]): float(row["value"]) for row in rows if row["round"] != "all"}
    assert sorted(values) == list(range(ROUNDS))
    return np.array([values[number] for number in range(ROUNDS)])


def overall(setup: str, metric: str) -> float:
    with PLOTS.open(newline="") as lines:
        [row] = [r for r in csv.DictReader(lines) if (r["cell"], r["metric"], r["round"]) == (setup, metric, "all")]
    return float(row["value"])


def test_the_preset_was_fitted_on_the_gpu_only_curve_and_on_nothing_else() -> None:
    """A point is a plotted round: its time over 3.7 services (1 to 4 requests under way) and 0.15 of the next one's
    first step; its hits are whole conversations, all turns or none. The times are read to 0.2 s."""
    points = load_calibration("a100-qwen3-8b-sglang").fitted_on.points
    hits, times = plotted("gpu_only", "hit_rate") / 100, plotted("gpu_only", "ttft_mean")
    turns = np.arange(ROUNDS)
    assert [point.prompt_tokens for point in points] == list(4096 * (turns + 1) + turns)
    assert [point.hit_tokens for point in points] == list(4096 * turns)
    shares = [point.hit_share * point.hit_tokens / (4096 * (turn + 1)) for turn, point in enumerate(points)]
    assert shares == pytest.approx(list(hits), abs=1e-4)
    services = 3.7 + np.where(turns > 0, 0.15 / ((1 - hits) * (turns + 1)), 0.0)
    for of, off in (("low_s", -0.2), ("measured_s", 0.0), ("high_s", 0.2)):
        assert [getattr(point, of) for point in points] == pytest.approx(list((times + off) / services), abs=1e-4)


def test_times_by_round_and_over_all_are_near_the_plots(study: Study) -> None:
    """The GPU-only curve is fitted and L1 + L2 is predicted."""
    errors = {setup: study.ttft_s[setup].mean(axis=0) / plotted(setup, "ttft_mean") - 1 for setup in SETUPS}
    assert abs(errors["gpu_only"]).mean() < 0.05 and abs(errors["l1_l2"]).mean() < 0.07
    for setup in SETUPS:
        # The document divides the sum of nine rounds by ten.
        assert study.ttft_s[setup].mean(axis=0).sum() / 10 == pytest.approx(overall(setup, "ttft_mean"), rel=0.04)
        assert study.input_per_s[setup].mean() == pytest.approx(overall(setup, "input_throughput"), rel=0.03)
    gain = study.input_per_s["l1_l2"].mean() / study.input_per_s["gpu_only"].mean()
    assert gain == pytest.approx(7057 / 6402, rel=0.03)


def test_while_everything_fits_each_round_hits_all_turns_but_the_new_one(tmp_path: Path) -> None:
    paper = {setup: by_round(rows) for setup, rows in rows_of(tmp_path / "paper", size="paper").items()}
    assert list(paper) == ["gpu_only", "l1_l2", "pool", "pool_ssd"]
    # Until when the KV of all clients fits: 29 turns in the GPU, 61 with the host, 135 with 95 % of the pool of 80 GiB,
    # always with the SSD. Host and pool hold the same pages twice.
    for setup, fits in {"gpu_only": 1, "l1_l2": 3, "pool": 6, "pool_ssd": ROUNDS}.items():
        for turn in paper[setup][:fits]:
            assert turn.cached_tokens == turn.turn * 4096 * CLIENTS and turn.n == CLIENTS
            assert turn.prompt_tokens == ((turn.turn + 1) * 4096 + turn.turn) * CLIENTS
        assert all((turn.hit_rate or 0.0) < turn.turn / (turn.turn + 1) - 0.01 for turn in paper[setup][fits:])
    here = rows_of(tmp_path / "here", "cache.gpu=8GiB", "sweep.caches=[gpu_only]")
    assert [turn.cached_tokens for turn in by_round(here["gpu_only"])] == [n * 512 * CLIENTS for n in range(6)]


def test_the_pools_cliff_and_what_the_ssd_saves_of_it(tmp_path: Path) -> None:
    """Printed: above 80 % for six rounds, 36 % in round 7 without the SSD, above 84 % through round 8 with it."""
    paper = {setup: by_round(rows) for setup, rows in rows_of(tmp_path / "sim", size="paper").items()}
    pool, ssd = paper["pool"], paper["pool_ssd"]
    assert pool[5].hit_rate == pytest.approx(0.83, abs=0.01)
    assert (pool[6].hit_rate or 0) > 0.75 and (pool[7].hit_rate or 0) == pytest.approx(0.36, abs=0.10)
    assert pool[7].ttft_s and pool[7].ttft_s.mean == pytest.approx(16, rel=0.15)
    assert all((turn.hit_rate or 0) >= 0.84 for turn in ssd[6:])
    assert msgspec.to_builtins(ssd[8].shares)["disk"] > 0.1 and msgspec.to_builtins(ssd[8].shares)["pool"] > 0.3
    mean = {setup: sum(turn.ttft_s.mean for turn in of if turn.ttft_s) / 10 for setup, of in paper.items()}
    # -57 % and -34 % are printed.
    assert -0.55 < mean["pool_ssd"] / mean["gpu_only"] - 1 < -0.40
    assert -0.38 < mean["pool_ssd"] / mean["pool"] - 1 < -0.22


def test_this_machines_size_has_setups_that_vllm_runs(tmp_path: Path) -> None:
    """Hit tokens of all rounds; those of gpu_only and all_fits are what vLLM and LMCache hit here, to the request."""
    rows = rows_of(tmp_path / "sim")
    assert all(len(of) == 120 for of in rows.values())
    cached = {setup: sum(row.cached_tokens or 0 for row in of) for setup, of in rows.items()}
    assert cached.pop("gpu_only") == 19_904 and cached.pop("all_fits") == 20 * 512 * sum(range(6))
    assert 50_000 < cached.pop("l1_l2") < 70_000 and not cached
