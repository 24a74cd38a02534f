"""vLLM's own Scheduler, KVCacheManager and BlockPool as an oracle, one time unit a step; no model runs.

    ENGINE_PYTHON vllm_scheduler.py < workloads.json > results.json

In:  [{"block": 16, "blocks": 65, "budget": 64, "seqs": 8, "requests": [
        {"id": "r0", "prompt": [[stream, tokens], ...], "reply": stream, "output": 9, "at": 0.0}, ...]}, ...]
Out: [{"rows": {"r0": {"tokens": [2.0, ...], "gpu": 0, "preemptions": 0}, ...},
       "journal": [["evicted", block, hash], ["preempted", "r1"], ...]}, ...]

Prompts are recipes of streams; every stream has its own tokens, and a reply is a stream as well. `gpu` counts the
tokens that vLLM's prefix cache served at a request's first admission. Of vLLM only the worker is left out: each
scheduled request is answered by the next token of its stream, one time unit later.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

MAX_TOKENS = 262_144
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "vocab_size": 60_000,
    "max_position_embeddings": MAX_TOKENS,
    "torch_dtype": "float32",
    "rms_norm_eps": 1e-5,
}


def stream(number: int, start: int, end: int) -> list[int]:
    """Tokens start to end of an endless stream."""
    mixed = (np.arange(start, end, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= np.uint64((number * 0xBF58476D1CE4E5B9) % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    return ((mixed >> np.uint64(33)) % np.uint64(59_000) + np.uint64(10)).tolist()


def new_scheduler(model: ModelConfig, case: dict[str, Any]) -> Scheduler:
    block = case["block"]
    limits = {"max_num_seqs": case["seqs"], "max_num_batched_tokens": case["budget"], "async_scheduling": False}
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=block, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            **limits, max_model_len=MAX_TOKENS, enable_chunked_prefill=True, is_encoder_decoder=False
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )
    for name, value in limits.items():  # platforms adjust them
        setattr(config.scheduler_config, name, value)
    config.cache_config.num_gpu_blocks = case["blocks"]
    layer = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=16, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=case["blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)],
        hash_block_size=block,
    )
    return Scheduler(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block,
        log_stats=True,
        hash_block_size=block,
    )


def keep_journal(scheduler: Scheduler) -> list[list[Any]]:
    """Writes down each block whose content vLLM gives up, and each preemption; what is done stays as it is."""
    journal: list[list[Any]] = []
    pool = scheduler.kv_cache_manager.block_pool
    evict, preempt = pool._maybe_evict_cached_block, scheduler._preempt_request

    def evict_and_note(block: Any) -> bool:
        key = block.block_hash
        evicted = evict(block)
        if evicted:
            journal.append(["evicted", block.block_id, key.hex()])
        return evicted

    def preempt_and_note(request: Request, *args: Any, **kwargs: Any) -> None:
        journal.append(["preempted", request.request_id])
        preempt(request, *args, **kwargs)

    pool._maybe_evict_cached_block, scheduler._preempt_request = evict_and_note, preempt_and_note
    return journal


def answer(ids: list[str], tokens: list[list[int]]) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={name: index for index, name in enumerate(ids)},
        sampled_token_ids=tokens,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


class Run:
    """One workload on one scheduler."""

    def __init__(self, model: ModelConfig, case: dict[str, Any]) -> None:
        self.scheduler = new_scheduler(model, case)
        self.journal = keep_journal(self.scheduler)
        self.hasher = get_request_block_hasher(case["block"], sha256)
        self.coming = sorted(case["requests"], key=lambda asked: asked["at"])[::-1]
        self.live: dict[str, tuple[Request, int]] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.now = 0.0

    def result(self) -> dict[str, Any]:
        while self.coming or self.live:
            self.arrive()
            self.step()
        return {"rows": self.rows, "journal": self.journal}

    def arrive(self) -> None:
        while self.coming and self.coming[-1]["at"] <= self.now:
            asked = self.coming.pop()
            prompt = [token for number, count in asked["prompt"] for token in stream(number, 0, count)]
            sampling = SamplingParams(max_tokens=asked["output"], ignore_eos=True)
            request = Request(asked["id"], prompt, sampling, None, block_hasher=self.hasher)
            self.live[asked["id"]] = request, asked["reply"]
            self.rows[asked["id"]] = {"tokens": []}
            self.scheduler.add_request(request)

    def step(self) -> None:
        planned = self.scheduler.schedule()
        for new in planned.scheduled_new_reqs:
            self.rows[new.req_id].setdefault("gpu", new.num_computed_tokens)
        ids = list(planned.num_scheduled_tokens)
        if not ids:  # nothing takes no time
            if planned.preempted_req_ids:
                self.scheduler.update_from_output(planned, answer([], []))
            elif self.coming:
                self.now = max(self.now, self.coming[-1]["at"])
            else:
                raise RuntimeError(f"vLLM waits in vain for {list(self.live)}")
            return
        self.now += 1
        self.scheduler.update_from_output(planned, answer(ids, [self.sampled(name) for name in ids]))
        for name in ids:
            request, _ = self.live[name]
            if request.is_finished():
                self.rows[name]["preemptions"] = request.num_preemptions
                del self.live[name]

    def sampled(self, name: str) -> list[int]:
        """The next token if the request's last known one has been computed."""
        request, reply = self.live[name]
        if request.num_computed_tokens < request.num_tokens:
            return []
        self.rows[name]["tokens"].append(self.now)
        return stream(reply, request.num_output_tokens, request.num_output_tokens + 1)


def main() -> None:
    cases = json.load(sys.stdin)
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(
            model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_TOKENS, enforce_eager=True
        )
        print(json.dumps([Run(model, case).result() for case in cases]), file=RESULT)


if __name__ == "__main__":
    RESULT, sys.stdout = sys.stdout, sys.stderr  # libraries print
    main()
