"""Writes an experiment file for people: each key with what it means, in the words of the key reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic import BaseModel

from harness.experiment.model import Experiment
from harness.experiment.reference import meanings, sections

_WIDTH = 118


def experiment_text(content: Mapping[str, Any], title: str) -> str:
    """YAML of an experiment's content, with a comment of one line a key. title: the file's first line."""
    workload = content["workload"]
    kind = workload["kind"]
    models = {s.place: s.model for s in sections(Experiment) if s.kind in (None, kind)}
    return "\n".join([f"# {title}", *_lines(content, models, "", ""), ""])


def _lines(content: Mapping[str, Any], models: Mapping[str, type[BaseModel]], place: str, indent: str) -> Iterator[str]:
    _, explained = meanings(models[place])
    for key, value in content.items():
        meaning, below = explained.get(key, ""), f"{place}.{key}" if place else key
        nested = isinstance(value, dict) and below in models
        line = f"{indent}{key}:" + ("" if nested else f" {_flow(value)}")
        comment = f"# {meaning}" if meaning else ""
        if not comment or len(line) + len(comment) + 2 <= _WIDTH:
            yield f"{line}  {comment}".rstrip()
        else:
            yield from (f"{indent}{comment}", line)
        if nested:
            yield from _lines(value, models, below, indent + "  ")


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")
