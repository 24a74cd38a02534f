"""No chain of string keys (`x["a"]["b"]`, `x.get("a").get("b")`) on a format of our own: it has structs and one reader.

A chain reads a document that another module wrote, by keys that only that module should know: a key that gets another
name is found in a report, not by mypy.
"""

from __future__ import annotations

import ast

import pytest

from tests.house.test_house import PACKAGES, relative, tree
from tests.support.paths import ROOT

# Files that may hold chains: another project owns the format, the file itself owns it, or no reader can fit.
ALLOWED = {
    "harness/blockio/fio.py": "fio's JSON output",
    "harness/caches/lmcache.py": "LMCache's answer to /status",
    "harness/caches/stores/redis.py": "Redis' answer to INFO",
    "harness/caches/stores/s3_bucket.py": "an S3 store's error, as botocore gives it",
    "harness/collectors/bpf.py": "bpftrace's JSON lines",
    "harness/commands/device.py": "pydantic's error dictionaries",
    "harness/engines/vllm/found.py": "LMCache's answer to /status",
    "harness/engines/vllm/process.py": "vLLM's answer to /server_info",
    "harness/experiment/read.py": "pydantic's error dictionaries",
    "harness/results/manifest.py": "it owns manifest.json, and may not know the workload whose kind it reads",
    "scripts/mutate_lib/rust_mutants.py": "cargo-mutants' list of mutants",
    "scripts/same_results_lib/comparing.py": "run folders of any two commits, compared value by value without a reader",
    "scripts/same_results_lib/main.py": "run folders of any two commits, compared value by value without a reader",
}


def read_by_key(node: ast.expr) -> ast.expr | None:
    """What the node reads by a string key, as `x` of x["a"] and of x.get("a", …); None for other nodes."""
    if isinstance(node, ast.Subscript):
        return node.value if _is_text(node.slice) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        return node.func.value if node.args and _is_text(node.args[0]) else None
    return None


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _bare(node: ast.expr) -> ast.expr:
    """Without `or {}`, a number or a name in brackets, and `:=`."""
    while True:
        if isinstance(node, ast.BoolOp):
            node = node.values[0]
        elif isinstance(node, ast.NamedExpr) or (isinstance(node, ast.Subscript) and not _is_text(node.slice)):
            node = node.value
        else:
            return node


def chain_complaints(source: str, name: str) -> list[str]:
    found = []
    for node in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.expr)):
        read = read_by_key(node)
        if read is not None and read_by_key(_bare(read)) is not None:
            found.append(
                f"{name}:{node.lineno} reads {ast.unparse(node)}: give the format structs and one reader, or name the"
                " file in ALLOWED in tests/house/test_chains.py"
            )
    return found


def chains_by_file() -> dict[str, list[str]]:
    names = {relative(path): path for path in tree(".py")}
    read = {name: path for name, path in names.items() if name.startswith((*PACKAGES, "scripts"))}
    found = {name: chain_complaints(path.read_text(), name) for name, path in read.items()}
    return {name: complaints for name, complaints in found.items() if complaints}


def test_our_own_formats_are_read_by_structs() -> None:
    found = [line for name, complaints in chains_by_file().items() if name not in ALLOWED for line in complaints]
    assert not found, "\n".join(found)


def test_each_file_on_the_list_still_needs_it() -> None:
    assert set(ALLOWED) <= chains_by_file().keys(), "take the others off the list"
    assert all((ROOT / name).is_file() for name in ALLOWED)


@pytest.mark.parametrize(
    "source",
    [
        'x["a"]["b"]',
        'x.get("a").get("b")',
        'x.get("a", {})["b"]',
        '(x["a"] or {}).get("b", 0)',
        'x["a"][0]["b"]',
        'x["a"][side]["b"]',
        'read(path)["a"]["b"]',
        'cell["tiers"][tier]["metrics"] = 1',
        '(found := x["a"])["b"]',
        "f\"{x['a']['b']}\"",
        'def f():\n    return [t["a"]["b"] for t in y]',
    ],
)
def test_a_chain_is_found(source: str) -> None:
    assert len(chain_complaints(source, "a.py")) == 1


@pytest.mark.parametrize(
    "source",
    ['x["a"]', 'x.get("a")', 'x["a"].b["c"]', "x[0][1]", "x[a][b]", 'x.a.b["c"]', 'y.get(name)["a"]', 'f(x["a"])["b"]'],
)
def test_a_single_key_is_not(source: str) -> None:
    assert chain_complaints(source, "a.py") == []
