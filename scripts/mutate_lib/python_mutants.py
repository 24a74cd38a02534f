"""Runs a module's tests once a mutant, each in a fork of one process that has the packages loaded; keeps outcomes.

    python scripts/mutate_lib/python_mutants.py MODULE MUTANTS MOST -- TEST_FILE…

MUTANTS: what generate.py printed. MOST: of more mutants than these, a seeded choice of MOST runs. outcomes.py keeps
each outcome as it comes and says which mutants need no other run. A fork imports the mutant in the module's place, so
no source file changes.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import json
import math
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from types import ModuleType

from scripts.mutate_lib.outcomes import Outcome, Outcomes

SEED = 1
# A fork loads this repository's modules itself, for they have to see the mutant; all other packages are there already.
_OURS = ("harness", "simulator", "traces", "tests")
_PRELOADED = ("numpy", "scipy.special", "scipy.stats", "pydantic", "msgspec", "yaml", "pytest", "pytest_timeout")
# A mutant may use this CPU time: _START_S, and _TIMES what the tests need as they are. A busy machine does not use CPU
# time up, so no mutant counts as caught because other programs ran. It may wait _WAIT_TIMES as long.
_START_S, _TIMES, _WAIT_TIMES = 5.0, 5.0, 8.0


class _Mutant(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, path: Path, source: str) -> None:
        self._name, self._path, self._source = ".".join(path.with_suffix("").parts), path, source

    def find_spec(self, fullname: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=str(self._path))

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(self._path)
        exec(compile(self._source, str(self._path), "exec"), module.__dict__)


def main() -> None:
    module, mutants_file = map(Path, sys.argv[1:3])
    most, tests = int(sys.argv[3]), sys.argv[5:]
    if not tests:
        sys.exit(f"error: {module} has no tests in scripts/mutate_lib/modules.yaml; add them")
    for name in _PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    importlib.import_module(".".join(module.with_suffix("").parts))
    for name in [name for name in sys.modules if name.partition(".")[0] in _OURS and name != "simulator._core"]:
        del sys.modules[name]
    mutants = [json.loads(line) for line in mutants_file.read_text().splitlines()]
    # Not sorted: a run that was stopped early is a choice by chance as well.
    chosen = random.Random(SEED).sample(range(len(mutants)), min(most, len(mutants)))
    kept = Outcomes.now(module, tests, len(mutants))
    names = {number: f"{mutants[number]['operator']}:{mutants[number]['occurrence']}" for number in chosen}
    left = [number for number in chosen if not kept.stands(names[number])]
    if not left:
        return
    began_s = _children_cpu_s()
    outcome, log = _try(module, module.read_text(), tests, 600.0)
    if outcome != "survived":
        sys.exit(f"error: the tests of {module} fail as it is; run: .venv/bin/pytest {' '.join(tests)}\n{log[-3000:]}")
    limit_s = _START_S + _TIMES * (_children_cpu_s() - began_s)
    for number in left:
        mutant = mutants[number]
        outcome, _ = _try(module, mutant["source"], tests, limit_s)
        kept.add(names[number], Outcome(outcome, mutant["line"], mutant["before"], mutant["after"]))
        print(f"{module}:{mutant['line']} {names[number]} {outcome}", flush=True)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _try(module: Path, source: str, tests: list[str], limit_s: float) -> tuple[str, str]:
    """'caught', 'survived' or 'timeout' (of limit_s seconds of CPU time), and what pytest printed."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit_s), math.ceil(limit_s)))
        _run(module, source, tests, write_end)
    os.close(write_end)
    deadline, output = time.monotonic() + _WAIT_TIMES * limit_s, bytearray()
    os.set_blocking(read_end, False)
    while True:
        with contextlib.suppress(BlockingIOError):
            output += os.read(read_end, 1 << 20)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    # What a test started and a mutant did not end is in the child's process group.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    os.close(read_end)
    text = output.decode(errors="replace")
    late = not ended or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL))
    return "timeout" if late else "survived" if status == 0 else "caught", text


def _run(module: Path, source: str, tests: list[str], output: int) -> None:
    code = 70
    try:
        os.setpgid(0, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.meta_path.insert(0, _Mutant(module, source))
        import pytest

        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", *tests]))
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
