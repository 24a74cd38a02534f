"""The Rust core's modules: which use which."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.house.test_house import circles
from tests.support.paths import ROOT

SOURCES = ROOT / "simulator/core/src"
# What a file takes from other modules of the core, wherever in the file: a path, and names in braces after it.
_USED = re.compile(r"(?<![\w:])(crate|super)((?:::\w+)*)(?:::\{([^}]*)\})?")
_OWN_TESTS = "#[cfg(test)]\nmod tests {"


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCES).with_suffix("").parts
    return "::".join(parts[:-1] if parts[-1] == "mod" else parts)


def used(source: str, module: str, modules: Mapping[str, object]) -> Iterator[str]:
    """Modules that a file uses, its own folder's left out: what a folder's files share, and its types, are one module
    in several files (an eviction policy is an `Eviction`, and `Engine`'s functions are in many files)."""
    for start, path, names in _USED.findall(source.partition(_OWN_TESTS)[0]):
        above = module.split("::")[:-1] if start == "super" else []
        for name in names.split(",") if names else [""]:
            parts = [*above, *f"{path}::{name.strip()}".strip(":").split("::")]
            while parts and "::".join(parts) not in modules:
                parts.pop()
            target = "::".join(parts)
            if target and target != module and not module.startswith(f"{target}::"):
                yield target


def arrows(sources: Mapping[str, str]) -> dict[str, set[str]]:
    return {module: set(used(source, module, sources)) for module, source in sources.items()}


def test_no_modules_of_the_core_use_each_other_in_a_circle() -> None:
    files = {module_of(path): path.read_text() for path in SOURCES.rglob("*.rs") if "tests" not in path.parts}
    files.pop("lib")
    fine = arrows(files)
    assert {"cache", "eviction::ordered", "python::cluster"} <= {module for module, targets in fine.items() if targets}
    assert not circles(fine), "\n".join(circles(fine))
    whole: dict[str, set[str]] = {}
    for module, targets in fine.items():
        here = module.split("::")[0]
        whole.setdefault(here, set()).update({target.split("::")[0] for target in targets} - {here})
    assert not circles(whole), "\n".join(circles(whole))


def test_a_circle_in_the_core_is_found() -> None:
    sources = {
        "a": "use crate::b::{self, X};",
        "b": "mod c;\n#[cfg(test)]\nmod tests {\n    use crate::a::Y;\n}",
        "b::c": "use super::X;\nuse super::d::Z;",
        "b::d": "use super::{X, c::Y};\nfn f() { super::c::g() }",
    }
    assert arrows(sources) == {"a": {"b"}, "b": set(), "b::c": {"b::d"}, "b::d": {"b::c"}}
    assert circles(arrows(sources)) == ["b::c -> b::d -> b::c"]
    assert circles(arrows({"a": "use crate::b::X;", "b": "type Y = crate::a::Y;"})) == ["a -> b -> a"]
