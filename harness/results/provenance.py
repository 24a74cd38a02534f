"""Where a run was made: machine, versions, commit. Facts only; nothing secret."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import harness
from harness.engines import ENGINES


def now() -> str:
    """UTC, to the second, as in 2026-11-21T10:00:00Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def host() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "hostname": platform.node(),
    }


def versions() -> dict[str, str]:
    names = ("aiohttp", "numpy", "pydantic", "uvloop")
    return {
        "kv-harness": harness.__version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
    }


def is_simulated(manifest: Mapping[str, Any]) -> bool:
    """Whether a run's times were computed. False for an engine that this version does not know."""
    kind = ENGINES.get(manifest["engine"])
    return kind is not None and kind.simulated


def git() -> dict[str, Any]:
    """The commit of the source tree that runs; None where it is not a checkout."""
    root = Path(harness.__file__).parent.parent
    commit = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _git(root: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
