"""Real SGLang and HiCache at a GPU's pace: tiers proven, conversations counted, what is not SGLang's, nothing left."""

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from harness.engines.accelerator import PLUGIN
from harness.errors import EngineError
from harness.experiment.read import load_experiment
from harness.measure.run import RunRequest, run
from harness.processes import warden
from harness.report.refresh import seal
from harness.results.folder import read_rows, read_samples
from harness.results.manifest import read_manifest
from tests.contract.cases import SGLANG_PYTHON, Case, needs
from tests.support.paths import ROOT
from tests.support.real_runs import HARNESS, Victim, harness, killed_and_resumed, left_behind
from tests.unit.measure.test_run_loop import Quiet, measured
from traces.load import Load
from traces.request import Request, RequestRecord, Segment
from traces.tiers import COMPUTED

pytestmark = needs("sglang", SGLANG_PYTHON)

STATES = ["recompute", "gpu", "cpu", "disk", "disk_cold"]
PAGE, TOKEN_BYTES = 64, 32768  # of tiny-llama
EXPERIMENT: dict[str, Any] = {
    "name": "real",
    "seed": 5,
    "workload": {"kind": "prefix", "prompt_tokens": 641, "hit_rate": 1.0},
    "measure": {"tiers": STATES, "samples": 2},
    "cache": {
        "block_tokens": PAGE,
        "chunk_tokens": PAGE,
        "gpu": "128MiB",
        "cpu": "512MiB",
        "disk": {"capacity": "2GiB"},
    },
}


def sglang(**more: Any) -> dict[str, Any]:
    return {"engines": {"sglang": {"python": str(SGLANG_PYTHON), **more}}}


KEPT = """
import torch
from types import SimpleNamespace
from kv_accelerator.sglang.hicache import kept_page
pool = SimpleNamespace(layer_num=2, page_size=4, head_num=2, head_dim=8, dtype=torch.bfloat16)
def page():
    return kept_page(pool)
first, second = page(), page()
at, other = first.data_ptr(), second.data_ptr()
assert first.shape == (256,) and first.dtype == pool.dtype and at != other
flat = first.fill_(3).view(2, 128)
del first
assert page().data_ptr() not in (at, other), "a view uses the memory"
del flat
again = page()
print(again.data_ptr() == at and not again.any() and second.data_ptr() == other)
"""


def test_memory_that_storage_was_read_into_is_used_again_once_it_is_free() -> None:
    found = subprocess.run(
        [SGLANG_PYTHON, "-c", KEPT], capture_output=True, text=True, env={"PYTHONPATH": str(PLUGIN)}, timeout=300
    )
    assert found.stdout.strip() == "True", found.stderr[-2000:]


def request(tmp_path: Path, **changes: Any) -> RunRequest:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump({**EXPERIMENT, **sglang(), **changes}))
    plan = load_experiment(path)
    return RunRequest(
        name="real", cells=plan.cells(), engine="sglang", experiment=plan.origin(), folder=tmp_path / "out"
    )


def left(tmp_path: Path) -> list[str]:
    """What runs, listens or lies anywhere after the run: also SGLang's snapshots of its load, pages and objects."""
    there, theirs = set(Path("/dev/shm").glob("sglang_loads_*")), set[Path]()
    for pid in (pid for pid, _, _ in warden.living() if _is_another_s(pid, tmp_path)):
        theirs |= warden.shared_memory([pid], "/dev/shm/sglang_loads_")
    snapshots = there - theirs
    files = (*tmp_path.glob("**/*.bin"), *tmp_path.glob("**/kv-harness-*"))
    return [*left_behind(tmp_path), *map(str, (*snapshots, *files))]


def _is_another_s(pid: int, tmp_path: Path) -> bool:
    """Whether it is, or is below, a server that another worker's test has started."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        lines = [" ".join(each.cmdline()) for each in (process, *process.parents())]
        return any("sglang.launch_server" in line and str(tmp_path) not in line for line in lines)
    return False


def test_every_state_is_proven_by_each_request_s_tokens_and_the_report_says_what_is_replaced(tmp_path: Path) -> None:
    """Three prefixes at a time, half of each prompt: in one life of the server, and with copies that move bytes."""
    load = {**EXPERIMENT["workload"], "concurrency": 3, "hit_rate": 0.5}
    folder = run(request(tmp_path, workload=load, **sglang(link="copied")), Quiet())
    rows = measured(folder)
    assert len(rows) == 3 * len(STATES) * 2
    assert {(row.verdict, row.verdict_reason, row.error) for row in rows} == {("proven", None, None)}
    for row in rows:
        hit = 0 if row.expected_tier == "recompute" else 320
        tier = {"recompute": COMPUTED, "disk_cold": "disk"}.get(str(row.expected_tier), row.expected_tier)
        told = {source: tokens for source, tokens in row.tokens_by_tier.items() if tokens}
        assert row.cached_tokens == hit and told == {COMPUTED: 641 - hit} | ({str(tier): hit} if hit else {})
    manifest = read_manifest(folder)
    resolved = manifest.cells[0].resolved
    assert resolved is not None and resolved.versions["sglang"] == "0.5.23" and resolved.connector == "file"
    assert resolved.gpu_bytes == 128 * 2**20 and resolved.cpu_bytes == 512 * 2**20
    assert resolved.cache_config["hicache_storage_prefetch_policy"] == "wait_complete"
    assert (resolved.block_tokens, resolved.chunk_tokens) == (PAGE, PAGE) and resolved.scheduler.max_sequences
    assert (
        str(resolved.accelerator) == "reference accelerator rtx-a5000-nfs, no GPU, steps of llama-3.2-3b for tiny-llama"
    )
    for sample in read_samples(folder):
        moved, hits = sample.observed, 0 if sample.tier == "recompute" else 3 * 320
        assert moved.paced["steps"] >= 1 and moved.paced["loads"] == moved.paced["stores"] == 0
        assert moved.external_tokens == (hits if sample.tier in ("cpu", "disk", "disk_cold") else 0)
        assert moved.stores_begun == moved.stores_ended
        if sample.tier == "disk_cold":
            assert moved.device_read_bytes["disk"] >= hits * TOKEN_BYTES
    assert not left(tmp_path)
    seal(folder)
    report = (folder / "report.html").read_text()
    assert len(resolved.replaced) > 5 and all(each.ours in report for each in resolved.replaced)


ROUNDS: dict[str, Any] = {
    "workload": {
        "kind": "rounds",
        "clients": 4,
        "rounds": 4,
        "first_tokens": 256,
        "parallel": 2,
        "rate_per_s": 16.0,
        "answers": "none",
    },
    "measure": {},
}


def test_conversations_hit_all_that_went_before_and_the_counters_say_the_same(tmp_path: Path) -> None:
    """All fits: turn r of r+1 equal pieces finds r of them, on the GPU or, where that is short, in CPU RAM. The paced
    link counts its transfers."""
    cache = {**EXPERIMENT["cache"], "gpu": "96MiB", "cpu": "1GiB", "disk": None}
    folder = run(request(tmp_path, **ROUNDS, cache=cache), Quiet())
    rows = measured(folder)
    assert len(rows) == 16 and {row.error for row in rows} == {None}
    by_tier = {tier: sum(row.tokens_by_tier.get(tier) or 0 for row in rows) for tier in (COMPUTED, "gpu", "cpu")}
    for row in rows:
        assert row.prompt_tokens == 256 * (row.turn + 1) and row.cached_tokens is not None
        # A whole prompt is never served: its last token is computed, and with it its page.
        assert row.cached_tokens == 256 * row.turn
        assert sum(tokens or 0 for tokens in row.tokens_by_tier.values()) == row.prompt_tokens
    [sample] = list(read_samples(folder))
    moved = sample.observed
    assert moved.computed_tokens == by_tier[COMPUTED] == 16 * 256
    assert (moved.hit_tokens["gpu"], moved.hit_tokens["cpu"]) == (by_tier["gpu"], by_tier["cpu"])
    assert by_tier["cpu"] == moved.external_tokens and min(by_tier["cpu"], by_tier["gpu"]) > 0
    assert moved.paced["stores"] > 0 and moved.paced["loads"] > 0
    assert not left(tmp_path)


CHECKED = {
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "checked_kv.models",
    "PYTHONPATH": f"{PLUGIN}:{ROOT / 'tests/support'}",
}


def test_what_comes_back_from_every_tier_is_what_was_written_and_a_page_that_is_not_ends_the_engine(
    tmp_path: Path,
) -> None:
    cache = {**EXPERIMENT["cache"], "gpu": "64MiB"}
    case = Case("sglang", {"cache": cache, **sglang(link="copied", env=CHECKED)})
    asked = [
        Request(id=str(number), prompt=(Segment(40 + number % 2, 1024), Segment(90 + number, 9)), output_tokens=2)
        for number in range(9)
    ]

    async def live() -> tuple[list[RequestRecord], str]:
        engine = case.make(tmp_path)
        records: list[RequestRecord] = []

        async def send(*numbers: int) -> None:
            await engine.replay(Load([asked[number] for number in numbers], concurrency=1), records.append)
            await engine.metrics()

        try:
            await engine.start()
            await engine.ready()
            await send(0, 2, 1, 3, 4)  # two prefixes, of which the GPU has room for one
            await engine.reset(frozenset({"gpu", "cpu"}))
            await send(6)
            await engine.reset(frozenset({"gpu", "cpu"}))
            for page in tmp_path.glob("**/*.bin"):
                with page.open("r+b") as file:
                    file.write(bytes(64))
            with pytest.raises(EngineError) as ended:
                await send(8)
            return records, str(ended.value)
        finally:
            await engine.stop()

    records, told = asyncio.run(live())
    cached = [{k: v for k, v in row.tokens_by_tier.items() if v and k != COMPUTED} for row in records]
    assert cached[:6] == [{}, {"gpu": 1024}, {}, {"gpu": 1024}, {"cpu": 1024}, {"disk": 1024}]
    assert records[6].error is not None and told.startswith("SGLang ended during the run")
    assert "is not what was written" in (tmp_path / "logs" / "sglang.log").read_text() and not left(tmp_path)


def test_a_server_that_runs_already_is_measured_as_init_found_it_and_left_running(tmp_path: Path) -> None:
    """SGLang as another harness started it: `harness init` finds sizes, process and folder; each state is proven."""
    own = tmp_path / "own"
    own.mkdir()
    mine = tmp_path / "mine.yaml"

    async def live() -> str:
        engine = Case("sglang", {"cache": EXPERIMENT["cache"], **sglang()}).make(own)
        try:
            await engine.start()
            resolved = await engine.ready()
            attach = ["--engine", "sglang", "--attach", str(resolved.url), "--model", "tiny-llama"]
            for arguments in (
                ["init", str(mine), *attach],
                ["run", str(mine), "--engine", "sglang", "--set", "measure.samples=2", "--out", str(tmp_path / "out")],
            ):
                process = harness(*arguments)
                said, errors = await asyncio.to_thread(process.communicate, timeout=120)
                assert process.returncode == 0 and not errors.count("Traceback"), said + errors
            await engine.metrics()
            return said
        finally:
            await engine.stop()

    said = asyncio.run(live())
    rows = measured(tmp_path / "out")
    assert {row.expected_tier for row in rows} == set(STATES) and len(rows) == 2 * len(STATES), said
    assert {(row.verdict, row.verdict_reason, row.error) for row in rows} == {("proven", None, None)}
    resolved = read_manifest(tmp_path / "out").cells[0].resolved
    assert resolved is not None and resolved.accelerator is None and resolved.gpu_bytes == 128 * 2**20
    assert not left(tmp_path)


SERVER = Victim("SGLang", "sglang.launch_server")
# Mooncake below HiCache: its RAM, and the SSD that gets what the RAM drops.
POOL: dict[str, Any] = {
    "cache": {**EXPERIMENT["cache"], "pool": "256MiB", "disk": {"capacity": "1GiB", "buffer": "256MiB"}},
    "measure": {"tiers": ["recompute", "gpu", "cpu", "pool", "disk", "disk_cold"], "samples": 3},
    **sglang(hicache={"storage": "mooncake"}, mooncake_args=["--default_kv_lease_ttl=500ms"]),
}
FILES: dict[str, Any] = {"measure": {**EXPERIMENT["measure"], "samples": 3}, **sglang()}


@pytest.mark.parametrize(
    ("storage", "victims"),
    [
        pytest.param(FILES, (HARNESS, SERVER), id="files"),
        pytest.param(
            POOL,
            (Victim("Mooncake client", "mooncake_client"), Victim("Mooncake master", "mooncake_master")),
            id="mooncake",
        ),
    ],
)
def test_however_a_run_ends_it_leaves_nothing_loses_no_row_and_goes_on(
    storage: dict[str, Any], victims: tuple[Victim, ...], tmp_path: Path
) -> None:
    path, folder = tmp_path / "experiment.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump({**EXPERIMENT, **storage}))
    rows = 3 * len(storage["measure"]["tiers"])
    start = [str(path), "--engine", "sglang", "--out", str(folder)]
    killed_and_resumed(start, folder, victims, rows, left)
    assert {row.error for row in read_rows(folder)} == {None}


def test_what_is_replaced_is_what_the_installed_release_has(tmp_path: Path) -> None:
    """The upstream names of the list are in the files of the installed SGLang that it names."""
    from harness.engines.sglang.replaced import TABLE

    asked = [str(SGLANG_PYTHON), "-c", "import importlib.util as u; print(u.find_spec('sglang').origin)"]
    found = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=tmp_path)
    home = Path(found.stdout.strip()).parent / "srt"
    for _, theirs, _ in TABLE:
        files, _, name = theirs.partition(": ")
        for file in files.split(" and "):
            assert (home / file).exists(), f"{file} is not in {home}, by {sys.executable}"
            if (home / file).is_file():
                assert name.partition("(")[0].rpartition(".")[2] in (home / file).read_text()
