"""What a vLLM and an LMCache server that run already say of themselves, for the section `attach` of an experiment."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from harness.collectors.prometheus import Metrics
from harness.errors import ConfigError
from harness.processes.child import listener

_TIMEOUT_S = 5.0


class FoundServer(msgspec.Struct, frozen=True, kw_only=True):
    """A running vLLM. weights: what it was told to load. max_tokens: of a prompt and its output together."""

    weights: str | None
    max_tokens: int | None
    block_tokens: int
    gpu_blocks: int


class FoundCache(msgspec.Struct, frozen=True, kw_only=True):
    """A running LMCache server. pid, disk_path: None where its process is not on this machine, or not ours to see."""

    chunk_tokens: int
    cpu_bytes: int
    pid: int | None
    disk_path: str | None


def find_server(url: str) -> FoundServer:
    """Raises ConfigError where no vLLM answers."""
    try:
        info = Metrics(_get(url, "/metrics").text).labels("vllm:cache_config_info")
        [model, *_] = _get(url, "/v1/models").json()["data"]
        return FoundServer(
            weights=model.get("root"),
            max_tokens=model.get("max_model_len"),
            block_tokens=int(info["block_size"]),
            gpu_blocks=int(info["num_gpu_blocks"]),
        )
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--attach {url}: no vLLM answers there ({error!r}); start it, or correct the URL") from None


def find_cache(url: str, pid: int | None = None) -> FoundCache:
    """pid: its process, where it is known already. Raises ConfigError where no LMCache server answers."""
    try:
        status = _get(url, "/status").json()
        chunk_tokens, size = status["chunk_size"], status["storage_manager"]["l1_manager"]["memory_total_bytes"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--lmcache-url {url}: no LMCache server answers there ({error!r}); its port is the --http-port of"
            " `lmcache server`"
        ) from None
    pid = pid or listener(url)
    return FoundCache(chunk_tokens=chunk_tokens, cpu_bytes=size, pid=pid, disk_path=_disk_path(pid))


def _get(url: str, path: str) -> httpx.Response:
    response = httpx.get(f"{url.rstrip('/')}{path}", timeout=_TIMEOUT_S)
    response.raise_for_status()
    return response


def _disk_path(pid: int | None) -> str | None:
    with contextlib.suppress(psutil.Error, OSError):
        if pid and (path := disk_path_of((process := psutil.Process(pid)).cmdline())):
            return str(Path(process.cwd()) / path)
    return None


def disk_path_of(arguments: Sequence[str]) -> str | None:
    """The folder that an LMCache server's --l2-adapter names; None without one, or where it is not JSON."""
    for number, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name != "--l2-adapter":
            continue
        with contextlib.suppress(ValueError, IndexError):
            spec: Any = json.loads(value if equals else arguments[number + 1])
            if isinstance(spec, dict) and isinstance(path := spec.get("base_path"), str):
                return path
    return None
