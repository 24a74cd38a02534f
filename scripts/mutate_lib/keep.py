"""Writes results/mutation/README.md from the outcomes beside it: per module how many mutants its tests catch, and each
survivor with its reason.

    python scripts/mutate_lib/keep.py

Reasons stand in survivors.yaml, by module, then by the changed line as the mutant has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from scipy.stats import binomtest

from scripts.mutate_lib.outcomes import FOLDER, Outcomes, code_of

FEWEST = 20  # mutants that have to run before their share says something
HEAD = """# Mutation tests

`scripts/mutate` changes one operator, number or condition of a module at a time and runs the module's tests. A mutant
that no test notices survives. One that exceeds its time limit counts as caught, and has a column of its own. The limit
is CPU time, five times what the tests use as they are, so a busy machine does not catch mutants.

The Python operators are cosmic-ray's, without those that fail at once (scripts/mutate_lib/generate.py). The Rust
mutants are cargo-mutants' (scripts/mutate_lib/rust_mutants.py); those that do not compile are left out. `run` says how
many of a module's mutants ran: a choice by chance where it is less than all. `now`: whether the module's code is still
what ran. `outcomes/` has one line for each mutant. An equivalent mutant does what the code does, so no test can catch
it; the last share leaves those out.
"""


def main() -> None:
    here = Path(__file__).parent
    table: dict[str, dict[str, list[str]]] = yaml.safe_load((here / "modules.yaml").read_text())
    reasons: dict[str, dict[str, str]] = yaml.safe_load((here / "survivors.yaml").read_text()) or {}
    lines = [
        HEAD,
        "| module | now | mutants | run | caught | of which out of time | survived | of which equivalent"
        " | share caught | without equivalent ones |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    survivors, parts, totals = list[str](), list[str](), dict[str, tuple[int, int]]()
    for language, modules in table.items():
        found = {module: Outcomes.read(module) for module in modules}
        rows = [(one, counts(one, reasons.get(one.module, {}))) for one in found.values() if one is not None]
        by_module = {one.module: row(one, of) for one, of in rows if ran(one)}
        lines += [by_module.get(module, f"| {module} | — | — | 0 | — | — | — | — | not run | |") for module in found]
        whole = [sum(column) for column in zip(*(of for _, of in rows), strict=True)] or [0] * 5
        totals[language] = (whole[1] - whole[3], whole[1])
        if whole[1]:
            lines.append(_cells(f"**{language.capitalize()}, all**", "", whole))
            parts += part(language.capitalize(), whole)
        survivors += [line for one, _ in rows for line in told(one, reasons.get(one.module, {}))]
    lines += ["", *parts, "## Survivors", "", *(survivors or ["None."]), ""]
    (FOLDER.parent / "README.md").write_text("\n".join(lines))
    words = [f"{caught} of {run} {language} mutants" for language, (caught, run) in totals.items()]
    print(f"{FOLDER.parent / 'README.md'}: caught {', '.join(words)}")


def ran(outcomes: Outcomes) -> int:
    return len(outcomes.known) - outcomes.count("unviable")


def counts(outcomes: Outcomes, reasons: dict[str, str]) -> list[int]:
    """Mutants, run, out of time, survived, equivalent."""
    survived = [one for one in outcomes.known.values() if one.outcome == "survived"]
    equivalent = sum(reasons.get(one.after, "").startswith("equivalent") for one in survived)
    return [outcomes.of, ran(outcomes), outcomes.count("timeout"), len(survived), equivalent]


def row(outcomes: Outcomes, of: Sequence[int]) -> str:
    return _cells(outcomes.module, "yes" if outcomes.code == code_of(Path(outcomes.module)) else "changed since", of)


def _cells(name: str, now: str, of: Sequence[int]) -> str:
    mutants, run, late, survived, equivalent = of
    shares = [(run - survived) / (run - without) if run > without else 1.0 for without in (0, equivalent)]
    told = [f"{share:.0%}" for share in shares] if run >= min(mutants, FEWEST) else ["too few ran", ""]
    cells = [name, now, mutants, run, run - survived, late, survived, equivalent, *told]
    return f"| {' | '.join(map(str, cells))} |"


def part(language: str, of: Sequence[int]) -> list[str]:
    """What a choice of a language's mutants says about all of them. Empty: all ran, or none that counts."""
    mutants, run, _, survived, equivalent = of
    if run in (mutants, equivalent):
        return []
    interval = binomtest(run - survived, run - equivalent).proportion_ci(0.95, method="wilson")
    return [
        f"{language}: {run} of {mutants} mutants ran. Without equivalent ones, the share caught has a 95 % interval of"
        f" {interval.low:.0%} to {interval.high:.0%}.",
        "Tests that were written for survivors of the choice raise this share, and not that of the other mutants.",
        "",
    ]


def told(outcomes: Outcomes, reasons: dict[str, str]) -> list[str]:
    return [
        f"- {outcomes.module}:{one.line}: `{one.before}` → `{one.after or '(removed)'}`:"
        f" {reasons.get(one.after, 'no test yet')}"
        for one in outcomes.known.values()
        if one.outcome == "survived"
    ]


if __name__ == "__main__":
    main()
