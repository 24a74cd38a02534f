"""Where a run was made: machine, versions, commit. Facts only; nothing secret."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

import harness
from harness.engines import ENGINES

# How a run's times came to be.
Made = Literal["measured", "paced", "simulated", "device measured, engine simulated"]


def now() -> str:
    """UTC, to the second, as in 2026-11-21T10:00:00Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The machine. None: it does not say, or the fact was not kept. gpus: as the driver names them; () without.
    python: the harness's own, with its build, on which the time of a core's loop depends (collectors/cores.py)."""

    cpu: str | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    kernel: str | None = None
    hostname: str | None = None
    gpus: tuple[str, ...] = ()
    python: str | None = None


class Git(msgspec.Struct, frozen=True, kw_only=True):
    """The commit of the source tree that ran; None where it was no checkout."""

    commit: str | None = None
    dirty: bool | None = None


def host() -> Host:
    return Host(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        hostname=platform.node(),
        gpus=_gpu_names(),
        python=" ".join(sys.version.split()),
    )


def versions() -> dict[str, str]:
    names = ("aiohttp", "numpy", "pydantic", "uvloop")
    return {
        "kv-harness": harness.__version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
    }


def is_simulated(engine: str) -> bool:
    """Whether a run's times were computed. False for an engine that this version does not know."""
    kind = ENGINES.get(engine)
    return kind is not None and kind.simulated


def git() -> Git:
    root = Path(harness.__file__).parent.parent
    commit = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain")
    return Git(commit=commit, dirty=None if status is None else bool(status))


def _git(root: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _gpu_names(driver: Path = Path("/proc/driver/nvidia")) -> tuple[str, ...]:
    """The models of NVIDIA's GPUs here, from the driver's own files."""
    found = []
    for path in sorted(driver.glob("gpus/*/information")):
        lines = path.read_text().splitlines()
        found += [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")]
    return tuple(found)


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
