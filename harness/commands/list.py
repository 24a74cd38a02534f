"""`harness list`: the experiments, models and presets that ship, and the runs of this folder."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from cyclopts import Parameter

from harness.commands.errors import DONE, told
from harness.commands.output import AsJson, print_json

What = Literal["experiments", "models", "presets", "runs"]
_WIDTH = 110


class _Entry(NamedTuple):
    """words: what a person reads beside the name. facts: the same for programs, unshortened."""

    name: str
    words: str
    facts: dict[str, Any]


@told
def list_all(
    what: Annotated[What | None, Parameter(help="Only these. Default: all four.")] = None, /, *, as_json: AsJson = False
) -> int:
    """Lists experiments, models, presets, and the runs in ./results.

    Other commands take these names. With --json: a list for each kind.

    Example: harness list experiments
    """
    kinds: dict[What, Callable[[], Iterator[_Entry]]] = {
        "experiments": _experiments,
        "models": _models,
        "presets": _presets,
        "runs": _runs,
    }
    found = {kind: list(kinds[kind]()) for kind in (kinds if what is None else (what,))}
    if as_json:
        print_json({kind: [{"name": each.name, **each.facts} for each in rows] for kind, rows in found.items()})
        return DONE
    for kind, rows in found.items():
        print(f"{kind}:" if rows else f"{kind}: none")
        for each in rows:
            print(f"  {each.name:28} {textwrap.shorten(each.words, _WIDTH - 31, placeholder=' …')}".rstrip())
    return DONE


def _experiments() -> Iterator[_Entry]:
    import yaml

    for path in _shipped("experiments"):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        about, sizes = content.get("description", ""), list(content.get("sizes") or ())
        shown = f" [sizes: {', '.join(sizes)}]" if sizes else ""
        words = textwrap.shorten(about, 78 - len(shown), placeholder=" …") + shown
        yield _Entry(path.stem, words, {"description": about, "sizes": sizes})


def _models() -> Iterator[_Entry]:
    from harness.experiment.units import format_bytes
    from simulator.models import load_model

    for path in _shipped("models"):
        model = load_model(path)
        words = f"{model.layers} layers, {format_bytes(model.kv_bytes_per_token)} of KV a token, {model.dtype}"
        facts = {"layers": model.layers, "kv_bytes_per_token": model.kv_bytes_per_token, "dtype": model.dtype}
        yield _Entry(path.stem, words, facts)


def _presets() -> Iterator[_Entry]:
    from simulator.calibration import load_calibration

    for path in _shipped("hardware"):
        preset = load_calibration(path)
        words = f"fitted on {preset.fitted_on.model}; {preset.machine}"
        facts = {"machine": preset.machine, "model": preset.fitted_on.model, "standing": preset.standing}
        yield _Entry(path.stem, words, facts)


def _runs() -> Iterator[_Entry]:
    from harness.errors import ResultsError
    from harness.experiment.model import results_root
    from harness.results.manifest import read_manifest

    for path in sorted(results_root().glob("*/manifest.json")):
        folder = str(path.parent)
        try:
            manifest = read_manifest(path.parent)
        except ResultsError as error:
            yield _Entry(folder, str(error), {"error": str(error)})
            continue
        points = len(manifest.cells)
        facts = {"status": manifest.status, "points": points, "created_at": manifest.created_at}
        facts |= {"experiment": manifest.name, "engine": manifest.engine}
        words = f"{manifest.status}, {points} point{'s' if points > 1 else ''}, {manifest.created_at}"
        yield _Entry(folder, words, facts)


def _shipped(folder: str) -> list[Path]:
    from simulator.models import CONFIGS

    return sorted((CONFIGS / folder).glob("*.yaml"), key=lambda path: path.stem)
