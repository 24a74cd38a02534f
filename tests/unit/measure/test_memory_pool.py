"""The tier of a memory pool between CPU RAM and the disk: proven and told where there is one, refused elsewhere."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.caches import CACHES, check_tiers
from harness.errors import PreflightError, SettingsError
from harness.experiment.cache import Cache
from harness.experiment.read import load_experiment
from harness.measure.run import run
from harness.report.refresh import seal
from harness.results.folder import read_samples
from tests.unit.measure import test_run_sim
from tests.unit.measure.test_run_loop import Quiet, measured, request
from traces.tiers import state_named, state_names

CACHE: dict[str, Any] = {"gpu": "64MiB", "cpu": "512MiB", "pool": "1GiB", "disk": {"capacity": "4GiB"}}


def test_every_state_is_proven_and_told(tmp_path: Path) -> None:
    states, remote = list(state_names()), {"capacity": "4GiB", "adapter": "resp"}
    cache = CACHE | {"remote": remote}
    folder = run(request(tmp_path, measure={"tiers": states, "samples": 2}, cache=cache), Quiet())
    rows = measured(folder)
    in_turn = [state for state in states if not state_named(state).restarted]
    assert [row.expected_tier for row in rows] == in_turn * 2 + ["disk_restart"] * 2
    assert {(row.verdict, row.verdict_reason) for row in rows} == {("proven", None)}
    [first, _] = [sample for sample in read_samples(folder) if sample.tier == "pool"]
    assert first.observed.hit_tokens == {"gpu": 0, "cpu": 0, "pool": 512, "disk": 0, "remote": 0}
    [cell] = seal(folder).cells
    assert cell.tiers["pool"].tokens.by_source["pool"] == 2 * 512
    page = (folder / "report.html").read_text()
    assert all(f'<th scope="col">{tier}</th>' in page for tier in CACHE)


def test_a_run_without_a_pool_has_no_column_for_one(tmp_path: Path) -> None:
    folder = run(request(tmp_path, measure={"tiers": ["recompute", "disk"], "samples": 2}), Quiet())
    seal(folder)
    page = (folder / "report.html").read_text()
    assert '<th scope="col">disk</th>' in page and '<th scope="col">pool</th>' not in page


def test_the_simulator_refuses_a_pool_that_its_preset_does_not_know(tmp_path: Path) -> None:
    config = {**test_run_sim.TIERS, "cache": CACHE}
    config.pop("sweep")
    with pytest.raises(SettingsError, match=r"cpu-2core: pool\.read\.latency_s is unknown .*needed here"):
        run(test_run_sim.request(tmp_path, config), Quiet())


def test_a_cache_server_refuses_a_tier_that_it_does_not_hold() -> None:
    key, pool = "engines.vllm.connector", {"gpu": "64MiB", "pool": "1GiB"}
    with pytest.raises(
        PreflightError, match=r"^cache\.pool: engines\.vllm\.connector mp has none; remove cache\.pool$"
    ):
        check_tiers(Cache.model_validate(CACHE), "vllm", key, "mp")
    with pytest.raises(PreflightError, match=r"mp has none; set it to mooncake, or remove cache\.pool$"):
        check_tiers(Cache.model_validate(pool), "vllm", key, "mp")
    check_tiers(Cache.model_validate(CACHE | {"pool": None}), "vllm", key, "mp")
    check_tiers(Cache.model_validate(CACHE), "sglang", "storage", "mooncake", frozenset({"cpu"}))


@pytest.mark.parametrize(
    ("sweep", "first"),
    [
        ({"cache.cpu": [None, "1GiB"]}, (None, None, False)),
        ({"cache.pool": [None, "2GiB"]}, (2**29, None, True)),
        ({"cache": {"kept": {"cache.cpu": None, "cache.pool": "2GiB"}}}, (None, 2**31, False)),
    ],
)
def test_without_the_ram_next_to_the_engine_nothing_is_below_it(
    tmp_path: Path, sweep: dict[str, Any], first: tuple[int | None, int | None, bool]
) -> None:
    path = tmp_path / "experiment.yaml"
    base: dict[str, Any] = {"name": "pools", "workload": {"kind": "prefix", "prompt_tokens": 1025}, "cache": CACHE}
    path.write_text(yaml.safe_dump({**base, "measure": {"tiers": ["gpu", "disk"], "samples": 1}, "sweep": sweep}))
    cache = load_experiment(path).cells()[0].experiment.cache
    assert (cache.cpu, cache.pool, cache.disk is not None) == first


def test_a_pool_alone_carries_a_disk() -> None:
    cache = Cache.model_validate({"gpu": "64MiB", "pool": "1GiB", "disk": {"capacity": "4GiB"}})
    assert cache.tiers == {"gpu", "pool", "disk"} and cache.sizes["pool_bytes"] == 2**30
    alone = Cache.model_validate({"gpu": "64MiB", "disk": {"capacity": "4GiB"}})
    with pytest.raises(PreflightError, match=r"cache\.disk needs cache\.cpu: chunks pass through CPU RAM"):
        CACHES["mp"].check(alone)
