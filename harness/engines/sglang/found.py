"""What an SGLang that runs already says of itself, for the section `attach` of an experiment."""

from __future__ import annotations

import contextlib

import httpx
import msgspec
import psutil

from harness.collectors.prometheus import Metrics
from harness.engines.sglang.process import ServerInfo
from harness.errors import ConfigError
from harness.processes.child import listener

_TIMEOUT_S = 5.0
_FOLDER = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"


class FoundSglang(msgspec.Struct, frozen=True, kw_only=True):
    """host_tokens: of HiCache's host pool; None: there is no HiCache. pid, disk_path: None where its process is not on
    this machine, or not ours to see."""

    info: ServerInfo
    host_tokens: int | None
    pid: int | None
    disk_path: str | None


def find_sglang(url: str) -> FoundSglang:
    """Raises ConfigError where no SGLang answers."""
    address = url.rstrip("/")
    try:
        answer = httpx.get(f"{address}/server_info", timeout=_TIMEOUT_S).raise_for_status()
        info = msgspec.json.decode(answer.content, type=ServerInfo)
        metrics = Metrics(httpx.get(f"{address}/metrics", timeout=_TIMEOUT_S).raise_for_status().text)
    except (httpx.HTTPError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--attach {url}: no SGLang answers there ({error!r}); start it with --enable-metrics, or correct the URL"
        ) from None
    pid = listener(url)
    host_tokens = metrics.total("sglang:hicache_host_total_tokens") if info.enable_hierarchical_cache else None
    return FoundSglang(info=info, host_tokens=host_tokens, pid=pid, disk_path=_disk_path(pid))


def _disk_path(pid: int | None) -> str | None:
    """The folder of its file backend, from its environment."""
    with contextlib.suppress(psutil.Error, OSError):
        return None if pid is None else psutil.Process(pid).environ().get(_FOLDER)
    return None
