"""An axis of named values: each name sets several keys, and reports show the name."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.errors import ConfigError
from harness.experiment.read import Plan, load_experiment
from harness.report.axes import cell_labels, varied_axes
from harness.results.summary import summarize
from tests.support.report_runs import cell, manifest, row

BASE: dict[str, Any] = {
    "name": "named",
    "workload": {"kind": "prefix", "prompt_tokens": 1025},
    "measure": {"tiers": ["recompute", "cpu", "disk_cold"], "samples": 1},
    "cache": {"gpu": "1GiB", "cpu": "1GiB", "disk": {"capacity": "1GiB", "path": "/mnt/yours"}},
}
DEVICES: dict[str, Any] = {
    "yours": {},
    "known": {"cache.disk.path": None, "storage.device": {"bandwidth": "1GiB/s"}},
}


def plan(tmp_path: Path, sweep: dict[str, Any], *overrides: str, **sizes: Any) -> Plan:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump({**BASE, "sweep": sweep, "sizes": sizes}, sort_keys=False))
    return load_experiment(path, overrides, next(iter(sizes), None))


def test_a_name_sets_its_keys_and_stands_for_them(tmp_path: Path) -> None:
    found = plan(tmp_path, {"device": DEVICES, "workload.concurrency": [1, 2]}).cells()
    assert [each.key for each in found] == [
        f"device={name},workload.concurrency={count}" for name in DEVICES for count in (1, 2)
    ]
    assert found[3].overrides == {"device": "known", "workload.concurrency": 2}
    yours, known = found[0].experiment, found[3].experiment
    assert yours.cache.disk is not None and yours.cache.disk.path == "/mnt/yours" and yours.storage is None
    assert known.cache.disk is not None and known.cache.disk.path is None
    assert known.storage is not None and known.storage.device is not None
    assert known.storage.device.bandwidth == 2**30 and known.workload.concurrency == 2  # type: ignore[union-attr]
    cells = [cell(each.key, each.overrides) for each in found]
    cells_shown = summarize(manifest(cells), [row("gpu", 0.1, cell=each.key) for each in cells]).cells
    assert [axis.name for axis in varied_axes(cells_shown)] == ["device", "concurrency"]
    assert cell_labels(cells_shown)[found[2].key] == "device=known, concurrency=1"


def test_a_null_that_a_name_sets_takes_along_what_needs_the_tier(tmp_path: Path) -> None:
    off, on = plan(tmp_path, {"server": {"off": {"cache.cpu": None}, "on": {}}}).cells()
    assert off.experiment.cache.cpu is None and off.experiment.measure.tiers == ("recompute",)
    assert on.experiment.cache.cpu == 2**30


def test_some_names_can_be_chosen_and_an_axis_replaced_or_removed(tmp_path: Path) -> None:
    sweep = {"device": DEVICES}
    assert [each.key for each in plan(tmp_path, sweep, "sweep.device=[known]").cells()] == ["device=known"]
    assert plan(tmp_path, sweep, "sweep.device=null").axes == {}
    fast = {"fast": {"storage.device": {"bandwidth": "9GiB/s"}, "cache.disk.path": None}}
    (found,) = plan(tmp_path, sweep, large={"sweep.device": fast}).cells()
    assert found.key == "device=fast"
    with pytest.raises(ConfigError, match=r"^--set: sweep\.device has no 'mine'; it has yours, known$"):
        plan(tmp_path, sweep, "sweep.device=[mine]")


def test_a_name_without_settings_and_settings_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"experiment\.yaml:\d+: sweep\.device: must map each name to `key: value`"):
        plan(tmp_path, {"device": {"yours": None}})
    with pytest.raises(ConfigError, match=r"disk\.pth: unknown key; .* \(in the sweep's cell device=yours\)$"):
        plan(tmp_path, {"device": {"yours": {"cache.disk.pth": "/mnt"}}}).cells()
