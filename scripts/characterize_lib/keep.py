"""Keeps the results of experiments 4 to 6 in a folder small enough for git: io.md to read, io.json with the data.

    python scripts/characterize_lib/keep.py results/io EXP4_RUN EXP5_RUN EXP6_RUN

EXP6_RUN must be a traced run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.experiment.units import format_bytes
from harness.report.io.tables import DIRECTIONS, labels, side_by_side
from harness.report.run.tables import figure_rows
from harness.results.manifest import read_manifest
from harness.results.summary import Summary, plain_summary, read_summary
from harness.results.traced import IoFigures, read_io


def main(target: Path, runs: Sequence[Path]) -> None:
    summaries = [read_summary(run) for run in runs]
    io, manifest = read_io(runs[-1]), read_manifest(runs[-1])
    assert io is not None, f"{runs[-1]}: not traced"
    host = {key: value for key, value in msgspec.structs.asdict(manifest.host).items() if key != "hostname"}
    resolved = manifest.cells[0].resolved
    assert resolved is not None, f"{runs[-1]}: no engine has started"
    versions = resolved.versions | manifest.versions
    lines = ["# What the cache does to the disk: vLLM with LMCache on ext4, xfs and btrfs", ""]
    lines += [f"Made by `scripts/characterize`, {manifest.created_at}, at {manifest.git.commit}. On reference"]
    lines += ["devices; 4,097 tokens, of which 4,096 come from 16 chunk files of 8 MiB. f2fs and NFS, which the paper"]
    lines += ["has too, are not in this kernel. The figures (the paper's 8 to 12) are in the last run's report.html;"]
    lines += ["io.json has their data, by 100 ms.", ""]
    lines += [f"Machine: {', '.join(f'{key} {value}' for key, value in host.items())}.", ""]
    lines += [f"Versions: {', '.join(f'{key} {value}' for key, value in versions.items())}.", ""]
    lines += ["## Experiment 6: the I/O, file systems side by side", ""]
    lines += table(["", *labels(io)], [[name, *texts] for name, texts in side_by_side(io)])
    lines += ["", "Block requests by size, reads + writes:", "", *table(["from", *labels(io)], size_rows(io))]
    for run, summary in zip(runs, summaries, strict=True):
        lines += ["", f"## TTFT of {read_manifest(run).name}", "", *ttft_table(summary)]
    target.mkdir(parents=True, exist_ok=True)
    (target / "io.md").write_text("\n".join(lines) + "\n")
    kept = {"manifest": {"host": host, "versions": versions, "git": msgspec.to_builtins(manifest.git)}, "io": named(io)}
    kept["summaries"] = {summary.run_id: plain_summary(summary)["cells"] for summary in summaries}
    (target / "io.json").write_text(json.dumps(kept, separators=(",", ":"), default=str) + "\n")
    for path in sorted(target.iterdir()):
        print(f"{path}  {format_bytes(path.stat().st_size)}")


def size_rows(io: IoFigures) -> list[list[str]]:
    """One row per power of two: the counts of reads + writes in each trace."""
    sizes = [[trace.block.of(side).sizes for side in DIRECTIONS] for trace in io.traces]
    lows = sorted({low for both in sizes for side in both for low in side})
    return [
        [format_bytes(low), *(" + ".join(f"{side.get(low, 0):,}" for side in both) for both in sizes)] for low in lows
    ]


def ttft_table(summary: Summary) -> list[str]:
    head = ["cell", "tier", "n", "mean ± 95 %", "p50", "p90", "p99", "verdicts"]
    rows = [
        [
            row.cell,
            row.tier,
            str(row.n),
            row.mean,
            *(p.text + "*" * p.thin for p in row.percentiles if p.name in head),
            row.verdicts,
        ]
        for row in figure_rows(summary)
    ]
    return [*table(head, rows), "", "\\* fewer values than this percentile needs: no more than the largest one seen"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def named(io: IoFigures) -> dict[str, Any]:
    """Without this machine's paths: devices by their limits, files by the hash at the end of their names."""
    content: dict[str, Any] = msgspec.to_builtins(io, str_keys=True)
    for trace in content["traces"]:
        device, files = trace["device"], trace["files"]
        trace["device"] = {key: device[key] for key in ("limits", "file_system", "size_bytes")}
        for each in files["each"]:
            each["name"] = each["name"].rpartition("@")[2]
    return content


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]])
