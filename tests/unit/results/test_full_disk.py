"""A run whose folder takes no more ends in one line, keeps each finished row once, and goes on when there is room."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from tests.support.paths import ROOT
from traces.request import RequestRecord

REQUESTS = 3000
WORKLOAD = {"kind": "synthetic", "requests": REQUESTS, "prompt_tokens": 513, "concurrency": 1}
# In a mount namespace, so that nothing stays mounted: full, read-only, then with room.
SCRIPT = """
disk=$1; run="$2 -m harness run"
mount -t tmpfs -o size=700k tmpfs "$disk"
$run "$3" --engine fake --out "$disk/out"; echo "code $?"
cp "$disk/out/rows.jsonl" "$4/before.jsonl"
mount -o remount,ro "$disk"
$run --resume "$disk/out"; echo "code $?"
mount -o remount,rw,size=200m "$disk"
$run --resume "$disk/out" >/dev/null; echo "code $?"
cp "$disk/out/rows.jsonl" "$4/after.jsonl"
"""


def rows(path: Path) -> list[RequestRecord]:
    """What was measured."""
    found = [msgspec.json.decode(line, type=RequestRecord) for line in path.read_bytes().splitlines()]
    return [row for row in found if row.phase == "measure"]


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount needs root")
def test_a_full_or_read_only_folder_ends_the_run_and_no_row_is_lost_or_doubled(tmp_path: Path) -> None:
    disk, path = tmp_path / "disk", tmp_path / "experiment.yaml"
    disk.mkdir()
    path.write_text(yaml.safe_dump({"name": "full", "workload": WORKLOAD, "cache": {"gpu": "1GiB"}, "measure": {}}))
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", SCRIPT, "sh"]
    done = subprocess.run(
        [*words, str(disk), sys.executable, str(path), str(tmp_path)], cwd=ROOT, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    codes = [line for line in done.stdout.splitlines() if line.startswith("code ")]
    assert codes == ["code 1", "code 2", "code 0"], done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    full = f"harness: {disk}/out: cannot be written (No space left on device); make room there, or make it writable"
    read_only = f"harness: {disk}/out: cannot be written (Read-only file system); make it writable, or copy it"
    lines = [line for line in done.stderr.splitlines() if line.startswith("harness: ")]
    assert full in lines and read_only in lines
    assert any(line.endswith(f"--resume {disk}/out goes on") for line in lines)
    before, after = ((tmp_path / f"{name}.jsonl").read_bytes() for name in ("before", "after"))
    assert before.endswith(b"\n") and after.startswith(before)
    kept = rows(tmp_path / "after.jsonl")
    assert 0 < len(rows(tmp_path / "before.jsonl")) < REQUESTS == len(kept) == len({row.id for row in kept})
    assert {row.attempt for row in kept} == {0, 1}
