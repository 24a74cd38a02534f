"""The simulator against SGLang's own cache and Mooncake's own pool: hits and evictions in their order.

SGLang's radix tree, HiCache and storage threads serve requests that come one after another; Mooncake's master and
client serve uses of single chunks. Each rule of SGLang's that the simulator lacks has a test that shows what it does
(docs/simulator.md lists them), and the random workloads are those where none of them matters.
"""

import os
from collections import Counter
from typing import Any

import msgspec
import pytest

from tests.support.oracle_cases import ask
from tests.support.oracle_mooncake import PoolCase, random_pool, simulate_pool, timed_pool
from tests.support.oracle_sglang import (
    Simulated,
    Workload,
    asked,
    random_device,
    random_host,
    rules,
    simulate_sglang,
)
from tests.support.paths import ROOT

PYTHON = ROOT / ".engines" / "sglang" / "bin" / "python"
pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="no engine environment; `scripts/engine_env sglang` makes it"
)
# More cases find more: HARNESS_ORACLE_CASES=200 takes minutes.
RANDOM_CASES = int(os.environ.get("HARNESS_ORACLE_CASES", "8"))
Answered = list[tuple[Workload, dict[str, Any]]]


@pytest.fixture(scope="module")
def served() -> dict[str, Answered]:
    """Workloads with what SGLang made of them."""
    groups = {
        "device": [random_device(seed) for seed in range(RANDOM_CASES)],
        "host": [random_host(seed) for seed in range(RANDOM_CASES)],
        "rules": [rule.case for rule in rules().values()],
    }
    cases = [asked(case) for group in groups.values() for case in group]
    answers = iter(ask("sglang_hicache.py", cases, python=PYTHON))
    return {name: [(case, next(answers)) for case in group] for name, group in groups.items()}


def hits(rows: dict[str, Any]) -> list[tuple[str, str, int]]:
    return [(name, tier, tokens) for name, row in rows.items() for tier, tokens in row.items()]


def of_simulator(mine: Simulated) -> dict[str, Any]:
    return {name: {"device": row.gpu, "host": row.cpu, "storage": row.disk} for name, row in mine.rows.items()}


def differences(mine: Simulated, real: dict[str, Any]) -> list[str]:
    """Where the simulator's hits, or what the GPU evicts, are not SGLang's."""
    simulated = hits(of_simulator(mine))
    pairs = zip(simulated, hits(real["rows"]), strict=True)
    found = [f"{row} is {theirs} in SGLang" for row, theirs in pairs if row != theirs]
    # The simulator's pages have no hashes: each page of ours must stand for one hash of SGLang's and no other.
    pages = [tuple(note.numbers) for note in mine.gpu if note.what == "evicted"]
    theirs = [number for tier, number in real["journal"] if tier == "device"]
    hashes: dict[Any, int] = {}
    for index, (page, number) in enumerate(zip(pages, theirs, strict=False)):
        if hashes.setdefault(page, number) != number:
            return [*found, f"eviction {index}: page {page} held something else in SGLang"]
    if len(pages) != len(theirs) or len(set(hashes.values())) != len(hashes):
        found.append(f"{len(pages)} evictions of {len(hashes)} pages; SGLang has {len(theirs)}")
    return found


def strain(served: Answered) -> Counter[str]:
    """Hit tokens by tier, and evicted pages."""
    seen: Counter[str] = Counter()
    for _, real in served:
        for _, tier, tokens in hits(real["rows"]):
            seen[tier] += tokens
        seen["evicted"] += len(real["journal"])
    return seen


@pytest.mark.parametrize("group", ["device", "host"])
def test_random_workloads_hit_and_evict_as_in_sglang(served: dict[str, Answered], group: str) -> None:
    for seed, (case, real) in enumerate(served[group]):
        assert not (found := differences(simulate_sglang(case), real)), f"seed {seed}: {found[:5]}"
    seen = strain(served[group])
    print(dict(seen))
    tiers = ["evicted", "device"] + (["host", "storage"] if group == "host" else [])
    assert min(seen[tier] for tier in tiers) > 10 * RANDOM_CASES, "the workloads do not strain the tiers"


@pytest.mark.parametrize("name", rules())
def test_a_rule_that_the_simulator_lacks(served: dict[str, Answered], name: str) -> None:
    rule, (case, real) = rules()[name], served["rules"][list(rules()).index(name)]
    last = case.requests[-1].id
    assert tuple(real["rows"][last].values()) == rule.sglang
    assert tuple(of_simulator(simulate_sglang(case))[last].values()) == rule.simulator


@pytest.fixture(scope="module")
def pooled() -> dict[str, list[tuple[PoolCase, Any]]]:
    """Uses of a pool with what Mooncake made of them."""
    groups = {
        "at rest": [random_pool(seed) for seed in range(RANDOM_CASES)],
        "in time": [timed_pool(seed) for seed in range(max(1, RANDOM_CASES // 10))],
    }
    cases = [msgspec.to_builtins(case) for group in groups.values() for case in group]
    answers = iter(ask("mooncake_pool.py", cases, python=PYTHON))
    return {name: [(case, next(answers)) for case in group] for name, group in groups.items()}


@pytest.mark.parametrize("group", ["at rest", "in time"])
def test_a_pool_hits_and_evicts_as_mooncakes_master_does(
    pooled: dict[str, list[tuple[PoolCase, Any]]], group: str
) -> None:
    seen: Counter[str] = Counter()
    for seed, (case, real) in enumerate(pooled[group]):
        if real is None:
            continue  # leases ended beside the uses that they were to end between
        for index, (mine, theirs) in enumerate(zip(simulate_pool(case), real, strict=True)):
            assert mine == theirs, f"seed {seed}, use {index} of chunk {case.uses[index]}"
            seen["evicted"] += len(theirs["gone"])
            seen["refused"] += not theirs["hit"] and not theirs["put"]
            seen["hit"] += theirs["hit"]
        seen["workloads"] += 1
    print(dict(seen))
    assert seen["workloads"] > 0, "the machine was too slow for all of them"
    assert min(seen["evicted"], seen["hit"]) > 10 * seen["workloads"]
