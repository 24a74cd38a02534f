"""The simulator against SGLang's own scheduler and cache and Mooncake's own pool: hits and evictions in their order.

SGLang's scheduler, radix tree and HiCache serve requests that run together, and ones that come one after another, with
its storage threads; Mooncake's master and client serve uses of single chunks. The rule of SGLang's that makes
the simulator's hits others has a test that shows what it does (docs/simulator.md lists all of them), and the random
workloads are those where none of them matters.
"""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.support.oracle_cases import ask
from tests.support.oracle_mooncake import PoolCase, random_pool, simulate_pool, timed_pool
from tests.support.oracle_sglang import (
    Crowd,
    Simulated,
    Workload,
    asked,
    asked_together,
    random_crowd,
    random_crowd_over_host,
    random_crowd_over_storage,
    random_device,
    random_host,
    rules,
    simulate_sglang,
    simulate_together,
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
    return found + differing_evictions(mine, real)


def differing_evictions(mine: Simulated, real: dict[str, Any]) -> list[str]:
    # The simulator's pages have no hashes: each page of ours must stand for one hash of SGLang's and no other.
    pages = [tuple(note.numbers) for note in mine.gpu if note.what == "evicted"]
    theirs = [number for tier, number in real["journal"] if tier == "device"]
    hashes: dict[Any, int] = {}
    for index, (page, number) in enumerate(zip(pages, theirs, strict=False)):
        if hashes.setdefault(page, number) != number:
            return [f"eviction {index}: page {page} held something else in SGLang"]
    if len(pages) != len(theirs) or len(set(hashes.values())) != len(hashes):
        return [f"{len(pages)} evictions of {len(hashes)} pages; SGLang has {len(theirs)}"]
    return []


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


Together = list[tuple[Crowd, Simulated, dict[str, Any]]]


def together(cases: list[Crowd]) -> Together:
    answers = ask("sglang_schedule.py", [asked_together(case) for case in cases], python=PYTHON)
    return [(case, simulate_together(case), real) for case, real in zip(cases, answers, strict=True)]


def differing_rows(case: Crowd, mine: Simulated, real: dict[str, Any]) -> list[str]:
    """Where a request's hits, or the steps of its first and last tokens, are not SGLang's."""
    rows = {
        name: tiers | {"first": mine.rows[name].first_token_s, "last": mine.rows[name].last_token_s}
        for name, tiers in of_simulator(mine).items()
    }
    assert len(rows) == len(real["rows"]) == len(case.requests)
    return [f"{name}: {rows[name]}, in SGLang {row}" for name, row in real["rows"].items() if rows[name] != row]


def strain_together(served: Together) -> Counter[str]:
    seen: Counter[str] = Counter()
    for _, _, real in served:
        seen += Counter(together=real["together"], retracted=real["retracted"], evicted=len(real["journal"]))
        for row in real["rows"].values():
            seen += Counter({tier: row[tier] for tier in ("device", "host", "storage")})
    print(dict(seen))
    return seen


def test_requests_run_together_as_in_sglang() -> None:
    """Hits, the steps of first and last tokens, and evictions."""
    served = together([random_crowd(seed) for seed in range(RANDOM_CASES)])
    for seed, (case, mine, real) in enumerate(served):
        found = differing_rows(case, mine, real) + differing_evictions(mine, real)
        assert not found, f"seed {seed}: {found[:5]}"
    seen = strain_together(served)
    assert seen["together"] > 3 * RANDOM_CASES, "few steps begin several requests"
    assert min(seen["evicted"], seen["device"]) > 10 * RANDOM_CASES, "the workloads do not strain the cache"


@pytest.mark.parametrize("crowd", [random_crowd_over_host, random_crowd_over_storage])
def test_requests_run_together_over_hicache_nearly_as_in_sglang(crowd: Callable[[int], Crowd]) -> None:
    """Over host memory that holds everything all are equal. The rules that the simulator lacks below it concern few
    requests (docs/simulator.md)."""
    served = together([crowd(seed) for seed in range(RANDOM_CASES)])
    equal = different = 0
    for seed, (case, mine, real) in enumerate(served):
        rows, evictions = differing_rows(case, mine, real), differing_evictions(mine, real)
        equal, different = equal + (not rows and not evictions), different + len(rows)
        print(f"seed {seed}: {[*rows, *evictions]}")
    requests = sum(len(case.requests) for case, _, _ in served)
    print(f"{equal} of {len(served)} workloads are equal in everything; {different} of {requests} requests are not")
    least = len(served) if crowd is random_crowd_over_host else 0.6 * len(served)
    assert equal >= least and different <= 0.05 * requests
    seen = strain_together(served)
    tiers = ("device", "host", "storage") if crowd is random_crowd_over_storage else ("device", "host")
    assert min(seen[tier] for tier in ("evicted", *tiers)) > 10 * RANDOM_CASES, "the workloads do not strain the tiers"


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
    # One group at a time: beside others, leases that have to end between two uses end late.
    return {name: [*zip(group, _asked_of_mooncake(group), strict=True)] for name, group in groups.items()}


def _asked_of_mooncake(cases: list[PoolCase]) -> list[Any]:
    return [*ask("mooncake_pool.py", [msgspec.to_builtins(case) for case in cases], python=PYTHON)]


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
