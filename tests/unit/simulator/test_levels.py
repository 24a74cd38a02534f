"""Levels below the GPU through the simulator's Python face: host, pool and SSD, private and shared."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from simulator.calibration import Calibration, load_calibration
from simulator.cluster import Cluster
from simulator.errors import CalibrationError, ModelError
from simulator.levels import Level, RemoteDevice, check_levels, standard_levels
from simulator.models import load_model
from simulator.policies import tier_policy
from simulator.simulate import Completion, Simulator
from traces.request import Request, Segment, reply_stream

CHUNK, CHUNK_BYTES = 64, 64 * 32768
HICACHE, MOONCAKE = tier_policy("sglang-0.5.23-hicache-wait"), tier_policy("mooncake-0.3.13")


def known() -> Calibration:
    """cpu-2core with a pool as fast as its CPU RAM."""
    calibration = load_calibration("cpu-2core")
    pool = {f"pool{name[3:]}": value for name, value in calibration.constants.items() if name.startswith("cpu.")}
    return msgspec.structs.replace(calibration, constants=calibration.constants | pool)


def simulator(chunks: dict[str, int], engine: str = "sglang-0.5.23", **settings: Any) -> Simulator:
    sizes = {f"{tier}_bytes": count * CHUNK_BYTES for tier, count in chunks.items()}
    asked: dict[str, Any] = {
        "gpu_blocks": 400,
        "block_tokens": 64,
        "chunk_tokens": CHUNK,
        "odirect": True,
        "max_num_batched_tokens": 4096,
        "max_num_seqs": 8,
    }
    return Simulator(load_model("tiny-llama"), known(), engine, HICACHE, **(asked | sizes | settings))


def ask(sim: Simulator | Cluster, stream: int, chunks: int, instance: int | None = None) -> Completion:
    prompt = (Segment(stream, chunks * CHUNK + 1),)
    request = Request(id=f"{stream} at {sim.now_s}", prompt=prompt, output_tokens=1, instance=instance)
    sim.submit(request, sim.now_s)
    [done] = sim.advance()
    sim.drain()
    return done


def served(done: Completion) -> tuple[int, int, int, int]:
    """Chunks by tier."""
    return done.gpu // CHUNK, done.cpu // CHUNK, (done.pool or 0) // CHUNK, done.disk // CHUNK


def test_each_level_serves_what_those_above_it_have_lost() -> None:
    sim = simulator({"cpu": 20, "pool": 40, "disk": 80})
    assert served(ask(sim, 1, 8)) == (0, 0, 0, 0)
    for emptied, found in [
        ([], (8, 0, 0, 0)),
        (["gpu"], (0, 8, 0, 0)),
        (["gpu", "cpu"], (0, 0, 8, 0)),
        (["gpu", "cpu", "pool"], (0, 0, 0, 8)),
    ]:
        sim.reset(emptied)
        assert served(ask(sim, 1, 8)) == found
    totals = sim.totals()
    assert totals.loaded_chunks == {"pool": 8, "disk": 8}
    assert totals.hit_tokens["pool"] == totals.hit_tokens["disk"] == 8 * CHUNK
    counters = sim.counters()
    assert (counters.pool_hit_tokens, counters.pool_loaded_chunks) == (8 * CHUNK, 8)


def test_a_pool_without_an_ssd_loses_the_heads_of_prompts_first() -> None:
    """19 of 20 chunks are above nine tenths: the two whose leases ran out first go, and a prompt without its head is
    worth nothing."""
    for disk, found in [({}, (0, 0, 0, 0)), ({"disk": 80}, (0, 0, 7, 2))]:
        sim = simulator({"cpu": 100, "pool": 20} | disk)
        ask(sim, 1, 9)
        ask(sim, 2, 10)
        sim.advance(sim.now_s + 1)
        sim.reset(["gpu", "cpu"])
        assert served(ask(sim, 1, 9)) == found


def test_instances_share_a_pool_and_keep_their_own_hosts() -> None:
    like = simulator({"cpu": 20, "pool": 40, "disk": 80})
    cluster = Cluster(like, instances=2, shared=("pool", "disk"))
    assert served(ask(cluster, 1, 8, instance=0)) == (0, 0, 0, 0)
    assert served(ask(cluster, 1, 8, instance=1)) == (0, 0, 8, 0)
    cluster.reset(["gpu"])
    assert served(ask(cluster, 1, 8, instance=1)) == (0, 8, 0, 0)
    # A store behind private pools.
    apart = Cluster(like, instances=2, shared=("disk",))
    ask(apart, 1, 8, instance=0)
    assert served(ask(apart, 1, 8, instance=1)) == (0, 0, 0, 8)
    apart.reset(["gpu", "cpu"])
    assert served(ask(apart, 1, 8, instance=0)) == (0, 0, 8, 0)
    with pytest.raises(ValueError, match="what is behind a shared tier is shared too; name disk as well"):
        Cluster(like, instances=2, shared=("pool",))


def test_levels_may_be_named_one_by_one() -> None:
    """An exclusive store below the host gets what the host drops; the pool's device times it."""
    host = Level(name="cpu", capacity_bytes=8 * CHUNK_BYTES, policy=HICACHE)
    store = Level(name="disk", capacity_bytes=80 * CHUNK_BYTES, policy=MOONCAKE, device="pool", exclusive=True)
    sim = simulator({}, levels=(host, store))
    assert sim.bytes_of("disk") == 80 * CHUNK_BYTES and sim.bytes_of("pool") is None
    ask(sim, 1, 8)
    ask(sim, 2, 8)
    sim.reset(["gpu"])
    assert served(ask(sim, 1, 8)) == (0, 0, 0, 8)
    sim.reset(["gpu"])
    assert served(ask(sim, 1, 8)) == (0, 8, 0, 0)
    shared = Cluster(simulator({}, levels=(host, msgspec.structs.replace(store, shared=True))), instances=2)
    assert shared.shared == ("disk",)


def test_prefetches_are_waited_for_or_cut_off() -> None:
    """Eight pages take 8 s from the pool. HiCache gives them 1 s and 0.125 s more."""
    slow = {"pool.read.latency_s": 0.0, "pool.read.chunk_s": 0.0}
    slow |= {f"pool.read.{of}": float(CHUNK_BYTES) for of in ("bytes_per_s", "shared_bytes_per_s")}
    calibration = msgspec.structs.replace(known(), constants=known().constants | slow)
    for policy, pages in [("-wait", 8), ("", 1), ("-best-effort", 0)]:
        pack = tier_policy(f"sglang-0.5.23-hicache{policy}")
        levels = standard_levels(pack, MOONCAKE, {"cpu": 20 * CHUNK_BYTES, "pool": 40 * CHUNK_BYTES})
        sim = Simulator(
            load_model("tiny-llama"),
            calibration,
            "sglang-0.5.23",
            pack,
            gpu_blocks=400,
            block_tokens=64,
            chunk_tokens=CHUNK,
            levels=levels,
            max_num_batched_tokens=4096,
            max_num_seqs=8,
        )
        ask(sim, 1, 8)
        sim.reset(["gpu", "cpu"])
        assert served(ask(sim, 1, 8)) == (0, 0, pages, 0), policy


def level(name: str, **fields: Any) -> Level:
    return Level(name=name, capacity_bytes=CHUNK_BYTES, policy=HICACHE, **fields)


@pytest.mark.parametrize(
    ("levels", "text"),
    [
        (
            [level("disk"), level("cpu")],
            "levels: disk, cpu must be some of cpu, pool, disk, remote, each once and in this order",
        ),
        ([level("cpu"), level("cpu")], "each once and in this order"),
        ([level("cpu", shared=True), level("disk")], "a private level cannot be behind a shared one"),
        ([level("cpu", exclusive=True)], "stores begin there; it cannot be exclusive"),
    ],
)
def test_levels_that_cannot_be_are_refused(levels: list[Level], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        check_levels(levels)


def test_what_a_pool_needs_is_asked_for() -> None:
    with pytest.raises(CalibrationError, match=r"cpu-2core: pool\.read\.latency_s is unknown"):
        Simulator(
            load_model("tiny-llama"),
            load_calibration("cpu-2core"),
            "sglang-0.5.23",
            HICACHE,
            gpu_blocks=9,
            block_tokens=64,
            chunk_tokens=CHUNK,
            cpu_bytes=CHUNK_BYTES,
            pool_bytes=CHUNK_BYTES,
            max_num_batched_tokens=64,
            max_num_seqs=1,
        )


def test_storage_may_be_next_to_the_gpu() -> None:
    """It is loaded from and stored to without memory between, and its pack says whether a full disk evicts."""
    sim = simulator({"disk": 8})
    assert served(ask(sim, 1, 8)) == (0, 0, 0, 0)
    assert served(ask(sim, 1, 8)) == (8, 0, 0, 0)
    sim.reset(["gpu"])
    assert served(ask(sim, 1, 8)) == (0, 0, 0, 8)
    for pack, found in ((HICACHE, 0), (tier_policy("lru"), 4)):
        sim = simulator({}, levels=standard_levels(pack, MOONCAKE, {"disk": 8 * CHUNK_BYTES}))
        ask(sim, 1, 8)
        ask(sim, 2, 4)
        sim.reset(["gpu"])
        assert served(ask(sim, 2, 4)) == (0, 0, 0, found)


def test_replies_are_stored_where_the_pack_says_so() -> None:
    """A prompt of 1 chunk and a reply of 2: the last token has no KV, so that the second chunk is never whole."""
    for stores, found in ((False, 1), (True, 2)):
        pack = msgspec.structs.replace(tier_policy("lru"), stores_replies=stores)
        sim = simulator({}, levels=standard_levels(pack, MOONCAKE, {"cpu": 80 * CHUNK_BYTES}))
        first = Request(id="first", prompt=(Segment(1, CHUNK),), output_tokens=2 * CHUNK)
        sim.submit(first, 0.0)
        sim.advance()
        sim.drain()
        sim.reset(["gpu"])
        said = Segment(reply_stream("first"), 2 * CHUNK)
        sim.submit(Request(id="next", prompt=(Segment(1, CHUNK), said, Segment(2, 5)), output_tokens=1), sim.now_s)
        [done] = sim.advance()
        assert done.cpu == found * CHUNK


def test_a_remote_device_takes_its_stated_time() -> None:
    """8 chunks over 4 connections: two waits of 0.5 s, 0.01 s of own work each, their bytes at 10 chunks a second."""
    remote = RemoteDevice(latency_s=0.5, overhead_s=0.01, bytes_per_s=10 * CHUNK_BYTES, connections=4)
    times = {}
    for name, device in (("remote", remote), ("instant", RemoteDevice(bytes_per_s=1e18, connections=4))):
        host = Level(name="cpu", capacity_bytes=80 * CHUNK_BYTES, policy=HICACHE)
        store = Level(name="remote", capacity_bytes=80 * CHUNK_BYTES, policy=HICACHE, device=device)
        sim = simulator({}, levels=(host, store))
        ask(sim, 1, 8)
        sim.reset(["gpu", "cpu"])
        sent_s = sim.now_s
        done = ask(sim, 1, 8)
        assert (done.remote, done.disk, done.first_token_s is None) == (8 * CHUNK, 0, False)
        times[name] = (done.first_token_s or 0) - sent_s
    assert times["remote"] - times["instant"] == pytest.approx(2 * 0.5 + 8 * 0.01 + 0.8, rel=1e-9)
    assert sim.counters().remote_loaded_chunks == 8


@pytest.mark.parametrize(("shared", "seconds"), [((), 0.8), (("remote",), 1.6)])
def test_instances_queue_at_the_total_of_a_shared_store(shared: tuple[str, ...], seconds: float) -> None:
    """Each link carries 10 chunks a second, and so does the store: two that read 8 at once take twice as long."""
    rate = 10 * CHUNK_BYTES
    device = RemoteDevice(bytes_per_s=rate, total_bytes_per_s=rate, connections=99)
    host = Level(name="cpu", capacity_bytes=80 * CHUNK_BYTES, policy=HICACHE)
    store = Level(name="remote", capacity_bytes=80 * CHUNK_BYTES, policy=HICACHE, device=device)
    cluster = Cluster(simulator({}, levels=(host, store)), instances=2, shared=shared)  # type: ignore[arg-type]
    for instance in (0, 1):
        ask(cluster, instance + 1, 8, instance=instance)
    cluster.reset(["gpu", "cpu"])
    sent_s = cluster.now_s
    for instance in (0, 1):
        prompt = (Segment(instance + 1, 8 * CHUNK + 1),)
        cluster.submit(Request(id=f"again {instance}", prompt=prompt, output_tokens=1, instance=instance), sent_s)
    done = [*cluster.advance(), *cluster.advance()]
    assert [one.remote for one in done] == [8 * CHUNK] * 2
    step_s = [(one.first_token_s or 0) - sent_s for one in done]
    assert all(seconds < one < seconds + 0.3 for one in step_s), step_s


@pytest.mark.parametrize("wrong", [{"bytes_per_s": 0.0}, {"latency_s": -1.0}, {"connections": 0}])
def test_a_remote_device_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ModelError, match=r"remote device: \w+ must be"):
        RemoteDevice(**({"bytes_per_s": 1.0} | wrong))  # type: ignore[arg-type]
