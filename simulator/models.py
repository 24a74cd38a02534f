"""The shape of a model, as far as its KV cache and a random-weight twin of it need it.

In a config.json, as Hugging Face's transformers writes it, `layer_types` says what a layer keeps. In a file without
them the fields that came before do: sliding_window with use_sliding_window and max_window_layers,
sliding_window_pattern, full_attention_interval, attention_chunk_size with no_rope_layers, kv_lora_rank. Each default
is that of the model type's class in transformers.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from simulator.errors import ModelError

Config = TypeVar("Config")
# In a checkout a link to the top level's configs; in a wheel those files themselves.
CONFIGS = (Path(__file__).parent / "configs").resolve()
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}
# Of these model types, every n-th layer has full attention and the others a window.
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gemma3n_text": 5, "gpt_oss": 2}
# Layers of these types keep the same; see the classes.
_KINDS = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
}


def _at_least_one(spec: msgspec.Struct) -> None:
    for field in spec.__struct_fields__:
        value = getattr(spec, field)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{field} must be at least 1, not {value}")


def _known_dtype(field: str, dtype: str) -> None:
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"{field} {dtype!r} is unknown: use one of {', '.join(DTYPE_BYTES)}")


class LayerGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """Layers that keep the same for a sequence. layers: how many of the model's there are."""

    layers: int

    def __post_init__(self) -> None:
        _at_least_one(self)

    @property
    def token_values(self) -> int:
        """Values that one token adds in all layers of the group."""
        raise NotImplementedError

    def kept_tokens(self, tokens: int) -> int:
        """Of a sequence of `tokens`, those whose values the group keeps."""
        return tokens

    def kept_bytes(self, tokens: int, value_bytes: int) -> int:
        """Bytes of one sequence of `tokens`, with values of value_bytes."""
        return self.kept_tokens(tokens) * self.token_values * value_bytes


class FullAttention(LayerGroup, frozen=True, kw_only=True, tag="full"):
    """Keys and values of each token, head by head."""

    kv_heads: int
    head_dim: int

    @property
    def token_values(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim


class SlidingWindow(FullAttention, frozen=True, kw_only=True, tag="sliding"):
    """Keys and values of the last `window` tokens."""

    window: int

    def kept_tokens(self, tokens: int) -> int:
        return min(tokens, self.window)


class LatentAttention(LayerGroup, frozen=True, kw_only=True, tag="latent"):
    """Multi-head latent attention: one latent vector and one rotary key a token, for all heads."""

    latent_dim: int
    rope_dim: int

    @property
    def token_values(self) -> int:
        return self.layers * (self.latent_dim + self.rope_dim)


class LinearAttention(LayerGroup, frozen=True, kw_only=True, tag="linear"):
    """A gated delta net: the last conv_kernel - 1 inputs of its convolution, and a matrix a value head.

    state_dtype: of the matrices; the inputs have the model's.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    conv_kernel: int
    state_dtype: str

    def __post_init__(self) -> None:
        super().__post_init__()
        _known_dtype("state_dtype", self.state_dtype)

    @property
    def token_values(self) -> int:
        return 0

    def kept_bytes(self, tokens: int, value_bytes: int) -> int:
        """The same for a sequence of any length."""
        inputs = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        matrices = self.value_heads * self.value_dim * self.key_dim * DTYPE_BYTES[self.state_dtype]
        return self.layers * ((self.conv_kernel - 1) * inputs * value_bytes + matrices) if tokens else 0


AnyGroup = FullAttention | SlidingWindow | LatentAttention | LinearAttention


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only transformer.

    kv_heads: fewer than attention_heads with grouped queries. mla_latent_dim, mla_rope_dim: multi-head latent
    attention keeps one latent vector and one rotary key a token and layer in place of keys and values per head.
    groups: what its layers keep, where they differ; together they are `layers` at most, for layers may keep nothing of
    their own. max_position: longest prompt plus output, in tokens.
    """

    name: str
    layers: int
    hidden_size: int
    intermediate_size: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    vocab_size: int
    max_position: int
    mla_latent_dim: int | None = None
    mla_rope_dim: int | None = None
    groups: tuple[AnyGroup, ...] = ()

    def __post_init__(self) -> None:
        _known_dtype("dtype", self.dtype)
        if (self.mla_latent_dim is None) != (self.mla_rope_dim is None):
            raise ValueError("mla_latent_dim and mla_rope_dim go together: give both or neither")
        _at_least_one(self)

        grouped = sum(group.layers for group in self.groups)
        if grouped > self.layers:
            raise ValueError(f"groups have {grouped} layers together, and the model {self.layers}: correct either")

    @property
    def layer_groups(self) -> tuple[AnyGroup, ...]:
        """What its layers keep; one group where all keep the same."""
        if self.groups:
            return self.groups
        if self.mla_latent_dim is not None and self.mla_rope_dim is not None:
            return (LatentAttention(layers=self.layers, latent_dim=self.mla_latent_dim, rope_dim=self.mla_rope_dim),)
        return (FullAttention(layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim),)

    @property
    def full_attention(self) -> bool:
        """Whether each layer keeps keys and values of each token, per head."""
        return all(type(group) is FullAttention for group in self.layer_groups)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache by which each further token makes a long sequence larger, over all layers."""
        kept = (group for group in self.layer_groups if not isinstance(group, SlidingWindow))
        return sum(group.token_values for group in kept) * DTYPE_BYTES[self.dtype]

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of KV cache that one sequence of `tokens` keeps, over all layers."""
        return sum(group.kept_bytes(tokens, DTYPE_BYTES[self.dtype]) for group in self.layer_groups)


def load_model(name: str | Path) -> ModelSpec:
    """A model by name from configs/models, from a YAML file, or from a config.json or the folder that has one.

    Raises ModelError: one line with file, field and cure.
    """
    path = Path(name)
    if path.name == "config.json" or (path.name != str(name) and (path / "config.json").is_file()):
        return _read_config_json(path if path.name == "config.json" else path / "config.json")
    return load_config("models", name, ModelSpec)


def load_config(folder: str, name: str | Path, kind: type[Config]) -> Config:
    """A file of configs/<folder> by its stem, or any YAML file by its path, checked strictly against `kind`."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml") and path.name != str(name):
        raise ModelError(f"{name}: a name has no folders in it; give a path that ends in .yaml")
    if path.suffix not in (".yaml", ".yml"):
        path = CONFIGS / folder / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in (CONFIGS / folder).glob("*.yaml")))
        if path == Path(name):
            raise ModelError(f"{name}: no such file; correct the path, or name one of configs/{folder}: {known}")
        raise ModelError(f"{name}: configs/{folder} has no file of that name; it has {known}, or give a path.yaml")
    state = path.stat()
    checked_as: Any = kind
    found: Config = _checked(path, checked_as, state.st_mtime_ns, state.st_size)
    return found


@functools.lru_cache(maxsize=64)
def _checked(path: Path, kind: Any, _changed_ns: int, _bytes: int) -> Any:
    """A sweep asks for the same file in every cell; a file that was changed is read again."""
    try:
        return msgspec.convert(yaml.safe_load(path.read_text()), kind)
    except (msgspec.ValidationError, yaml.YAMLError, ValueError) as error:
        raise ModelError(f"{path}: {' '.join(str(error).split())}") from error


def _read_config_json(file: Path) -> ModelSpec:
    """The model is named as the file's folder."""
    try:
        whole = json.loads(file.read_text())
        # A model of pictures and text keeps its language model's fields apart.
        config = whole | (whole.get("text_config") or {})
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        groups = _groups(config, kv_heads, head_dim)
        first = groups[0]
        uniform = len(groups) == 1 and first.layers == config["num_hidden_layers"]
        latent = isinstance(first, LatentAttention) and uniform
        shape = {
            "name": file.resolve().parent.name,
            "layers": config["num_hidden_layers"],
            "hidden_size": config["hidden_size"],
            "intermediate_size": config.get("intermediate_size") or config["hidden_size"],
            "attention_heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "dtype": config.get("dtype") or config.get("torch_dtype") or "bfloat16",
            "vocab_size": config["vocab_size"],
            "max_position": config["max_position_embeddings"],
            "mla_latent_dim": config["kv_lora_rank"] if latent else None,
            "mla_rope_dim": config["qk_rope_head_dim"] if latent else None,
            "groups": [] if latent or (uniform and type(first) is FullAttention) else msgspec.to_builtins(groups),
        }
        return msgspec.convert(shape, ModelSpec)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{file}: does not tell a decoder-only transformer's shape ({error!r}); give a model YAML instead"
        ) from None


def _groups(config: Mapping[str, Any], kv_heads: int, head_dim: int) -> list[AnyGroup]:
    """What the layers keep, in the order in which the kinds first come."""
    if config.get("kv_lora_rank"):
        latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        return [LatentAttention(layers=config["num_hidden_layers"], latent_dim=latent, rope_dim=rope)]
    types = config.get("layer_types") or _types_before(config)
    # Gemma 3n: the last layers read what earlier ones keep.
    own = types[: len(types) - (config.get("num_kv_shared_layers") or 0)]
    unknown = sorted({str(each) for each in own} - set(_KINDS))
    if unknown:
        raise ValueError(f"layers of type {', '.join(unknown)} are unknown; known are {', '.join(sorted(_KINDS))}")
    found: list[AnyGroup] = []
    for kind, layers in Counter(_KINDS[each] for each in own).items():
        if kind == "full":
            found.append(FullAttention(layers=layers, kv_heads=kv_heads, head_dim=head_dim))
        elif kind == "linear":
            found.append(_linear(config, layers))
        else:
            window = config["sliding_window" if kind == "sliding" else "attention_chunk_size"]
            found.append(SlidingWindow(layers=layers, kv_heads=kv_heads, head_dim=head_dim, window=window))
    return found


def _types_before(config: Mapping[str, Any]) -> list[str]:
    """layer_types of a config.json that has none."""
    layers, kind = config["num_hidden_layers"], config.get("model_type")
    if interval := config.get("full_attention_interval"):
        return _every(layers, interval, "linear_attention")
    if config.get("attention_chunk_size"):
        # Llama 4: 0 in no_rope_layers is a layer without rotary embedding, which sees everything.
        ropes = config.get("no_rope_layers") or [int((at + 1) % 4 != 0) for at in range(layers)]
        return ["chunked_attention" if rope else "full_attention" for rope in ropes]
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ["full_attention"] * layers
    if pattern := config.get("sliding_window_pattern") or _PATTERNS.get(str(kind)):
        return _every(layers, pattern, "sliding_attention")
    # Qwen 2: the first max_window_layers see everything.
    first = config.get("max_window_layers", 0) if "use_sliding_window" in config else 0
    return ["full_attention" if at < first else "sliding_attention" for at in range(layers)]


def _every(layers: int, interval: int, others: str) -> list[str]:
    return ["full_attention" if (at + 1) % interval == 0 else others for at in range(layers)]


def _linear(config: Mapping[str, Any], layers: int) -> LinearAttention:
    return LinearAttention(
        layers=layers,
        key_heads=config["linear_num_key_heads"],
        key_dim=config["linear_key_head_dim"],
        value_heads=config["linear_num_value_heads"],
        value_dim=config["linear_value_head_dim"],
        conv_kernel=config["linear_conv_kernel_dim"],
        state_dtype=config.get("mamba_ssm_dtype") or config.get("dtype") or config.get("torch_dtype") or "bfloat16",
    )
