"""What the counters have to show for each state, and what follows when they do not."""

import asyncio
from typing import Any

import msgspec
import pytest

from harness.engines.fake.engine import FakeEngine
from harness.experiment.model import Experiment
from harness.experiment.workloads import PrefixWorkload
from harness.measure.placing import Probe, after_sample, fillers_for, needs_fresh_prefix, place
from harness.measure.proof import expected_counters, prove, stored_below_memory, with_verdict
from harness.records import Counters, Resolved
from simulator.models import load_model
from traces.request import RequestRecord

TIERS = ("gpu", "cpu", "disk")
ZEROS = dict.fromkeys(("computed_tokens", "external_tokens", "stores_begun", "stores_ended"), 0)
ZEROS |= dict.fromkeys((f"{tier}_hit_tokens" for tier in TIERS), 0)
ZEROS |= {"disk_loaded_chunks": 0, "disk_device_read_bytes": 0}
KV_BYTES = 32768


def probe(concurrency: int = 1, cpu_bytes: int | None = 2**30) -> Probe:
    experiment = Experiment.model_validate(
        {
            "name": "x",
            "workload": {"kind": "prefix", "prompt_tokens": 1025, "hit_rate": 0.5, "concurrency": concurrency},
            "measure": {"tiers": ["gpu"], "samples": 1},
            "cache": {"gpu": "1GiB", "cpu": "1GiB", "disk": {"capacity": "1GiB"}},
        }
    )
    assert isinstance(experiment.workload, PrefixWorkload)
    can = FakeEngine(experiment, load_model("tiny-llama")).capabilities
    return Probe("c", experiment, experiment.workload, Resolved(kv_bytes_per_token=KV_BYTES, cpu_bytes=cpu_bytes), can)


def row(name: str = "a", **fields: Any) -> RequestRecord:
    return RequestRecord(id=name, scheduled_s=0.0, sent_s=0.0, prompt_tokens=1025, **fields)


def moved(tier: str, one: Probe, **other: int | None) -> Counters:
    """Counters that moved exactly as the tier needs, but for `other`."""
    return Counters.of({**ZEROS, **expected_counters(one, tier).named(), **other})


@pytest.mark.parametrize("tier", ["recompute", "gpu", "cpu", "disk", "disk_cold"])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_each_state_is_proven_by_its_own_counters_and_by_no_other_states(tier: str, concurrency: int) -> None:
    one = probe(concurrency)
    rows = [row(cached_tokens=0 if tier == "recompute" else 512) for _ in range(concurrency)]
    assert prove(one, tier, moved(tier, one), rows) == ("proven", None)
    for other in {"recompute", "gpu", "cpu", "disk", "disk_cold"} - {tier}:
        verdict, reason = prove(one, tier, moved(other, one), rows)
        assert verdict == "contradicted" and reason is not None, (tier, other)


@pytest.mark.parametrize(
    ("tier", "other", "verdict", "reason"),
    [
        ("cpu", {"external_tokens": 256}, "contradicted", "external_tokens moved by 256, cpu needs 512"),
        ("cpu", {"disk_hit_tokens": 256}, "contradicted", "disk_hit_tokens moved by 256, cpu needs 0"),
        ("cpu", {"cpu_hit_tokens": None}, "unproven", "the engine does not report cpu_hit_tokens"),
        ("gpu", {"computed_tokens": None}, "unproven", "the engine does not report computed_tokens"),
        ("disk", {"disk_device_read_bytes": 512 * KV_BYTES}, "contradicted", "disk_device_read_bytes moved by"),
        ("disk", {"disk_device_read_bytes": 4096}, "proven", None),
        ("disk", {"disk_loaded_chunks": 1}, "contradicted", "disk_loaded_chunks moved by 1, disk needs 2"),
        ("disk_cold", {"disk_device_read_bytes": 0}, "contradicted", "disk_device_read_bytes moved by 0"),
        ("disk_cold", {"disk_device_read_bytes": 512 * KV_BYTES // 2}, "contradicted", "disk_device_read_bytes"),
        ("disk_cold", {"disk_device_read_bytes": 512 * KV_BYTES + 4096}, "proven", None),
        ("disk_cold", {"disk_device_read_bytes": None}, "unproven", "does not report disk_device_read_bytes"),
    ],
)
def test_the_slightest_difference_is_named(
    tier: str, other: dict[str, int | None], verdict: str, reason: str | None
) -> None:
    got = prove(probe(), tier, moved(tier, probe(), **other), [row()])
    assert got[0] == verdict and (reason is None) == (got[1] is None) and (reason or "") in (got[1] or "")


def test_sums_that_agree_do_not_hide_a_request_that_disagrees() -> None:
    one = probe(concurrency=2)
    rows = [row("a", cached_tokens=1024), row("b", cached_tokens=0)]
    verdict, reason = prove(one, "gpu", moved("gpu", one), rows)
    assert verdict == "contradicted" and reason == "request a had 1024 cached tokens, gpu needs 512"


def test_a_request_that_names_another_tier_contradicts_its_sample() -> None:
    """Its own word by tier, where the engine gives one; a tier that it leaves open says nothing."""
    one = probe(concurrency=2)
    good = {"computed": 513, "gpu": 0, "cpu": 512, "disk": None}
    assert prove(one, "cpu", moved("cpu", one), [row("a", tokens_by_tier=good), row("b")]) == ("proven", None)
    other = {"computed": 513, "gpu": 256, "cpu": 256}
    verdict, reason = prove(one, "cpu", moved("cpu", one), [row("a"), row("b", tokens_by_tier=other)])
    told = "computed (513), gpu (256), cpu (256)"
    assert (verdict, reason) == ("contradicted", f"request b had its tokens from {told}, cpu needs 512")


def test_a_failed_request_leaves_its_sample_unproven() -> None:
    verdict, reason = prove(probe(), "gpu", moved("gpu", probe()), [row(error="boom")])
    assert verdict == "unproven" and reason is not None and "boom" in reason


def test_only_a_proven_row_says_who_served_it() -> None:
    done = with_verdict(row(), probe(), "cpu", "proven", None)
    assert done.tokens_by_tier == {"computed": 513, "gpu": 0, "cpu": 512, "pool": 0, "disk": 0, "remote": 0}
    assert done.expected_hit_tokens == 512
    doubtful = with_verdict(row(), probe(), "cpu", "contradicted", "why")
    assert doubtful.tokens_by_tier == {} and doubtful.verdict_reason == "why"


def test_after_a_sample_without_proof_the_next_starts_from_empty_tiers() -> None:
    one = probe()
    after_sample(one, "recompute", "proven", fresh_prefix=False)
    assert one.prefixes.resident == {"gpu", "cpu", "disk"} and one.stray_tokens == 513
    engine = FakeEngine(one.experiment, load_model("tiny-llama"))
    sent: list[str] = []
    after_sample(one, "cpu", "contradicted", fresh_prefix=False)
    assert not one.prefixes.resident
    asyncio.run(place(engine, one, "cpu", 1, lambda row: sent.append(row.id)))
    assert sent == ["warm-cpu-00001-000"] and one.prefixes.resident == {"cpu", "disk"} and one.stray_tokens == 0


def test_prompts_share_their_prefix_with_the_warm_up_and_their_suffix_with_nothing() -> None:
    one = probe(concurrency=2)
    [first, second] = one.requests("gpu", 0)
    [warm, _] = one.warmers("gpu", 0)
    assert first.prompt[0] == warm.prompt[0] != second.prompt[0]
    suffixes = {r.prompt[-1] for tier in ("gpu", "cpu") for i in (0, 1) for r in one.requests(tier, i)}
    assert len(suffixes) == 8 and first.prompt_tokens == 1025 and warm.prompt_tokens == 512
    [fresh, _] = one.requests("recompute", 0, fresh_prefix=True)
    assert fresh.prompt[0] != first.prompt[0]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("recompute", {"computed_tokens": 2050, "gpu_hit_tokens": 0, "external_tokens": 0}),
        ("gpu", {"computed_tokens": 1026, "gpu_hit_tokens": 1024, "external_tokens": 0}),
        ("cpu", {"computed_tokens": 1026, "gpu_hit_tokens": 0, "external_tokens": 1024, "cpu_hit_tokens": 1024,
                 "disk_hit_tokens": 0}),
        ("disk", {"computed_tokens": 1026, "gpu_hit_tokens": 0, "external_tokens": 1024, "cpu_hit_tokens": 0,
                  "disk_hit_tokens": 1024, "disk_loaded_chunks": 4, "disk_device_read_bytes": 0}),
        ("disk_cold", {"computed_tokens": 1026, "gpu_hit_tokens": 0, "external_tokens": 1024, "cpu_hit_tokens": 0,
                       "disk_hit_tokens": 1024, "disk_loaded_chunks": 4,
                       "disk_device_read_bytes": 1024 * KV_BYTES}),
    ],
)  # fmt: skip
def test_a_states_proof_asks_for_every_counter_that_could_betray_it(state: str, expected: dict[str, int]) -> None:
    named = expected_counters(probe(concurrency=2), state).named()
    assert named == expected and all(isinstance(count, int) for count in named.values())


@pytest.mark.parametrize(("state", "tokens"), [("recompute", 2 * 1025), ("gpu", 2 * 513), ("disk_cold", 2 * 513)])
def test_a_sample_stores_what_it_computes_where_a_tier_below_memory_takes_it(state: str, tokens: int) -> None:
    one = probe(concurrency=2)
    assert stored_below_memory(one, state) == tokens * KV_BYTES
    one.experiment = one.experiment.model_copy(update={"cache": one.experiment.cache.model_copy(update={"disk": None})})
    assert one.experiment.cache.tiers == {"gpu", "cpu"}
    assert stored_below_memory(one, state) == 0


@pytest.mark.parametrize(
    ("number", "counter", "contradicted"),
    [
        (0, "gpu_hit_tokens", True),
        (0, "computed_tokens", True),
        (0, "stores_ended", False),
        (1, "gpu_hit_tokens", False),
    ],
)
def test_only_the_instance_that_was_asked_may_serve_tokens(number: int, counter: str, contradicted: bool) -> None:
    one = probe()
    two = one.experiment.deployment.model_copy(update={"instances": 2})
    one.experiment = one.experiment.model_copy(update={"deployment": two})
    assert one.asked == 1
    each = [Counters.of({**ZEROS, **({counter: 64} if place == number else {})}) for place in range(2)]
    observed = msgspec.structs.replace(moved("gpu", one), by_instance=tuple(each))
    told = f"instance 0 served tokens ({counter} (64)), gpu asks 1"
    assert prove(one, "gpu", observed, [row()]) == (("contradicted", told) if contradicted else ("proven", None))


def test_an_engine_of_unknown_kv_size_is_held_to_no_stored_bytes() -> None:
    one = probe()
    one.resolved = Resolved(kv_bytes_per_token=None, cpu_bytes=2**30)
    assert stored_below_memory(one, "recompute") == 0


@pytest.mark.parametrize("state", ["disk", "disk_cold"])
def test_an_engine_of_unknown_kv_size_is_held_to_no_bytes_from_the_device(state: str) -> None:
    one = probe()
    one.resolved = Resolved(kv_bytes_per_token=None, cpu_bytes=2**30)
    assert expected_counters(one, state).named()["disk_device_read_bytes"] == 0
    assert prove(one, state, moved(state, one), [row()]) == ("proven", None)
    seen = moved(state, one, disk_device_read_bytes=1)
    verdict, reason = prove(one, state, seen, [row()])
    assert (verdict, reason) == ("contradicted", f"disk_device_read_bytes moved by 1, {state} needs 0")


@pytest.mark.parametrize(
    ("state", "read_bytes", "verdict"),
    [
        ("disk_cold", 99 * 512 * KV_BYTES // 100, "contradicted"),  # rounded down: just less than 99 %
        ("disk_cold", 99 * 512 * KV_BYTES // 100 + 1, "proven"),
        ("disk", 512 * KV_BYTES // 100, "proven"),
        ("disk", 512 * KV_BYTES // 100 + 1, "contradicted"),
    ],
)
def test_a_hundredth_of_the_bytes_is_what_a_read_may_differ_by(state: str, read_bytes: int, verdict: str) -> None:
    one = probe()
    assert prove(one, state, moved(state, one, disk_device_read_bytes=read_bytes), [row()])[0] == verdict


def test_exactly_that_share_from_the_device_is_a_cold_read() -> None:
    one = probe()
    one.resolved = Resolved(kv_bytes_per_token=25, cpu_bytes=2**30)
    seen = moved("disk_cold", one, disk_device_read_bytes=12672)
    assert 0.99 * 512 * 25 == 12672 and prove(one, "disk_cold", seen, [row()]) == ("proven", None)


def test_a_hit_rate_of_nothing_asks_no_offload_tier_for_its_hits() -> None:
    one = probe()
    asked = expected_counters(one, "recompute").named()
    assert asked == {"computed_tokens": 1025, "gpu_hit_tokens": 0, "external_tokens": 0}


def test_a_verdict_is_written_with_the_state_that_was_meant() -> None:
    done = with_verdict(row(), probe(), "recompute", "proven", None)
    assert (done.expected_tier, done.expected_hit_tokens, done.verdict) == ("recompute", 0, "proven")
    assert done.tokens_by_tier == {"computed": 1025, "gpu": 0, "cpu": 0, "pool": 0, "disk": 0, "remote": 0}
    assert done.verdict_reason is None


@pytest.mark.parametrize("state", ["disk", "disk_cold"])
def test_a_disk_hit_that_the_cpu_tier_helped_to_serve_is_contradicted(state: str) -> None:
    one = probe()
    verdict, reason = prove(one, state, moved(state, one, cpu_hit_tokens=256), [row()])
    assert (verdict, reason) == ("contradicted", f"cpu_hit_tokens moved by 256, {state} needs 0")


def test_only_the_counters_that_an_engine_gives_as_evidence_are_asked_of_it() -> None:
    one = probe()
    less = {"disk": one.capabilities.evidence["disk"] - {"cpu_hit_tokens", "disk_loaded_chunks"}}
    one.capabilities = msgspec.structs.replace(one.capabilities, evidence=less)
    seen = Counters.of({**moved("disk", one).named(), "cpu_hit_tokens": None, "disk_loaded_chunks": None})
    assert prove(one, "disk", seen, [row()]) == ("proven", None)
    assert prove(one, "cpu", seen, [row()]) == ("unproven", "the engine's counters are no evidence for cpu")


@pytest.mark.parametrize(("evicts_when_full", "share"), [(False, 0.75), (True, 0.95)])
def test_suffixes_that_could_push_the_prefix_out_make_the_next_sample_start_over(
    evicts_when_full: bool, share: float
) -> None:
    one = probe(cpu_bytes=(10_000 * KV_BYTES))
    one.capabilities = msgspec.structs.replace(one.capabilities, evicts_when_full=evicts_when_full)
    engine = FakeEngine(one.experiment, load_model("tiny-llama"))
    sent: list[str] = []
    limit = int(share * 10_000) - 2 * 1025
    for index, stray_tokens in enumerate((limit, limit, limit + 1)):
        asyncio.run(place(engine, one, "cpu", index, lambda row: sent.append(row.id)))
        assert one.prefixes.resident == {"cpu", "disk"} and "gpu" in one.prefixes.absent
        one.stray_tokens = stray_tokens
    assert sent == ["warm-cpu-00000-000"]
    asyncio.run(place(engine, one, "cpu", 3, lambda row: sent.append(row.id)))
    assert sent == ["warm-cpu-00000-000", "warm-cpu-00003-000"] and one.stray_tokens == 0


def test_where_a_tier_cannot_be_emptied_the_prefix_is_a_new_one() -> None:
    one = probe()
    one.capabilities = msgspec.structs.replace(one.capabilities, resets=frozenset({frozenset({"gpu"})}))
    engine, before = FakeEngine(one.experiment, load_model("tiny-llama")), one.warmers("cpu", 0)[0].prompt
    asyncio.run(place(engine, one, "cpu", 0, lambda _: None))
    assert one.generation == 1 and one.warmers("cpu", 0)[0].prompt != before
    assert needs_fresh_prefix(one.capabilities, "recompute") and not needs_fresh_prefix(one.capabilities, "cpu")
    after_sample(one, "recompute", "proven", fresh_prefix=True)
    assert one.stray_tokens == 1025 and "gpu" not in one.prefixes.resident


@pytest.mark.parametrize("prompt_tokens", [257, 1025, 2561, 3073, 4097])
def test_fillers_of_the_engines_own_cache_are_little_more_than_it_holds(prompt_tokens: int) -> None:
    one = probe()
    workload = one.workload.model_copy(update={"prompt_tokens": prompt_tokens})
    experiment = one.experiment.model_copy(update={"workload": workload})
    resolved = Resolved(kv_bytes_per_token=KV_BYTES, gpu_bytes=8192 * KV_BYTES, cpu_bytes=8192 * KV_BYTES)
    each_tokens, count = fillers_for(experiment, resolved, frozenset({"gpu"}))
    assert each_tokens % 256 == 0 and each_tokens <= prompt_tokens
    assert 8192 < each_tokens * count <= 8192 + 256 * count
    each_tokens, count = fillers_for(experiment, resolved, frozenset({"cpu"}))
    assert each_tokens <= prompt_tokens and each_tokens * count >= 8192 + prompt_tokens // 256 * 256
