"""Shapes from config.json files: what each layer keeps is what vLLM's own specs allocate for it."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from simulator.errors import ModelError
from simulator.models import CONFIGS, DTYPE_BYTES, FullAttention, SlidingWindow, load_model
from tests.support.oracle_cases import PYTHON, ask

BLOCK = 16
PLAIN: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "full precision": {"model_type": "llama", "torch_dtype": "float32"},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 1024},
    "mistral without": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": False, "max_window_layers": 4},
    "qwen2 with windows": {
        "model_type": "qwen2",
        "sliding_window": 512,
        "use_sliding_window": True,
        "max_window_layers": 4,
    },
    "gpt-oss": {"model_type": "gpt_oss", "sliding_window": 128},
    "gemma 2": {"model_type": "gemma2", "sliding_window": 4096},
    "gemma 3": {"model_type": "gemma3_text", "sliding_window": 1024},
    "gemma 3, another pattern": {"model_type": "gemma3_text", "sliding_window": 1024, "sliding_window_pattern": 4},
    "layer types": {
        "model_type": "gemma3_text",
        "sliding_window": 1024,
        "layer_types": ["full_attention"] * 5 + ["sliding_attention"] * 7,
    },
    "qwen3 next": {"model_type": "qwen3_next", "full_attention_interval": 4} | LINEAR,
    "qwen3.5": {
        "model_type": "qwen3_5_text",
        "full_attention_interval": 3,
        "mamba_ssm_dtype": "float32",
    }
    | LINEAR,
    "deepseek": {"model_type": "deepseek_v3", "kv_lora_rank": 128, "qk_rope_head_dim": 32},
}


def written(folder: Path, fields: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.skipif(not PYTHON.exists(), reason="no engine environment; `scripts/engine_env vllm` makes it")
def test_each_kind_of_layer_keeps_what_vllm_allocates(tmp_path: Path) -> None:
    configs = [PLAIN | fields for fields in CASES.values()]
    answers = ask("kv_specs.py", configs)
    kinds = set()
    for (name, _), config, layers in zip(CASES.items(), configs, answers, strict=True):
        model = load_model(written(tmp_path / name, config))
        width = DTYPE_BYTES[model.dtype]
        allocated: dict[tuple[str, int | None], list[int]] = defaultdict(list)
        for layer in layers:
            allocated[layer["type"], layer["window"]].append(layer["page_bytes"])
        ours = [(group.layers, group.kept_bytes(BLOCK, width)) for group in model.layer_groups]
        assert sorted(ours) == sorted((len(pages), sum(pages)) for pages in allocated.values()), name
        windows = sorted(group.window for group in model.layer_groups if isinstance(group, SlidingWindow))
        assert windows == sorted(window for _, window in allocated if window), name
        assert model.full_attention == ({layer["type"] for layer in layers} == {"full_attention"}), name
        kinds |= {layer["type"] for layer in layers}
    assert kinds == {"full_attention", "sliding_attention", "linear_attention", "latent"}


def test_a_sequence_keeps_what_its_layers_keep() -> None:
    model = load_model("gpt-oss-120b")
    token = 2 * 8 * 64 * 2
    assert model.kv_bytes_per_token == 18 * token
    assert model.kv_bytes(100) == 36 * 100 * token
    assert model.kv_bytes(1000) == 18 * (1000 + 128) * token
    delta = load_model("qwen3-next-80b-a3b")
    state = 36 * (3 * (2 * 16 * 128 + 32 * 128) + 32 * 128 * 128) * 2
    assert (
        delta.kv_bytes(1) == state + delta.kv_bytes_per_token
        and delta.kv_bytes(10) == state + 10 * delta.kv_bytes_per_token
    )
    assert load_model("llama-3.1-70b").kv_bytes(8192) == 8192 * 327_680


def test_layers_that_share_what_others_keep_have_none_of_their_own(tmp_path: Path) -> None:
    types = (["sliding_attention"] * 4 + ["full_attention"]) * 2 + ["sliding_attention", "full_attention"]
    fields = {"model_type": "gemma3n_text", "layer_types": types, "sliding_window": 512, "num_kv_shared_layers": 2}
    model = load_model(written(tmp_path / "shared", PLAIN | fields))
    assert [(type(group), group.layers) for group in model.layer_groups] == [(SlidingWindow, 8), (FullAttention, 2)]
    assert model.layers == 12


def test_a_model_of_pictures_keeps_its_text_model_apart(tmp_path: Path) -> None:
    whole = written(tmp_path / "pictures", {"model_type": "gemma3", "text_config": PLAIN, "hidden_size": 1})
    assert load_model(whole) == msgspec.structs.replace(load_model(whole / "config.json"), name="pictures")
    assert load_model(whole).hidden_size == 512


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"layer_types": ["mamba"] * 12}, "layers of type mamba are unknown; known are"),
        ({"num_attention_heads": None}, "does not tell a decoder-only transformer's shape"),
        ({"sliding_window": -3}, "window must be at least 1"),
        ({"torch_dtype": "int3"}, "dtype 'int3' is unknown"),
    ],
)
def test_a_config_that_cannot_be_read_is_one_line(tmp_path: Path, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=text) as raised:
        load_model(written(tmp_path / "bad", PLAIN | fields))
    assert "config.json" in str(raised.value) and "\n" not in str(raised.value)


def test_groups_have_no_more_layers_than_the_model() -> None:
    model = load_model("gpt-oss-120b")
    with pytest.raises(ValueError, match="groups have 36 layers together, and the model 20"):
        msgspec.convert(msgspec.to_builtins(model) | {"layers": 20}, type(model))


def test_every_shipped_model_can_be_read() -> None:
    for path in sorted((CONFIGS / "models").glob("*.yaml")):
        model = load_model(path.stem)
        assert model.name == path.stem and model.kv_bytes(2) > model.kv_bytes(1) > 0
