"""`harness list`: the experiments, models and presets that ship, and the runs of this folder."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from harness.commands.errors import DONE, told

What = Literal["experiments", "models", "presets", "runs"]
_WIDTH = 110


@told
def list_all(what: Annotated[What | None, Parameter(help="Only these. Default: all four.")] = None, /) -> int:
    """Lists experiments, models, presets, and the runs in ./results.

    Other commands take these names.

    Example: harness list experiments
    """
    kinds: dict[What, Callable[[], Iterator[tuple[str, str]]]] = {
        "experiments": _experiments,
        "models": _models,
        "presets": _presets,
        "runs": _runs,
    }
    for kind in kinds if what is None else (what,):
        rows = list(kinds[kind]())
        print(f"{kind}:" if rows else f"{kind}: none")
        for name, text in rows:
            print(f"  {name:28} {textwrap.shorten(text, _WIDTH - 31, placeholder=' …')}".rstrip())
    return DONE


def _experiments() -> Iterator[tuple[str, str]]:
    import yaml

    for path in _shipped("experiments"):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        sizes = f" [sizes: {', '.join(content['sizes'])}]" if content.get("sizes") else ""
        yield path.stem, textwrap.shorten(content.get("description", ""), 78 - len(sizes), placeholder=" …") + sizes


def _models() -> Iterator[tuple[str, str]]:
    from harness.experiment.units import format_bytes
    from simulator.models import load_model

    for path in _shipped("models"):
        model = load_model(path)
        yield path.stem, f"{model.layers} layers, {format_bytes(model.kv_bytes_per_token)} of KV a token, {model.dtype}"


def _presets() -> Iterator[tuple[str, str]]:
    from simulator.calibration import load_calibration

    for path in _shipped("hardware"):
        preset = load_calibration(path)
        yield path.stem, f"fitted on {preset.fitted_on.model}; {preset.machine}"


def _runs() -> Iterator[tuple[str, str]]:
    from harness.errors import ResultsError
    from harness.experiment.model import results_root
    from harness.results.manifest import read_manifest

    for path in sorted(results_root().glob("*/manifest.json")):
        try:
            manifest = read_manifest(path.parent)
        except ResultsError as error:
            yield str(path.parent), str(error)
            continue
        cells = len(manifest.cells)
        yield (
            str(path.parent),
            f"{manifest.status}, {cells} point{'s' if cells > 1 else ''}, {manifest.created_at}",
        )


def _shipped(folder: str) -> list[Path]:
    from simulator.models import CONFIGS

    return sorted((CONFIGS / folder).glob("*.yaml"))
