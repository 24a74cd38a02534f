"""cache.eviction: what the cache server drops from CPU RAM, the same on both sides of a validation, or refused."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from harness.commands.validate import validate as validate_command
from harness.errors import NotComparable, PreflightError, SettingsError
from harness.experiment.read import load_experiment
from harness.measure.run import RunRequest, run
from harness.results.folder import read_rows, read_samples
from harness.results.manifest import encode_manifest, read_manifest
from harness.validation.comparable import check_sides
from harness.validation.points import read_side
from tests.support.noisy_runs import noisy_copy
from tests.unit.measure.test_run_loop import Quiet

VALIDATION = Path("configs/validation/cpu_vllm.yaml")
CONFIG: dict[str, Any] = {
    "name": "evicting",
    "workload": {"kind": "synthetic", "requests": 3, "prompt_tokens": 513, "hit_rate": 0.5, "concurrency": 1},
    "cache": {"gpu": "1GiB", "cpu": "1GiB", "eviction": {"policy": "arc", "ratio": 0.5}},
}


def on_the_simulator(path: Path, folder: Path, size: str | None = None) -> Path:
    plan = load_experiment(path, [] if size is None else ["measure.warm_up=0"], size=size)
    request = RunRequest(name="v", cells=plan.cells(), engine="sim", experiment=plan.origin(), folder=folder)
    return run(request, Quiet())


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(CONFIG | changes))
    return path


def test_another_eviction_changes_what_is_hit_as_the_validation_needs_it(tmp_path: Path) -> None:
    """The sizes of the kept validation: counts are a simulator's of LMCache, whose eviction has an oracle."""
    hits = {}
    for size in ("policy_lru", "policy_arc", "policy_watermark"):
        folder = on_the_simulator(VALIDATION, tmp_path / size, size)
        resolved = read_manifest(folder).cells[0].resolved
        assert resolved is not None and resolved.eviction is not None
        (sample,) = read_samples(folder)
        hits[msgspec.structs.astuple(resolved.eviction)] = sample.observed.external_tokens
    assert hits == {("lru", 0.8, 0.2): 11520, ("arc", 0.8, 0.2): 13056, ("lru", 0.5, 0.2): 7680}


def test_both_sides_of_a_validation_evict_alike_in_every_pass(tmp_path: Path) -> None:
    """A second pass is not the first one again: ARC remembers what it dropped, though the tier was emptied. So a pass
    that only warms up is sent to both sides."""
    sizes, cold = ["policy_arc", "policy_watermark"], ["measure.warm_up=0"]
    out = tmp_path / "out"
    assert (
        validate_command(VALIDATION, calibration="cpu-2core", engine="sim", overrides=cold, sizes=sizes, out=out) == 0
    )
    content = json.loads((out / "validation.json").read_text())
    assert content["overall"]["counts_equal"] == content["overall"]["counts"] > 8
    for side in ("real", "sim"):
        passes = {s.cell: s.observed.external_tokens for s in read_samples(out / side)}
        assert passes["policy_arc:base#1"] != passes["policy_arc:base#2"]
        assert passes["policy_watermark:base#1"] == passes["policy_watermark:base#2"]
    warmed = tmp_path / "warmed"
    assert validate_command(VALIDATION, calibration="cpu-2core", engine="sim", sizes=sizes[:1], out=warmed) == 0
    for side in ("real", "sim"):
        later = [s.observed.external_tokens for s in read_samples(warmed / side)]
        rows = read_rows(warmed / side)
        assert later[:2] == [passes["policy_arc:base#2"], passes["policy_arc:base#3"]]
        assert Counter(row.cell for row in rows if row.phase == "warm") == {
            "policy_arc:base#1": 22 + 2 * 12, "policy_arc:base#2": 12, "policy_arc:base#3": 12
        }  # fmt: skip


def test_sides_that_evict_differently_are_refused(tmp_path: Path) -> None:
    here = on_the_simulator(written(tmp_path), tmp_path / "here")
    there = noisy_copy(here, tmp_path / "there", seed=1, spread=0.0)
    manifest = read_manifest(there)
    resolved = manifest.cells[0].resolved
    assert resolved is not None and resolved.eviction is not None
    later = msgspec.structs.replace(resolved.eviction, watermark=0.9)
    manifest.cells[0].resolved = msgspec.structs.replace(resolved, eviction=later)
    (there / "manifest.json").write_bytes(encode_manifest(manifest))
    with pytest.raises(NotComparable, match=r"different eviction: .*0\.8.* on one side, .*0\.9.* on the other"):
        check_sides(read_side([here]), read_side([there]))


def test_an_eviction_that_nothing_would_follow_is_refused(tmp_path: Path) -> None:
    def refused(error: type[Exception], text: str, engine: Any, **changes: Any) -> None:
        plan = load_experiment(written(tmp_path, **changes))
        request = RunRequest(
            name="v", cells=plan.cells(), engine=engine, experiment=plan.origin(), folder=tmp_path / "out"
        )
        with pytest.raises(error, match=text):
            run(request, Quiet())
        assert not (tmp_path / "out").exists()

    refused(SettingsError, "cache.eviction: only lmcache-0.5.6-mp has", "sim", engines={"sim": {"tier_policy": "lru"}})
    refused(PreflightError, "cache.eviction needs cache.cpu", "sim", cache={**CONFIG["cache"], "cpu": None})
    refused(PreflightError, "set engines.vllm.connector to mp", "vllm", engines={"vllm": {"connector": "in_process"}})
