"""Runs the core's tests once a mutant of cargo-mutants' list, with all mutants in one build; keeps outcomes.

    cargo mutants --list --json … >LIST; python scripts/mutate_lib/rust_mutants.py LIST SCRATCH MOST

cargo-mutants itself builds the core once a mutant, which takes several times as long as its tests. Here each function
holds its own body and one copy of it for each of its mutants, and the environment variable KV_MUTANT says which one
runs. A copy that does not compile is left out and counts as no mutant. MOST: of more mutants than these, a seeded
choice of MOST runs. The copy of the core under SCRATCH changes, the repository's does not.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.mutate_lib.outcomes import Outcome, Outcomes

SEED = 1
CORE = Path("simulator/core")
_TESTS = CORE / "src/tests"
# The quick tests run first: most mutants end there.
_STAGES = (("--skip", "tests::fuzz"), ("tests::fuzz",))
_START_S, _TIMES, _WAIT_TIMES = 5.0, 5.0, 8.0  # of CPU time, as in python_mutants.py
_MOST_MEMORY_BYTES = 8 << 30
_SWITCH = """
/// Which mutant runs; 0: none.
pub(crate) fn mutant() -> u32 {
    static ACTIVE: std::sync::LazyLock<u32> =
        std::sync::LazyLock::new(|| std::env::var("KV_MUTANT").ok().and_then(|text| text.parse().ok()).unwrap_or(0));
    *ACTIVE
}
"""


@dataclass(frozen=True)
class Mutant:
    """start, end: where the replacement goes in the file's text; body: the function's, braces included."""

    number: int
    file: str
    name: str
    line: int
    before: str
    after: str
    body: tuple[int, int]
    start: int
    end: int
    replacement: str


def main() -> None:
    listed, scratch, most = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    mutants = [known for n, one in enumerate(json.loads(listed.read_text()), 1) if (known := _read(n, one)) is not None]
    tests = sorted(map(str, _TESTS.glob("*.rs")))
    by_file: dict[str, list[Mutant]] = defaultdict(list)
    for one in mutants:
        by_file[one.file].append(one)
    kept = {file: Outcomes.now(CORE / file, tests, len(all_)) for file, all_ in by_file.items()}
    chosen = random.Random(SEED).sample(mutants, min(most, len(mutants)))
    left = [one for one in chosen if not kept[one.file].stands(one.name)]
    if not left:
        return
    program, viable = _build(left, scratch)
    limits_s = []
    for stage in _STAGES:
        began_s = _children_cpu_s()
        if (outcome := _try(program, 0, stage, 3600.0)) != "survived":
            sys.exit(f"error: the core's tests {' '.join(stage)} fail as they are ({outcome}); run: cargo test")
        limits_s.append(_START_S + _TIMES * (_children_cpu_s() - began_s))

    def found(one: Mutant) -> str:
        if one not in viable:
            return "unviable"
        tries = (_try(program, one.number, *of) for of in zip(_STAGES, limits_s, strict=True))
        return next((outcome for outcome in tries if outcome != "survived"), "survived")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {pool.submit(found, one): one for one in left}
        for done in as_completed(running):
            one = running[done]
            kept[one.file].add(one.name, Outcome(done.result(), one.line, one.before, one.after))
            print(f"{CORE / one.file}:{one.name} {done.result()}", flush=True)


def _read(number: int, listed: dict[str, Any]) -> Mutant | None:
    """None: a mutant outside all functions."""
    if listed["function"] is None:
        return None
    file = listed["file"]
    text = (CORE / file).read_text()
    lines = text.splitlines(keepends=True)

    def at(place: dict[str, int]) -> int:
        return sum(map(len, lines[: place["line"] - 1])) + place["column"] - 1

    start, end = at(listed["span"]["start"]), at(listed["span"]["end"])
    whole = listed["function"]["span"]
    line, column = listed["span"]["start"]["line"], listed["span"]["start"]["column"]
    before = lines[line - 1].strip()
    after = (text[:start] + listed["replacement"] + text[end:]).splitlines()[line - 1].strip()
    name = f"{line}:{column}: {listed['name'].split(': ', 1)[1]}"
    body = _body(text, at(whole["start"])), at(whole["end"])
    return Mutant(number, file, name, line, before, after, body, start, end, listed["replacement"])


def _body(text: str, start: int) -> int:
    """Where a function's first brace is that stands in no parenthesis."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(text[place], 0)
        if text[place] == "{" and depth == 0:
            return place
    raise ValueError(f"no body in {text[start : start + 80]!r}")


def _build(mutants: Sequence[Mutant], scratch: Path) -> tuple[Path, list[Mutant]]:
    """The tests' program, and the mutants in it. A mutant that the compiler refuses is taken out, and all is built
    again."""
    copy = scratch / "core"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(CORE, copy, ignore=shutil.ignore_patterns("target"))
    with (copy / "src/lib.rs").open("a") as file:
        file.write(_SWITCH)
    viable = list(mutants)
    profile = {"OPT_LEVEL": "1", "DEBUG": "0"}
    environment = os.environ | {f"CARGO_PROFILE_TEST_{name}": value for name, value in profile.items()}
    command = ["cargo", "test", "--quiet", "--lib", "--no-run", "--no-default-features", "--message-format=json"]
    command += [f"--manifest-path={copy / 'Cargo.toml'}", f"--target-dir={(scratch / 'target').resolve()}"]
    while True:
        places = _write(viable, copy)
        built = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        messages = [json.loads(line) for line in built.stdout.splitlines() if line.startswith("{")]
        if built.returncode == 0:
            [built_as] = [m["executable"] for m in messages if m.get("executable")]
            # Another build of the core takes the same name.
            return Path(shutil.copy2(built_as, scratch / "tests")), viable
        refused = set(_refused(messages, places))
        if not refused:
            texts = [m["message"]["rendered"] for m in messages if m.get("message")]
            sys.exit(f"error: the core does not build with mutants in it\n{''.join(texts)[-3000:]}")
        print(f"{len(refused)} mutants do not compile", flush=True)
        viable = [one for one in viable if one.number not in refused]


def _write(mutants: Iterable[Mutant], copy: Path) -> dict[str, list[tuple[int, int, set[int]]]]:
    """Writes the files with mutants into the copy; by file, which lines are which mutants'. Lines of a function that
    are no single mutant's are all of its mutants'."""
    places: dict[str, list[tuple[int, int, set[int]]]] = defaultdict(list)
    bodies: dict[str, dict[tuple[int, int], list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for one in mutants:
        bodies[one.file][one.body].append(one)
    for source in (CORE / "src").rglob("*.rs"):
        file = str(source.relative_to(CORE))
        if file == "src/lib.rs":
            continue
        text, out, done = source.read_text(), "", 0
        for (start, end), own in sorted(bodies[file].items()):
            if start < done:  # a function within a function
                continue
            out += text[done:start] + "{ match crate::mutant() {\n"
            first = out.count("\n")
            for one in own:
                begin = out.count("\n") + 1
                out += f"{one.number} => {text[start : one.start]}{one.replacement}{text[one.end : end]}\n"
                places[file].append((begin, out.count("\n"), {one.number}))
            out += f"_ => {text[start:end]}\n}} }}"
            places[file].append((first, out.count("\n") + 1, {one.number for one in own}))
            done = end
        target = copy / file
        if not target.exists() or target.read_text() != out + text[done:]:
            target.write_text(out + text[done:])
    return places


def _refused(messages: Iterable[dict[str, Any]], places: dict[str, list[tuple[int, int, set[int]]]]) -> Iterable[int]:
    for message in messages:
        if (told := message.get("message")) is None or told["level"] != "error":
            continue
        for span in told["spans"]:
            file = "src/" + span["file_name"].partition("src/")[2]
            if span["is_primary"]:
                # The narrowest first: a mutant before its function.
                found = [own for first, last, own in places.get(file, ()) if first <= span["line_start"] <= last]
                yield from min(found, key=len, default=set())


def _try(program: Path, number: int, stage: Sequence[str], limit_s: float) -> str:
    """'caught', 'survived' or 'timeout' (of limit_s seconds of CPU time)."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit_s), math.ceil(limit_s)))
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY_BYTES, _MOST_MEMORY_BYTES))

    child = subprocess.Popen(
        [program, *stage], env=os.environ | {"KV_MUTANT": str(number)}, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, preexec_fn=limit,
    )  # fmt: skip
    late = threading.Event()

    def give_up() -> None:
        late.set()
        child.kill()

    timer = threading.Timer(_WAIT_TIMES * limit_s, give_up)
    timer.start()
    failed = False
    assert child.stdout is not None
    for line in child.stdout:
        if line.rstrip().endswith("FAILED"):
            failed = True
            child.kill()
            break
    child.stdout.close()
    status = child.wait()
    timer.cancel()
    if failed:
        return "caught"
    # The kernel ends a process at its limit with SIGKILL, as the hard limit is the soft one.
    return "timeout" if late.is_set() or status in (-9, -24) else "survived" if status == 0 else "caught"


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
