"""What `harness init` asks of an engine's kind, and what the kind proposes: settings, tiers, and states to measure."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from harness.errors import ConfigError
from simulator.models import ModelSpec, load_model

GIB = 2**30
CHUNK_TOKENS = 256
# The prefix that is measured where the tiers hold it: 16 chunks of LMCache's default size.
PREFIX_TOKENS = 4096
# A tier has room for so many prompts, so that eviction does not begin in the middle of a sample.
_ROOM = 4


class NamedServers(NamedTuple):
    """Servers that run already, as far as the user has named them."""

    url: str
    lmcache_url: str | None
    lmcache_pid: int | None
    disk_path: str | None


class Wanted(NamedTuple):
    """The user's answers. model: a name, a YAML file or a folder of weights; None: nothing was said.

    model_file: where the shape of a folder's model is written. hardware: a preset. device None: gpu where this machine
    has one.
    """

    model: str | None
    model_file: Path
    disk: Path | None = None
    hardware: str | None = None
    device: str | None = None
    attached: NamedServers | None = None


class Proposal(NamedTuple):
    """section: the engine's. cache: the tiers. tiers: the states that can be proven. notes: for the user."""

    model: str
    prompt_tokens: int
    section: dict[str, Any]
    cache: dict[str, Any]
    tiers: list[str]
    notes: list[str]


def known_model(named: str, model_file: Path) -> tuple[str, str | None]:
    """(the experiment's model, the folder of weights); writes model_file for a folder. Raises UserError."""
    if (Path(named) / "config.json").is_file():
        model_file.write_text(yaml.safe_dump(_shape(Path(named)), sort_keys=False))
        return str(model_file), named
    load_model(named)
    return named, None


def roomy_cache(spec: ModelSpec, block_tokens: int) -> dict[str, Any]:
    """Tiers with room for several prompts of the usual length."""
    prompt_bytes = (PREFIX_TOKENS + CHUNK_TOKENS) * spec.kv_bytes_per_token
    gib = max(1, math.ceil(_ROOM * prompt_bytes / GIB))
    return {
        "block_tokens": block_tokens,
        "chunk_tokens": CHUNK_TOKENS,
        "gpu": f"{gib}GiB",
        "cpu": f"{gib}GiB",
        "disk": {"capacity": f"{4 * gib}GiB"},
    }


def _shape(folder: Path) -> dict[str, Any]:
    """A model's shape from its config.json, under the names of ModelSpec. Raises ConfigError."""
    try:
        config = json.loads((folder / "config.json").read_text())
        heads = config["num_attention_heads"]
        shape = {
            "name": folder.resolve().name,
            "layers": config["num_hidden_layers"],
            "hidden_size": config["hidden_size"],
            "intermediate_size": config["intermediate_size"],
            "attention_heads": heads,
            "kv_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
            "dtype": config.get("dtype") or config.get("torch_dtype") or "bfloat16",
            "vocab_size": config["vocab_size"],
            "max_position": config["max_position_embeddings"],
            "mla_latent_dim": config.get("kv_lora_rank"),
            "mla_rope_dim": config.get("qk_rope_head_dim"),
        }
        msgspec.convert(shape, ModelSpec)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder}/config.json: is not a decoder-only transformer's ({error!r}); give a model YAML instead"
        ) from None
    return {key: value for key, value in shape.items() if value is not None}
