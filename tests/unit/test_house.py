"""The rules of the house, as tests: imports run downwards, files and functions stay small, no machine leaks in.

Each rule is a function from source text to a list of complaints; it is shown to fail on a bad snippet, and then
held against the tree. `pytest -s` prints the median sizes.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("traces", "simulator", "harness")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 450, 60
HEAVY = {"aiohttp", "numpy", "pandas", "plotly", "pyarrow", "scipy"}

# Module or package -> level. An import must go to a lower level, or stay on its level inside one package.
LEVELS = {
    "traces": 0,
    "simulator": 1,
    "harness": 2,
    "harness.config": 2,
    "harness.engines.base": 2,  # the seam's nouns, which results keep
    "harness.experiments": 2,
    "harness.loads": 2,
    "harness.preflight": 3,
    "harness.provenance": 2,
    "harness.sampling": 2,
    "harness.stats": 2,
    "harness.strict": 2,
    "harness.units": 2,
    "harness.results": 3,
    "harness.summary": 3,
    "harness.sides": 4,
    "harness.comparable": 4,
    "harness.compare": 4,
    "harness.outcome": 4,
    "harness.limits": 4,
    "harness.collectors": 4,
    "harness.engines": 5,
    "harness.blockio": 6,
    "harness.report": 6,
    "harness.seal": 7,
    "harness.warmup": 6,
    "harness.measure": 7,
    "harness.micro": 7,
    "harness.run": 7,
    "harness.calibrate": 8,
    "harness.doctor": 8,
    "harness.serve": 8,
    "harness.serving": 6,
    "harness.session": 8,
    "harness.judge": 8,
    "harness.published": 8,
    "harness.rounds": 2,
    "harness.sweep": 8,
    "harness.turns": 8,
    "harness.validate": 8,
    "harness.cli": 9,
}
# Downwards, and still not allowed: a report is made from a run's folder, whatever engine wrote it.
FORBIDDEN = {"harness.report": ("harness.engines", "harness.collectors", "harness.blockio")}


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def entry(module: str) -> str | None:
    """The longest name in LEVELS that holds the module; 'harness' itself holds only harness/__init__.py."""
    names = [name for name in LEVELS if within(module, name) and (name != "harness" or module == name)]
    return max(names, key=len, default=None)


def home(module: str) -> str:
    """The package whose modules may import each other: 'harness' for harness.run, harness.engines for its own."""
    name = entry(module) or module
    return name if (ROOT / name.replace(".", "/")).is_dir() else name.rpartition(".")[0]


def imports(source: str, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything imported anywhere in the source, type-checking blocks included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package and node.level == 1 else is_package - node.level]
                base = ".".join([*parents, *filter(None, [base])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def import_complaints(source: str, module: str, is_package: bool = False) -> list[str]:
    here = entry(module)
    if here is None:
        return [f"{module} has no level: add it to LEVELS in tests/unit/test_house.py"]
    found = []
    for line, target in imports(source, module, is_package):
        if target.split(".")[0] not in PACKAGES or within(target, here):
            continue
        # `from harness import x` names an attribute of the package itself or a module in it.
        there = entry(target) or ("harness" if entry(target.rpartition(".")[0]) == "harness" else None)
        if there is None:
            found.append(f"{module}:{line} imports {target}, which has no level: add it to LEVELS in test_house.py")
            continue
        up = LEVELS[there] > LEVELS[here] or (LEVELS[there] == LEVELS[here] and home(there) != home(here))
        if up or any(within(target, name) for name in FORBIDDEN.get(here, ())):
            found.append(
                f"{module}:{line} (level {LEVELS[here]}) imports {target} (level {LEVELS[there]}): imports run down"
            )
    return found


def function_lengths(source: str, suffix: str) -> Iterator[tuple[str, int]]:
    """Name and lines of each function, its docstring included."""
    if suffix == ".py":
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1
    if suffix == ".rs":
        # Rust here is formatted, so that a function ends at the first brace with its own indentation.
        for match in re.finditer(r"^([ ]*)(?:pub(?:\(\w+\))? )?(?:const |unsafe )*fn (\w+)", source, re.MULTILINE):
            if body := re.match(rf".*?^{match[1]}\}}", source[match.start() :], re.MULTILINE | re.DOTALL):
                yield match[2], body[0].count("\n") + 1


def size_complaints(source: str, name: str) -> list[str]:
    lines = source.count("\n")
    found = [f"{name} has {lines} lines, more than {MAX_FILE_LINES}: split it"] if lines > MAX_FILE_LINES else []
    for function, length in function_lengths(source, Path(name).suffix):
        if length > MAX_FUNCTION_LINES:
            found.append(f"{name}: {function} has {length} lines, more than {MAX_FUNCTION_LINES}: split it")
    return found


def text_complaints(text: str, name: str) -> list[str]:
    """Paths of the machine that something was written on, and notes to self."""
    # Spelt so that this file does not complain about itself.
    machine = re.compile(r"(?<![\w./$}~-])/(?:wor" + "k|roo" + "t|far" + r"m)(?![\w-])")
    unfinished = re.compile(r"\b(?:TO" + "DO|FIX" + r"ME)\b")
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if machine.search(line):
            found.append(f"{name}:{number} holds a path of one machine: {line.strip()[:80]}")
        if unfinished.search(line):
            found.append(f"{name}:{number} is unfinished: {line.strip()[:80]}")
    return found


def experiment_complaints(text: str, name: str, readme: str) -> list[str]:
    described = Path(name).name in readme or bool((yaml.safe_load(text) or {}).get("description"))
    return [] if described else [f"{name} has no description, and the README does not mention it: add one"]


def tree(*suffixes: str) -> list[Path]:
    """Files that git tracks or would, so that built and downloaded ones stay out."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    paths = [ROOT / line for line in listed if not suffixes or line.endswith(suffixes)]
    return [path for path in paths if path.is_file()]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_imports_run_downwards() -> None:
    found: list[str] = []
    for path in tree(".py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] in PACKAGES:
            is_package = parts[-1] == "__init__"
            module = ".".join(parts[:-1] if is_package else parts)
            found += import_complaints(path.read_text(), module, is_package)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("traces.load", "from simulator.models import ModelSpec"),
        ("simulator.models", "import harness.config"),
        ("harness.config", "def f():\n    from harness.results import Sample"),
        ("harness.collectors.host", "from harness.engines.vllm import Vllm"),
        ("harness.engines.sim", "from ..run import run"),
        ("harness.run", "from harness import cli"),
        ("harness.report.html", "from harness.engines.base import Counters"),
        ("harness.warmup", "from harness.report.html import write"),
        ("harness.novelty", "import json"),
        ("harness.run", "from harness.novelty import new"),
    ],
)
def test_an_import_that_runs_up_is_found(module: str, source: str) -> None:
    assert len(import_complaints(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("simulator.simulate", "from traces.request import Request\nfrom simulator import _core"),
        ("harness.engines.sim", "from harness.engines.base import Engine\nfrom . import base\nimport numpy"),
        ("harness.engines.sim", "from .. import __version__\nfrom ..config import load"),
        ("harness.experiments", "from harness.config import Experiment"),
        ("harness.engines.lmcache", "from harness.collectors.prometheus import scrape"),
        ("harness.sweep", "from harness.run import run\nfrom harness import warmup"),
        ("harness.cli", "from harness.doctor import checks"),
        ("harness.results", "from harness.engines.base import Counters"),
    ],
)
def test_an_import_that_runs_down_is_not(module: str, source: str) -> None:
    assert import_complaints(source, module) == []


def test_files_and_functions_are_small() -> None:
    found: list[str] = []
    file_lines: list[int] = []
    function_lines: list[int] = []
    for path in tree(".py", ".rs", ".bt"):
        source = path.read_text()
        found += size_complaints(source, relative(path))
        if source.strip():
            file_lines.append(source.count("\n"))
            function_lines += [length for _, length in function_lengths(source, path.suffix)]
    print(
        f"\nfiles: {len(file_lines)}, median {statistics.median(file_lines):.0f} lines, longest {max(file_lines)}; "
        f"functions: {len(function_lines)}, median {statistics.median(function_lines):.0f}, "
        f"longest {max(function_lines)}"
    )
    assert not found, "\n".join(found)


def test_what_is_too_long_is_found() -> None:
    body = "    x = 1\n" * MAX_FUNCTION_LINES
    assert size_complaints(f"def f():\n{body}", "a.py") == ["a.py: f has 61 lines, more than 60: split it"]
    assert size_complaints(f"def f():\n{body[10:]}", "a.py") == []
    rust = f"impl A {{\n    pub(crate) fn g(&self) {{\n{body}    }}\n\n    fn h() {{\n    }}\n}}\n"
    assert size_complaints(rust, "a.rs") == ["a.rs: g has 62 lines, more than 60: split it"]
    assert size_complaints("\n" * 451, "a.bt") == ["a.bt has 451 lines, more than 450: split it"]


def test_no_machine_paths_and_nothing_unfinished() -> None:
    found: list[str] = []
    for path in tree():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # a figure or another binary
        if path.suffix != ".lock":
            found += text_complaints(text, relative(path))
    assert not found, "\n".join(found)


def test_a_machine_path_or_an_unfinished_line_is_found() -> None:
    for line in ("cd /wor" + "k/main", 'open("/roo' + 't")', "x = 1  # TO" + "DO: later"):
        assert len(text_complaints(f"fine\n{line}\n", "a")) == 1
    assert text_complaints("a/work\nsys/root\n./farm/x\n$HOME/root\n/workspace\n", "a") == []


def test_experiments_say_what_they_are_for() -> None:
    readme = (ROOT / "README.md").read_text()
    files = sorted((ROOT / "configs/experiments").glob("*.yaml"))
    assert files, "configs/experiments holds no experiment"
    found = [line for file in files for line in experiment_complaints(file.read_text(), relative(file), readme)]
    assert not found, "\n".join(found)


def test_an_experiment_without_description_is_found() -> None:
    assert len(experiment_complaints("engine: sim", "configs/experiments/a.yaml", "")) == 1
    assert experiment_complaints("description: why", "configs/experiments/a.yaml", "") == []
    assert experiment_complaints("engine: sim", "configs/experiments/a.yaml", "see a.yaml") == []


def heavy_after(code: str) -> set[str]:
    """The heavy libraries that a fresh interpreter has imported after running the code."""
    script = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint('\\n' + ' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return HEAVY & set(done.stdout.splitlines()[-1].split())


def test_help_is_quick() -> None:
    """`harness --help` answers at once: what takes a second to import is imported by the verb that needs it."""
    found = heavy_after("sys.argv = ['harness', '--help']; import harness.cli; harness.cli.main()")
    assert not found, f"harness --help imports {', '.join(sorted(found))}: import them inside the verb"


def test_a_heavy_import_is_found() -> None:
    assert heavy_after("import numpy") == {"numpy"}
