"""One page of each kind, and a headless Chromium that opens them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.report.refresh import seal
from harness.report.validation.html import write_comparison
from harness.validation.document import read_document
from tests.support.paths import ROOT
from tests.support.report_runs import cell, folder_of, row, sample
from tests.unit.report.test_report_io import traced_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WARM = {"recompute": 1.0, "gpu": 0.03, "cpu": 0.05, "disk": 0.1, "disk_cold": 0.3}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of one module: while its driver lives, no other test of the process can run an event loop of its own."""
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        pytest.skip("no chromium on the path: apt-get install chromium")
    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="session")
def page_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The report of a kind of run, made once."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp("pages") / kind
            made[kind] = MAKERS[kind](folder) / "report.html"
        return made[kind]

    return make


def _ran(folder: Path, *words: str) -> Path:
    """A run of the simulator. In a process of its own: the browser's driver keeps this one's event loop busy."""
    _harness(*words, "--engine", "sim", "--out", str(folder))
    return folder


def _harness(*words: str, codes: tuple[int, ...] = (0,)) -> None:
    done = subprocess.run([sys.executable, "-m", "harness", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode in codes, f"harness {' '.join(words)}\n{done.stdout}\n{done.stderr}"


def _sealed(folder: Path) -> Path:
    seal(folder)
    return folder


def _warm_rows(key: str, scale: float, tiers: Any = WARM, samples: int = 3) -> list[Any]:
    return [
        row(tier, WARM[tier] * scale * (1 + n / 20), cell=key, at_s=10.0 * n, id=f"{key}-{tier}-{n}")
        for tier in tiers
        for n in range(samples)
    ]


def _one_axis(folder: Path) -> Path:
    cells = [cell(str(n), {"workload.prompt_tokens": n}) for n in (513, 1025, 2049, 4097)]
    rows = [each for n, one in enumerate(cells) for each in _warm_rows(one.key, 2.0**n)]
    rows.append(row("disk", 9.0, cell="513", at_s=50.0, verdict="contradicted", verdict_reason="cpu served 512 tokens"))
    rows.append(row("disk", None, cell="513", at_s=51.0))
    return _sealed(folder_of(folder, rows, [sample("disk", n, cell="513") for n in range(4)], cells=cells))


def _names(folder: Path) -> Path:
    """A sweep over an axis of long names, of a free load."""
    values = [None, {"path": "/mnt/fast", "capacity": 2**30}, "round-robin with a rather long name"]
    cells = [cell(str(n), {"cache.disk": value}) for n, value in enumerate(values)]
    rows = [row(None, 29 + n + k / 10, cell=str(n), at_s=float(k)) for n in range(3) for k in range(20)]
    return _sealed(folder_of(folder, rows, cells=cells))


def _two_axes(folder: Path) -> Path:
    cells = [
        cell(f"{n},{h}", {"workload.prompt_tokens": n, "workload.hit_rate": h})
        for n in range(513, 5634, 512)[:10]
        for h in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    rows = []
    for one in cells:
        length, rate = one.overrides["workload.prompt_tokens"], one.overrides["workload.hit_rate"]
        rows += _warm_rows(one.key, length / 4097, ("recompute",))
        rows += _warm_rows(one.key, length / 4097 * (0.4 + 12 * (1 - rate)), ("cpu", "disk"))
    return _sealed(folder_of(folder, rows, cells=cells))


def _cluster(folder: Path) -> Path:
    """A hundred thousand requests over nine cells."""
    shared: tuple[list[str], ...] = ([], ["disk"], ["cpu", "disk"])
    cells = [
        cell(f"{way}-{n}", {"deployment.routing": way, "deployment.shared": tiers})
        for way in ("round-robin", "least-loaded", "prefix-aware")
        for n, tiers in enumerate(shared)
    ]
    rows = [
        row(None, 0.1 + (n * 7919 % 1000) / 500, cell=cells[n % 9].key, at_s=n / 50, id=f"{n:06}", output_tokens=8)
        for n in range(100_000)
    ]
    return _sealed(folder_of(folder, rows, cells=cells))


def _storage(folder: Path) -> Path:
    return _ran(folder, "run", "storage_only", "--set", "measure.budget=4s", "--set", "workload.users=2")


def _trace(folder: Path) -> Path:
    """The public trace, 12,031 requests."""
    return _ran(folder, "run", "mooncake_trace")


def _validation(folder: Path) -> Path:
    folder.mkdir()
    write_comparison(folder, read_document(ROOT / "results" / "validation" / "cpu_vllm"))
    return folder


def _comparison(folder: Path) -> Path:
    sides = [_ran(folder.with_name(f"side{n}"), "run", "quickstart", "--set", f"seed={n}") for n in (1, 2)]
    _harness("compare", *map(str, sides), "--out", str(folder), codes=(0, 1, 3))
    return folder


def _contrast(folder: Path) -> Path:
    """Two unlike set-ups, of which one has a state that the other lacks."""
    unlike = ("cache.disk=null", "cache.gpu=2GiB", "cache.chunk_tokens=128", "measure.tiers=[recompute, gpu, cpu]")
    settings = [word for each in unlike for word in ("--set", each)]
    sides = [
        _ran(folder.with_name("plain"), "run", "quickstart"),
        _ran(folder.with_name("unlike"), "run", "quickstart", *settings),
    ]
    _harness("compare", *map(str, sides), "--out", str(folder))
    return folder


MAKERS: dict[str, Callable[[Path], Path]] = {
    "demo": lambda folder: _ran(folder, "run", "quickstart"),
    "one axis": _one_axis,
    "names": _names,
    "two axes": _two_axes,
    "cluster": _cluster,
    "storage": _storage,
    "io": lambda folder: traced_run(folder, 12),
    "validation": _validation,
    "comparison": _comparison,
    "contrast": _contrast,
}
if os.environ.get("HARNESS_TRACES"):
    MAKERS["trace"] = _trace
