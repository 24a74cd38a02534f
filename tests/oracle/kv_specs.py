"""What vLLM allocates for each layer of a model. Run by the engine's Python; reads and answers JSON.

In: config.json files, each {"model_type", …}. Out, for each: the layers' pages as vLLM's own specs size them,
{"type": of transformers' class, "page_bytes": of BLOCK tokens, or of a sequence where a layer keeps the same for any,
"window": tokens or null}. transformers' configuration classes say which layer is of which type.
"""

import json
import sys
from typing import Any

import torch
from transformers import AutoConfig
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

BLOCK = 16


def main() -> None:
    print(json.dumps([layers(config) for config in json.load(sys.stdin)]))


def layers(fields: dict[str, Any]) -> list[dict[str, Any]]:
    made = AutoConfig.for_model(**fields)
    config = getattr(made, "text_config", made)
    dtype = getattr(torch, fields.get("torch_dtype", "bfloat16"))
    types: list[str] | None = getattr(config, "layer_types", None)
    if getattr(config, "kv_lora_rank", None):
        types = ["latent"] * config.num_hidden_layers
    elif types is None:
        window = getattr(config, "sliding_window", None)
        types = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    answers = []
    for kind in types:
        spec = spec_of(kind, config, dtype)
        window = getattr(spec, "sliding_window", None)
        answers.append({"type": kind, "page_bytes": spec.page_size_bytes, "window": window})
    return answers


def spec_of(kind: str, config: Any, dtype: torch.dtype) -> KVCacheSpec:
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = {"block_size": BLOCK, "dtype": dtype}
    per_head = attention | {"num_kv_heads": config.num_key_value_heads, "head_size": size}
    if kind == "latent":
        width = config.kv_lora_rank + config.qk_rope_head_dim
        return MLAAttentionSpec(**attention, num_kv_heads=1, head_size=width)
    if kind == "sliding_attention":
        return SlidingWindowSpec(**per_head, sliding_window=config.sliding_window)
    if kind == "linear_attention":
        shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
            1,
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
            config.linear_conv_kernel_dim,
        )
        state = getattr(config, "mamba_ssm_dtype", None) or "auto"
        dtypes = MambaStateDtypeCalculator.gated_delta_net_state_dtype(dtype, "auto", state)
        return MambaSpec(block_size=BLOCK, shapes=shapes, dtypes=dtypes)
    assert kind == "full_attention", kind
    return FullAttentionSpec(**per_head)


main()
