"""Writes README.md: per module how many mutants its tests catch, and each survivor, with the reason if it has one.

    python scripts/mutate_lib/keep.py .mutation results/mutation

Reasons stand in equivalent.yaml, by module, then by the changed line as the mutant has it. Only outcomes of the
modules and tests as they are now count: what ran before a change of either is left out.
"""

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import yaml

from scripts.mutate_lib.python_mutants import SEED, state_of

FEWEST = 20  # mutants that have to run before their share says something
HEAD = """# Mutation tests

`scripts/mutate` changes one operator, number or condition of a module at a time and runs the module's tests. A mutant
that no test notices survives. One that runs out of time counts as caught, and stands in a column of its own. The
operators are cosmic-ray's, without those that fail at once (scripts/mutate_lib/generate.py); for Rust, cargo-mutants'.
`run` says how many of a module's mutants ran: a choice by chance (seed {seed}) where it is less than all.
A line with `not run` claims nothing. Only outcomes of the modules and tests as they stood on {date} count.
"""


def main() -> None:
    scratch, target = Path(sys.argv[1]), Path(sys.argv[2])
    here = Path(__file__).parent
    table: dict[str, dict[str, list[str]]] = yaml.safe_load((here / "modules.yaml").read_text())
    reasons: dict[str, dict[str, str]] = yaml.safe_load((here / "equivalent.yaml").read_text()) or {}
    rows, survivors, caught_of_all, run_of_all = [], list[str](), 0, 0
    for module, tests in table["python"].items():
        found = python_outcomes(scratch / "python" / f"{module.replace('/', '.')}.jsonl", module, tests)
        left = [one for one in found if one["outcome"] == "survived"]
        late = sum(one["outcome"] == "timeout" for one in found)
        rows.append(row(module, found[0]["of"] if found else None, len(found), len(left), late))
        survivors += [survivor(module, one, reasons.get(module, {})) for one in left]
        caught_of_all, run_of_all = caught_of_all + len(found) - len(left), run_of_all + len(found)
    for module in table["rust"]:
        outcomes = scratch / "rust" / module.replace("/", ".") / "mutants.out" / "outcomes.json"
        known = json.loads(outcomes.read_text()) if outcomes.exists() else None
        run = known["caught"] + known["missed"] + known["timeout"] if known else 0
        rows.append(row(module, known["total_mutants"] if known else None, run, known["missed"] if known else 0,
                        known["timeout"] if known else 0))  # fmt: skip
        for one in known["outcomes"] if known else ():
            if one["summary"] == "MissedMutant":
                survivors.append(f"- `{one['scenario']['Mutant']['name']}`")
    lines = [
        HEAD.format(seed=SEED, date=datetime.datetime.now(datetime.UTC).date()),
        "| module | mutants | run | caught | of which out of time | survived | share caught |",
    ]
    lines += ["|---|---:|---:|---:|---:|---:|---:|", *rows, "", "## Survivors", "", *(survivors or ["None."]), ""]
    target.mkdir(parents=True, exist_ok=True)
    (target / "README.md").write_text("\n".join(lines))
    print(f"{target / 'README.md'}: {caught_of_all} of {run_of_all} Python mutants caught")


def python_outcomes(file: Path, module: str, tests: list[str]) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    state = state_of(Path(module), tests)
    known = [one for one in map(json.loads, file.read_text().splitlines()) if one["state"] == state]
    return list({one["mutant"]: one for one in known}.values())


def row(module: str, of: int | None, run: int, survived: int, late: int) -> str:
    if not run:
        return f"| {module} | {of or '—'} | 0 | — | — | — | not run |"
    share = f"{(run - survived) / run:.0%}" if run >= min(of or 0, FEWEST) else "too few ran"
    return f"| {module} | {of} | {run} | {run - survived} | {late} | {survived} | {share} |"


def survivor(module: str, one: dict[str, Any], reasons: dict[str, str]) -> str:
    said = reasons.get(one["after"])
    reason = f"equivalent: {said}" if said else "no test yet"
    return f"- {module}:{one['line']}: `{one['before']}` → `{one['after'] or '(removed)'}`: {reason}"


if __name__ == "__main__":
    main()
