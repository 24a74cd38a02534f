"""What became of each mutant: one file a module under results/mutation/outcomes, which the README is made from.

The first line of a file says which code it is about, and each other line is one mutant's outcome. A file starts anew
when its module's code changes; comments and docstrings are no code. A caught mutant stays caught when tests are added,
so only survivors run again when the tests change. Delete a file to run all of its mutants again.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path("results/mutation/outcomes")


@dataclass(frozen=True)
class Outcome:
    """outcome: 'caught', 'survived' or 'timeout'. before, after: the first changed line; after is '' where it is gone.
    tests: which version of the tests said so."""

    outcome: str
    line: int
    before: str
    after: str
    tests: str = ""


@dataclass
class Outcomes:
    """of: how many mutants the module has. known: by the mutant's name, in the order of their runs."""

    module: str
    code: str
    of: int
    tests: str = ""
    known: dict[str, Outcome] = field(default_factory=dict)

    @classmethod
    def now(cls, module: Path, tests: Sequence[str], of: int) -> Outcomes:
        """The outcomes for the code as it stands, ready for more."""
        now = cls(str(module), code_of(module), of, _hash(b"\0".join(Path(name).read_bytes() for name in tests)))
        kept = cls.read(str(module))
        if kept is not None and (kept.code, kept.of) == (now.code, now.of):
            now.known = kept.known
        return now

    @classmethod
    def read(cls, module: str) -> Outcomes | None:
        file = _file(module)
        if not file.exists():
            return None
        head, *lines = map(json.loads, file.read_text().splitlines())
        known = {fields.pop("mutant"): Outcome(**fields) for fields in lines}
        return cls(head["module"], head["code"], head["of"], known=known)

    def stands(self, mutant: str) -> bool:
        """Whether the mutant's outcome is known and another run could not change it."""
        kept = self.known.get(mutant)
        return kept is not None and (kept.outcome != "survived" or kept.tests == self.tests)

    def add(self, mutant: str, outcome: Outcome) -> None:
        """Keeps the outcome at once: a run that is stopped loses none."""
        self.known[mutant] = Outcome(**asdict(outcome) | {"tests": self.tests})
        self.save()

    def save(self) -> None:
        head: dict[str, Any] = {"module": self.module, "code": self.code, "of": self.of}
        lines = [{"mutant": name, **asdict(one)} for name, one in sorted(self.known.items(), key=_place)]
        file = _file(self.module)
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in (head, *lines)))
        temporary.replace(file)

    def count(self, outcome: str) -> int:
        return sum(one.outcome == outcome for one in self.known.values())


def code_of(module: Path) -> str:
    """A hash of what a file does: of Python without comments and docstrings, of Rust without comment lines."""
    text = module.read_text()
    if module.suffix != ".py":
        lines = (line.strip() for line in text.splitlines())
        return _hash("\n".join(line for line in lines if not line.startswith("//")).encode())
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return _hash(ast.dump(tree).encode())


def _place(item: tuple[str, Outcome]) -> tuple[int, str]:
    return item[1].line, item[0]


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _file(module: str) -> Path:
    return FOLDER / f"{module.replace('/', '.')}.jsonl"
