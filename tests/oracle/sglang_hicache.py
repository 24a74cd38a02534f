"""SGLang's own UnifiedRadixCache, HiCache controller and storage threads as an oracle; no model runs.

    ENGINE_PYTHON sglang_hicache.py < workloads.json > results.json

In:  [{"page": 16, "device_pages": 65, "host_pages": 130 or null, "chunk": 64, "storage": null, "fast" or "stalled",
       "prefetch": "wait_complete", "threshold": 32, "flushes": [7], "requests": [
        {"id": "r0", "prompt": [[stream, tokens], ...], "reply": stream, "output": 9}, ...]}, ...]
Out: [{"rows": {"r0": {"device": 0, "host": 0, "storage": 0}, ...}, "journal": [["device", page hash], ...],
       "stored": 12}, ...]

One request runs at a time, and its copies and writes end before the next one comes. Its way is that of SGLang's
scheduler: the prefetch at its arrival, the match, the load back, chunks of prefill, decoding, the insertion at its end.
`journal` has the pages that the device and the host gave up, in their order; a node's pages from its first one on.
`stored` counts the pages that storage holds at the end. "stalled": storage is written at once and never read.

SGLang's classes are as installed, but for page-locking and the two copies between device and host, which need CUDA:
here pages are not locked and nothing is copied. The hash of pages is written here once more, as SGLang would compile
its own at the first prefetch. Prompts are recipes of streams; every stream has its own tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req, split_cached_prefix_by_tier
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.allocation import alloc_for_decode, alloc_for_extend
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.cpp_utils import native_hash
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.pool_host import base, mha
from sglang.srt.mem_cache.storage.sim_storage import SimHiCacheStorage
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.sampling.sampling_params import SamplingParams

CONTEXT = 8192
RANKS = ("tp_rank", "pp_rank", "attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "attn_dcp_rank")
TIERS = {"GPU": "device", "CPU": "host"}


def stream(number: int, start: int, end: int) -> list[int]:
    """Tokens start to end of an endless stream."""
    mixed = (np.arange(start, end, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= np.uint64((number * 0xBF58476D1CE4E5B9) % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    return ((mixed >> np.uint64(33)) % np.uint64(59_000) + np.uint64(10)).tolist()


def page_hashes(
    raw: array[int], length: int, _width: int, _bigram: bool, prior: bytes | None, page: int | None
) -> str | list[str]:
    """As in cpp_utils/hash_binding.cpp: a page's SHA-256 goes on from that of the page before."""
    tokens, found, digest = np.asarray(raw[:length], dtype="<u4"), [], prior or b""
    for start in range(0, length, page or length):
        digest = hashlib.sha256(digest + tokens[start : start + (page or length)].tobytes()).digest()
        found.append(digest.hex())
    return found if page else found[0]


def stand_in_for_cuda() -> None:
    """What a CPU lacks: page-locking, and copies between device and host, which move nothing here."""
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    init = mha.MHATokenToKVPoolHost.__init__

    def unpinned(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs | {"pin_memory": False})

    def nothing(**_kwargs: Any) -> None:
        pass

    native_hash._load_native_hash_module = lambda: SimpleNamespace(get_hash=page_hashes)
    mha.MHATokenToKVPoolHost.__init__ = unpinned
    mha.transfer_kv_per_layer_direct_pf_lf = mha.transfer_kv_all_layer_direct_lf_pf = nothing


class Stalled(SimHiCacheStorage):
    """Storage whose reads end when the wait for them has: the transfer's next batch is not begun any more."""

    def batch_get(self, keys: list[str], *_args: Any, **_kwargs: Any) -> list[None]:
        time.sleep(0.01)
        return [None] * len(keys)


class Batch(SimpleNamespace):
    """What SGLang's allocation reads of a ScheduleBatch of one request."""

    def is_dllm(self) -> bool:
        return False

    def maybe_evict_swa(self) -> None:
        """No layer has a sliding window."""


class Run:
    """One workload on one cache."""

    def __init__(self, case: dict[str, Any], stalled: bool) -> None:
        self.case, self.page = case, case["page"]
        size = case["device_pages"] * self.page
        self.rows_pool = ReqToTokenPool(case.get("running", 4), CONTEXT, "cpu", False)
        pool = MHATokenToKVPool(size, self.page, torch.float32, 1, 2, 1, "cpu", False)
        self.allocator = PagedTokenToKVPoolAllocator(size, self.page, torch.float32, "cpu", pool, False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows_pool,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page,
            enable_kv_cache_events=True,
            chunked_prefill_size=case["chunk"],
            tree_components=(ComponentType.FULL,),
        )
        self.cache = UnifiedRadixCache(params)
        if case["host_pages"] is not None:
            self.cache.init_hicache(get_context().server_args, params)
            host = self.cache.cache_controller.mem_pool_host
            assert host.size == case["host_pages"] * self.page, f"{host.size} tokens of host memory"
        if stalled:
            self.cache.cache_controller.storage_backend.__class__ = Stalled
        self.scheduler = SimpleNamespace(
            enable_hicache_storage=case["storage"] is not None, enable_lmcache=False, tree_cache=self.cache
        )
        self.journal: list[list[Any]] = []
        self.rows: dict[str, dict[str, int]] = {}

    def result(self) -> dict[str, Any]:
        for index, asked in enumerate(self.case["requests"]):
            if index in self.case["flushes"]:
                self.flush()
            self.serve(asked)
        stored = 0
        if self.case["storage"] is not None:
            stored = len(self.cache.cache_controller.storage_backend._keys)
        self.cache.shutdown()
        return {"rows": self.rows, "journal": self.journal, "stored": stored}

    def flush(self) -> None:
        """As Scheduler.flush_cache."""
        self.cache.reset()
        self.rows_pool.clear()
        self.allocator.clear()

    def serve(self, asked: dict[str, Any]) -> None:
        prompt = array("q", [token for number, count in asked["prompt"] for token in stream(number, 0, count)])
        sampling = SamplingParams(max_new_tokens=asked["output"], ignore_eos=True)
        sampling.normalize(None)
        reply = stream(asked["reply"], 0, asked["output"])
        req = Req(asked["id"], "", prompt, sampling, vocab_size=60_000)
        Scheduler._prefetch_kvcache(self.scheduler, req)
        self.await_prefetch(req)
        self.admit(req)
        while req.extend_end < len(prompt):  # as Scheduler's stash and add_chunked_req
            self.extend(req)
            checkpoint_kv_cache(req, self.cache)
            self.settle()
            req.init_next_round_input()
            self.adder().add_chunked_req(req)
        self.extend(req)
        for token in reply:
            req.output_ids.append(token)
            req.update_finish_state()
            if req.finished():
                release_kv_cache(req, self.cache, checkpoint=True)
            elif len(req.output_ids) == 1:
                checkpoint_kv_cache(req, self.cache)
            self.settle()
            if not req.finished():
                self.decode(req)
        assert req.finished()

    def adder(self) -> PrefillAdder:
        return PrefillAdder(self.page, self.cache, self.allocator, None, 1.0, 10**6, self.case["chunk"])

    def await_prefetch(self, req: Req) -> None:
        """Polls as the scheduler does; storage that can be read has been read before the first poll."""
        if self.case["storage"] is None:
            return
        handle = req.cache_request_handle
        if self.case["storage"] == "fast":
            self.until(lambda: not self.cache.has_ongoing_prefetch(handle))
        else:  # the look-up has ended, and the read has begun
            self.until(lambda: self.cache.cache_controller.prefetch_queue.empty() and not self.querying(handle))
        self.until(lambda: self.cache.check_prefetch_progress(handle))
        tokens, start = self.cache.pop_prefetch_loaded_span(handle)
        if tokens > 0:
            req.storage_hit_length, req.storage_hit_start, req.host_hit_is_storage = tokens, start, False
        self.settle()

    def querying(self, handle: Any) -> bool:
        ongoing = self.cache.ongoing_prefetch.get(handle)
        return ongoing is not None and ongoing.host_indices is None

    def admit(self, req: Req) -> None:
        req.init_next_round_input(self.cache)
        adder = self.adder()
        adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
        if adder.can_run_list != [req]:
            raise RuntimeError(f"{req.rid} does not fit")
        device, host, storage = split_cached_prefix_by_tier(
            req.prefix_len,
            req.materialized_host_hit_len(),
            req.storage_hit_length,
            req.storage_hit_start,
            req.host_hit_is_storage,
        )
        self.rows[req.rid] = {"device": device, "host": host, "storage": storage}

    def batch(self, req: Req, length: int) -> Batch:
        lengths = torch.tensor([length], dtype=torch.int64)
        indices = torch.tensor([req.kv.req_pool_idx or 0], dtype=torch.int64)
        return Batch(
            reqs=[req],
            device="cpu",
            hisparse_coordinator=None,
            req_to_token_pool=self.rows_pool,
            tree_cache=self.cache,
            token_to_kv_pool_allocator=self.allocator,
            prefix_lens=[req.prefix_len],
            extend_lens=[length - req.prefix_len],
            extend_num_tokens=length - req.prefix_len,
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            req_pool_indices=indices,
            req_pool_indices_cpu=indices,
            model_config=SimpleNamespace(is_encoder_decoder=False),
        )

    def extend(self, req: Req) -> None:
        self.cache.ready_to_load_host_cache()
        alloc_for_extend(self.batch(req, req.extend_end))
        self.settle()

    def decode(self, req: Req) -> None:
        pages = 1 if req.kv.kv_committed_len % self.page == 0 else 0  # ScheduleBatch.new_tokens_required_next_decode
        if not self.allocator.check_decode_capacity(num_tokens=pages * self.page, tree_cache=self.cache):
            raise RuntimeError(f"{req.rid} does not fit")
        alloc_for_decode(self.batch(req, len(req.origin_input_ids) + len(req.output_ids) - 1), 1)
        self.settle()

    def settle(self) -> None:
        """All copies and writes end."""
        self.cache.flush_pending_backups()
        if self.cache.cache_controller is not None:
            under_way = ("ongoing_write_through", "ongoing_load_back", "ongoing_backup")
            self.until(lambda: not any(getattr(self.cache, name) for name in under_way))
        self.note()

    def until(self, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while True:
            self.cache.check_hicache_events()
            if ready():
                return
            if time.monotonic() > end:
                raise TimeoutError("SGLang's threads did not end their work")
            time.sleep(1e-4)

    def note(self) -> None:
        for event in self.cache.take_events():
            if type(event).__name__ == "BlockRemoved":
                self.journal += [[TIERS[event.medium.name], number] for number in event.block_hashes]


def configure(case: dict[str, Any], **others: Any) -> None:
    """SGLang's settings for one workload."""
    stalled = case["storage"] == "stalled"
    fields = {"page_size": case["page"], "chunked_prefill_size": case["chunk"], "hicache_size": 0}
    fields |= {"hicache_ratio": ((case["host_pages"] or 1) - 1 + 0.5 / case["page"]) / case["device_pages"]}
    fields |= {"hicache_io_backend": "direct", "hicache_mem_layout": "page_first_direct"}
    fields |= {"hicache_write_policy": "write_through", "hicache_storage_prefetch_policy": case["prefetch"]}
    config = {"prefetch_threshold": case["threshold"], "sim_write_gbps": 0, "sim_op_latency_us": 0}
    config |= {"prefetch_timeout_base": 0.0, "prefetch_timeout_per_ki_token": 0.0} if stalled else {}
    fields |= {"hicache_storage_backend": None if case["storage"] is None else "sim"}
    fields |= {"hicache_storage_backend_extra_config": json.dumps(config)}
    get_context().override("oracle", **fields, **others)


def run(case: dict[str, Any]) -> dict[str, Any]:
    configure(case)
    return Run(case, case["storage"] == "stalled").result()


def main() -> None:
    stand_in_for_cuda()
    get_parallel().override_permanently(**dict.fromkeys(RANKS, 0))
    logging.disable(logging.ERROR)
    with get_context().override_server_args():
        print(json.dumps([run(case) for case in json.load(sys.stdin)]), file=RESULT)


if __name__ == "__main__":
    RESULT, sys.stdout = sys.stdout, sys.stderr  # libraries print
    main()
