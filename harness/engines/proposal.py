"""What `harness init` asks of an engine's kind, and what the kind proposes: settings, tiers, and states to measure."""

from __future__ import annotations

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
# Of the CPU tier, the share that a prompt may take: half of what stays below LMCache's eviction watermark, and less
# than what HiCache brings at a time.
_KEPT_SHARE = 0.4
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
        shape = msgspec.to_builtins(load_model(Path(named) / "config.json"))
        said = {field: value for field, value in shape.items() if value not in (None, [], ())}
        model_file.write_text(yaml.safe_dump(said, sort_keys=False))
        return str(model_file), named
    load_model(named)
    return named, None


def roomy_cache(
    spec: ModelSpec, block_tokens: int, chunk_tokens: int = CHUNK_TOKENS, cpu_times: int = 1
) -> dict[str, Any]:
    """Tiers with room for several prompts of the usual length; the CPU tier is cpu_times as large as the GPU's."""
    prompt_bytes = (PREFIX_TOKENS + CHUNK_TOKENS) * spec.kv_bytes_per_token
    gib = max(1, math.ceil(_ROOM * prompt_bytes / GIB))
    return {
        "block_tokens": block_tokens,
        "chunk_tokens": chunk_tokens,
        "gpu": f"{gib}GiB",
        "cpu": f"{cpu_times * gib}GiB",
        "disk": {"capacity": f"{4 * cpu_times * gib}GiB"},
    }


def fitting_prompt(cache: dict[str, Any], spec: ModelSpec, max_tokens: int | None) -> int:
    """The longest prompt up to the usual one that the tiers hold and the engine takes: whole chunks and one token."""
    chunk = int(cache["chunk_tokens"])
    limits = [PREFIX_TOKENS, int(int(cache["gpu"][:-1]) / spec.kv_bytes_per_token / 2)]
    if "cpu" in cache:
        limits.append(int(_KEPT_SHARE * int(cache["cpu"][:-1]) / spec.kv_bytes_per_token))
    if max_tokens is not None:
        limits.append(max_tokens - 2)
    return max(1, min(limits) // chunk) * chunk + 1


def shape_of_attached(wanted: Wanted, weights: str | None) -> str:
    """The experiment's model: the one that is named, or that of the folder that the server loads. Raises UserError."""
    named = wanted.model or weights
    if named is None or (wanted.model is None and not (Path(named) / "config.json").is_file()):
        raise ConfigError(
            f"--model is missing: the server loads {named}, of which no folder with config.json is here; name one, a"
            " model YAML, or a name of `harness list models`"
        )
    return known_model(named, wanted.model_file)[0]


def checked_disk(disk: Path | None) -> dict[str, str]:
    """What cache.disk gets of it. Raises ConfigError."""
    if disk is not None and not disk.is_dir():
        raise ConfigError(f"--disk {disk}: is no folder; make it, on the disk that is to be judged")
    return {} if disk is None else {"path": str(disk)}
