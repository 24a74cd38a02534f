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

from harness.engines import ENGINES
from tests.support.paths import ROOT

PACKAGES = ("traces", "simulator", "harness")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 450, 60
HEAVY = {"aiohttp", "numpy", "pandas", "plotly", "pyarrow", "scipy"}

# The wings, top to bottom: a module imports from its own wing and from those below. Flat modules are named singly.
WINGS = (
    "harness.__main__",
    "harness.commands",
    "harness.doctor",
    "harness.report",
    "harness.validation",
    "harness.calibration",
    "harness.serving",
    "harness.measure",
    "harness.blockio",
    "harness.engines",
    "harness.caches",
    "harness.processes",
    "harness.collectors",
    "harness.results",
    "harness.experiment",
    "harness.engines and harness.caches (kinds)",
    "harness.experiment.fields",
    "harness.experiment.units",
    "harness.records",
    "harness.storage_records",
    "harness.errors",
    "harness.stats",
    "harness",
    "simulator",
    "traces",
)
# What the experiment's models have to know of engines: the table of kinds, each kind, and its settings.
KINDS = re.compile(
    r"harness\.engines(\.[A-Z]\w*|\.kind(\.\w+)?|\.\w+\.(kind|settings)(\.\w+)?)?"
    r"|harness\.caches(\.[A-Z]\w*|\.caches_of|\.kind(\.\w+)?)?"
)
# Downwards, and still not allowed: a report is made from a run's folder, whatever engine wrote it.
FORBIDDEN = {
    "harness.report.run": ("harness.engines", "harness.collectors", "harness.blockio"),
    "harness.report.validation": ("harness.engines", "harness.collectors", "harness.blockio"),
    "harness.report.io": ("harness.engines", "harness.collectors", "harness.blockio"),
}


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def wing(module: str) -> str | None:
    """The wing that holds the module; 'harness' itself holds only harness/__init__.py."""
    if KINDS.fullmatch(module):
        return "harness.engines and harness.caches (kinds)"
    names = [name for name in WINGS if within(module, name) and (name != "harness" or module == name)]
    return max(names, key=len, default=None)


def loaded(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is loaded: neither functions nor `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        typing_only = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        if not typing_only and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from loaded(node)


def imports(source: str, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything imported anywhere in the source, type-checking blocks included.

    Of a kind, what is imported when it is loaded: its functions are the doors to the engine, which stands above it.
    """
    tree = ast.parse(source)
    for node in loaded(tree) if KINDS.fullmatch(module) else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package and node.level == 1 else is_package - node.level]
                base = ".".join([*parents, *filter(None, [base])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def import_complaints(source: str, module: str, is_package: bool = False) -> list[str]:
    here = wing(module)
    if here is None:
        return [f"{module} is in no wing: move it into one, or name it in WINGS in tests/house/test_house.py"]
    found = []
    for line, target in imports(source, module, is_package):
        if target.split(".")[0] not in PACKAGES:
            continue
        # `from harness import x` names an attribute of the package itself or a module in it.
        there = wing(target) or ("harness" if wing(target.rpartition(".")[0]) == "harness" else None)
        if there is None:
            found.append(f"{module}:{line} imports {target}, which is in no wing: see WINGS in test_house.py")
            continue
        forbidden = [name for place, names in FORBIDDEN.items() if within(module, place) for name in names]
        if WINGS.index(there) < WINGS.index(here) or any(within(target, name) for name in forbidden):
            found.append(f"{module}:{line} imports {target}: {there} lies above {here}, and imports run down")
    return found


def module_of(path: Path) -> tuple[str, bool]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    return ".".join(parts[:-1] if is_package else parts), is_package


def circles(arrows: dict[str, set[str]]) -> list[str]:
    """Circles of modules that import each other when they are loaded, each as 'a -> b -> a'."""
    found: list[str] = []
    done: set[str] = set()

    def walk(module: str, trail: list[str]) -> None:
        if module in trail:
            found.append(" -> ".join([*trail[trail.index(module) :], module]))
            return
        if module in done:
            return
        for target in sorted(arrows.get(module, ())):
            walk(target, [*trail, module])
        done.add(module)

    for module in sorted(arrows):
        walk(module, [])
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
        module, is_package = module_of(path)
        if module.split(".")[0] in PACKAGES:
            found += import_complaints(path.read_text(), module, is_package)
    assert not found, "\n".join(found)


def test_no_modules_import_each_other_in_a_circle() -> None:
    paths = {module_of(path)[0]: path for path in tree(".py") if module_of(path)[0].split(".")[0] in PACKAGES}
    arrows: dict[str, set[str]] = {}
    for module, path in paths.items():
        for _, target in imports(path.read_text(), module, path.stem == "__init__"):
            whose = target if target in paths else target.rpartition(".")[0]
            # A package's own module may be imported by its __init__, which imports nothing of it in turn.
            if whose in paths and whose != module:
                arrows.setdefault(module, set()).add(whose)
    assert not circles(arrows), "\n".join(circles(arrows))


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b -> c -> b"]
    assert circles({"a": {"b", "c"}, "b": {"c"}}) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("traces.load", "from simulator.models import ModelSpec"),
        ("simulator.models", "import harness.experiment.model"),
        ("harness.experiment.model", "def f():\n    from harness.results.folder import read_rows"),
        ("harness.collectors.host", "from harness.engines.vllm import Vllm"),
        ("harness.engines.sim.engine", "from ...measure.run import run"),
        ("harness.measure.run", "from harness import commands"),
        ("harness.report.run.html", "from harness.engines.base import Engine"),
        ("harness.measure.warmup", "from harness.report.run.html import write"),
        ("harness.engines.vllm.settings", "from harness.experiment.model import Experiment"),
        ("harness.engines.vllm.kind", "from harness.engines.vllm.engine import VllmEngine"),
        ("harness.experiment.model", "from harness.engines.vllm.engine import VllmEngine"),
        ("harness.novelty", "import json"),
        ("harness.measure.run", "from harness.novelty import new"),
    ],
)
def test_an_import_that_runs_up_is_found(module: str, source: str) -> None:
    assert len(import_complaints(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("simulator.simulate", "from traces.request import Request\nfrom simulator import _core"),
        ("harness.engines.sim.engine", "from harness.engines.base import Engine\nfrom . import storage\nimport numpy"),
        ("harness.engines.sim.engine", "from ... import __version__\nfrom ...experiment.model import load"),
        ("harness.experiment.read", "from harness.experiment.model import Experiment"),
        ("harness.caches.lmcache", "from harness.collectors.prometheus import scrape"),
        ("harness.commands.app", "from harness.doctor import checks"),
        ("harness.experiment.model", "from harness.engines import ENGINES"),
        ("harness.engines.vllm.kind", "def make():\n    from harness.engines.vllm.engine import VllmEngine"),
        ("harness.engines.vllm.settings", "from harness.experiment.fields import Strict"),
        ("harness.results.folder", "from harness.records import Counters"),
    ],
)
def test_an_import_that_runs_down_is_not(module: str, source: str) -> None:
    assert import_complaints(source, module) == []


def name_complaints(source: str, name: str) -> list[str]:
    """Comparisons with an engine's name: what one engine has, its EngineKind says."""
    found = []
    for node in ast.walk(ast.parse(source)):
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        sides += [node.value] if isinstance(node, ast.MatchValue) else []
        parts = [part for side in sides for part in (getattr(side, "elts", None) or [side])]
        if any(isinstance(part, ast.Constant) and part.value in list(ENGINES) for part in parts):
            found.append(f"{name}:{sides[0].lineno} asks for an engine by name: let its EngineKind say what differs")
    return found


def test_no_engine_is_asked_for_by_name() -> None:
    found: list[str] = []
    for path in tree(".py"):
        name = relative(path)
        if name.startswith(PACKAGES) and not name.startswith("harness/engines/"):
            found += name_complaints(path.read_text(), name)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    ['engine == "vllm"', 'if "sim" != name:\n    pass', 'engine in ("fake", "x")', 'match e:\n case "sim": pass'],
)
def test_an_engine_by_name_is_found(source: str) -> None:
    assert len(name_complaints(source, "a.py")) == 1


def test_an_engine_by_kind_is_not() -> None:
    assert name_complaints('run(engine="sim", ok=ENGINES["sim"].disk(e) == "real")', "a.py") == []


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
    found = heavy_after("sys.argv = ['harness', '--help']; import harness.commands.app as app; app.main()")
    assert not found, f"harness --help imports {', '.join(sorted(found))}: import them inside the verb"


def test_a_heavy_import_is_found() -> None:
    assert heavy_after("import numpy") == {"numpy"}
