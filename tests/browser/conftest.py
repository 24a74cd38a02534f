"""One page of each kind, and a headless Chromium that opens them."""

from __future__ import annotations

import csv
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from harness.report.kept import kept_report, write_kept_page
from harness.report.refresh import seal
from harness.report.validation.html import write_comparison
from harness.results.manifest import read_kept_manifests
from harness.validation.document import read_document
from tests.support.paths import ROOT
from tests.support.report_runs import cell, folder_of, row, sample
from tests.unit.report.test_report_io import traced_run
from traces.catalogue import find_trace
from traces.errors import TraceFileError

if TYPE_CHECKING:
    from playwright.sync_api import Browser

KEPT = ROOT / "results"
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


class Folders:
    """The folder of each kind of run, made once with its report."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._made: dict[str, Path] = {}

    def of(self, kind: str) -> Path:
        if kind not in self._made:
            self._made[kind] = MAKERS[kind](self._base / kind, self)
        return self._made[kind]

    def page(self, kind: str) -> Path:
        return self.of(kind) / "report.html"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("pages"))


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


def _demo(folder: Path) -> Path:
    return _ran(folder, "run", "quickstart")


def _vllm(folder: Path) -> Path:
    """A real vLLM with LMCache: the kept rows of its calibration's lengths, eight turns of each, as one sweep."""
    kept = KEPT / "validation" / "cpu_vllm"
    known = read_kept_manifests(kept / "manifest.json")["real"]
    cells = {
        each.key.removesuffix("#1"): msgspec.structs.replace(each, key=each.key.removesuffix("#1"))
        for each in known.cells
        if each.key.endswith("cache.chunk_tokens=256#1")
        and set(each.overrides) == {"workload.prompt_tokens", "cache.chunk_tokens"}
    }
    rows: list[Any] = []
    with (kept / "rows.csv").open(newline="") as lines:
        for line in csv.DictReader(lines):
            key, _, turn = line["cell"].partition("#")
            if line["side"] == "real" and key in cells:
                fields: dict[str, Any] = {
                    name: int(line[name]) for name in ("prompt_tokens", "cached_tokens", "output_tokens")
                }
                fields |= {"id": f"{line['id']}#{turn}", "sample": 1000 * int(turn) + int(line["sample"])}
                rows.append(row(line["tier"], float(line["ttft_s"]), cell=key, at_s=len(rows), **fields))
    about = {name: getattr(known, name) for name in known.__struct_fields__ if name != "cells"}
    return _sealed(folder_of(folder, rows, cells=list(cells.values()), **about))


def _loads(folder: Path) -> Path:
    """Loads of two routings at several rates, with goals: what a rate costs in TTFT."""
    goals = {"measure": {"goals": ["ttft_p90<400ms", "throughput>2requests/s", "e2e_mean<2s"]}}
    cells = [
        cell(f"{way}-{n}", {"workload.rate_per_s": n, "deployment.routing": way}, config=goals)
        for way in ("round-robin", "prefix-aware")
        for n in (1, 2, 4, 8)
    ]
    rows = []
    for one in cells:
        rate, slow = one.overrides["workload.rate_per_s"], 1 + (one.overrides["deployment.routing"] == "round-robin")
        gap_s, ttft_s = 1 / min(rate, 6 / slow), slow * rate / 20
        rows += [
            row(None, ttft_s * (1 + n % 7 / 5), cell=one.key, at_s=n * gap_s, id=f"{one.key}-{n}") for n in range(40)
        ]
    return _sealed(folder_of(folder, rows, cells=cells))


def _rounds(folder: Path) -> Path:
    """Conversations in rounds over three cells, each load in four trials of which one is incomplete."""
    config = {"workload": {"kind": "rounds"}, "report": {"against": "gpu only"}, "measure": {"trials": 4}}
    names = {
        "gpu only": (1.0, 0.0),
        "GPU and CPU RAM": (0.7, 0.5),
        "a pool of SSDs with a rather long name": (0.4, 1.0),
    }
    cells = [cell(f"cache={name}", {"cache": name}, config=config) for name in names]
    rows, samples = [], []
    for one, (slow, hits) in zip(cells, names.values(), strict=True):
        for trial in range(4):
            samples.append(sample("load", trial, None, cell=one.key))
            for turn, session in itertools.product(range(6), range(10)):
                prompt, cached = 4096 * (turn + 1), int(4096 * turn * hits)
                ttft_s = None if (trial, turn, session) == (1, 3, 3) else slow * (1 + turn + session / 20 + trial / 50)
                by_tier: dict[str, int | None] = {
                    "computed": prompt - cached,
                    "gpu": cached // 4,
                    "cpu": cached - cached // 4,
                    "disk": 0,
                }
                fields: dict[str, Any] = {"id": f"{turn}-{session}", "session": str(session), "turn": turn}
                fields |= {"sample": trial, "prompt_tokens": prompt, "cached_tokens": cached}
                at_s = 1000.0 * trial + 10 * turn + session / 10
                rows.append(row(None, ttft_s, cell=one.key, at_s=at_s, by_tier=by_tier, **fields))
    return _sealed(folder_of(folder, rows, samples, cells=cells))


def _worth(folder: Path) -> Path:
    few = ("--set", "measure.samples=2", "--set", "measure.until=null")
    return _ran(folder, "worth", "quickstart", "--tokens", "64", "--tokens", "512", "--tokens", "2048", *few)


def _flat(folder: Path) -> Path:
    """A simulated sweep over an axis that the preset has no term for."""
    cells = [cell(str(n), {"cache.chunk_tokens": n}) for n in (64, 128, 256)]
    rows = [
        row(tier, seconds, cell=one.key, at_s=float(n))
        for one in cells
        for n, (tier, seconds) in enumerate((("recompute", 1.0), ("cpu", 0.05), ("disk", 0.1)))
    ]
    return _sealed(folder_of(folder, rows, cells=cells, engine="sim"))


def _kept_io(folder: Path) -> Path:
    shutil.copytree(KEPT / "io", folder, ignore=shutil.ignore_patterns("report.html"))
    write_kept_page(folder, kept_report(folder).page)
    return folder


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
    """The public trace, 12,031 requests, where it was fetched; else conversations in the same format."""
    try:
        trace = find_trace("mooncake_conversation")
    except TraceFileError:
        trace = folder.with_name("conversations.jsonl")
        with trace.open("w") as lines:
            for n in range(600):
                user, turn = n % 40, n // 40
                # Every turn of a user begins with the blocks of the turns before it.
                blocks = [1000 * user + each for each in range(2 + turn)]
                request = {"timestamp": 500 * n, "input_length": 512 * len(blocks) - 100, "output_length": 20 + n % 90}
                lines.write(json.dumps(request | {"hash_ids": blocks}) + "\n")
    return _ran(folder, "run", "mooncake_trace", "--set", f"workload.trace={trace}")


def _validation(folder: Path) -> Path:
    folder.mkdir()
    write_comparison(folder, read_document(KEPT / "validation" / "cpu_vllm"))
    return folder


def _comparison(folder: Path, made: Folders) -> Path:
    other = _ran(folder.with_name("other"), "run", "quickstart", "--set", "seed=2")
    _harness("compare", str(made.of("demo")), str(other), "--out", str(folder), codes=(0, 1, 3))
    return folder


def _contrast(folder: Path, made: Folders) -> Path:
    """Two unlike set-ups, of which one has a state that the other lacks."""
    unlike = ("cache.disk=null", "cache.gpu=2GiB", "cache.chunk_tokens=128", "measure.tiers=[recompute, gpu, cpu]")
    settings = [word for each in unlike for word in ("--set", each)]
    other = _ran(folder.with_name("unlike"), "run", "quickstart", *settings)
    _harness("compare", str(made.of("demo")), str(other), "--out", str(folder))
    return folder


def _alone(make: Callable[[Path], Path]) -> Callable[[Path, Folders], Path]:
    return lambda folder, _: make(folder)


MAKERS: dict[str, Callable[[Path, Folders], Path]] = {
    "demo": _alone(_demo),
    "vllm": _alone(_vllm),
    "worth": _alone(_worth),
    "loads": _alone(_loads),
    "rounds": _alone(_rounds),
    "flat axis": _alone(_flat),
    "one axis": _alone(_one_axis),
    "names": _alone(_names),
    "two axes": _alone(_two_axes),
    "break-even": _alone(lambda folder: _ran(folder, "sweep", "shared_storage", "--set", "workload.duration=10s")),
    "cluster": _alone(_cluster),
    "storage": _alone(_storage),
    "trace": _alone(_trace),
    "io": _alone(lambda folder: traced_run(folder, 12)),
    "kept io": _alone(_kept_io),
    "validation": _alone(_validation),
    "comparison": _comparison,
    "contrast": _contrast,
}
