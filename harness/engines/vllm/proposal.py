"""What `harness init` writes for vLLM: one that the harness starts, or servers that run already."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any

from harness.engines.proposal import (
    CHUNK_TOKENS,
    GIB,
    PREFIX_TOKENS,
    NamedServers,
    Proposal,
    Wanted,
    checked_disk,
    fitting_prompt,
    known_model,
    roomy_cache,
    shape_of_attached,
)
from harness.engines.vllm.found import FoundCache, find_cache, find_server
from harness.engines.vllm.settings import VllmSettings
from harness.results.provenance import host
from simulator.models import load_model
from traces.tiers import states_in

# vLLM's attention on CPU takes multiples of 32 tokens; on a GPU 16 is vLLM's own default.
_BLOCK_TOKENS = {"cpu": 32, "gpu": 16}
_MODEL = "tiny-llama"


def propose_vllm(wanted: Wanted) -> Proposal:
    """Raises UserError, also where servers that should run do not answer."""
    return _started(wanted) if wanted.attached is None else _attached(wanted, wanted.attached)


def _started(wanted: Wanted) -> Proposal:
    device = wanted.device or ("gpu" if host().gpus else "cpu")
    on_disk = checked_disk(wanted.disk)
    model, weights = known_model(wanted.model or _MODEL, wanted.model_file)
    cache, notes = roomy_cache(load_model(model), _BLOCK_TOKENS[device]), []
    cache["disk"] |= on_disk
    if weights is None:
        notes.append("no folder of weights is named: vLLM gets random weights of the model's shape, as quick as real")
    return Proposal(model, PREFIX_TOKENS + 1, _section(device, weights), cache, states_in(cache), notes)


def _section(device: str, weights: str | None) -> dict[str, Any]:
    """The section of a vLLM that the harness starts: that on the PATH, or that of scripts/engine_env."""
    on_path = shutil.which("vllm")
    beside = Path(on_path).parent / "python" if on_path else None
    section: dict[str, Any] = {"python": str(beside) if beside and beside.exists() else VllmSettings().python}
    if weights:
        section["model_path"] = weights
    section["device"] = device
    if device == "cpu" and (os.cpu_count() or 1) > 1:
        section["cores"] = {"engine": [0], "client": [1]}
    return section


def _attached(wanted: Wanted, attached: NamedServers) -> Proposal:
    """Of servers that run already: what they say, and what of it can be proven."""
    server = find_server(attached.url)
    model = shape_of_attached(wanted, server.weights)
    spec = load_model(model)
    gpu_bytes = server.gpu_blocks * server.block_tokens * spec.kv_bytes_per_token
    cache: dict[str, Any] = {"block_tokens": server.block_tokens, "gpu": f"{gpu_bytes}B"}
    attach: dict[str, Any] = {"url": attached.url}
    tiers, notes = ["recompute", "gpu"], []
    if attached.lmcache_url is None:
        cache["chunk_tokens"] = math.ceil(CHUNK_TOKENS / server.block_tokens) * server.block_tokens
        notes.append("only recompute and gpu can be proven; name the LMCache server's HTTP address with --lmcache-url")
    else:
        found = find_cache(attached.lmcache_url, attached.lmcache_pid)
        attach["lmcache_url"] = attached.lmcache_url
        cache |= {"chunk_tokens": found.chunk_tokens, "cpu": f"{found.cpu_bytes}B"}
        tiers.append("cpu")
        notes += _disk_of_attached(attached, found, attach)
        if "disk_path" in attach:
            cache["disk"] = {"capacity": f"{4 * max(1, found.cpu_bytes // GIB)}GiB"}
            tiers += ["disk", "disk_cold"] if "lmcache_pid" in attach else []
    prompt_tokens = fitting_prompt(cache, spec, server.max_tokens)
    return Proposal(model, prompt_tokens, {"attach": attach}, cache, tiers, notes)


def _disk_of_attached(attached: NamedServers, found: FoundCache, attach: dict[str, Any]) -> list[str]:
    """Adds process and folder to `attach`, each where it is known; returns notes for the user."""
    notes = []
    if found.pid is None:
        notes.append(
            "no process of ours listens at the LMCache server's address: name it with --lmcache-pid, or disk and"
            " disk_cold cannot be proven"
        )
    else:
        attach["lmcache_pid"] = found.pid
    path = attached.disk_path or found.disk_path
    if path is None:
        notes.append("the LMCache server names no folder: with --disk-path, disk and disk_cold can be proven")
    else:
        attach["disk_path"] = path
        notes.append(f"a run deletes the chunk files in {path}, and empties the servers' caches, to bring states about")
    return notes
