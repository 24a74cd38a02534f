"""Runs all experiments on two checkouts, compares their results and prints differences; exit code 1 if any differ.

python -m scripts.same_results_lib.main BEFORE AFTER WORK NAMES
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from scripts.same_results_lib import kept, matrix
from scripts.same_results_lib.comparing import (
    RENAMED_KEYS,
    Run,
    compare_figures,
    compare_rows,
    figures,
    numbers,
    summary_figures,
)

SHOWN = 3
DEFAULTS = {"engines.sim.instances": 1, "engines.sim.routing": "round-robin", "engines.sim.shared": []}
VALIDATED = ("lengths", "hits", "concurrency", "chunk64", "ext4_200", "xfs_100", "policy_arc", "policy_watermark")
# Of a run whose bytes a real disk moved, these figures do not depend on its times.
COUNTED = re.compile(r"/(tokens|rows)/|/(read|write)/(operations|bytes)$|/(kv_tokens|output_tokens|requests_finished)$")


@dataclass
class Side:
    """One checkout: where its runs go, and the names that it has for keys of the experiment file."""

    root: Path
    work: Path
    names: dict[str, str] = field(default_factory=dict)

    def harness(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Its own command line."""
        hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE", "HARNESS_RESULTS")
        env = {key: value for key, value in os.environ.items() if key not in hidden} | {"COLUMNS": "200"}
        command = [".venv/bin/harness", *map(str, words)]
        return subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True)

    def run(self, name: str, content: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        """Runs every point of an experiment into work/name."""
        file = self.work / f"{name}.yaml"
        file.write_text(yaml.safe_dump(matrix.renamed(content, self.names), sort_keys=False))
        verb = "sweep" if content.get("sweep") else "run"
        return self.harness(verb, file, "--engine", "sim", "--out", self.work / name)

    def learn_names(self) -> None:
        """Asks which of their names this checkout accepts: for all keys at once, then key by key."""
        if not self._accepts("all", list(DEFAULTS)):
            self.names = {key: later for key, later in RENAMED_KEYS if not self._accepts(key, [key])}

    def _accepts(self, name: str, keys: Sequence[str]) -> bool:
        content: dict[str, Any] = {"name": "names", "workload": matrix.TRACE | {"limit": 1}, "cache": {"gpu": "1GiB"}}
        for key in keys:
            matrix.assign(content, key, DEFAULTS[key])
        return not self.run(f"names-{name}", content).returncode


@dataclass
class Tally:
    """What was compared, by part, and every difference."""

    compared: dict[str, int] = field(default_factory=dict)
    differing: dict[str, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def add(self, part: str, where: str, result: tuple[int, list[str]]) -> None:
        count, found = result
        self.compared[part] = self.compared.get(part, 0) + count
        self.differing[part] = self.differing.get(part, 0) + len(found)
        self.lines += [f"{where}: {part}: {line[:600]}" for line in found[:SHOWN]]
        if len(found) > SHOWN:
            self.lines.append(f"{where}: {part}: {len(found) - SHOWN} more")


class Comparison:
    """Both sides, asked the same in two processes at a time."""

    def __init__(self, before: Side, after: Side) -> None:
        self.sides, self.tally = (before, after), Tally()
        self._pool = ThreadPoolExecutor(2)

    def both(self, ask: Callable[[Side], Any]) -> tuple[Any, Any]:
        before, after = self._pool.map(ask, self.sides)
        return before, after

    def ended(self, where: str, done: Sequence[subprocess.CompletedProcess[str]], good: Sequence[int]) -> bool:
        """Whether both commands ended alike, and well. An end that proves nothing is a difference."""
        codes = [one.returncode for one in done]
        found = [] if codes[0] == codes[1] and codes[0] in good else [f"exit codes {codes[0]} -> {codes[1]}"]
        found += [(one.stderr or one.stdout).strip()[-300:] for one in done if found and one.returncode not in good]
        self.tally.add("commands", where, (1, found))
        return not found

    def experiment(self, name: str, content: dict[str, Any]) -> None:
        began = time.monotonic()
        done = self.both(lambda side: side.run(name, content))
        rows = 0
        if self.ended(name, done, (0, 1)):
            wall_clock = content.get("engines", {}).get("sim", {}).get("mode") == "storage"
            rows = self.compare_runs(name, *self.both(lambda side: read_run(side.work / name)), wall_clock)
        print(f"  {name:<34} {rows:>6,} rows  {time.monotonic() - began:4.1f} s", flush=True)

    def compare_runs(self, name: str, before: Run, after: Run, wall_clock: bool = False) -> int:
        result = compare_rows(before, after, wall_clock)
        self.tally.add("requests", name, result)
        ours, theirs = (summary_figures(run, before.absent) for run in (before, after))
        if wall_clock:
            ours = {place: value for place, value in ours.items() if COUNTED.search(place)}
        self.tally.add("figures of summaries", name, compare_figures(ours, theirs))
        return result[0]

    def old_folders(self, names: Sequence[str]) -> None:
        """The candidate makes summaries and reports of the other side's run folders."""
        before, after = self.sides
        copies = {name: after.work / f"old-{name}" for name in names if (before.work / name / "summary.json").exists()}
        for name, copy in copies.items():
            shutil.copytree(before.work / name, copy)
            (copy / "summary.json").unlink()
        done = after.harness("report", *copies.values())
        if self.ended("report of the other side's folders", (done, done), (0,)):
            for name, copy in copies.items():
                ours = read_run(before.work / name)
                figures_of = [summary_figures(run, ours.absent) for run in (ours, read_run(copy))]
                self.tally.add("figures of old run folders", name, compare_figures(figures_of[0], figures_of[1]))

    def kept_evidence(self, with_full_trace: bool) -> None:
        """The kept files, and what both sides compute from them."""
        before, after = (kept.kept_figures(side.root) for side in self.sides)
        self.tally.add("figures of kept files", "results", compare_figures(before, after))
        evidence, configs = self.sides[0].root / "results", self.sides[0].root / "configs/validation"
        config = json.loads((self.sides[0].work / "quickstart/manifest.json").read_text())["cells"][0]["config"]
        source = evidence / "validation/cpu_vllm"
        folders = {side.work: kept.make_validation(source, config, side.work / "kept") for side in self.sides}
        real: dict[Path, list[str | Path]] = {work: [] for work in folders}
        for work, made in folders.items():
            real[work] += [word for run in made if run.name != "sim" for word in ("--real", run)]
        sizes = [word for size in (*VALIDATED, *["trace"] * with_full_trace) for word in ("--size", size)]
        calibration: tuple[str | Path, ...] = ("--calibration", source / "calibration.yaml", *sizes)
        self.validation("cpu_vllm", lambda s: (configs / "cpu_vllm.yaml", *calibration, *real[s.work]))
        self.validation("published", lambda _: (configs / "published.yaml",))
        done = self.both(lambda side: side.harness("report", *folders[side.work]))
        if self.ended("report of kept runs", done, (0,)):
            for number, run in enumerate(folders[self.sides[0].work]):
                ours, theirs = (read_run(folders[side.work][number]) for side in self.sides)
                found = [summary_figures(one, ours.absent) for one in (ours, theirs)]
                self.tally.add("figures made of kept evidence", f"kept {run.name}", compare_figures(found[0], found[1]))
        traced = {side.work: kept.make_io(evidence / "io", config, side.work / "kept-io") for side in self.sides}
        done = self.both(lambda side: side.harness("io", "characterize", traced[side.work]))
        if self.ended("kept traces", done, (0,)):
            told = [numbers(one.stdout) for one in done]
            self.tally.add("figures made of kept evidence", "results/io", compare_figures(told[0], told[1]))

    def validation(self, name: str, words: Callable[[Side], Sequence[str | Path]]) -> None:
        done = self.both(lambda s: s.harness("validate", *words(s), "--out", s.work / f"validate-{name}"))
        if self.ended(f"validate {name}", done, (0, 1, 3)):
            folders = [side.work / f"validate-{name}" for side in self.sides]
            found = [dict(figures(json.loads((folder / "validation.json").read_text()))) for folder in folders]
            self.tally.add("figures made of kept evidence", f"validate {name}", compare_figures(found[0], found[1]))
            self.compare_runs(f"validate {name}", read_run(folders[0] / "sim"), read_run(folders[1] / "sim"))


def read_run(folder: Path) -> Run:
    """A run folder; one within a validation has no summary."""
    rows = map(json.loads, (folder / "rows.jsonl").read_text().splitlines())
    summary = folder / "summary.json"
    return Run(
        json.loads((folder / "manifest.json").read_text()),
        rows,
        json.loads(summary.read_text()) if summary.exists() else {},
    )


def show(tally: Tally, experiments: int, seconds: float) -> None:
    for line in tally.lines[:60]:
        print(line)
    print(f"\n{experiments} experiments on both sides, {seconds:.0f} s\n{'':<32} {'compared':>10} {'differing':>10}")
    for part, count in tally.compared.items():
        print(f"{part:<32} {count:>10,} {tally.differing[part]:>10,}")


def main(before: Path, after: Path, work: Path, names: str) -> int:
    """names: of the experiments to run, as a shell pattern; * is everything, kept evidence included."""
    began = time.monotonic()
    comparison = Comparison(*(Side(root, work / name) for root, name in ((before, "before"), (after, "after"))))
    for side in comparison.sides:
        side.work.mkdir()
    comparison.both(lambda side: side.learn_names())
    for side, which in zip(comparison.sides, ("before", "after"), strict=True):
        print(f"{which}: {side.root.name}, renamed keys: {side.names or 'none'}")
    traces = Path(os.environ.get("HARNESS_TRACES", "traces/data"))
    with_full_trace = (traces / "mooncake_conversation.jsonl").exists()
    print("with the full trace" if with_full_trace else f"without the full trace: {traces} does not hold it")
    every: Mapping[str, dict[str, Any]] = matrix.shipped(before, with_full_trace) | matrix.sweeps()
    experiments = {name: content for name, content in every.items() if fnmatch.fnmatch(name, names)}
    if not experiments:
        print(f"--only {names}: fits none of {', '.join(every)}", file=sys.stderr)
        return 2
    for name, content in experiments.items():
        comparison.experiment(name, content)
    comparison.old_folders(list(experiments))
    if names == "*":
        comparison.kept_evidence(with_full_trace)
    show(comparison.tally, len(experiments), time.monotonic() - began)
    differing = sum(comparison.tally.differing.values())
    print("all of it is equal" if not differing else f"{differing:,} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    checkouts = [Path(word).resolve() for word in sys.argv[1:4]]
    sys.exit(main(checkouts[0], checkouts[1], checkouts[2], sys.argv[4]))
