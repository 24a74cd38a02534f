"""A model whose attention layers have the named model's shape, and whose forward pass takes a GPU's time.

SGLang makes the KV cache from the config: its pages and bytes are those of the model named. As on a GPU, a layer waits
until its part of a loaded prefix has come; layers before it have been computed meanwhile.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_context import get_attn_backend
from torch import nn

from ...settings import pacing

# The token that every request generates: any but an end of sequence, which the model's config lacks.
_TOKEN = 7
# A layer that is there answers faster than this.
_THERE_S = 1e-4


class SglangPacedForCausalLM(nn.Module):
    def __init__(self, config: Any, *_args: Any, **_kwargs: Any) -> None:
        super().__init__()
        self._vocabulary = config.vocab_size
        self.layers = nn.ModuleList(
            RadixAttention(
                config.num_attention_heads,
                config.head_dim,
                config.head_dim**-0.5,
                config.num_key_value_heads,
                layer_id=index,
            )
            for index in range(config.num_hidden_layers)
        )

    @torch.no_grad()
    def forward(self, _input_ids: torch.Tensor, _positions: torch.Tensor, batch: Any, **_kwargs: Any) -> Any:
        steps, pool = pacing().steps, get_attn_backend().token_to_kv_pool
        steps.plan(_sequences(batch))
        for layer in range(len(self.layers)):
            asked_s = time.perf_counter()
            pool.get_key_buffer(layer)  # returns once this layer of a loaded prefix has come
            if time.perf_counter() - asked_s > _THERE_S:
                steps.held_up(1 - layer / len(self.layers))
        logits = torch.zeros(batch.batch_size, self._vocabulary)
        logits[:, _TOKEN] = 1.0
        steps.finish(more=True)
        return LogitsProcessorOutput(next_token_logits=logits)

    def load_weights(self, *_weights: Any) -> set[str]:
        return set()


def _sequences(batch: Any) -> list[tuple[int, int]]:
    """(new tokens, context) of each request in the step."""
    lengths = batch.seq_lens[: batch.batch_size].tolist()
    new = batch.extend_seq_lens[: batch.batch_size].tolist() if batch.forward_mode.is_extend() else [1] * len(lengths)
    return [(q, length - q) for q, length in zip(new, lengths, strict=True)]


EntryClass = SglangPacedForCausalLM
