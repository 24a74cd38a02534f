"""SGLang's own scheduler over its own radix cache, HiCache and allocator as an oracle; no model runs.

    ENGINE_PYTHON sglang_schedule.py < workloads.json > results.json

In:  [{"page": 16, "device_pages": 65, "host_pages": 130 or null, "chunk": 64, "running": 4, "storage": null or "fast",
       "prefetch": "wait_complete", "threshold": 32, "flushes": [7], "requests": [
        {"id": "r0", "at": 0.5, "prompt": [[stream, tokens], ...], "reply": stream, "output": 9}, ...]}, ...]
Out: [{"rows": {"r0": {"device": 0, "host": 0, "storage": 0, "first": 1.5, "last": 9.5}, ...},
       "journal": [["device", page hash], ...], "together": 7, "retracted": 2}, ...]

Each step takes one second of a clock that stands still otherwise. `first` and `last` are the ends of the steps that
gave a request its first and its last token. `together` counts the steps in which several requests began, `retracted`
the requests that were taken back for want of pages.

Copies between device and host end with the step that began them. Storage answers, and reads, between two passes of the
scheduler: a pass has what earlier ones asked for. Before the requests of `flushes` all others end, and device and host
are emptied.

The choice of each step is Scheduler.get_next_batch_to_run as installed, without overlap: chunked prefill, PrefillAdder,
SchedulePolicy (fcfs), the decode batch. A batch is a list of requests here, without tensors for a model. What follows a
step is written here as in batch_result_processor.py.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers import scheduler
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch, split_cached_prefix_by_tier
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.allocation import alloc_for_decode, alloc_for_extend
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_hicache import RANKS, Run, configure, stand_in_for_cuda, stream


class Batch:
    """ScheduleBatch as far as the scheduler and the allocation read it."""

    is_prefill_only = return_logprob = is_retracted = False
    input_embeds = hisparse_coordinator = decoding_reqs = chunked_req = None
    device = "cpu"
    model_config = SimpleNamespace(is_encoder_decoder=False)
    spec_algorithm = SpeculativeAlgorithm.NONE
    check_decode_mem = ScheduleBatch.check_decode_mem
    new_tokens_required_next_decode = ScheduleBatch.new_tokens_required_next_decode
    retract_decode = ScheduleBatch.retract_decode
    release_req = ScheduleBatch.release_req
    _get_decode_retraction_order = staticmethod(ScheduleBatch._get_decode_retraction_order)

    def __init__(self, reqs: list[Req], cache: Any = None, batch_is_full: bool = False) -> None:
        self.reqs, self.tree_cache, self.batch_is_full = reqs, cache, batch_is_full
        if cache is not None:
            self.req_to_token_pool = cache.req_to_token_pool
            self.token_to_kv_pool_allocator = cache.token_to_kv_pool_allocator

    @classmethod
    def init_new(cls, reqs: list[Req], *args: Any, chunked_req: Req | None, **_kwargs: Any) -> Batch:
        batch = cls(list(reqs), args[2])
        batch.chunked_req = chunked_req
        return batch

    def batch_size(self) -> int:
        return len(self.reqs)

    def is_empty(self) -> bool:
        return not self.reqs

    def is_dllm(self) -> bool:
        return False

    def maybe_evict_swa(self) -> None:
        """No layer has a sliding window."""

    def filter_batch(self, reqs_to_exclude: Any = None, keep_indices: list[int] | None = None) -> None:
        excluded = reqs_to_exclude or []
        kept = range(len(self.reqs)) if keep_indices is None else keep_indices
        rest = [self.reqs[index] for index in kept]
        self.reqs = [req for req in rest if keep_indices is not None or not (req.finished() or req in excluded)]

    def merge_batch(self, other: Batch) -> None:
        self.reqs = self.reqs + other.reqs

    def lengths(self, ends: list[int]) -> None:
        self.seq_lens = self.seq_lens_cpu = torch.tensor(ends, dtype=torch.int64)

    def prepare_for_extend(self) -> None:
        self.forward_mode = SimpleNamespace(is_extend=lambda: True)
        self.prefix_lens = [req.prefix_len for req in self.reqs]
        self.extend_lens = [req.extend_len for req in self.reqs]
        self.extend_num_tokens = sum(self.extend_lens)
        self.lengths([req.extend_end for req in self.reqs])
        alloc_for_extend(self)

    def prepare_for_decode(self) -> None:
        self.forward_mode = SimpleNamespace(is_extend=lambda: False)
        self.req_pool_indices = torch.tensor([req.kv.req_pool_idx for req in self.reqs], dtype=torch.int64)
        self.req_pool_indices_cpu = self.req_pool_indices
        self.lengths([len(req.origin_input_ids) + len(req.output_ids) - 1 for req in self.reqs])
        alloc_for_decode(self, 1)


class Puts:
    """Counts what goes into a queue."""

    def __init__(self, queue: Any, counts: Callable[[Any], bool] = lambda _item: True) -> None:
        self.queue, self.number = queue, 0
        put = queue.put

        def counted(item: Any, *args: Any, **kwargs: Any) -> None:
            put(item, *args, **kwargs)
            self.number += counts(item)

        queue.put = counted


class Threads:
    """HiCache's storage threads: a pass of the scheduler has what earlier ones asked of them, and nothing else."""

    def __init__(self, cache: Any) -> None:
        controller = cache.cache_controller
        self.asked, self.answered = Puts(controller.prefetch_queue), Puts(controller.prefetch_hit_queue)
        self.reads = Puts(controller.prefetch_buffer)
        self.came = Puts(controller.ack_prefetch_queue, lambda ack: bool(ack.completed_req))
        # Questions that earlier passes have asked, and those whose answers they took.
        self.before = self.taken = 0
        self.due = (0, 0)
        self.ready = type(cache)._sync_hicache_ready_counts.__get__(cache)
        cache._sync_hicache_ready_counts = self.counts

    def busy(self) -> bool:
        """The next pass will have what the last one had not."""
        return self.taken < self.before or self.came.queue.qsize() > 0 or self.came.number < self.reads.number

    def pass_begins(self) -> None:
        while self.came.number < self.reads.number:
            time.sleep(1e-4)
        self.due = (self.before - self.taken, self.came.queue.qsize())

    def pass_has_looked(self) -> None:
        self.taken, self.due = self.before, (0, 0)

    def pass_ends(self) -> None:
        self.wait_for_answers()
        self.before = self.asked.number

    def wait_for_answers(self) -> None:
        """A question is about what storage holds when it is asked."""
        while self.answered.number < self.asked.number:
            time.sleep(1e-4)

    def counts(self) -> tuple[int, int, tuple[int, ...], Any]:
        """What the scheduler may take from the threads now: copies and writes that have ended, and what is due."""
        writes, loads, sizes, names = self.ready()
        return writes, loads, (*self.due, *sizes[2:]), names


class Together(Run):
    """One workload: what Scheduler.get_next_batch_to_run asks of a scheduler, and its event loop."""

    chunked_req = dllm_config = prefill_delayer = min_free_slots_delayer = dynamic_chunk_sizer = None
    lora_drainer = hisparse_coordinator = decode_offload_manager = truncation_align_size = None
    scheduler_stage_metrics = None
    enable_hisparse = enable_lora = enable_lmcache = is_mixed_chunk = enable_skip_finishing_decode = False
    enable_priority_preemption = enable_priority_scheduling = is_hybrid_swa = require_mlp_sync = False
    enable_unified_cache_external_linker = enable_overlap = False
    priority_scheduling_preemption_threshold = max_prefill_bs = processed_tokens_counter = forward_ct = 0
    max_prefill_tokens = 10**6
    spec_algorithm = SpeculativeAlgorithm.NONE
    model_config = None
    get_next_batch_to_run = Scheduler.get_next_batch_to_run
    get_new_batch_prefill = Scheduler.get_new_batch_prefill
    _get_new_batch_prefill_raw = Scheduler._get_new_batch_prefill_raw
    get_num_allocatable_reqs = Scheduler.get_num_allocatable_reqs
    get_prefill_adder_class = Scheduler.get_prefill_adder_class
    update_running_batch = Scheduler.update_running_batch
    _reqs_finishing_inflight = Scheduler._reqs_finishing_inflight
    _prefetch_kvcache = Scheduler._prefetch_kvcache
    _process_storage_prefetch_retries = Scheduler._process_storage_prefetch_retries
    _retry_storage_prefetch = Scheduler._retry_storage_prefetch
    _prefetch_after_device_hit_loss = Scheduler._prefetch_after_device_hit_loss

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__(case, stalled=False)
        self.tree_cache, self.token_to_kv_pool_allocator = self.cache, self.allocator
        self.req_to_token_pool, self.page_size = self.rows_pool, self.page
        self.chunked_prefill_size, self.max_running_requests = case["chunk"], case["running"]
        self.policy = SchedulePolicy("fcfs", self.cache, False, False, False)
        self.waiting_queue: list[Req] = []
        model_runner = SimpleNamespace(attn_backend=SimpleNamespace(), prefill_aware_swa=False)
        self.tp_worker = SimpleNamespace(model_runner=model_runner)
        self.new_token_ratio_tracker = SimpleNamespace(current=1.0, decay_step=lambda: None)
        self.grammar_manager = SimpleNamespace(has_waiting_grammars=lambda: False)
        self.beam_coordinator = SimpleNamespace(pending_member_rows=lambda _batch: 0)
        self.load_inquirer = SimpleNamespace(_get_num_pending_tokens=lambda **_kwargs: 0)
        self.metrics_reporter = SimpleNamespace(enable_metrics=False)
        same = lambda batch, **_kwargs: batch  # noqa: E731
        self.dp_attn_adapter = SimpleNamespace(maybe_prepare_mlp_sync_batch=same, maybe_convert_decode_to_extend=same)
        self.ngram_embedding_manager = SimpleNamespace(prepare_for_forward=same)
        self.replies: dict[str, list[int]] = {}
        self.together = self.retracted = 0
        self.enable_hierarchical_cache = case["host_pages"] is not None
        self.enable_hicache_storage = case["storage"] is not None
        self.threads: Threads | None = None

    def process_pending_chunked_abort(self) -> None:
        """Nothing is aborted."""

    def _process_hicache_events(self) -> None:
        if self.threads is not None:
            self.threads.pass_begins()
        Scheduler._process_hicache_events(self)
        if self.threads is not None:
            self.threads.pass_has_looked()

    def _should_defer_prefill(self, _running: Batch) -> bool:
        return False

    def _arm_prefill_decode_interval(self, _batch: Batch | None) -> None:
        """--prefill-decode-interval is 0."""

    def stash_chunked_request(self, req: Req) -> None:
        checkpoint_kv_cache(req, self.cache)
        self.settle()

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        self.retracted += is_retracted
        self._prefetch_kvcache(req)
        if self.threads is not None:
            self.threads.wait_for_answers()
        self.waiting_queue.append(req)

    def result(self) -> dict[str, Any]:
        sent = sorted(self.case["requests"], key=lambda asked: asked["at"])
        for start, end in zip([0, *self.case["flushes"]], [*self.case["flushes"], len(sent)], strict=True):
            if start > 0:
                self.flush()
            # The storage threads get new queues at a flush.
            self.threads = Threads(self.cache) if self.enable_hicache_storage else None
            self.serve_together(sent[start:end])
        self.cache.shutdown()
        return {
            "rows": self.rows,
            "journal": self.journal,
            "together": self.together,
            "retracted": self.retracted,
        }

    def serve_together(self, sent: list[dict[str, Any]]) -> None:
        now, running, last = sent[0]["at"], Batch([], self.cache), None
        while sent or running.reqs or self.waiting_queue or last is not None:
            while sent and sent[0]["at"] <= now:
                self.arrive(sent.pop(0))
            plan = self.get_next_batch_to_run(running, last)
            last, running = plan.batch_to_run, plan.running_batch
            if self.threads is not None:
                self.threads.pass_ends()
            self.note()
            if last is not None:
                now += 1.0
                self.end(last, now)
                self.settle()
            elif self.threads is not None and self.threads.busy():
                continue
            elif sent:
                now = sent[0]["at"]
            else:
                assert not self.waiting_queue, "a request fits never"

    def arrive(self, asked: dict[str, Any]) -> None:
        prompt = array("q", [token for number, count in asked["prompt"] for token in stream(number, 0, count)])
        sampling = SamplingParams(max_new_tokens=asked["output"], ignore_eos=True)
        sampling.normalize(None)
        self.replies[asked["id"]] = stream(asked["reply"], 0, asked["output"])
        self._add_request_to_queue(Req(asked["id"], "", prompt, sampling, vocab_size=60_000))

    def end(self, batch: Batch, now: float) -> None:
        prefill = batch.forward_mode.is_extend()
        began = [req for req in batch.reqs if prefill and req.rid not in self.rows]
        self.together += len(began) > 1
        for req in began:
            tiers = split_cached_prefix_by_tier(
                req.prefix_len,
                req.materialized_host_hit_len(),
                req.storage_hit_length,
                req.storage_hit_start,
                req.host_hit_is_storage,
            )
            self.rows[req.rid] = dict(zip(("device", "host", "storage"), tiers, strict=True))
        for req in batch.reqs:
            if req.inflight_middle_chunks > 0:
                req.inflight_middle_chunks -= 1
                continue
            req.output_ids.append(self.replies[req.rid][len(req.output_ids)])
            req.update_finish_state()
            self.rows[req.rid].setdefault("first", now)
            if req.finished():
                self.rows[req.rid]["last"] = now
                release_kv_cache(req, self.cache, checkpoint=True)
            elif prefill:
                checkpoint_kv_cache(req, self.cache)


def run(case: dict[str, Any]) -> dict[str, Any]:
    configure(case, pp_max_micro_batch_size=case["running"], hicache_storage_prefetch_retry_poll_interval=0)
    return Together(case).result()


def main() -> None:
    stand_in_for_cuda()
    get_parallel().override_permanently(**dict.fromkeys(RANKS, 0))
    logging.disable(logging.ERROR)
    scheduler.ScheduleBatch = Batch
    scheduler.PrefillStats = SimpleNamespace(from_adder=lambda *_args, **_kwargs: None)
    with get_context().override_server_args():
        print(json.dumps([run(case) for case in json.load(sys.stdin)]), file=RESULT)


if __name__ == "__main__":
    RESULT, sys.stdout = sys.stdout, sys.stderr  # libraries print
    main()
