"""One name, one notion: no public name of the house means two things.

A name counts when a module of the house defines it at its top level: a class, a function, or an alias in CamelCase.
Two rules allow a name twice. A verb's function in harness/commands carries the verb's name, as does the library
function that does its work. Each program's entry point is `main`.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping

import pytest

from harness.commands.app import VERBS
from tests.house.test_house import PACKAGES, module_of, tree
from tests.support.paths import ROOT

ENTRY_POINT = "main"
COMMANDS = frozenset((f"harness.commands.{module}", function) for module, function, _ in VERBS.values())


def public_names(source: str) -> Iterator[str]:
    """The public names that a module defines: not those that it imports, and not its constants."""
    for node in ast.parse(source).body:
        names: list[str] = []
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            named = [target.id for target in node.targets if isinstance(target, ast.Name)]
            names = [name for name in named if name[0].isupper() and not name.isupper()]
        yield from (name for name in names if not name.startswith("_"))


def double_names(sources: Mapping[str, str]) -> list[str]:
    """Complaints about names that two modules define. sources: each module's text, by its dotted name."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, source in sorted(sources.items()):
        for name in public_names(source):
            if name != ENTRY_POINT and (module, name) not in COMMANDS:
                places[name].append(module)
    return [
        f"{name} is defined in {' and '.join(modules)}: give each notion a name of its own"
        for name, modules in sorted(places.items())
        if len(modules) > 1
    ]


def test_public_names_mean_one_thing() -> None:
    paths = [path for path in tree(".py") if path.relative_to(ROOT).parts[0] in PACKAGES]
    found = double_names({module_of(path)[0]: path.read_text() for path in paths})
    assert not found, "\n".join(found)


@pytest.mark.parametrize("source", ["class Point:\n    x = 1", "def Point():\n    pass", "Point = tuple[int, int]"])
def test_a_name_with_two_meanings_is_found(source: str) -> None:
    other = "class Point:\n    y = 1"
    assert len(double_names({"harness.a": source, "harness.b": other})) == 1


@pytest.mark.parametrize(
    "source", ["from a import Point", "def f():\n    class Point: ...", "_Point = int", "POINT = 1"]
)
def test_an_import_a_local_name_a_private_name_and_a_constant_are_none(source: str) -> None:
    assert double_names({"harness.a": source, "harness.b": "class Point: ...\nclass _Point: ...\nPOINT = 2"}) == []


def test_only_the_verb_s_own_function_shares_its_name() -> None:
    verb, library = "def run():\n    pass", "def run():\n    pass"
    assert double_names({"harness.commands.run": verb, "harness.measure.run": library}) == []
    assert len(double_names({"harness.commands.options": verb, "harness.measure.run": library})) == 1
