"""Mode tiers: every byte of every tier moves, without an engine; and the policy alone says what is dropped."""

import hashlib
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness.experiment.loads import free_load
from harness.measure.run import run
from harness.report.refresh import seal
from harness.results.folder import read_rows
from harness.results.manifest import read_manifest
from simulator.storage import CoreStore
from tests.support.paths import ROOT
from tests.unit.engines.test_placement import Plain
from tests.unit.engines.test_storage_mode import command, figures
from tests.unit.measure.test_run_loop import Quiet, measured
from tests.unit.measure.test_run_sim import request
from traces.request import Request, stable_id

CHUNK_BYTES = 64 * 32768
# The order of the sends does not depend on the devices: a round's requests go one after another, four at a time.
ROUNDS: dict[str, Any] = {
    "kind": "rounds", "clients": 6, "rounds": 4, "first_tokens": 200, "turn_tokens": 90, "output_tokens": 40,
    "parallel": 4, "order": "fifo", "answers": "none",
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "name": "tiers",
    "workload": ROUNDS,
    "cache": {"chunk_tokens": 64, "gpu": "0B", "cpu": "20MiB", "disk": {"capacity": "60MiB"}},
    "engines": {"sim": {"mode": "tiers", "storage": {"reserve": "0B", "verify": True, "depth": 4}}},
}
SIZES: dict[str, dict[str, Any]] = {
    "cpu over disk": {"cpu": "20MiB", "disk": {"capacity": "40MiB"}},
    "disk": {"disk": {"capacity": "56MiB"}},
    "cpu": {"cpu": "56MiB"},
    "gpu, cpu and disk": {"gpu": "12MiB", "cpu": "20MiB", "disk": {"capacity": "30MiB"}},
}


def config(cache: dict[str, Any], tiers: dict[str, Any], **changes: Any) -> dict[str, Any]:
    sim = {**CONFIG["engines"]["sim"], "tiers": {"gpu": "ram", **tiers}}
    cache = {"chunk_tokens": 64, "gpu": "0B", **cache}
    return {**CONFIG, "cache": cache, "engines": {"sim": sim}, **changes}


def oracle(requests: list[Request], sizes: list[int], grain: str, rule: str) -> tuple[str, Counter[str]]:
    """What requests, one after another, find, write, push down and drop: a digest, and counts of slots."""
    plain, whole, counts = Plain(sizes, rule, 0.8), {}, Counter[str]()
    for each in requests:
        lines, leading, missing = [], True, []
        for key, units in entries(each, grain):
            held = [n for n, tier in enumerate(plain.tiers) for name, _ in tier if name == key]
            hit = bool(held) and (leading or grain == "turn")
            leading = leading and hit
            lines.append(f"{'R' if hit else '-' if held else 'W'} {key}\n")
            counts["found" if hit else "written"] += units * (hit or not held)
            if hit:
                plain.use(key)
            elif not held:
                missing.append((key, units))
        for key, units in missing:
            for victim, _, to in plain.store(key, units):
                lines.append(f"{'X' if to is None else 'D'} {victim}\n")
                counts["dropped" if to is None else "moved"] += next(
                    n for name, n in every_entry(requests, grain) if name == victim
                )
        whole[each.id] = hashlib.sha256("".join(lines).encode()).hexdigest()
    text = "".join(f"{name} {digest}\n" for name, digest in sorted(whole.items()))
    return hashlib.sha256(text.encode()).hexdigest(), counts


def entries(each: Request, grain: str) -> list[tuple[int, int]]:
    if grain == "turn":
        return [(stable_id("turn", s.hash_id, s.tokens), -(-s.tokens // 64)) for s in each.prompt]
    tokens = [(s.hash_id, n) for s in each.prompt for n in range(s.tokens)]
    names, before = [], "chunk"
    for start in range(0, len(tokens) - 63, 64):
        part: list[object] = []
        for name in dict.fromkeys(name for name, _ in tokens[start : start + 64]):
            own = [n for held, n in tokens[start : start + 64] if held == name]
            part += [name, own[0], len(own)]
        names.append((stable_id(before, *part), 1))
        before = names[-1][0]  # type: ignore[assignment]
    return names


def every_entry(requests: list[Request], grain: str) -> list[tuple[int, int]]:
    return [entry for each in requests for entry in entries(each, grain)]


@pytest.mark.parametrize("grain", ["chunk", "turn"])
@pytest.mark.parametrize("rule", ["waterfall", "spillover"])
@pytest.mark.parametrize("name", SIZES)
def test_what_moves_is_what_the_policy_says(tmp_path: Path, name: str, rule: str, grain: str) -> None:
    asked = config(SIZES[name], {"entry": grain, "placement": rule, "decode_read_tokens": 0})
    wanted = request(tmp_path, asked)
    folder = run(wanted, Quiet())
    rows, found = measured(folder), figures(folder)
    assert len(rows) == 24 and all(row.error is None for row in rows)
    [cell] = wanted.cells
    cache = cell.experiment.cache
    slots = [(cache.bytes_of(tier) or 0) // CHUNK_BYTES for tier in ("gpu", "cpu", "disk") if cache.bytes_of(tier)]
    by_id = {each.id: each for each in free_load(cell.experiment).requests}
    digest, counts = oracle([by_id[row.id] for row in sorted(rows, key=lambda r: r.sent_s)], slots, grain, rule)
    assert found["operations_sha256"] == digest and counts["found"] > 0 and counts["dropped"] > 0
    kv = found["kv"]
    assert kv["load_read_bytes"] == counts["found"] * CHUNK_BYTES
    assert kv["prefill_write_bytes"] == counts["written"] * CHUNK_BYTES
    assert kv["demoted_bytes"] == counts["moved"] * CHUNK_BYTES and kv["decode_read_bytes"] == 0
    assert kv["dropped_bytes"] == counts["dropped"] * CHUNK_BYTES
    tiers = kv["by_tier"].values()
    for way, bytes_asked in (
        ("read", kv["load_read_bytes"]),
        ("write", kv["prefill_write_bytes"] + kv["demoted_bytes"]),
    ):
        assert sum(tier[way]["moved_bytes"] for tier in tiers) == bytes_asked
        assert all(tier[way]["moved_bytes"] == tier[way]["asked_bytes"] for tier in tiers)
    # What moves down is in memory here: the tier below takes it from there, and no operation reads it first.
    assert sum(tier["write"]["taken_bytes"] for tier in tiers) == kv["demoted_bytes"]
    assert not any(tier["read"]["taken_bytes"] for tier in tiers)
    held = counts["written"] - counts["dropped"]
    assert sum(tier["held_bytes"] for tier in tiers) == held * CHUNK_BYTES and found["failed_operations"] == 0


def test_a_load_ten_times_as_large_as_the_tiers_ends(tmp_path: Path) -> None:
    """Real concurrency: users go on as they are answered, and every read of what was kept has its own bytes."""
    workload = {
        "kind": "personas", "users": 8, "turns": 30, "new_conversation": 0.5, "answers": "none",
        "personas": [{"name": "any", "context_tokens": [64, 200], "output_tokens": [8, 70]}],
    }  # fmt: skip
    sizes = {"cpu": "16MiB", "disk": {"capacity": "80MiB"}}
    tiers = {"entry": "turn", "decode_reads": "turn", "max_writes": 2}
    folder = run(request(tmp_path, config(sizes, tiers, workload=workload)), Quiet())
    rows, found = measured(folder), figures(folder)
    assert len(rows) == 240 and {row.error for row in rows} == {None} and found["complete"]
    assert found["kv"]["prefill_write_bytes"] > 10 * 96 * 2**20 and found["kv"]["dropped_bytes"] > 0
    assert found["failed_operations"] == 0
    assert all(tier["held_bytes"] <= 80 * 2**20 for tier in found["kv"]["by_tier"].values())
    assert seal(folder).cells[0].storage is not None


def test_decode_reads_generation_and_prefill_only(tmp_path: Path) -> None:
    tiers = {"entry": "turn", "decode_reads": "turn", "decode_read_tokens": 16, "token_time": "1ms"}
    folder = run(request(tmp_path, config({"cpu": "1GiB"}, {**tiers, "prefill_only_tokens": 150})), Quiet())
    rows, found = measured(folder), figures(folder)
    first = [row for row in rows if row.turn == 0]
    assert {row.e2e_s == row.ttft_s for row in first} == {True}, "a prompt of 200 new tokens ends with its prefill"
    later = [row for row in rows if row.turn > 0]
    assert all((row.e2e_s or 0) - (row.ttft_s or 0) >= 0.040 for row in later)
    # 40 tokens: three times 16 or fewer, and once before; 90 tokens take two slots of 64.
    assert found["kv"]["decode_read_bytes"] == len(later) * 4 * 2 * CHUNK_BYTES
    assert found["kv"]["amplification"] == pytest.approx(
        sum(4 * 90 * (row.turn > 0) + (row.cached_tokens or 0) for row in rows) / (40 * len(rows))
    )


def test_steady_state_counts_what_ends_inside(tmp_path: Path) -> None:
    workload = {
        "kind": "personas", "users": 4, "turns": 500, "new_conversation": 0.3, "duration": "1500ms", "warm_up": "500ms",
        "personas": [{"name": "any", "context_tokens": [64, 128], "output_tokens": [10, 10], "think": ["1ms", "2ms"]}],
    }  # fmt: skip
    folder = run(request(tmp_path, config({"cpu": "1GiB"}, {"token_time": "3ms"}, workload=workload)), Quiet())
    phases = Counter(row.phase for row in read_rows(folder))
    found = figures(folder)
    assert phases["warm"] > 0 and 0 < phases["drain"] <= 4 and all(row.error is None for row in read_rows(folder))
    assert abs(phases["measure"] - found["requests_finished"]) <= 1, "the two clocks begin a moment apart"
    assert found["elapsed_s"] == pytest.approx(1.0) and found["complete"]
    assert found["output_tokens"] == 10 * found["requests_finished"]


def test_what_lies_in_a_gpu_is_read_before_it_moves_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoreStore, "take_from", lambda *_: None)
    folder = run(request(tmp_path, config(SIZES["gpu, cpu and disk"], {"decode_read_tokens": 0})), Quiet())
    kv = figures(folder)["kv"]
    read = sum(tier["read"]["moved_bytes"] for tier in kv["by_tier"].values())
    assert read == kv["load_read_bytes"] + kv["demoted_bytes"] and kv["demoted_bytes"] > 0
    assert not any(tier["write"]["taken_bytes"] for tier in kv["by_tier"].values())


@pytest.mark.skipif(os.geteuid() != 0, reason="a reference device needs root")
def test_the_device_counts_the_bytes_that_were_asked_for(tmp_path: Path) -> None:
    device = {"device": {"bandwidth": "800MiB/s", "size": "400MiB"}}
    asked = config({"cpu": "20MiB", "disk": {"capacity": "40MiB"}}, {}, storage=device)
    found = figures(run(request(tmp_path, asked), Quiet()))
    for way in ("read", "write"):
        assert found[way]["asked_bytes"] == found[way]["moved_bytes"] > 0
        # The file system reads or writes some blocks of its own.
        assert 0 <= found[way]["device_bytes"] - found[way]["moved_bytes"] <= 64 * 1024


@pytest.mark.skipif(os.geteuid() != 0, reason="a loop device needs root")
def test_a_device_that_fails_midway_fails_requests_and_ends(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    sizes = {"cpu": "12MiB", "disk": {"capacity": "60MiB", "path": str(disk)}}
    failing = [sys.executable, str(ROOT / "tests/support/failing_disk.py"), str(disk), "30"]
    folder = tmp_path / "out"
    done = command(tmp_path, config(sizes, {}), "unshare", "--mount", "--propagation", "private", *failing)
    assert "Traceback" not in done.stderr, done.stderr
    assert read_manifest(folder).status == "complete" and len(measured(folder)) == 24
    assert figures(folder)["failed_operations"] > 0 and list(disk.iterdir()) == []
