"""The packs that a user can name, through the whole simulator: where a prompt's chunks are found, and bad settings."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from simulator.models import load_model
from simulator.policies import TIER_POLICIES, cache_hits, engine_policy, tier_policy
from simulator.simulate import Completion, Simulator
from tests.support.oracle_cases import calibration
from traces.request import Request, Segment

CHUNK = 64
CHUNK_BYTES = CHUNK * load_model("tiny-llama").kv_bytes_per_token


def simulator(pack: Any, cpu_chunks: int, disk_chunks: int | None, **settings: Any) -> Simulator:
    return Simulator(
        load_model("tiny-llama"),
        calibration({"step_s": 1e-3} | settings.pop("constants", {})),
        settings.pop("engine", "vllm-0.32"),
        pack,
        gpu_blocks=300,
        cpu_bytes=cpu_chunks * CHUNK_BYTES,
        disk_bytes=None if disk_chunks is None else disk_chunks * CHUNK_BYTES,
        **{"block_tokens": 16, "chunk_tokens": CHUNK, "max_num_batched_tokens": 4096, "max_num_seqs": 8} | settings,
    )


def ask(sim: Simulator, stream: int, chunks: int) -> Completion:
    """A prompt of whole chunks and one token, to a GPU that holds nothing."""
    sim.drain()
    sim.reset(["gpu"])
    prompt = (Segment(stream, chunks * CHUNK + 1),)
    sim.submit(Request(id=f"{stream} at {sim.now_s}", prompt=prompt, output_tokens=1), sim.now_s)
    (done,) = sim.advance()
    sim.drain()
    return done


def served(sim: Simulator, stream: int, chunks: int) -> tuple[int, int]:
    """Chunks that came from CPU memory and from disk."""
    done = ask(sim, stream, chunks)
    return done.cpu // CHUNK, done.disk // CHUNK


@pytest.mark.parametrize("pack", sorted(TIER_POLICIES))
def test_every_pack_serves_from_cpu_memory_what_it_was_left(pack: str) -> None:
    sim = simulator(pack, 40, 40)
    assert served(sim, 1, 8) == (0, 0)
    assert served(sim, 1, 8) == (8, 0)


def test_a_waterfall_moves_down_what_new_prompts_push_out() -> None:
    sim = simulator("waterfall", 4, 4)
    assert [served(sim, stream, 4) for stream in (1, 2)] == [(0, 0), (0, 0)]
    # The first prompt fell to disk, is read there, and stays there; the second is still in CPU memory.
    assert [served(sim, stream, 4) for stream in (1, 1, 2)] == [(0, 4), (0, 4), (4, 0)]
    # A third pushes the second down, and the first out.
    assert [served(sim, stream, 4) for stream in (3, 2, 1)] == [(0, 0), (0, 4), (0, 0)]


def test_a_spillover_leaves_the_first_prompts_in_memory_and_the_next_on_disk() -> None:
    sim = simulator("spillover", 10, 100)
    assert [served(sim, stream, 5) for stream in (1, 2, 3)] == [(0, 0)] * 3
    # 7 of 10 chunks are below 80 %: the first prompt and two of the second.
    assert [served(sim, stream, 5) for stream in (1, 2, 3)] == [(5, 0), (2, 3), (0, 5)]


def test_hicache_reads_what_arrives_in_time_and_computes_the_rest() -> None:
    # 1 s and 0.25 s for 1,024 tokens: five pages of 0.25 s.
    slow = {"disk.read.bytes_per_s": CHUNK_BYTES / 0.25}
    sim = simulator("sglang-0.5.23-hicache", 40, 40, constants=slow, odirect=True)
    ask(sim, 1, 16)
    sim.reset(["cpu"])
    assert served(sim, 1, 16) == (0, 5)
    assert sim.counters().l2_loaded_chunks == 5
    # Three pages are fewer than 256 tokens.
    sim.reset(["cpu"])
    assert served(sim, 1, 3) == (0, 0)


def test_mooncake_leases_what_is_looked_up() -> None:
    sim = simulator("mooncake-0.3.13", 10, 100)
    ask(sim, 1, 9)
    assert served(sim, 1, 9) == (9, 0)
    # One of three chunks finds room, and is copied to the SSD. Memory is above 90 %: a tick may drop only that one.
    ask(sim, 2, 3)
    sim.advance(sim.now_s + 1)
    assert served(sim, 1, 9) == (9, 0)
    assert served(sim, 2, 3) == (0, 1)


@pytest.mark.parametrize(("pack", "kept_blocks"), [("vllm-0.32", 3), ("sglang-0.5.23", 8)])
def test_sglangs_scheduler_keeps_the_prefixes_of_all_that_begin_in_a_step(pack: str, kept_blocks: int) -> None:
    """24 blocks: two prompts of 8, the older of which is asked for again, in one step with a third that takes 13
    blocks. Five have to go: of the oldest prompt, or of the other one."""
    sim = Simulator(
        load_model("tiny-llama"),
        calibration({"step_s": 1e-3}),
        pack,
        "lru",
        gpu_blocks=24 + engine_policy(pack).null_blocks,
        block_tokens=16,
        chunk_tokens=CHUNK,
        max_num_batched_tokens=512,
        max_num_seqs=8,
    )

    def submit(stream: int, blocks: int) -> None:
        prompt = (Segment(stream, blocks * 16 + 1),)
        sim.submit(Request(id=f"{stream} at {sim.now_s}", prompt=prompt, output_tokens=1), sim.now_s)

    for stream in (1, 2):
        submit(stream, 8)
        sim.advance()
    submit(3, 12)
    submit(1, 8)
    done = sim.advance() + sim.advance()
    assert [one.gpu for one in done] == [0, kept_blocks * 16]


def test_hicache_evicts_a_prompt_from_its_tail_however_many_steps_stored_it() -> None:
    """Only leaves go: of a prompt stored in two steps, the second step's pages go before the first one's."""
    sim = simulator("sglang-0.5.23-hicache", 8, None, max_num_batched_tokens=4 * CHUNK)
    ask(sim, 1, 8)
    ask(sim, 2, 4)
    assert served(sim, 1, 8) == (4, 0)


@pytest.mark.parametrize(("engine", "pack", "counted"), [
    ("sglang-0.5.23", "sglang-0.5.23-hicache", 4), ("vllm-0.32", "mooncake-0.3.13", 4),
    ("vllm-0.32", "lmcache-0.5.6-mp", 8),
])  # fmt: skip
def test_only_lmcache_counts_what_the_gpu_has_too(engine: str, pack: str, counted: int) -> None:
    """Its server counts all that it finds. SGLang counts what it takes beyond the GPU, and Mooncake's master too."""
    sim = simulator(pack, 40, None, engine=engine)
    ask(sim, 1, 8)
    ask(sim, 1, 4)  # empties the GPU, and brings the first half back
    before = sim.counters()
    prompt = (Segment(1, 8 * CHUNK), Segment(7, 1))
    sim.submit(Request(id="half", prompt=prompt, output_tokens=1), sim.now_s)
    (done,) = sim.advance()
    sim.drain()
    assert (done.gpu, done.cpu) == (4 * CHUNK, 4 * CHUNK)
    after = sim.counters()
    assert (after.l1_hit_tokens or 0) - (before.l1_hit_tokens or 0) == counted * CHUNK
    assert after.external_tokens - before.external_tokens == 4 * CHUNK


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"eviction": "clock"}, 'no eviction policy "clock": use one of lru, fifo, lfu, s3-fifo, arc, lease'),
        ({"placement": "upwards"}, 'no placement "upwards": use one of copy, waterfall, spillover'),
        ({"tick_share": "all"}, 'no tick share "all": use one of ratio, surplus'),
        ({"watermark": float("nan")}, "the tier policy's watermark must be a number of 0 or more, not NaN"),
        ({"evict_ratio": -0.5}, "the tier policy's evict_ratio must be a number of 0 or more, not -0.5"),
        ({"max_prefetches": -1}, "max_prefetches"),
    ],
)
def test_a_policy_of_bad_words_or_numbers_is_refused(change: dict[str, Any], text: str) -> None:
    pack = msgspec.structs.replace(tier_policy("lru"), **change)
    with pytest.raises(ValueError) as refusal:
        simulator(pack, 10, 10)
    assert text in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("cpu_chunks", "disk_chunks", "settings", "text"),
    [
        (0, 10, {}, "the cpu tier has no room for one chunk of 64 tokens"),
        (10, 0, {}, "the disk tier has no room for one chunk of 64 tokens"),
        (10, 10, {"block_tokens": 24}, "chunk_tokens must be a multiple of block_tokens, not 64 of 24"),
        (10, 10, {"chunk_tokens": 1 << 62}, "not a usable value"),
        (10, 10, {"chunk_tokens": 1 << 30}, "use smaller chunks"),
    ],
)
def test_tiers_that_could_keep_nothing_are_refused(
    cpu_chunks: int, disk_chunks: int, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError) as refusal:
        simulator("lru", cpu_chunks, disk_chunks, **settings)
    assert text in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_spillover_without_cpu_memory_is_storage_alone() -> None:
    sim = simulator("spillover", 0, 40)
    assert [served(sim, 1, 8) for _ in range(2)] == [(0, 0), (0, 8)]


def test_hits_of_an_unknown_policy_or_of_huge_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="no eviction policy"):
        cache_hits("random", 3, [1])
    with pytest.raises(OverflowError):
        cache_hits("lru", -1, [1])
    assert cache_hits("lru", (1 << 64) - 1, [1, -1, 1]) == [False, False, True]
