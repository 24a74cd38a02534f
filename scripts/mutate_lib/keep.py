"""Writes results/mutation/README.md from the outcomes beside it: per module how many mutants its tests catch, and each
survivor with its reason.

    python scripts/mutate_lib/keep.py

Reasons stand in survivors.yaml, by module, then by the changed line as the mutant has it.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from scripts.mutate_lib.outcomes import FOLDER, Outcomes, code_of

FEWEST = 20  # mutants that have to run before their share says something
HEAD = """# Mutation tests

`scripts/mutate` changes one operator, number or condition of a module at a time and runs the module's tests. A mutant
that no test notices survives. One that exceeds its time limit counts as caught, and has a column of its own. The limit
is CPU time, five times what the tests use as they are, so a busy machine does not catch mutants.

The Python operators are cosmic-ray's, without those that fail at once (scripts/mutate_lib/generate.py). The Rust
mutants are cargo-mutants' (scripts/mutate_lib/rust_mutants.py); those that do not compile are left out. `run` says how
many of a module's mutants ran: a choice by chance where it is less than all. `now`: whether the module's code is still
what ran. `outcomes/` has one line for each mutant.
"""


def main() -> None:
    here = Path(__file__).parent
    table: dict[str, dict[str, list[str]]] = yaml.safe_load((here / "modules.yaml").read_text())
    reasons: dict[str, dict[str, str]] = yaml.safe_load((here / "survivors.yaml").read_text()) or {}
    lines = [HEAD, "| module | mutants | run | caught | of which out of time | survived | share caught | now |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|---|"]
    survivors, totals = list[str](), dict[str, tuple[int, int]]()
    for language, modules in table.items():
        found = {module: Outcomes.read(module) for module in modules}
        known = [one for one in found.values() if one is not None]
        lines += [row(module, one) for module, one in found.items()]
        of, run = sum(one.of for one in known), sum(map(ran, known))
        late, survived = (sum(one.count(outcome) for one in known) for outcome in ("timeout", "survived"))
        totals[language] = (run - survived, run)
        if run:
            lines.append(_cells(f"**{language.capitalize()}, all**", of, run, late, survived, ""))
        survivors += [line for one in known for line in told(one, reasons.get(one.module, {}))]
    lines += ["", "## Survivors", "", *(survivors or ["None."]), ""]
    (FOLDER.parent / "README.md").write_text("\n".join(lines))
    words = [f"{caught} of {run} {language} mutants" for language, (caught, run) in totals.items()]
    print(f"{FOLDER.parent / 'README.md'}: caught {', '.join(words)}")


def ran(outcomes: Outcomes) -> int:
    return len(outcomes.known) - outcomes.count("unviable")


def row(module: str, outcomes: Outcomes | None) -> str:
    if outcomes is None or not ran(outcomes):
        return f"| {module} | {outcomes.of if outcomes else '—'} | 0 | — | — | — | not run | |"
    late, survived = outcomes.count("timeout"), outcomes.count("survived")
    now = "yes" if outcomes.code == code_of(Path(module)) else "changed since"
    return _cells(module, outcomes.of, ran(outcomes), late, survived, now)


def _cells(name: str, of: int, run: int, late: int, survived: int, now: str) -> str:
    share = f"{(run - survived) / run:.0%}" if run >= min(of, FEWEST) else "too few ran"
    return f"| {name} | {of} | {run} | {run - survived} | {late} | {survived} | {share} | {now} |"


def told(outcomes: Outcomes, reasons: dict[str, str]) -> list[str]:
    return [
        f"- {outcomes.module}:{one.line}: `{one.before}` → `{one.after or '(removed)'}`:"
        f" {reasons.get(one.after, 'no test yet')}"
        for one in outcomes.known.values()
        if one.outcome == "survived"
    ]


if __name__ == "__main__":
    main()
