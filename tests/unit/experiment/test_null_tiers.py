"""A sweep over a tier that is null in some cell: what needs the tier goes with it, and nothing else does."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.errors import ConfigError
from harness.experiment.model import Experiment
from harness.experiment.read import load_experiment

BASE: dict[str, Any] = {
    "name": "off-on",
    "workload": {"kind": "prefix", "prompt_tokens": 1025},
    "measure": {"tiers": ["recompute", "gpu", "cpu", "disk", "disk_cold"], "samples": 1},
    "cache": {
        "gpu": "1GiB",
        "cpu": "1GiB",
        "disk": {"capacity": "4GiB"},
        "eviction": {"policy": "lru"},
    },
    "storage": {"trace": True},
}


def cells(tmp_path: Path, sweep: dict[str, Any], **changes: Any) -> list[Experiment]:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump({**BASE, **changes, "sweep": sweep}))
    return [cell.experiment for cell in load_experiment(path).cells()]


def test_without_cpu_there_is_no_cache_server_and_nothing_of_it(tmp_path: Path) -> None:
    off, on = cells(tmp_path, {"cache.cpu": [None, "2GiB"]})
    assert (off.cache.cpu, off.cache.disk, off.cache.eviction, off.storage) == (None, None, None, None)
    assert off.measure.tiers == ("recompute", "gpu") and off.cache.gpu == on.cache.gpu
    assert on.cache.cpu == 2 * 2**30 and on.cache.disk is not None and on.cache.eviction is not None
    assert on.measure.tiers == ("recompute", "gpu", "cpu", "disk", "disk_cold") and on.storage is not None


def test_without_a_disk_the_cache_server_stays(tmp_path: Path) -> None:
    off, on = cells(tmp_path, {"cache.disk": [None, {"capacity": "2GiB"}]})
    assert off.cache.cpu == 2**30 and off.cache.eviction is not None and off.storage is None
    assert off.measure.tiers == ("recompute", "gpu", "cpu") and on.measure.tiers[-1] == "disk_cold"


def test_a_free_load_need_not_reach_a_tier_that_is_not_there(tmp_path: Path) -> None:
    load = {"kind": "trace", "trace": "tiny_conversation"}
    off, on = cells(tmp_path, {"cache.cpu": [None, "1GiB"]}, workload=load, measure={"must_reach": "disk"})
    assert (off.measure.must_reach, on.measure.must_reach) == (None, "disk")


@pytest.mark.parametrize(
    ("sweep", "tiers", "words"),
    [
        ({"cache.cpu": [None, "1GiB"]}, ["cpu"], "names cpu, but cache.cpu is not set"),
        ({"cache.cpu": [None], "measure.tiers": [["cpu"]]}, ["cpu"], "names cpu, but cache.cpu is not set"),
    ],
)
def test_what_contradicts_itself_is_still_refused(
    sweep: dict[str, Any], tiers: list[str], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        cells(tmp_path, sweep, measure={"tiers": tiers, "samples": 1})
