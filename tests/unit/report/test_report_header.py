"""What a run's header names: engine, cache server and disk as they resolved, or whose machine was modelled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.records import PresetFacts, Resolved, StoreFacts
from harness.report.run.header import header_facts
from harness.results.manifest import DeviceEntry, read_kept_manifests
from harness.results.provenance import Git, Host, _gpu_names
from simulator.calibration import load_calibration
from tests.support.paths import ROOT
from tests.support.report_runs import cell, manifest

KEPT = ROOT / "results" / "validation"


def test_a_kept_run_of_vllm_names_its_versions_its_machine_and_its_disk() -> None:
    facts = dict(header_facts(read_kept_manifests(KEPT / "cpu_vllm" / "manifest.json")["real"]))
    assert facts["engine"] == "vLLM 0.32.0" and facts["cache server"] == "LMCache 0.5.6-g3e11e108 (mp)"
    assert facts["runs on"] == "AMD EPYC, 2 cores" and facts["made"] == "2026-11-22T14:43:25Z"
    assert "on ext4" in facts["disk"] and "preset" not in facts


def resolved(**fields: Any) -> Resolved:
    known: dict[str, Any] = {"disk_bytes": 2**31, "versions": {"vllm": "0.32.0"}}
    return Resolved(**(known | fields))


def test_the_gpu_and_the_device_below_the_disk_tier_are_named_or_said_to_be_unreported() -> None:
    config = {"model": "llama-3.2-3b", "engines": {"vllm": {"device": "gpu"}}}
    host = Host(cpu="EPYC", cores=16, gpus=("NVIDIA H100",))
    real = resolved(disk_file_system="xfs", disk_device="nvme0n1 (Model 9)")
    known = manifest(
        [cell(config=config, resolved=real)], engine="vllm", host=host, git=Git(commit="a" * 40, dirty=True)
    )
    assert dict(header_facts(known)) == {
        "engine": "vLLM 0.32.0",
        "runs on": "NVIDIA H100; EPYC, 16 cores",
        "model": "llama-3.2-3b",
        "disk": "2GiB on xfs, device nvme0n1 (Model 9)",
        "commit": "aaaaaaaaaaaa with uncommitted changes",
    }
    unknown = manifest([cell(config=config, resolved=Resolved(disk_bytes=2**31))], engine="vllm")
    facts = dict(header_facts(unknown))
    assert facts["engine"] == "vLLM (version not reported)" and facts["disk"].count("not reported") == 2
    assert facts["runs on"] == "GPU not reported; CPU not reported"


def test_a_paced_device_is_called_paced_and_a_sweeps_values_stand_side_by_side() -> None:
    device = DeviceEntry(
        limits={"read_bytes_per_s": 104857600.0, "read_iops": 0.0}, file_system="ext4", size_bytes=2**31
    )
    cells = [cell("a", resolved=resolved(disk_file_system="ext4"), device=device)]
    cells += [cell("b", resolved=resolved(disk_file_system="xfs", disk_device="vda"))]
    disk = dict(header_facts(manifest(cells, engine="vllm")))["disk"]
    assert disk == "2GiB on ext4, paced device (read 100MiB/s); 2GiB on xfs, device vda"


def test_a_simulated_run_names_whose_machine_it_stands_for_and_how_far_it_may_be_believed() -> None:
    preset = PresetFacts(name="p", machine="RTX A5000, NFS", date="2026-11", standing="3 of its 10 fitted rows pass")
    versions = {"engine_policy": "vllm-0.32", "tier_policy": "lmcache-0.5.6-mp", "calibration": "p"}
    known = manifest([cell(resolved=resolved(versions=versions, preset=preset))], engine="sim", host=Host(cpu="EPYC"))
    assert dict(header_facts(known)) == {
        "engine": "simulator of vllm-0.32",
        "cache server": "simulated, of lmcache-0.5.6-mp",
        "preset": "p, of 2026-11",
        "preset's machine": "RTX A5000, NFS",
        "preset's validation": "3 of its 10 fitted rows pass",
        "disk": "2GiB, modelled",
    }
    store = StoreFacts(io="io_uring", page_cache=None, slot_bytes=4096)
    alone = manifest([cell(resolved=resolved(versions={}, store=store, disk_device="vda"))], engine="sim")
    facts = dict(header_facts(alone))
    assert facts["engine"] == "simulator: no engine, the tiers alone" and facts["disk"].endswith("device vda")


def test_the_drivers_names_of_gpus_are_read(tmp_path: Path) -> None:
    assert _gpu_names(tmp_path) == ()
    for bus, name in (("0000:01", "NVIDIA H100"), ("0000:02", "NVIDIA A10")):
        (tmp_path / "gpus" / bus).mkdir(parents=True)
        (tmp_path / "gpus" / bus / "information").write_text(f"Model: \t\t {name}\nIRQ:   1\n")
    assert _gpu_names(tmp_path) == ("NVIDIA H100", "NVIDIA A10")


@pytest.mark.parametrize("name", ["rtx-a5000-nfs", "rtx-4000ada-ssd", "h100-llama-3.1-8b", "h200-gpt-oss-120b"])
def test_what_a_preset_says_of_its_validation_is_what_the_kept_evidence_says(name: str) -> None:
    kept = json.loads((KEPT / "published" / "validation.json").read_text())
    rows = [point for point in kept["points"] if point["axes"].get("source", "").endswith(f" {name}")]
    fitted = [point["verdict"] for point in rows if point["axes"]["constants"] == "fitted"]
    others = [point["verdict"] for point in rows if point["axes"]["constants"] != "fitted"]
    held = load_calibration(name).held
    assert held is not None and fitted and others
    assert (held.fitted, held.fitted_pass) == (len(fitted), fitted.count("pass"))
    assert (held.others, held.others_pass) == (len(others), others.count("pass"))
    assert held.evidence == "results/validation/published" and held.margin == kept["margin"]
    assert kept["created_at"].startswith(held.date) and len(load_calibration(name).fitted_on.points) == held.fitted


def test_a_preset_without_kept_evidence_says_so() -> None:
    calibration = load_calibration("cpu-2core")
    assert calibration.held is None
    assert calibration.standing == "no kept validation holds it against rows that it was not fitted on"
    own = load_calibration(KEPT / "cpu_vllm" / "calibration.yaml")
    assert own.standing.startswith("its own check is not good: left out, points are missed by 5.6%")
    assert load_calibration("rtx-a5000-nfs").standing == (
        "3 of its 11 fitted rows and 0 of 1 others pass ±5% (results/validation/published, 2026-11-27)"
    )
