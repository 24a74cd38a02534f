"""SGLang without SGLang: what is refused, what it is started with, what its answers say, and its control calls."""

import asyncio
import itertools
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from harness.collectors.prometheus import Metrics
from harness.engines import ENGINES
from harness.engines.base import TellsCause
from harness.engines.http.stream import Answer
from harness.engines.sglang import process
from harness.engines.sglang.causes import cause, lost_tokens
from harness.engines.sglang.check import check_sglang
from harness.engines.sglang.dialect import Generate
from harness.engines.sglang.engine import SglangEngine
from harness.engines.sglang.process import SglangProcess, accelerator_of
from harness.engines.sglang.replaced import TABLE, replaced
from harness.engines.sglang.settings import SglangSettings
from harness.errors import ConfigError, EngineError, PreflightError
from harness.experiment.model import Experiment
from harness.records import Counters, Resolved
from simulator.models import load_model
from tests.support.paths import ROOT
from tests.unit.measure.test_run_loop import request as run_request
from traces.load import Load

CACHE: dict[str, Any] = {
    "block_tokens": 64,
    "chunk_tokens": 64,
    "gpu": "128MiB",
    "cpu": "512MiB",
    "disk": {"capacity": "1GiB"},
}
TOKEN_BYTES = 32768  # of tiny-llama


def experiment(tmp_path: Path, sglang: dict[str, Any] | None = None, **changes: Any) -> Experiment:
    config = {"cache": CACHE, "engines": {"sglang": sglang or {}}, **changes}
    [cell] = run_request(tmp_path, engine="sglang", **config).cells
    return cell.experiment


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"accelerator": None}, "device cpu needs an accelerator.*or set device: gpu"),
        ({"model_path": "/weights"}, "remove model_path: model gives the shape"),
        ({"hicache": {"io_backend": "kernel"}}, "only page_first_direct with io_backend: direct"),
        ({"hicache": {"storage": "tape"}}, "no storage 'tape'; HiCache has .*file"),
        ({"hicache": {"ratio": 2}}, "ratio: unknown key"),
        ({"env": {"MY_API_KEY": "x"}}, "seems to hold a secret"),
    ],
)
def test_a_section_that_cannot_be_is_refused(tmp_path: Path, section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        experiment(tmp_path, section)


def test_on_a_gpu_and_attached_nothing_stands_for_it(tmp_path: Path) -> None:
    gpu = experiment(tmp_path, {"device": "gpu", "model_path": "/weights", "hicache": {"io_backend": "kernel"}})
    assert gpu.engines.of(SglangSettings).paced_by is None
    attached = experiment(tmp_path, {"attach": {"url": "http://h:1"}})
    assert attached.engines.of(SglangSettings).paced_by is None
    assert experiment(tmp_path).engines.of(SglangSettings).paced_by == "rtx-a5000-nfs"


PROMPT = {"kind": "prefix", "prompt_tokens": 1025, "hit_rate": 1.0}


@pytest.mark.parametrize(
    ("hicache", "changes", "words"),
    [
        ({"write": "write_back"}, {}, "measure.tiers cpu: hicache.write write_back does not bring a prefix down"),
        ({"prefetch": "best_effort"}, {}, "measure.tiers disk: hicache.prefetch best_effort computes what storage"),
        ({"prefetch_threshold": 1025}, {}, "a prefix of 1024 tokens is below hicache.prefetch_threshold 1025"),
        (
            {},
            {"workload": {**PROMPT, "concurrency": 9}},
            "at most half of cache.cpu, 256MiB, and the prefixes are 288MiB",
        ),
    ],
)
def test_what_hicache_would_not_fetch_is_refused(
    tmp_path: Path, hicache: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    asked = experiment(tmp_path, {"hicache": hicache}, **{"workload": PROMPT, **changes})
    with pytest.raises(PreflightError, match=words):
        check_sglang(asked, tmp_path)


def test_states_of_the_gpu_alone_ask_nothing_of_hicache(tmp_path: Path) -> None:
    lone = {"tiers": ["recompute", "gpu"], "samples": 1}
    section = {"hicache": {"write": "write_back", "prefetch": "best_effort"}, "python": "/bin/true"}
    check_sglang(experiment(tmp_path, section, workload=PROMPT, measure=lone), tmp_path)


@pytest.mark.parametrize(("gpu", "cpu"), [("128MiB", "512MiB"), ("1GiB", "1000MiB"), ("200MiB", "64MiB")])
def test_the_host_pool_gets_the_pages_that_cache_cpu_holds(tmp_path: Path, gpu: str, cpu: str) -> None:
    """SGLang 0.5.23 makes of the ratio: int(device tokens * ratio) // page + 1 pages (mem_cache/pool_host/base.py)."""
    asked = experiment(tmp_path, cache=CACHE | {"gpu": gpu, "cpu": cpu})
    model = load_model("tiny-llama")
    accelerator = accelerator_of(asked.engines.of(SglangSettings), model)
    flags = SglangProcess(asked, model, tmp_path, accelerator)._flags(1)
    given = dict(itertools.pairwise(flags))
    tokens, ratio = int(given["--max-total-tokens"]), float(given["--hicache-ratio"])
    assert tokens * TOKEN_BYTES <= asked.cache.gpu < (tokens + 64) * TOKEN_BYTES and tokens % 64 == 0
    assert asked.cache.cpu is not None
    assert int(tokens * ratio) // 64 + 1 == asked.cache.cpu // (64 * TOKEN_BYTES)
    assert given["--page-size"] == "64" and given["--hicache-write-policy"] == "write_through"
    assert given["--device"] == "cpu" and "--disable-overlap-schedule" in flags


def test_a_gpu_alone_has_no_hicache_and_stock_flags(tmp_path: Path) -> None:
    alone = {key: value for key, value in CACHE.items() if key not in ("cpu", "disk")}
    asked = experiment(tmp_path, {"device": "gpu"}, cache=alone, measure={"tiers": ["gpu"], "samples": 1})
    flags = SglangProcess(asked, load_model("tiny-llama"), tmp_path)._flags(1)
    assert not [flag for flag in flags if "hi" in flag and "cache" in flag and flag != "--enable-cache-report"]
    assert "--device" not in flags and "--disable-overlap-schedule" not in flags
    capabilities = SglangEngine(asked, load_model("tiny-llama"), tmp_path, lambda: 0.0).capabilities
    assert capabilities.resets == {frozenset({"gpu"})} and set(capabilities.evidence) == {"recompute", "gpu"}


def answer(*events: dict[str, Any], tiers: tuple[str, ...] = ("disk",)) -> Answer:
    found = Answer(0.0, Generate(tiers).decode, tells_ids=True)
    found.status, found.content_type = 200, "text/event-stream"
    for number, event in enumerate(events):
        found.feed(b"data: %b\n\n" % msgspec.json.encode(event), float(number))
    found.feed(b"data: [DONE]\n\n", 9.0)
    return found


def meta(output: int, cached: int, details: dict[str, Any] | None) -> dict[str, Any]:
    return {"prompt_tokens": 10, "completion_tokens": output, "cached_tokens": cached, "cached_tokens_details": details}


SOURCES = {"device": 1, "host": 2, "storage": 4, "storage_backend": "HiCacheFile"}


def test_an_answer_tells_its_tokens_by_tier_and_its_ids_once() -> None:
    first = {"output_ids": [7], "meta_info": meta(1, 7, SOURCES)}
    last = {"output_ids": [8, 9], "meta_info": meta(3, 7, SOURCES) | {"finish_reason": {"type": "length"}}}
    found = answer(first, last)
    assert found.failure(10) is None and found.token_s == [0.0, 1.0] and found.token_ids == [7, 8, 9]
    assert found.usage is not None and found.usage.cached_tokens == 7
    assert found.usage.tokens_by_tier == {"computed": 3, "gpu": 1, "cpu": 2, "disk": 4}


@pytest.mark.parametrize(
    ("details", "cached", "tiers", "by_tier"),
    [
        (None, 0, ("disk",), {"computed": 10, "gpu": 0}),
        (None, 7, ("disk",), {}),
        ({"device": 7, "host": 0}, 7, (), {"computed": 3, "gpu": 7, "cpu": 0}),
        (SOURCES, 7, ("pool", "disk"), {"computed": 3, "gpu": 1, "cpu": 2, "pool": None, "disk": None}),
        (SOURCES | {"storage": 0}, 3, ("pool", "disk"), {"computed": 7, "gpu": 1, "cpu": 2, "pool": 0, "disk": 0}),
    ],
)
def test_what_an_answer_does_not_tell_is_not_guessed(
    details: dict[str, Any] | None, cached: int, tiers: tuple[str, ...], by_tier: dict[str, int | None]
) -> None:
    found = answer({"output_ids": [7], "meta_info": meta(1, cached, details)}, tiers=tiers)
    assert found.usage is not None and found.usage.tokens_by_tier == by_tier


def test_a_refused_request_is_told() -> None:
    found = answer({"error": {"message": "too long", "type": "invalid_request_error", "code": 400}})
    assert found.failure(10) == "the server reported an error in the stream: too long"


def test_every_stand_in_is_named_by_its_file_and_line() -> None:
    plugin = ROOT / "harness/engines/accelerator/plugin"
    assert len(replaced()) == len(TABLE)
    for each in replaced():
        place, name = each.ours.split()
        file, line = place.rsplit(":", 1)
        assert re.match(rf"(class|def) {name}\b|{name} = ", (plugin / file).read_text().splitlines()[int(line) - 1])
    ours = {ours.split(":")[1] for ours, _, _ in TABLE}
    # What the plugin hands to SGLang, in the order of the source.
    source = (plugin / "kv_accelerator/sglang/hicache.py").read_text() + (
        plugin / "kv_accelerator/sglang/steps.py"
    ).read_text()
    handed = set(re.findall(r"HookRegistry\.register\([^,]+, (\w+),", source))
    handed |= set(re.findall(r"^    \w+\.[\w. =]+ = (\w+)$", source, re.MULTILINE))
    assert handed == ours - {"SglangPacedForCausalLM"}


def test_what_was_lost_is_told_with_its_cure() -> None:
    unfulfilled, dropped = "sglang:storage_prefetch_unfulfilled_tokens_total", "sglang:hicache_dropped_tokens_total"

    def looked(**tokens: int) -> dict[str, int]:
        lines = [
            f'{dropped}{{reason="write_through_unbacked_eviction"}} {count}'
            if reason == "unbacked"
            else f'{unfulfilled}{{reason="{reason}"}} {count}'
            for reason, count in tokens.items()
        ]
        return lost_tokens(Metrics("\n".join(lines) + "\n"))

    told = cause(looked(deadline=64, unbacked=3), looked(deadline=576, unbacked=3))
    assert told is not None and told.startswith("SGLang counts 512 tokens as lost by deadline: ")
    assert told.endswith("set it to wait_complete")
    told = cause(looked(deadline=576), looked(deadline=576, unbacked=4))
    assert told is not None and "4 tokens as lost by write_through_unbacked_eviction: the GPU dropped them" in told
    assert cause(looked(deadline=5), looked(deadline=5)) is None and cause({}, {}) is None
    assert "see the log" in (cause({}, looked(anchor_lost=1)) or "")


INFO = {"version": "0.5.23", "page_size": 64, "max_total_num_tokens": 4096, "max_req_input_len": 4090}
INFO |= {"chunked_prefill_size": 2048, "enable_hierarchical_cache": True, "hicache_write_policy": "write_through"}
INFO |= {"internal_states": [{"effective_max_running_requests_per_dp": 31}]}
METRICS = """
sglang:hicache_host_total_tokens{tp_rank="0"} 16384
sglang:prompt_tokens_total{is_streaming="true"} 100
sglang:realtime_tokens_total{mode="prefill_compute"} 60
sglang:realtime_tokens_total{mode="decode"} 5
sglang:cached_tokens_total{cache_source="device"} 10
sglang:cached_tokens_total{cache_source="host"} 14
sglang:cached_tokens_total{cache_source="storage"} 128
sglang:load_back_tokens_total{tp_rank="0"} 142
sglang:prefetched_tokens_total{tp_rank="0"} 128
sglang:hicache_backup_tokens_total{tp_rank="0"} 640
sglang:backuped_tokens_total{tp_rank="0"} %d
"""


class StandIn:
    """Answers as an SGLang does whose stores end after a while, and which then flushes."""

    def __init__(self, busy: int = 0, **info: Any) -> None:
        self.info, self.busy, self.flushes = INFO | info, busy, 0
        self.app = web.Application()
        self.app.router.add_get("/health", self._says(""))
        self.app.router.add_get("/server_info", self._says(json.dumps(self.info)))
        self.app.router.add_get("/metrics", self._metrics)
        self.app.router.add_post("/flush_cache", self._flush)

    def _says(self, text: str) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(_request: web.Request) -> web.Response:
            return web.Response(text=text)

        return handler

    async def _metrics(self, _request: web.Request) -> web.Response:
        self.busy -= 1
        return web.Response(text=METRICS % (640 if self.busy < 0 else 576))

    async def _flush(self, request: web.Request) -> web.Response:
        self.flushes += 1
        assert float(request.query["timeout"]) > 0
        return web.Response(status=400 if self.flushes < 3 else 200, text="Timed out waiting for idle state.")


async def attached(
    tmp_path: Path, server: StandIn, work: Callable[[SglangEngine], Awaitable[Any]], **attach: Any
) -> tuple[Resolved, Any]:
    runner = web.AppRunner(server.app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    asked = experiment(tmp_path, {"attach": {"url": url, **attach}})
    engine = SglangEngine(asked, load_model("tiny-llama"), tmp_path, lambda: 0.0)
    try:
        await engine.start()
        return await engine.ready(), await work(engine)
    finally:
        await engine.stop()
        await runner.cleanup()


def test_sizes_and_counters_are_those_that_the_server_tells(tmp_path: Path) -> None:
    server = StandIn(busy=4)
    resolved, counters = asyncio.run(
        attached(tmp_path, server, lambda engine: engine.metrics(), disk_path=str(tmp_path), pid=1)
    )
    assert (resolved.gpu_bytes, resolved.cpu_bytes) == (4096 * TOKEN_BYTES, 16384 * TOKEN_BYTES)
    assert (resolved.gpu_blocks, resolved.block_tokens, resolved.chunk_tokens) == (64, 64, 64)
    assert resolved.max_prompt_tokens == 4089 and resolved.replaced == () and resolved.accelerator is None
    assert (resolved.scheduler.max_batched_tokens, resolved.scheduler.max_sequences) == (2048, 31)
    assert resolved.cache_config == {"hicache_write_policy": "write_through"}
    assert issubclass(SglangEngine, TellsCause)
    named = Counters.named(counters)
    assert (named["computed_tokens"], named["gpu_hit_tokens"], named["cpu_hit_tokens"]) == (60, 10, 14)
    assert (named["disk_hit_tokens"], named["external_tokens"], named["disk_loaded_chunks"]) == (128, 142, 2)
    assert named["stores_begun"] == named["stores_ended"] == 10 and server.busy < -2, "it waited for the stores"


def test_counters_that_have_settled_are_looked_at_once_until_something_is_sent(tmp_path: Path) -> None:
    """A look at a server's metrics takes its core for 50 ms and more, and samples of warm states need two."""
    server, looks = StandIn(), list[int]()

    async def count(engine: SglangEngine) -> None:
        async def looked() -> None:
            before = server.busy
            await engine.metrics()
            looks.append(before - server.busy)

        await looked()
        await looked()
        await engine.replay(Load([], concurrency=1), lambda _record: None)
        await looked()

    asyncio.run(attached(tmp_path, server, count, disk_path=str(tmp_path), pid=1))
    assert looks == [4, 1, 4]


def test_flushing_waits_until_the_server_agrees_and_names_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = frozenset({"gpu", "cpu"})
    server = StandIn()
    asyncio.run(attached(tmp_path, server, lambda engine: engine.reset(both)))
    assert server.flushes == 3
    with pytest.raises(EngineError, match="SGLang empties cpu and gpu together"):
        asyncio.run(attached(tmp_path, StandIn(), lambda engine: engine.reset(frozenset({"gpu"}))))
    monkeypatch.setattr(process, "_FLUSH_S", 0.05)
    with pytest.raises(EngineError, match=r"refused for 0.05 s \(Timed out waiting for idle state.\): .*stores"):
        asyncio.run(attached(tmp_path, StandIn(), lambda engine: engine.reset(both)))


def test_pages_of_another_size_and_another_release_are_told(tmp_path: Path) -> None:
    async def nothing(_engine: SglangEngine) -> None:
        return None

    with pytest.raises(EngineError, match=r"has pages of 16 tokens, cache\.block_tokens is 64"):
        asyncio.run(attached(tmp_path, StandIn(page_size=16), nothing))
    with pytest.raises(EngineError, match=r"is not what SGLang 0\.5\.23 answers"):
        asyncio.run(attached(tmp_path, StandIn(page_size=None), nothing))
    with pytest.raises(EngineError, match=r"has no HiCache; remove cache\.cpu"):
        asyncio.run(attached(tmp_path, StandIn(enable_hierarchical_cache=False), nothing))


def test_without_its_folder_or_process_less_is_proven_and_the_cure_is_told(tmp_path: Path) -> None:
    kind = ENGINES["sglang"]
    for section, states, words in (
        ({}, {"recompute", "gpu", "cpu"}, r"attach.disk_path \(.*attach.pid \("),
        ({"disk_path": str(tmp_path)}, {"recompute", "gpu", "cpu"}, r"add engines.sglang.attach.pid \("),
        ({"disk_path": str(tmp_path), "pid": 1}, {"recompute", "gpu", "cpu", "disk", "disk_cold"}, "^$"),
    ):
        asked = experiment(tmp_path, {"attach": {"url": "http://h:1", **section}})
        engine = SglangEngine(asked, load_model("tiny-llama"), tmp_path, lambda: 0.0)
        assert set(engine.capabilities.evidence) == states and not engine.capabilities.quotes
        assert re.search(words, kind.unproven(asked))
