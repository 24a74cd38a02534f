"""The key reference of experiment files, written from the models that check them.

A key's meaning is what its section's docstring says after `key: `; a section's own meaning is the rest of it.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import re
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from harness.errors import ConfigError
from harness.experiment.fields import Strict
from harness.experiment.model import Experiment
from harness.experiment.units import Bytes, BytesPerS, Seconds, format_bytes

_UNITS = {
    get_args(Bytes)[1]: "size, e.g. `8GiB`",
    get_args(BytesPerS)[1]: "bandwidth, e.g. `400MiB/s`",
    get_args(Seconds)[1]: "time, e.g. `30s`",
}
_PLAIN = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}


class Section(NamedTuple):
    """One model of the file. place: its key, '' for the top level; kind: which of several models stands there."""

    place: str
    kind: str | None
    model: type[BaseModel]


def reference(prefix: str = "") -> str:
    """Every key that begins with the prefix as Markdown: a heading and a table a section, in the order of the file.

    Raises ConfigError where there is none.
    """
    chosen = {section: _below(section, prefix) for section in sections(Experiment)}
    found = [_rendered(section, names) for section, names in chosen.items() if names]
    if not found:
        known = [key for section in chosen for key in _keys(section)]
        near = difflib.get_close_matches(prefix, known, n=1, cutoff=0.5)
        raise ConfigError(
            f"{prefix}: no key begins so; {f'did you mean {near[0]!r}? ' if near else ''}see harness keys"
        )
    return "\n\n".join(found)


def _keys(section: Section) -> dict[str, str]:
    """Whole key: its name in the section."""
    return {f"{section.place}.{name}" if section.place else name: name for name in section.model.model_fields}


def _below(section: Section, prefix: str) -> list[str]:
    """Names of the section's keys that the prefix, in whole words, leads to."""
    return [
        name for key, name in _keys(section).items() if not prefix or f"{key}.".startswith(f"{prefix.rstrip('.')}.")
    ]


def sections(model: type[BaseModel], place: str = "", kind: str | None = None) -> Iterator[Section]:
    """The model and all models below its keys, each where it stands in a file."""
    yield Section(place, kind, model)
    for name, field in model.model_fields.items():
        inner = [part for part in _parts(field.annotation) if inspect.isclass(part) and issubclass(part, BaseModel)]
        repeated = any(get_origin(part) is tuple for part in _parts(field.annotation))
        for part in inner:
            below = f"{place}.{name}" if place else name
            tag = part.model_fields.get("kind")
            yield from sections(part, f"{below}[]" if repeated else below, _kind(tag) if len(inner) > 1 else None)


def meanings(model: type[BaseModel]) -> tuple[str, dict[str, str]]:
    """What a model's docstring says of the whole, and of each of its keys."""
    whole: list[str] = []
    found: dict[str, str] = {}
    names = "|".join(sorted(map(re.escape, model.model_fields), key=len, reverse=True))
    begins = re.compile(rf"(?:^|(?<=[.;] ))((?:{names})(?:(?:, | and )(?:{names}))*)(?: (\w+))?: ") if names else None
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(model.__doc__ or "")):
        text = " ".join(paragraph.split())
        hits = list(begins.finditer(text)) if begins else []
        if before := text[: hits[0].start() if hits else None].strip():
            whole.append(before)
        for hit, after in itertools.pairwise([*hits, None]):
            assert hit is not None
            meaning = text[hit.end() : after.start() if after else None].strip().rstrip(".;")
            for key in re.split(r", | and ", hit[1]):
                earlier = found.get(key)
                if hit[2]:
                    value = f"`{hit[2] if hit[2] != 'None' else 'null'}`: {meaning}"
                    found[key] = f"{earlier}; {value}" if earlier else value
                else:
                    found[key] = f"{meaning}; {earlier}" if earlier else meaning
    for base in model.__mro__[1:]:
        if issubclass(base, Strict) and base is not Strict:
            found = meanings(base)[1] | found
    for name, field in model.model_fields.items():
        if name not in found and (section := _section_of(field)) is not None:
            found[name] = meanings(section)[0].partition(". ")[0].rstrip(".")
    return " ".join(whole), found


def _rendered(section: Section, names: Sequence[str]) -> str:
    whole, meaning = meanings(section.model)
    kind = f" with `kind: {section.kind}`" if section.kind else ""
    lines = [f"### {f'`{section.place}`' if section.place else 'Top level'}{kind}", "", whole, ""]
    lines += ["| key | value | default | meaning |", "|---|---|---|---|"]
    own = inspect.get_annotations(section.model)
    for name in sorted(names, key=lambda name: name not in own):
        field = section.model.model_fields[name]
        cells = (f"`{name}`", allowed_text(field), _default(field), meaning.get(name, ""))
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def allowed_text(field: FieldInfo) -> str:
    """What may stand at a key: unit, choices or bounds."""
    return _text(field.annotation, field.metadata)


def _text(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    for unit in metadata:
        if unit in _UNITS:
            return _UNITS[unit]
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _text(inner[0], inner[1:])
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in inner)
    if origin is tuple:
        parts = [part for part in inner if part is not Ellipsis]
        return f"list of {_text(parts[0])}" if Ellipsis in inner else f"[{', '.join(map(_text, parts))}]"
    if origin is dict:
        return f"mapping of {_text(inner[0])} to {_text(inner[1])}"
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_text(part) for part in inner))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return _PLAIN.get(annotation, str(annotation)) + _bounds(metadata)


def _bounds(metadata: Sequence[Any]) -> str:
    flat = [each for item in metadata for each in (item.metadata if isinstance(item, FieldInfo) else [item])]
    signs = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
    found = [f"{sign} {_number(getattr(item, of))}" for item in flat for of, sign in signs if hasattr(item, of)]
    pattern = next((item.pattern for item in flat if getattr(item, "pattern", None)), None)
    return f" {', '.join(found)}" if found else f" like `{pattern}`" if pattern else ""


def _number(value: float) -> str:
    power = int(value).bit_length() - 1
    return f"2^{power}" if value == 2**power and value >= 2**16 else f"{value:,}" if value >= 1000 else f"{value:g}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Strict) or value is None:
        return "null" if value is None else ""
    if any(unit in _UNITS and "size" in _UNITS[unit] for unit in field.metadata):
        return f"`{format_bytes(value)}`"
    if any(unit in _UNITS and "time" in _UNITS[unit] for unit in field.metadata):
        return f"`{value:g}s`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`" if value not in ("", {}) else "empty"


def _parts(annotation: Any) -> Iterator[Any]:
    """The annotation and all that it is made of."""
    yield annotation
    for inner in get_args(annotation):
        yield from _parts(inner)


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    return next(
        (part for part in _parts(field.annotation) if inspect.isclass(part) and issubclass(part, BaseModel)), None
    )


def _kind(field: FieldInfo | None) -> str | None:
    return None if field is None else str(get_args(field.annotation)[0])
