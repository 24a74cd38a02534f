"""The question-answering experiment: its rate, on this machine's size; and, on the document's, which tiers keep up."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.experiment.read import load_experiment
from harness.measure.run import RunRequest, preflight, run
from harness.report.refresh import seal
from harness.results.summary import CellFigures, read_summary
from tests.unit.measure.test_run_loop import Quiet

STUDY, SHARED, GIB = Path("multi_round_qa"), Path("shared_storage"), 2**30


def asked(
    folder: Path, *overrides: str, size: str | None = None, engine: str = "sim", study: Path = STUDY
) -> RunRequest:
    plan = load_experiment(study, [f"engines.vllm.python={sys.executable}", *overrides], size)
    return RunRequest(name="qa", cells=plan.cells(), engine=engine, experiment=plan.origin(), folder=folder)


def cells(folder: Path, *overrides: str, size: str | None = None) -> dict[str, CellFigures]:
    request = asked(folder, *overrides, size=size)
    seal(run(request, Quiet()))
    names = {cell.key: cell.overrides["caches"] for cell in request.cells}
    return {names[cell.key]: cell for cell in read_summary(folder).cells}


def hit_rate(cell: CellFigures) -> float:
    return sum(turn.cached_tokens or 0 for turn in cell.turns) / sum(turn.prompt_tokens for turn in cell.turns)


def test_users_ask_at_the_published_rate_and_a_tier_behind_the_gpu_hits_what_it_lost(tmp_path: Path) -> None:
    found = cells(tmp_path / "sim")
    for cell in found.values():
        load = cell.asked
        assert load is not None and load.asked_per_s is not None and load.keeps_up
        assert load.asked_per_s == pytest.approx(2 * 20 / 19, rel=0.02)
        assert load.sent_per_s == pytest.approx(load.asked_per_s, rel=0.02)
        assert 0 < load.unfinished < 15 and sum(turn.n for turn in cell.turns) == load.sent
    assert hit_rate(found["cpu"]) > 1.2 * hit_rate(found["gpu_only"]) > 0


def test_with_histories_of_20_000_tokens_gpu_memory_alone_does_not_keep_up(tmp_path: Path) -> None:
    """The document's claim: no set-up is better than CPU RAM with a shared store, and GPU memory alone fails first."""
    found = cells(tmp_path / "sim", "sweep.workload.history_tokens=[20000]", size="paper")
    loads = {name: cell.asked for name, cell in found.items()}
    keeps_up = {name: load.keeps_up for name, load in loads.items() if load is not None}
    assert keeps_up == {"gpu_only": False, "cpu": True, "cpu_store": True}
    assert all(load is not None and load.duration_s == 1200 for load in loads.values())
    assert hit_rate(found["cpu_store"]) > hit_rate(found["cpu"]) > hit_rate(found["gpu_only"])


@pytest.mark.parametrize("study", [STUDY, SHARED])
def test_this_machines_size_passes_its_preflight_on_vllm(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.collectors.room.available_memory_bytes", lambda: 14 * GIB)
    monkeypatch.setattr("harness.collectors.room.shutil.disk_usage", lambda _: SimpleNamespace(free=100 * GIB))
    monkeypatch.setattr("harness.collectors.room.os.sched_getaffinity", lambda _: {0, 1})
    preflight(asked(tmp_path / "vllm", engine="vllm", study=study))
