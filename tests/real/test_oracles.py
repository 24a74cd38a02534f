"""The simulator against vLLM's and LMCache's own classes: hits, evictions in their order, preemptions, all equal.

vLLM: its Scheduler with KVCacheManager and BlockPool runs the same requests. Evicted blocks are compared by what they
held, one by one in their order, and not by number: the simulator's blocks have none. LMCache: its L1Manager, eviction
policies and controller, store and prefetch controllers get what the simulator asked of its tiers, in the same order.
The oracles are scripts in tests/oracle/, run once for all tests by the engine's Python.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from simulator.models import load_model
from simulator.simulate import Completion, Note
from tests.support.oracle_cases import PYTHON, Case, ask, random_batching, random_eviction, random_tiers, simulate
from traces.catalogue import find_trace
from traces.formats import open_trace
from traces.request import reply_stream

# Not marked real: no server is started and nothing is timed, so that these run beside other tests.
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no engine environment; `scripts/engine_env vllm` makes it")
# More cases find more: HARNESS_ORACLE_CASES=220 takes minutes.
RANDOM_CASES = int(os.environ.get("HARNESS_ORACLE_CASES", "60"))
# vLLM decides in Python and takes a second for 50 requests of this trace, LMCache one for 100.
VLLM_TRACE_REQUESTS = 500
LMCACHE_TRACE_REQUESTS = 1200
Journal = list[list[Any]]


def conversation(count: int, settings: dict[str, Any], constants: dict[str, float]) -> Case | None:
    """The first `count` requests of the Mooncake conversation trace; no case: the trace is not on this machine."""
    if not (Path(os.environ.get("HARNESS_TRACES", "")) / "mooncake_conversation.jsonl").is_file():
        return None
    requests = open_trace(find_trace("mooncake_conversation")).requests[:count]
    limits = {"block_tokens": 128, "chunk_tokens": 256, "max_num_batched_tokens": 8192, "max_num_seqs": 256}
    return Case([(request.at_s or 0.0, request) for request in requests], limits | settings, constants)


def with_trace(cases: list[Case], trace: Case | None) -> list[Case]:
    return cases if trace is None else [*cases, trace]


def workload(case: Case) -> dict[str, Any]:
    """What tests/oracle/vllm_scheduler.py reads."""
    requests = [
        {
            "id": request.id,
            "prompt": [[segment.hash_id, segment.tokens] for segment in request.prompt],
            "reply": reply_stream(request.id),
            "output": request.output_tokens,
            "at": at_s,
        }
        for at_s, request in case.requests
    ]
    names = {
        "block": "block_tokens",
        "blocks": "gpu_blocks",
        "budget": "max_num_batched_tokens",
        "seqs": "max_num_seqs",
    }
    return {name: case.settings[setting] for name, setting in names.items()} | {"requests": requests}


@pytest.fixture(scope="module")
def scheduled() -> list[tuple[Case, dict[str, Any]]]:
    """Workloads with what vLLM made of them; the trace, where there is one, comes last."""
    # Steps of 1/5 s, as a busy GPU takes them: time runs five times as fast.
    trace = conversation(VLLM_TRACE_REQUESTS, {"gpu_blocks": 4000}, {"step_s": 1.0})
    if trace is not None:
        trace.requests = [(at_s * 5, request) for at_s, request in trace.requests]
    cases = with_trace([random_batching(seed) for seed in range(RANDOM_CASES)], trace)
    return list(zip(cases, ask("vllm_scheduler.py", [workload(case) for case in cases]), strict=True))


def scheduling_differences(rows: dict[str, Completion], journal: list[Note], real: dict[str, Any]) -> list[str]:
    """Where the simulator's requests, evictions or preemptions are not vLLM's."""
    found = [] if rows.keys() == real["rows"].keys() else ["other requests completed"]
    for name, row in real["rows"].items():
        mine = {"tokens": list(rows[name].token_s), "gpu": rows[name].gpu, "preemptions": rows[name].preemptions}
        found += [f"{name}: {key} {mine[key]} is {row[key]} in vLLM" for key in mine if mine[key] != row[key]]
    # The simulator's blocks have no numbers. Each content of ours must stand for one hash of vLLM's and no other.
    noted = [(what, name or tuple(numbers)) for what, name, numbers in journal]
    hashes: dict[Any, str] = {}
    for index, (mine_note, theirs) in enumerate(zip(noted, real["journal"], strict=False)):
        if mine_note[0] != theirs[0] or (theirs[0] == "preempted" and mine_note[1] != theirs[1]):
            return [*found, f"note {index}: {mine_note} is {theirs} in vLLM"]
        if theirs[0] == "evicted" and hashes.setdefault(mine_note[1], theirs[2]) != theirs[2]:
            found.append(f"note {index}: block {theirs[1]} held something else in vLLM")
    if len(noted) != len(real["journal"]) or len(set(hashes.values())) != len(hashes):
        found.append(f"{len(noted)} notes of {len(hashes)} keys; vLLM has {len(real['journal'])}")
    return found


@pytest.mark.parametrize("macro_steps", [True, False])
def test_random_workloads_are_scheduled_as_vllm_does(
    scheduled: list[tuple[Case, dict[str, Any]]], macro_steps: bool
) -> None:
    seen: Counter[str] = Counter()
    for seed, (case, real) in enumerate(scheduled[:RANDOM_CASES]):
        rows, journal, _ = simulate(case, macro_steps=macro_steps)
        assert not (found := scheduling_differences(rows, journal, real)), f"seed {seed}: {found[:5]}"
        seen.update(note[0] for note in journal)
        seen["hit tokens"] += sum(row.gpu for row in rows.values())
    print(dict(seen))
    least = min(seen["evicted"], seen["preempted"], seen["hit tokens"])
    assert least > 10 * RANDOM_CASES, "the workloads do not strain the GPU"


def test_the_conversation_trace_is_scheduled_as_vllm_does(scheduled: list[tuple[Case, dict[str, Any]]]) -> None:
    if len(scheduled) == RANDOM_CASES:
        pytest.skip("no mooncake_conversation.jsonl in $HARNESS_TRACES; `harness traces fetch` gets it")
    case, real = scheduled[-1]
    rows, journal, _ = simulate(case)
    assert not (found := scheduling_differences(rows, journal, real)), found[:5]
    seen = Counter(note[0] for note in journal)
    print(f"{len(rows)} requests, {dict(seen)}, {sum(row.gpu for row in rows.values())} hit tokens")
    assert seen["evicted"] > 10_000 and seen["preempted"] > 10


def test_another_block_count_is_found(scheduled: list[tuple[Case, dict[str, Any]]]) -> None:
    case, real = scheduled[0]
    case = Case(case.requests, case.settings | {"gpu_blocks": case.settings["gpu_blocks"] + 1})
    rows, journal, _ = simulate(case)
    assert scheduling_differences(rows, journal, real)


def tier_journal(case: Case) -> dict[str, Any]:
    """What tests/oracle/lmcache_l1.py reads; the simulator has run the case."""
    rows, _, notes = simulate(case)
    assert not [row.error for row in rows.values() if row.error]
    model = load_model("llama-3.2-3b" if case.settings["block_tokens"] > 100 else "tiny-llama")
    chunks = case.settings["cpu_bytes"] // (case.settings["chunk_tokens"] * model.kv_bytes_per_token)
    disk = case.settings["disk_bytes"] is not None
    policy, watermark, ratio = case.eviction
    journal = [[what, numbers] for what, _, numbers in notes]
    return {"chunks": chunks, "disk": disk, "eviction": [policy.upper(), watermark, ratio], "journal": journal}


def lies(journal: Journal) -> list[Journal]:
    """The journal up to its first note of each kind that claims a decision, with that decision changed."""
    found = []
    for kind in ("answer", "storing", "writes", "tick"):
        at = next(index for index, (what, numbers) in enumerate(journal) if what == kind and len(numbers) > 1)
        found.append([*journal[:at], [kind, journal[at][1][:-1]]])
    return found


Answered = list[tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def tiers() -> dict[str, Answered]:
    """Journals with LMCache's verdict: random ones by default and by other evictions, four lies, and the trace's (by
    LRU and by ARC) where there is one."""
    chunk_bytes = 256 * load_model("llama-3.2-3b").kv_bytes_per_token
    constants = {"step_s": 0.02, "token_s": 1.2e-5, "cpu.read.bytes_per_s": 2e10, "cpu.write.bytes_per_s": 2e10}
    constants |= {"disk.read.latency_s": 0.05, "disk.read.bytes_per_s": 4e9, "disk.write.bytes_per_s": 3e9}
    sizes = {"gpu_blocks": 4000, "cpu_bytes": 8000 * chunk_bytes, "disk_bytes": 10**6 * chunk_bytes, "odirect": True}
    trace = with_trace([], conversation(LMCACHE_TRACE_REQUESTS, sizes, constants))
    groups = {
        "default": [tier_journal(random_tiers(seed)) for seed in range(RANDOM_CASES)],
        "evicting": [tier_journal(random_eviction(seed)) for seed in range(RANDOM_CASES)],
        "trace": [tier_journal(case) for case in trace],
        "trace by ARC": [tier_journal(msgspec.structs.replace(case, eviction=("arc", 0.7, 0.1))) for case in trace],
    }
    busy = next(journal for journal in groups["default"] if journal["disk"] and len(journal["journal"]) > 800)
    groups["lies"] = [busy | {"journal": lie} for lie in lies(busy["journal"])]
    # LRU's journal, told as if ARC had made it.
    groups["lies"].append(busy | {"eviction": ["ARC", *busy["eviction"][1:]]})
    answers = iter(ask("lmcache_l1.py", [journal for group in groups.values() for journal in group]))
    return {name: [(journal, next(answers)) for journal in group] for name, group in groups.items()}


@pytest.mark.parametrize("group", ["default", "evicting"])
def test_lmcache_decides_alike_on_random_workloads(tiers: dict[str, Answered], group: str) -> None:
    seen: Counter[str] = Counter()
    for seed, (asked, real) in enumerate(tiers[group]):
        first = asked["journal"][real["wrong"][0][0]] if real["wrong"] else None
        assert not real["wrong"], f"seed {seed}, {asked['eviction']}: {first} is {real['wrong']} in LMCache"
        assert sum(real["checked"].values()) == len(asked["journal"])
        seen.update(real["checked"] | {"evicted": real["evicted"]})
    print(dict(seen))
    least = min(seen["evicted"], seen["prefetched"], seen["release"])
    assert least > 10 * RANDOM_CASES, "the workloads do not strain the tier"


@pytest.mark.parametrize("group", ["trace", "trace by ARC"])
def test_lmcache_decides_alike_on_the_conversation_trace(tiers: dict[str, Answered], group: str) -> None:
    if not tiers[group]:
        pytest.skip("no mooncake_conversation.jsonl in $HARNESS_TRACES; `harness traces fetch` gets it")
    asked, real = tiers[group][0]
    print(real)
    assert not real["wrong"], f"{asked['journal'][real['wrong'][0][0]]} is {real['wrong']} in LMCache"
    assert real["evicted"] > 10_000 and real["checked"]["prefetched"] > 100


def test_a_lie_about_lmcache_is_found(tiers: dict[str, Answered]) -> None:
    *changed, other_policy = tiers["lies"]
    for asked, real in changed:
        assert [index for index, _ in real["wrong"]] == [len(asked["journal"]) - 1]
    assert other_policy[1]["wrong"]
