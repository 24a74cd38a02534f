"""Run folders made again from the evidence in results/, as the commit that kept it would have written them.

The kept files lack some of what a run folder has: each request's moment of sending (0 here), its tokens by tier, the
counters of each sample (here what its rows add up to), and the settings that no figure depends on.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from scripts.same_results_lib.comparing import figures, numbers


def kept_figures(root: Path) -> dict[str, Any]:
    """Every figure in the files below results/validation and results/io of a checkout."""
    found: dict[str, Any] = {}
    for path in sorted(p for name in ("validation", "io") for p in (root / "results" / name).rglob("*") if p.is_file()):
        text, place = path.read_text(), f"/{path.relative_to(root)}"
        if path.suffix in (".json", ".yaml"):
            content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
            found |= {f"{place}{inner}": value for inner, value in figures(content)}
        elif path.suffix == ".csv":
            lines = list(csv.DictReader(text.splitlines()))
            found |= {f"{place} line {n} {k}": v for n, line in enumerate(lines, 2) for k, v in line.items()}
        else:
            found |= {f"{place} {inner}": value for inner, value in numbers(text).items()}
    return found


def make_validation(kept: Path, config: Mapping[str, Any], target: Path) -> list[Path]:
    """Run folders of a kept validation, one for each run in its manifest.json; returns their paths.

    config: a cell's in some run's manifest, for all that the kept cells do not say.
    """
    runs: dict[str, Any] = json.loads((kept / "manifest.json").read_text())
    with (kept / "rows.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    made = []
    for name, manifest in runs.items():
        own = [row for row in rows if row["side"] == name]
        tiers: dict[str, dict[str, None]] = {}
        for row in own:
            tiers.setdefault(row["cell"], {})[row["tier"]] = None
        cells = []
        for cell in manifest["cells"]:
            known = [tier for tier in tiers.get(cell["key"], {}) if tier]
            asked = {"tiers": known, "samples": 1 if known else None, "until": None, "budget": None}
            sections = cell.get("config", cell)
            settings = {key: sections.get(key) for key in ("workload", "cache", "storage")} | {
                "name": name,
                "seed": manifest["seed"],
            }
            whole = {**config, **settings} | {"measure": config["measure"] | asked}
            cells.append(
                {key: cell[key] for key in ("key", "overrides", "status", "trace", "resolved")} | {"config": whole}
            )
        made.append(target / name)
        _write(made[-1], manifest | {"cells": cells}, [_row(row) for row in own])
    return made


def make_io(kept: Path, config: Mapping[str, Any], target: Path) -> Path:
    """A run folder with the kept traces' figures; returns its path."""
    content = json.loads((kept / "io.json").read_text())
    io, facts = (
        content["io"],
        {"schema": 1, "run_id": "io", "name": "io", "status": "complete", "seed": 6, "error": None},
    )
    cell = {"overrides": {}, "status": "complete", "resolved": None, "trace": None, "config": config}
    cells = [cell | {"key": key} for trace in io["traces"] for key in trace["cells"]]
    facts |= {"engine": io["engine"], "created_at": "2026-11-21T23:30:49Z", "finished_at": None}
    _write(target, content["manifest"] | facts | {"cells": cells}, [])
    (target / "io.json").write_text(json.dumps(io))
    return target


def _row(kept: Mapping[str, str]) -> dict[str, Any]:
    def number(name: str) -> int | None:
        return int(kept[name]) if kept[name] else None

    ttft_s, e2e_s = (float(kept[name]) if kept[name] else None for name in ("ttft_s", "e2e_s"))
    return {
        "id": kept["id"],
        "cell": kept["cell"],
        "phase": "measure",
        "sample": int(kept["sample"]),
        "expected_tier": kept["tier"] or None,
        "expected_hit_tokens": number("cached_tokens") if kept["tier"] else None,
        "verdict": kept["verdict"] or None,
        "scheduled_s": 0.0,
        "sent_s": 0.0,
        "first_chunk_s": ttft_s,
        "first_token_s": ttft_s,
        "last_token_s": e2e_s,
        "prompt_tokens": int(kept["prompt_tokens"]),
        "output_tokens": number("output_tokens"),
        "cached_tokens": number("cached_tokens"),
        "error": None if kept["ttft_s"] else "no time was kept",
    }


def _samples(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One sample for the rows that were sent together; a free load is one."""
    groups: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["cell"], row["expected_tier"] or "load", row["sample"]), []).append(row)
    found = []
    for (cell, tier, index), group in groups.items():
        cached = sum(row["cached_tokens"] or 0 for row in group)
        computed = sum(row["prompt_tokens"] for row in group) - cached
        moved = {"computed_tokens": computed, ("gpu_hit_tokens" if tier == "gpu" else "external_tokens"): cached}
        sample = {"cell": cell, "tier": tier, "index": index, "verdict": group[0]["verdict"]}
        found.append(sample | {"started_s": 0.0, "ended_s": 1.0, "observed": moved, "expected": moved})
    return found


def _write(folder: Path, manifest: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    told = {"experiment": {"path": "kept.yaml", "sha256": None}, "command": "", "attempts": []}
    host = {"host": manifest["host"] | {"hostname": "kept"}}
    (folder / "manifest.json").write_text(json.dumps({**told, **manifest, **host}))
    for name, lines in (("rows", rows), ("samples", _samples(rows))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
