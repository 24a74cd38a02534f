"""The shape of a model, as far as its KV cache and a random-weight twin of it need it."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
import yaml

from simulator.errors import ModelError

Config = TypeVar("Config")
# In a checkout a link to the top level's configs; in a wheel those files themselves.
CONFIGS = (Path(__file__).parent / "configs").resolve()
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only transformer.

    kv_heads: fewer than attention_heads with grouped queries. mla_latent_dim, mla_rope_dim: multi-head latent
    attention keeps one latent vector and one rotary key a token and layer in place of keys and values per head.
    max_position: longest prompt plus output, in tokens.
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

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is unknown: use one of {', '.join(DTYPE_BYTES)}")
        if (self.mla_latent_dim is None) != (self.mla_rope_dim is None):
            raise ValueError("mla_latent_dim and mla_rope_dim go together: give both or neither")
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{field} must be at least 1, not {value}")

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache that one token takes over all layers."""
        if self.mla_latent_dim is not None and self.mla_rope_dim is not None:
            values = self.mla_latent_dim + self.mla_rope_dim
        else:
            values = 2 * self.kv_heads * self.head_dim
        return self.layers * values * DTYPE_BYTES[self.dtype]


def load_model(name: str | Path) -> ModelSpec:
    """A model from a YAML file, or by name from configs/models. ModelError: one line with file, field and cure."""
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
    try:
        return msgspec.convert(yaml.safe_load(path.read_text()), kind)
    except (msgspec.ValidationError, yaml.YAMLError, ValueError) as error:
        raise ModelError(f"{path}: {' '.join(str(error).split())}") from error
