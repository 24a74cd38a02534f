"""Plain English, as tests: no archaic vocabulary and no endless sentence in prose that a reader or user meets.

The prose is every comment, docstring, string literal and Markdown paragraph. Each rule is a function from a source
text to a list of complaints; a test shows it to fail on a bad snippet before another test applies it to the tree.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

# A sentence should stay below 25 words; the test refuses more than this.
MAX_WORDS = 35

BANNED = (
    "foretell",
    "foretells",
    "foretold",
    "hereof",
    "thereof",
    "thereupon",
    "wherewith",
    "whereof",
    "whoever",
    "whosoever",
    "nobody",
    "somebody",
    "told apart",
    "tell apart",
    "tells apart",
    "time gone",
    "of meaning",
    "is owed",
    "are owed",
    "that is none",
    "in the midst",
    "has not to",
    "such as there are",
)
_BANNED = re.compile(r"\b(?:" + "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in BANNED) + r")\b", re.I)

SUFFIXES = {".py", ".rs", ".sh", ".bt", ".md", ".yaml"}
# Data, generated files, and this list of words itself.
EXEMPT = ("traces/data/", "configs/engines/", "results/validation/", "results/io/", "tests/house/test_language.py")
# Files whose language is not plain yet. Remove a file's line once its prose obeys; never add one.
NOT_YET_PLAIN = frozenset((Path(__file__).parent / "not_yet_plain.txt").read_text().split())


def comments(source: str, suffix: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each comment; neighbouring comment lines are one text, because sentences span lines."""
    if suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        lines = [(t.start[0], t.start[1], t.string.lstrip("#! ")) for t in tokens if t.type == tokenize.COMMENT]
    else:
        mark = r"//[/!]?" if suffix in (".rs", ".bt") else r"#!?"
        found = [
            (n, re.match(rf"^(.*?)(?:^|(?<=\s)){mark}(?=\s|$)(.*)$", line))
            for n, line in enumerate(source.split("\n"), 1)
        ]
        lines = [(n, len(m[1]), m[2].strip()) for n, m in found if m]
        if suffix in (".rs", ".bt"):
            blocks = re.finditer(r"/\*(.*?)\*/", source, re.S)
            for block in blocks:
                text = "\n".join(re.sub(r"^\s*\* ?", "", line) for line in block[1].split("\n"))
                yield source.count("\n", 0, block.start()) + 1, text
    yield from joined(lines)


def joined(lines: list[tuple[int, int, str]]) -> Iterator[tuple[int, str]]:
    begin, column, text, last = 0, -1, "", -1
    for number, at, words in lines:
        if text and number == last + 1 and at == column:
            text += "\n" + words
        else:
            if text:
                yield begin, text
            begin, column, text = number, at, words
        last = number
    if text:
        yield begin, text


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := ast.get_docstring(node)
        ):
            yield node.body[0].lineno, text


def literals(source: str, suffix: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each string literal; the constant parts of an f-string are literals too."""
    if suffix == ".py":
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.lineno, node.value
    elif suffix == ".rs":
        for match in re.finditer(r'"((?:[^"\\\n]|\\.|\\\n)*)"', source):
            yield source.count("\n", 0, match.start()) + 1, match[1]


def markdown(source: str) -> Iterator[tuple[int, str]]:
    """(line, paragraph or list item), without code blocks, tables and links' addresses."""
    without_code = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), source, flags=re.S | re.M)
    for match in re.finditer(r"(?:^(?!\s*$|\s*\|).+\n?)+", without_code, re.M):
        item_begin = match.start()
        for item in re.split(r"(?=^\s*(?:[-*]|\d+\.)\s|^#)", match[0], flags=re.M):
            text = re.sub(r"\]\([^)]*\)", "]", item)
            if item.strip():
                yield without_code.count("\n", 0, item_begin) + 1, text
            item_begin += len(item)


def sentences(text: str) -> Iterator[str]:
    """Sentences of prose. A blank line, a line of code or of aligned columns, or a list item ends a sentence too."""
    prose = re.sub(r"^(?:(?:    |\t).*|.*\S {3,}\S.*)$", "", text, flags=re.M)
    prose = re.sub(r"`[^`]*`", "x", prose)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", prose):
        yield from re.split(r"(?<=[.:;!?])[)\"'*]*\s+|\s+\|\s+", " ".join(paragraph.split()))


def words(sentence: str) -> int:
    """Words of a sentence: numbers, symbols and lone punctuation are no words."""
    return len(re.findall(r"(?<![\w/.])[A-Za-z][A-Za-z'-]*(?![\w/])", sentence))


def vocabulary_complaints(source: str, name: str) -> list[str]:
    suffix = Path(name).suffix or ".sh"
    texts = [(1, source)] if suffix == ".md" else [*comments(source, suffix), *literals(source, suffix)]
    return [
        f"{name}:{line}: {match[0]!r} is archaic or hides the actor: name who acts, in plain words"
        for line, text in texts
        for match in _BANNED.finditer(text)
    ]


def length_complaints(source: str, name: str) -> list[str]:
    suffix = Path(name).suffix
    texts = {".py": docstrings, ".md": markdown}.get(suffix)
    return [
        f"{name}:{line}: a sentence of {count} words, more than {MAX_WORDS}: split it ({sentence[:60]}…)"
        for line, text in (texts(source) if texts else ())
        for sentence in sentences(text)
        if (count := words(sentence)) > MAX_WORDS
    ]


def complaints(path: Path) -> list[str]:
    source, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
    return vocabulary_complaints(source, name) + length_complaints(source, name)


def tracked() -> list[Path]:
    """Every tracked or new file with prose: known suffixes, and scripts without a suffix."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    paths = [ROOT / name for name in names if not name.startswith(EXEMPT)]
    return [p for p in paths if p.is_file() and (p.suffix in SUFFIXES or (p.parent.name == "scripts" and not p.suffix))]


LONG = " ".join(["word"] * (MAX_WORDS + 1))


@pytest.mark.parametrize("word", BANNED)
def test_a_banned_word_is_found_in_comments_docstrings_literals_and_markdown(word: str) -> None:
    for source, name in (
        (f"x = 1  # {word} knows\n", "a.py"),
        (f'def f():\n    """A {word.upper()} b."""\n', "a.py"),
        (f'raise E(f"a {{x}}: {word} b")\n', "a.py"),
        (f"/// {word} knows\nfn f() {{}}\n", "a.rs"),
        (f'let x = "a {word} b";\n', "a.rs"),
        (f"true # {word}\n", "scripts/check"),
        (f"// {word}\n", "a.bt"),
        (f"/*\n * {word}\n */\n", "a.bt"),
        (f"a: 1 # {word}\n", "a.yaml"),
        (f"Text, {word}.\n", "a.md"),
    ):
        assert vocabulary_complaints(source, name), (word, name)


def test_a_name_in_code_is_not_prose() -> None:
    assert not vocabulary_complaints(f"{BANNED[0]} = 1\n", "a.py")
    assert not vocabulary_complaints(f"let {BANNED[0]} = 1;\n", "a.rs")


def test_a_long_sentence_is_found_and_its_limit_is_exact() -> None:
    assert length_complaints(f'"""{LONG}."""\n', "a.py") and length_complaints(f"{LONG}.\n", "a.md")
    exact = LONG.removesuffix(" word")
    assert not length_complaints(f'"""{exact}. {exact}."""\n', "a.py")
    assert not length_complaints(f"{exact}.\n\n{exact}\n\n- {exact}\n- {exact}\n", "a.md")
    assert not length_complaints(f"```\n{LONG}\n```\n", "a.md")
    assert not length_complaints(f'"""Short:\n\n    {LONG}\n\nEnd.\n"""\n', "a.py")
    assert not length_complaints(f'"""Tree:\n\nname     {LONG}\n"""\n', "a.py")


def test_a_sentence_over_several_lines_is_one() -> None:
    half = " ".join(["word"] * (MAX_WORDS // 2 + 1))
    assert length_complaints(f'"""{half}\n{half}."""\n', "a.py") and length_complaints(f"{half}\n{half}.\n", "a.md")


def test_the_prose_of_the_house_is_plain() -> None:
    found = [
        line for path in tracked() if str(path.relative_to(ROOT)) not in NOT_YET_PLAIN for line in complaints(path)
    ]
    assert not found, "\n" + "\n".join(found)


def test_every_file_that_is_not_yet_plain_exists_and_still_has_complaints() -> None:
    stale = [name for name in sorted(NOT_YET_PLAIN) if not (ROOT / name).is_file() or not complaints(ROOT / name)]
    assert not stale, f"plain by now: remove from tests/house/not_yet_plain.txt: {', '.join(stale)}"
