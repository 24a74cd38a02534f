"""The key reference: every key of the models, each with its value, default and meaning; the page in docs is current."""

from __future__ import annotations

import pytest

from harness.errors import ConfigError
from harness.experiment.model import Experiment
from harness.experiment.reference import meanings, reference, sections
from tests.support.paths import ROOT


def test_the_page_equals_the_models() -> None:
    page = (ROOT / "docs/experiments.md").read_text()
    _, begin, rest = page.partition("<!-- harness keys -->\n\n")
    assert begin, "docs/experiments.md has no line <!-- harness keys -->"
    assert rest == reference() + "\n", "docs/experiments.md is old: `harness keys` prints what stands below that line"


def test_every_key_has_a_meaning() -> None:
    missing = [
        f"{section.model.__name__}: {name}"
        for section in sections(Experiment)
        for name in section.model.model_fields
        if not meanings(section.model)[1].get(name)
    ]
    assert not missing, f"say `KEY: what it means` in the class's docstring: {', '.join(missing)}"


def test_units_bounds_choices_and_defaults_are_told() -> None:
    lines = reference().splitlines()

    def row(key: str, below: str) -> list[str]:
        at = lines.index(f"### {below}")
        return [cell.strip() for cell in next(x for x in lines[at:] if x.startswith(f"| `{key}`")).split("|")][2:4]

    assert row("capacity", "`cache.disk`") == ["size, e.g. `8GiB`", "required"]
    assert row("budget", "`measure`") == ["time, e.g. `30s` or null", "null"]
    assert row("request_timeout", "`measure`") == ["time, e.g. `30s`", "`600s`"]
    assert row("size", "`storage.device`") == ["size, e.g. `8GiB`", "`4GiB`"]
    assert row("block_tokens", "`cache`") == ["integer ≥ 1, ≤ 4,096", "`32`"]
    assert row("routing", "`deployment`")[1] == "`round-robin`"
    assert row("prompt_tokens", "`workload` with `kind: prefix`") == ["integer ≥ 2, ≤ 2^24", "required"]


def test_a_prefix_chooses_keys_in_whole_words() -> None:
    disk = reference("cache.disk")
    assert (
        "### `cache.disk`" in disk
        and "| `capacity` |" in disk
        and "| `disk` |" in disk
        and "`chunk_tokens`" not in disk
    )
    one = reference("measure.samples")
    assert one.count("| `") == 1 and "exactly so many samples" in one
    assert "| `kind` |" in reference("workload.") and "### `workload` with `kind: trace`" in reference("workload")
    with pytest.raises(ConfigError, match=r"measure\.sample: no key begins so; did you mean 'measure\.samples'\?"):
        reference("measure.sample")
    with pytest.raises(ConfigError, match="no key begins so; see harness keys"):
        reference("zzz")
