"""Experiments on a simulated cluster: the same bytes every time, rows that name their instance, refusals."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.engines.kind import EngineName
from harness.errors import ConfigError
from harness.experiment.model import Experiment
from harness.experiment.read import load_experiment
from harness.measure.run import run
from harness.records import ClusterShape
from harness.results.folder import read_rows, read_samples
from harness.results.manifest import read_manifest
from tests.support.paths import ROOT
from tests.unit.measure.test_run_loop import Quiet, measured
from tests.unit.measure.test_run_sim import FREE, SYNTHETIC, TIERS, request
from traces.tiers import state_named

EXPERIMENT = "configs/experiments/cluster_routing.yaml"


def clustered(config: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {**config, "deployment": {"instances": 4, **settings}}


@pytest.mark.parametrize("shared", [[], ["disk"], ["cpu", "disk"]])
@pytest.mark.parametrize("config", [FREE, SYNTHETIC], ids=["trace", "synthetic"])
def test_a_run_on_a_cluster_repeats_itself_and_says_who_served(
    tmp_path: Path, config: dict[str, Any], shared: list[str]
) -> None:
    asked = clustered(config, routing="least-loaded", shared=shared)
    first, second = (run(request(tmp_path, asked, out=name), Quiet()) for name in ("one", "two"))
    for name in ("rows.jsonl", "samples.jsonl"):
        assert (first / name).read_bytes() == (second / name).read_bytes() != b""
    rows = measured(first)
    # The fourth is needed only where four requests are in flight at once.
    assert {0, 1, 2} <= {row.instance for row in rows} <= {0, 1, 2, 3}
    assert all(row.error is None and row.tokens_by_tier["computed"] for row in rows)
    resolved = read_manifest(first).cells[0].resolved
    assert resolved is not None
    assert resolved.cluster == ClusterShape(instances=4, routing="least-loaded", shared=tuple(shared))
    assert resolved.cpu_bytes == (1 if "cpu" in shared else 4) * 2**30
    assert resolved.disk_bytes == (1 if "disk" in shared else 4) * 2**32


def test_a_cluster_of_one_gives_the_rows_of_an_engine(tmp_path: Path) -> None:
    one = run(request(tmp_path, {**FREE, "deployment": {"instances": 1, "routing": "prefix-aware"}}), Quiet())
    plain = run(request(tmp_path, FREE, out="plain"), Quiet())
    assert (one / "rows.jsonl").read_bytes() == (plain / "rows.jsonl").read_bytes()


@pytest.mark.parametrize("shared", [[], ["disk"], ["cpu", "disk"]])
def test_a_shared_tier_serves_what_another_instance_has_stored(tmp_path: Path, shared: list[str]) -> None:
    """The last instance is asked; the first one has computed what comes from a shared tier, and no other has."""
    folder = run(request(tmp_path, {**TIERS, "deployment": {"instances": 2, "shared": shared}}), Quiet())
    rows = list(read_rows(folder))
    asked = [row for row in rows if row.phase == "measure"]
    assert {(row.verdict, row.verdict_reason, row.instance) for row in asked} == {("proven", None, 1)}
    assert {row.expected_tier for row in asked} == set(TIERS["measure"]["tiers"])
    for row in rows:
        if row.phase == "warm":
            served_by = state_named(row.id.split("-")[1]).served_by
            assert row.instance == (0 if served_by in shared else 1), row.id
    assert any(row.phase == "warm" and row.instance == 0 for row in rows) == bool(shared)
    for sample in read_samples(folder):
        other, one = sample.observed.by_instance
        assert not other.computed_tokens and not other.external_tokens
        assert one.computed_tokens == sample.observed.computed_tokens


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("deployment.instances=0", "deployment.instances"),
        ("deployment.routing=random", "deployment.routing"),
        ("deployment.shared=[gpu]", "deployment.shared"),
        ("deployment.shared=[cpu]", "name disk as well"),
        ("deployment.shared=[disk, disk]", "names a tier twice"),
        ("cache.disk=null", "no disk tier to share"),
    ],
)
def test_mistakes_are_told_on_one_line(setting: str, said: str, tmp_path: Path) -> None:
    words = ["run", EXPERIMENT, "--engine", "sim", "--size", "small", "--out", str(tmp_path / "out")]
    words += ["--set", "deployment.shared=[disk]", "--set", setting]
    command = [sys.executable, "-m", "harness", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["instances: 2", "routing: least-loaded", "shared: [disk]"])
def test_a_file_with_a_key_in_its_old_place_learns_the_new_one(key: str, tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    text = (ROOT / EXPERIMENT).read_text()
    path.write_text(text.replace("rtx-a5000-nfs}", f"rtx-a5000-nfs, {key}}}"))
    name = key.split(":")[0]
    with pytest.raises(ConfigError, match=rf"old.yaml:\d+: engines.sim.{name}: .*; write deployment.{name}$"):
        load_experiment(path)


def test_a_kept_manifest_with_the_old_keys_is_read_as_the_same_experiment(tmp_path: Path) -> None:
    experiment = request(tmp_path, clustered(FREE, routing="least-loaded", shared=["disk"])).cells[0].experiment
    old = experiment.model_dump(mode="json")
    old["engines"]["sim"] |= old.pop("deployment")
    assert old["engines"]["sim"]["instances"] == 4
    assert Experiment.model_validate_json(json.dumps(old), context={"resolved": True}) == experiment
    with pytest.raises(ValueError, match=r"engines.sim.instances"):
        Experiment.model_validate_json(json.dumps(old))


@pytest.mark.parametrize(
    ("engine", "engines"),
    [
        ("fake", {}),
        ("vllm", {"vllm": {"attach": {"url": "http://h:1"}}}),
        ("sglang", {"sglang": {"attach": {"url": "http://h:1"}}}),
    ],
)
def test_an_engine_of_one_instance_refuses_several(tmp_path: Path, engine: EngineName, engines: dict[str, Any]) -> None:
    config = clustered(FREE) | {"engines": engines}
    asked = msgspec.structs.replace(request(tmp_path, config), engine=engine)
    with pytest.raises(ValueError, match=rf"^deployment.instances 4: engine {engine} runs one instance; set it to 1"):
        run(asked, Quiet())
    assert not asked.folder.exists()


def test_a_server_is_one_engine() -> None:
    command = [sys.executable, "-m", "harness", "serve", EXPERIMENT, "--size", "small", "--port", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert "deployment.instances" in done.stderr
