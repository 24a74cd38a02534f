"""What `harness init` writes for SGLang: one that the harness starts, or a server that runs already."""

from __future__ import annotations

import os
from typing import Any

from harness.engines.proposal import (
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
from harness.engines.sglang.found import FoundSglang, find_sglang
from harness.engines.sglang.settings import SglangSettings
from harness.errors import ConfigError
from harness.results.provenance import host
from simulator.models import load_model
from traces.tiers import states_in

_PAGE_TOKENS = 64
# Other prompts push a prefix out of the GPU, and the host pool holds those beside it.
_HOST_TIMES = 3
_MODEL = "tiny-llama"


def propose_sglang(wanted: Wanted) -> Proposal:
    """Raises UserError, also where a server that should run does not answer."""
    return _started(wanted) if wanted.attached is None else _attached(wanted, wanted.attached)


def _started(wanted: Wanted) -> Proposal:
    device, on_disk = wanted.device or ("gpu" if host().gpus else "cpu"), checked_disk(wanted.disk)
    model, weights = known_model(wanted.model or _MODEL, wanted.model_file)
    cache = roomy_cache(load_model(model), _PAGE_TOKENS, _PAGE_TOKENS, _HOST_TIMES)
    cache["disk"] |= on_disk
    section: dict[str, Any] = {"python": SglangSettings().python, "device": device}
    notes = []
    if device == "cpu":
        accelerator = SglangSettings().accelerator
        section["accelerator"] = accelerator
        notes.append(f"no GPU: {accelerator} stands for one, which computes with no weights; times are paced")
        if (os.cpu_count() or 1) > 1:
            section["cores"] = {"engine": [0], "client": [1]}
    elif weights is None:
        notes.append("no folder of weights is named: SGLang gets random weights of the model's shape, as quick as real")
    else:
        section["model_path"] = weights
    return Proposal(model, PREFIX_TOKENS + 1, section, cache, states_in(cache), notes)


def _attached(wanted: Wanted, attached: NamedServers) -> Proposal:
    """Of a server that runs already: what it says, and what of it can be proven."""
    if attached.lmcache_url or attached.lmcache_pid:
        raise ConfigError("--lmcache-url and --lmcache-pid are a vLLM's; SGLang has its own tiers: leave them out")
    server = find_sglang(attached.url)
    info = server.info
    model = shape_of_attached(wanted, info.model_path)
    spec = load_model(model)
    page, per_token = info.page_size, spec.kv_bytes_per_token
    cache: dict[str, Any] = {"block_tokens": page, "chunk_tokens": page}
    cache["gpu"] = f"{info.max_total_num_tokens * per_token}B"
    attach: dict[str, Any] = {"url": attached.url}
    tiers, notes = ["recompute", "gpu"], []
    if server.host_tokens is None:
        notes.append("only recompute and gpu can be proven: the server has no HiCache (--enable-hierarchical-cache)")
    else:
        cache["cpu"] = f"{server.host_tokens * per_token}B"
        tiers.append("cpu")
    if info.hicache_storage_backend is not None:
        notes += _storage(attached, server, attach)
        if "disk_path" in attach:
            cache["disk"] = {"capacity": f"{4 * max(1, (server.host_tokens or 0) * per_token // GIB)}GiB"}
            tiers += ["disk", "disk_cold"] if "pid" in attach else []
        else:
            tiers.remove("recompute")
    section: dict[str, Any] = {"attach": attach}
    if hicache := _policies(server):
        section["hicache"] = hicache
    return Proposal(model, fitting_prompt(cache, spec, info.max_req_input_len), section, cache, tiers, notes)


def _policies(server: FoundSglang) -> dict[str, str]:
    """What the preflight has to know of its HiCache."""
    info = server.info
    found = {"write": info.hicache_write_policy, "prefetch": info.hicache_storage_prefetch_policy}
    return {key: value for key, value in found.items() if value is not None} if server.host_tokens is not None else {}


def _storage(attached: NamedServers, server: FoundSglang, attach: dict[str, Any]) -> list[str]:
    """Adds process and folder to `attach`, each where it is known; returns notes for the user."""
    backend = server.info.hicache_storage_backend
    if backend != "file":
        return [f"its storage {backend} can be neither emptied nor proven from outside: recompute is left out"]
    notes = []
    if server.pid is None:
        notes.append("no process of ours listens at its address: add engines.sglang.attach.pid, or disk is not proven")
    else:
        attach["pid"] = server.pid
    path = attached.disk_path or server.disk_path
    if path is None:
        notes.append("its storage's folder is not known: with --disk-path, recompute, disk and disk_cold can be proven")
    else:
        attach["disk_path"] = path
        notes.append(f"a run deletes the page files in {path}, and flushes the server's caches, to bring states about")
    return notes
