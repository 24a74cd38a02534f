"""A model folder with no weights: enough for an engine started with `--load-format dummy`.

TTFT does not depend on what the weights say. The tokenizer maps bytes to the first 256 ids and names every other
id, so that any id the engine generates has a text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from simulator.models import ModelSpec


def write_random_model(spec: ModelSpec, folder: Path, architecture: str = "LlamaForCausalLM") -> Path:
    """Writes config.json and tokenizer files of a Llama of `spec`'s shape; returns the folder. architecture: the class
    that the engine builds from it."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": _config(spec, architecture),
        "generation_config.json": {"do_sample": False},
        "tokenizer.json": _tokenizer(spec.vocab_size),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": spec.max_position,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def _config(spec: ModelSpec, architecture: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.attention_heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": spec.dtype,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    vocab = {symbol: i for i, symbol in enumerate(_byte_symbols())}
    vocab |= {f"<{i}>": i for i in range(len(vocab), vocab_size)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }


def _byte_symbols() -> list[str]:
    """The 256 printable characters that byte-level BPE writes for the 256 bytes, in order of the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]
