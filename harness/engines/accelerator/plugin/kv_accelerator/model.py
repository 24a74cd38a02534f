"""A model whose attention layers have the named model's shape, and which computes nothing.

vLLM makes the KV cache from the layers: its blocks and bytes are those of the model named. The vocabulary is small, so
that logits are cheap. `scheduler.py` takes a step's time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

# The token that every request generates: any but an end of sequence, which the model's config lacks.
_TOKEN = 7


class PacedForCausalLM(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        from . import link

        link.install()
        config = vllm_config.model_config.hf_config
        self._vocabulary, self._hidden = config.vocab_size, config.hidden_size
        self._dtype = vllm_config.model_config.dtype
        self.layers = nn.ModuleList(
            Attention(
                config.num_attention_heads,
                config.head_dim,
                config.head_dim**-0.5,
                num_kv_heads=config.num_key_value_heads,
                cache_config=vllm_config.cache_config,
                prefix=f"{prefix}model.layers.{index}.self_attn.attn",
            )
            for index in range(config.num_hidden_layers)
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, 1, dtype=self._dtype).expand(len(input_ids), self._hidden)

    def forward(self, input_ids: torch.Tensor | None, positions: torch.Tensor, **_kwargs: Any) -> torch.Tensor:
        return self.embed_input_ids(positions if input_ids is None else input_ids)

    def compute_logits(self, hidden_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        logits = torch.zeros(hidden_states.shape[0], self._vocabulary)
        logits[:, _TOKEN] = 1.0
        return logits

    def load_weights(self, *_weights: Any) -> set[str]:
        return set()
