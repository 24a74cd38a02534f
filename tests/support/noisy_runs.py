"""Run folders like those of a real engine: the simulator's rows with seeded noise on each time."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import yaml

from harness.experiment.read import load_experiment
from harness.measure.run import RunRequest, run
from harness.results.folder import RunFolder, read_rows, read_samples
from harness.results.manifest import read_manifest
from tests.unit.measure.test_run_loop import Quiet
from traces.request import RequestRecord


def sim_run(folder: Path, config: dict[str, Any], calibration: Path | None = None) -> Path:
    """Runs the experiment's cells on the simulator, into folder/sim."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "experiment.yaml"
    engines = {"sim": {"hardware": str(calibration)}} if calibration else {}
    path.write_text(yaml.safe_dump({**config, "engines": engines}))
    plan = load_experiment(path)
    request = RunRequest(name="v", cells=plan.cells(), engine="sim", experiment=plan.origin(), folder=folder / "sim")
    return run(request, Quiet())


def noisy_copy(
    source: Path, target: Path, *, seed: int, spread: float, slower: float = 1.0, core_loop_s: float | None = None
) -> Path:
    """The run again, as engine 'fake', each sample's times after sending times `slower` and a log-normal of that
    spread with mean 1. core_loop_s: what a fixed loop took on the engine's core."""
    rng = np.random.default_rng(seed)
    factors: dict[tuple[Any, ...], float] = {}

    def noisy(row: RequestRecord) -> RequestRecord:
        key = (row.cell, row.expected_tier, row.sample, row.id if row.expected_tier is None else None)
        sigma = math.sqrt(math.log(1 + spread**2))
        factor = factors.setdefault(key, slower * math.exp(sigma * rng.standard_normal() - sigma**2 / 2))
        late = {
            name: None if value is None else row.sent_s + (value - row.sent_s) * factor
            for name in ("first_chunk_s", "first_token_s", "last_token_s")
            for value in [getattr(row, name)]
        }
        return msgspec.structs.replace(row, **late)

    manifest = msgspec.structs.replace(read_manifest(source), engine="fake", run_id=target.name)
    made = RunFolder.create(target, manifest)
    made.append_rows(map(noisy, read_rows(source)))
    for sample in read_samples(source):
        host = sample.host if core_loop_s is None else msgspec.structs.replace(sample.host, core_loop_s=core_loop_s)
        made.append_sample(msgspec.structs.replace(sample, host=host))
    made.close()
    return target


DISK_BANDWIDTH = ("disk.read.bytes_per_s", "disk.read.shared_bytes_per_s")


def wrong_calibration(path: Path, factor: float, *constants: str) -> Path:
    """configs/hardware/cpu-2core.yaml with constants (the disk's bandwidth: alone and shared) times a factor; 0 stays,
    which a file may leave out."""
    known = yaml.safe_load(Path("configs/hardware/cpu-2core.yaml").read_text())
    for constant in constants or DISK_BANDWIDTH:
        known["constants"][constant] = known["constants"].get(constant, 0.0) * factor
    path.write_text(yaml.safe_dump(known))
    return path


def changed_rows(source: Path, target: Path, **changes: Any) -> Path:
    """The run again with some fields of its measured rows replaced."""
    shutil.copytree(source, target)
    (target / "rows.jsonl").unlink()
    folder = RunFolder.resume(target)
    folder.append_rows(
        msgspec.structs.replace(row, **changes) if row.phase == "measure" else row for row in read_rows(source)
    )
    folder.close()
    return target
