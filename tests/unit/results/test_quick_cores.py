"""Which samples stand for a point's times, where its cell waits for quick cores."""

from pathlib import Path

import pytest

from harness.records import HostSample, Sample
from harness.results.quick_cores import FEWEST_QUICK, on_slow_cores
from harness.validation.points import read_side
from tests.support.report_runs import cell, folder_of, row, sample
from traces.request import Verdict

QUICK_S, SLOW_S = 60e-6, 90e-6
WAITING = {"measure": {"steady": "5s"}}


def met(key: str, loops_s: list[float], client: bool = False, verdict: Verdict = "proven") -> list[Sample]:
    hosts = [HostSample(client_loop_s=each) if client else HostSample(core_loop_s=each) for each in loops_s]
    return [sample("gpu", index, verdict, cell=key, host=host) for index, host in enumerate(hosts)]


def run(path: Path, samples: list[Sample], config: dict[str, object] | None = None) -> Path:
    rows = [
        row("gpu", 0.02 if (one.host.core_loop_s or QUICK_S) < SLOW_S else 0.03, cell=one.cell, sample=one.index)
        for one in samples
    ]
    keys = dict.fromkeys(one.cell for one in samples)
    return folder_of(
        path, rows, samples, cells=[cell(key, config=WAITING if config is None else config) for key in keys]
    )


ENOUGH = [QUICK_S] * FEWEST_QUICK


@pytest.mark.parametrize("client", [False, True])
def test_a_sample_on_slow_cores_stands_for_nothing_where_enough_others_do(tmp_path: Path, client: bool) -> None:
    loops_s = [*ENOUGH, SLOW_S, 1.1 * QUICK_S]
    assert on_slow_cores([run(tmp_path / "a", met("base#1", loops_s, client))]) == [{("base#1", "gpu", 6, 0)}]


def test_a_point_with_few_quick_samples_stands_with_the_quickest(tmp_path: Path) -> None:
    loops_s = [*ENOUGH[2:], 1.6 * QUICK_S, 1.3 * QUICK_S, 1.4 * QUICK_S]
    assert on_slow_cores([run(tmp_path / "a", met("base#1", loops_s))]) == [{("base#1", "gpu", 4, 0)}]
    assert on_slow_cores([run(tmp_path / "b", met("base#1", loops_s[:6]))]) == [set()]
    unproven = [*met("base#1", ENOUGH, verdict="unproven"), *met("base#2", [SLOW_S])]
    assert on_slow_cores([run(tmp_path / "c", unproven)]) == [set()]


def test_a_pace_that_most_samples_met_is_no_exception(tmp_path: Path) -> None:
    loops_s = [QUICK_S, QUICK_S, *[SLOW_S] * 8, 1.2 * SLOW_S]
    assert on_slow_cores([run(tmp_path / "a", met("base#1", loops_s))]) == [{("base#1", "gpu", 10, 0)}]


def test_a_cell_that_does_not_wait_keeps_all(tmp_path: Path) -> None:
    assert on_slow_cores([run(tmp_path / "a", met("base#1", [*ENOUGH, SLOW_S]), config={"measure": {}})]) == [set()]


def test_passes_and_runs_of_one_point_count_together_and_their_counts_stay(tmp_path: Path) -> None:
    first = [*met("base#1", [*ENOUGH[2:], SLOW_S]), *met("base#2", [QUICK_S])]
    folders = [run(tmp_path / "a", first), run(tmp_path / "b", met("base#3", [QUICK_S, SLOW_S]))]
    assert on_slow_cores(folders) == [{("base#1", "gpu", 4, 0)}, {("base#3", "gpu", 1, 0)}]
    point = read_side(folders).points["base", "gpu"]
    assert [one.ttft_s for one in point.rows] == pytest.approx([0.02] * 6)
    assert (point.on_slow_cores, point.left_out, len(point.observed())) == (2, [], 8)
