"""`cache.tiers`: the list means what the short form means; what contradicts itself is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.engines.sim.make import make_engine
from harness.errors import ConfigError
from harness.experiment.model import Experiment
from harness.experiment.read import load_experiment
from harness.measure.run import run
from harness.report.refresh import seal
from harness.results.folder import read_rows
from harness.results.summary import FREE_LOAD
from simulator.models import load_model
from tests.unit.measure.test_run_loop import Quiet, request
from traces.tiers import COMPUTED, all_tiers

DEVICE = {"latency": "1ms", "bandwidth": "1GB/s", "total_bandwidth": "1GB/s", "connections": 8}
LONG: list[dict[str, Any]] = [
    {"name": "cpu", "capacity": "64MiB", "policy": "lru"},
    {"name": "pool", "capacity": "64MiB", "policy": "lru", "device": "cpu"},
    {"name": "disk", "capacity": "64MiB", "policy": "lru", "odirect": True},
    {"name": "remote", "capacity": "4GiB", "policy": "lru", "shared": True, "device": DEVICE},
]
POLICIES = dict.fromkeys(("cpu", "pool", "disk", "remote"), "lru")
SHORT = {
    "cache": {
        "cpu": "64MiB",
        "pool": "64MiB",
        "disk": {"capacity": "64MiB", "odirect": True},
        "remote": {"capacity": "4GiB"},
    },
    "deployment": {"shared": ["remote"]},
    "engines": {"sim": {"policies": POLICIES, "devices": {"pool": "cpu", "remote": DEVICE}}},
}
WORKLOAD = {"kind": "synthetic", "requests": 12, "prompt_tokens": 1025, "hit_rate": 0.75, "concurrency": 2}


def experiment(path: Path, sections: dict[str, Any]) -> Experiment:
    cache = {"chunk_tokens": 64, "gpu": "128MiB"} | sections.get("cache", {})
    path.write_text(yaml.safe_dump({"name": "list", "workload": WORKLOAD, **sections, "cache": cache}))
    return load_experiment(path).experiment


def test_a_list_means_what_the_short_form_means(tmp_path: Path) -> None:
    long = experiment(tmp_path / "long.yaml", {"cache": {"tiers": LONG}})
    assert long == experiment(tmp_path / "short.yaml", SHORT)
    assert long.cache.tiers == {tier.name for tier in all_tiers()} and long.deployment.shared == ("remote",)


@pytest.mark.parametrize(
    ("cache", "others", "words"),
    [
        ({"tiers": LONG, "cpu": "1GiB"}, {}, "cache.tiers and cache.cpu both say what is below the GPU; keep one"),
        ({"tiers": {"cpu": 1}}, {}, "cache.tiers must be a list of at most 4 tiers"),
        ({"tiers": ["cpu"]}, {}, r"cache.tiers\[0\] holds a value, not a mapping; write"),
        ({"tiers": [{"name": "cpuu", "capacity": 1}]}, {}, r"cache.tiers\[0\].name: 'cpuu' .* did you mean cpu\?"),
        (
            {"tiers": LONG[::-1]},
            {},
            r"cache.tiers\[1\].name: disk cannot be below remote; name each once, in the order",
        ),
        ({"tiers": [{"name": "cpu"}]}, {}, r"cache.tiers\[0\].capacity is missing; add the size of cpu"),
        ({"tiers": [LONG[0] | {"shared": 1}]}, {}, r"cache.tiers\[0\].shared: 1 is refused; write true or false"),
        ({"tiers": [LONG[0] | {"path": "/x"}]}, {}, r"cache.tiers\[0\].path: memory has no such key; remove it"),
        ({"tiers": [LONG[2] | {"pth": "/x"}]}, {}, "cache.disk.pth: unknown key; did you mean 'path'"),
        ({"tiers": LONG}, {"deployment": {"shared": ["disk"]}}, "deployment.shared and cache.tiers both"),
        ({"tiers": LONG}, {"engines": {"sim": {"policies": {"cpu": "lru"}}}}, "engines.sim.policies and cache.tiers"),
        (
            {"cpu": "1GiB"},
            {"engines": {"sim": {"devices": {"gpu": "cpu"}}}},
            "devices names gpu, no tier below the GPU",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(
    cache: dict[str, Any], others: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        experiment(tmp_path / "wrong.yaml", {"cache": cache, **others})
    assert "\n" not in str(caught.value)


def test_packs_and_devices_of_tiers_that_are_not_there_are_refused(tmp_path: Path) -> None:
    settings = {"policies": {"disk": "lru"}}
    made = experiment(tmp_path / "absent.yaml", {"cache": {"cpu": "64MiB"}, "engines": {"sim": settings}})
    with pytest.raises(Exception, match=r"engines\.sim: policies and devices .* remove disk, or give it a size"):
        make_engine(made, load_model("tiny-llama"), tmp_path)


def test_rows_summary_and_report_name_every_tier(tmp_path: Path) -> None:
    """Two instances: what one has stored, the other reads from the store that they share."""
    sections: dict[str, Any] = {"deployment": {"instances": 2}, "engines": {"sim": {"hardware": "cpu-2core"}}}
    folder = run(
        request(
            tmp_path, workload=WORKLOAD, engine="sim", measure={}, cache={"gpu": "64MiB", "tiers": LONG}, **sections
        ),
        Quiet(),
    )
    rows = list(read_rows(folder))
    assert all(set(row.tokens_by_tier) == {COMPUTED, *(tier.name for tier in all_tiers())} for row in rows)
    assert sum(row.tokens_by_tier["remote"] or 0 for row in rows) > 0
    [cell] = seal(folder).cells
    total = sum(row.tokens_by_tier["remote"] or 0 for row in rows)
    assert cell.tiers[FREE_LOAD].tokens.by_source["remote"] == total
    page = (folder / "report.html").read_text()
    assert all(f'<th scope="col">{tier.name}</th>' in page for tier in all_tiers())
