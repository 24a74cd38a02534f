"""Clusters through their Python face: one equals a simulator, routing, sharing, refusals."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import pytest

from simulator.calibration import load_calibration
from simulator.cluster import Cluster
from simulator.columns import RequestColumns
from simulator.models import load_model
from simulator.simulate import Completion, Simulator
from traces.catalogue import find_trace
from traces.formats import TraceOptions, open_trace
from traces.request import Request, Segment

GIB = 1 << 30
TRACE = open_trace(find_trace("tiny_conversation"), options=TraceOptions(block_tokens=32)).requests


def simulator(tier_pack: str = "lmcache-0.5.6-mp", **settings: Any) -> Simulator:
    defaults: dict[str, Any] = {
        "gpu_blocks": 400,
        "block_tokens": 32,
        "chunk_tokens": 256,
        "cpu_bytes": GIB,
        "disk_bytes": GIB,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 256,
    }
    calibration = load_calibration("cpu-2core")
    return Simulator(load_model("tiny-llama"), calibration, "vllm-0.32", tier_pack, **(defaults | settings))


def all_of(engine: Simulator | Cluster) -> list[Completion]:
    done: list[Completion] = []
    while some := engine.advance():
        done += some
    return done


def submit(engine: Simulator | Cluster, requests: tuple[Request, ...] = TRACE) -> None:
    for request in requests:
        engine.submit(request, request.at_s or 0.0)


@pytest.mark.parametrize("routing", ["round-robin", "least-loaded", "prefix-aware"])
@pytest.mark.parametrize("shared", [(), ("disk",), ("cpu", "disk")])
@pytest.mark.parametrize("tier_pack", ["lmcache-0.5.6-mp", "lru"])
def test_a_cluster_of_one_is_its_simulator_and_the_same_calls_give_the_same(
    routing: Any, shared: Any, tier_pack: str
) -> None:
    one = simulator(tier_pack)
    cluster = Cluster(one, instances=1, routing=routing, shared=shared)
    submit(one)
    submit(cluster)
    assert all_of(one) == all_of(cluster)
    assert one.counters() == cluster.counters()
    several = [Cluster(one, instances=3, routing=routing, shared=shared) for _ in range(3)]
    submit(several[0])
    submit(several[1])
    several[2].submit_many(RequestColumns.of(TRACE))
    rows = all_of(several[0])
    assert rows == all_of(several[1])
    columns = several[2].advance_many()
    assert columns.ids == [row.id for row in rows]
    for name in ("first_token_s", "last_token_s", "computed", "gpu", "cpu", "disk", "preemptions"):
        assert getattr(columns, name).tolist() == [getattr(row, name) for row in rows], name
    assert columns.instances.tolist() == [row.instance for row in rows]
    assert sorted(columns.ids) == sorted(request.id for request in TRACE)
    assert sum(columns.computed.tolist()) == several[0].counters().computed_tokens


def test_round_robin_deals_the_trace_out_and_prefix_aware_hits_more() -> None:
    hits = {}
    for routing in ("round-robin", "prefix-aware"):
        cluster = Cluster(simulator(cpu_bytes=None, disk_bytes=None), instances=4, routing=routing)
        submit(cluster)
        rows = all_of(cluster)
        hits[routing] = sum(row.gpu for row in rows)
        if routing == "round-robin":
            counts = Counter(row.instance for row in rows).values()
            assert max(counts) - min(counts) <= 1
            order = {row.id: row.instance for row in rows}
            assert [order[request.id] for request in TRACE[:6]] == [0, 1, 2, 3, 0, 1]
    assert hits["prefix-aware"] > hits["round-robin"] > 0


def test_a_shared_server_serves_to_one_what_another_stored() -> None:
    ask = Request(id="a", prompt=(Segment(1, 4097),), output_tokens=1)
    cases: list[tuple[tuple[Literal["cpu", "disk"], ...], str]]
    cases = [((), "computed"), (("disk",), "disk"), (("cpu", "disk"), "cpu")]
    for shared, served in cases:
        cluster = Cluster(simulator(), instances=2, shared=shared)
        cluster.submit(ask, 0.0)
        (first,) = cluster.advance()
        cluster.drain()
        cluster.submit(Request(id="b", prompt=ask.prompt, output_tokens=1), cluster.now_s)
        (second,) = cluster.advance()
        assert (first.instance, second.instance) == (0, 1)
        assert getattr(second, served) >= 4096
        cluster.drain()
        cluster.reset({"gpu", "cpu", "disk"})
        cluster.submit(ask, cluster.now_s)
        assert cluster.advance()[0].computed == 4097


def test_what_cannot_be_is_refused_in_one_line() -> None:
    one, bare = simulator(), simulator(cpu_bytes=None, disk_bytes=None)
    cases: list[tuple[Simulator, dict[str, Any], str]] = [
        (one, {"instances": 0}, "instances must be at least 1"),
        (one, {"instances": -1}, "not a usable value"),
        (one, {"instances": 2, "routing": "random"}, "no routing 'random'"),
        (one, {"instances": 2, "shared": ("gpu",)}, "'gpu' is not one of cpu, pool, disk"),
        (one, {"instances": 2, "shared": ("cpu",)}, "name disk as well"),
        (bare, {"instances": 2, "shared": ("cpu", "disk")}, "no cpu tier to share"),
    ]
    for like, settings, text in cases:
        with pytest.raises(ValueError, match=text) as refused:
            Cluster(like, **settings)
        assert "\n" not in str(refused.value)
    cluster = Cluster(one, instances=2)
    submit(cluster, TRACE[:1])
    with pytest.raises(ValueError, match="in flight already"):
        submit(cluster, TRACE[:1])
    with pytest.raises(ValueError, match="drain"):
        cluster.reset({"gpu"})


def test_behind_a_chunk_from_the_disk_a_look_up_counts_none_in_cpu_ram() -> None:
    """A conversation's turns alternate between two instances. LMCache 0.5.6 counts in its L1 the prefix that L1 serves
    alone: the fourth turn's first chunks come from the disk, and what that instance stored of the second one does not
    count there. The rows say where each chunk came from."""
    cluster = Cluster(simulator(gpu_blocks=100), instances=2, shared=["disk"])
    prompt: tuple[Segment, ...] = ()
    for turn in range(4):
        prompt += (Segment(turn, 256),)
        asked = Request(id=f"t{turn}", prompt=(*prompt, Segment(100 + turn, 1)), output_tokens=1)
        cluster.submit(asked, cluster.now_s)
        [done] = cluster.advance()
        cluster.drain()
        cluster.reset(["gpu"])
    counted = [(one.l1_hit_tokens, one.l2_hit_tokens, one.l2_loaded_chunks) for one in cluster.counters_by_instance()]
    assert counted == [(256, 256, 1), (0, 256 + 768, 3)]
    assert (done.instance, done.cpu, done.disk) == (1, 256, 512)
