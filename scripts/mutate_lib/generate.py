"""Prints the mutants of one Python file as JSON lines: operator, occurrence, line, before, after, source.

    uv run --no-project --with cosmic-ray==VERSION scripts/mutate_lib/generate.py FILE

The operators are cosmic-ray's. Of its replacements for one arithmetic or comparison operator, those are taken that a
programmer could mean: + for -, < for <=, and so on; the others fail at once, and would flatter the share.
A mutant that differs in annotations only, or equals another, is none.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import cosmic_ray.plugins
from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import MutationVisitor

_BINARY = {
    "Add": ["Sub"], "Sub": ["Add"], "Mul": ["Div"], "Div": ["Mul"], "FloorDiv": ["Div", "Mul"], "Mod": ["FloorDiv"],
    "Pow": ["Mul"], "LShift": ["RShift"], "RShift": ["LShift"], "BitOr": ["BitAnd"], "BitAnd": ["BitOr"],
    "BitXor": ["BitAnd"],
}  # fmt: skip
_COMPARISON = {
    "Eq": ["NotEq"], "NotEq": ["Eq"], "Lt": ["LtE", "GtE"], "LtE": ["Lt", "Gt"], "Gt": ["GtE", "LtE"],
    "GtE": ["Gt", "Lt"], "Is": ["IsNot"], "IsNot": ["Is"], "In": ["NotIn"], "NotIn": ["In"],
}  # fmt: skip


class _Bare(ast.NodeTransformer):
    """Drops annotations: they say what a value is, and do nothing."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)


def operators() -> Iterator[str]:
    for full in cosmic_ray.plugins.operator_names():
        kind, _, rest = full.rpartition("/")[2].partition("_")
        before, _, after = rest.partition("_")
        table = {"ReplaceBinaryOperator": _BINARY, "ReplaceComparisonOperator": _COMPARISON}.get(kind)
        if (table is None or after in table.get(before, ())) and kind not in ("VariableInserter", "VariableReplacer"):
            yield full


def main() -> None:
    source = Path(sys.argv[1]).read_text()
    seen = {_meaning(source)}
    for name in operators():
        operator = cosmic_ray.plugins.get_operator(name)()
        places = sum(len(list(operator.mutation_positions(node))) for node in _nodes(get_ast(source)))
        for occurrence in range(places):
            try:
                mutant = MutationVisitor.mutate_code(source, operator, occurrence)
            except AttributeError:  # its ExceptionReplacer knows no dotted names
                continue
            if mutant is None or (meaning := _meaning(mutant)) in seen:
                continue
            seen.add(meaning)
            line, before, after = _difference(source, mutant)
            fields = {"operator": name.rpartition("/")[2], "occurrence": occurrence, "line": line}
            print(json.dumps(fields | {"before": before, "after": after, "source": mutant}))


def _nodes(node: object) -> Iterator[object]:
    yield node
    for child in getattr(node, "children", ()):
        yield from _nodes(child)


def _meaning(source: str) -> str | None:
    try:
        return ast.dump(_Bare().visit(ast.parse(source)))
    except SyntaxError:
        return None


def _difference(source: str, mutant: str) -> tuple[int, str, str]:
    """The first line that differs, as it was and as it is; a removed line is told as ''."""
    old, new = source.splitlines(), mutant.splitlines()
    line = next((n for n, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), len(new))
    gone = len(old) > len(new)
    return line + 1, old[line].strip(), "" if gone or line >= len(new) else new[line].strip()


if __name__ == "__main__":
    main()
