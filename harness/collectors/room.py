"""Whether this machine has the cores, the memory and the disk that an engine will take. Raises PreflightError."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from harness.collectors.memory import available_memory_bytes
from harness.errors import PreflightError
from harness.experiment.fields import Cores
from harness.experiment.units import format_bytes

# Of the free memory, what the tiers may take: the engine itself needs some.
_MEMORY_SHARE = 0.9


def check_cores(cores: Cores, where: str) -> None:
    """where: the key of the section, e.g. engines.vllm.cores."""
    here = os.sched_getaffinity(0)
    for name, asked in (("engine", cores.of_engines), ("client", cores.client)):
        absent = sorted(set(asked or ()) - here)
        if absent:
            raise PreflightError(f"{where}.{name}: core {absent[0]} is not here (here: {sorted(here)}); correct it")


def check_memory(need_bytes: int, what: str) -> None:
    """what: the tiers that take it, as the subject of a sentence."""
    free = available_memory_bytes()
    if free is not None and need_bytes > _MEMORY_SHARE * free:
        raise PreflightError(
            f"cache: {what} take {format_bytes(need_bytes)} of RAM, {format_bytes(free)} are free; make them smaller"
        )


def check_disk(path: Path, capacity_bytes: int, reserve_bytes: int) -> None:
    """Whether the disk tier and what the file system keeps free fit where the path is, or will be."""
    while not path.exists() and path != path.parent:
        path = path.parent
    if not os.access(path, os.W_OK):
        raise PreflightError(f"cache.disk.path: {path} is not writable; name a folder that is")
    free = shutil.disk_usage(path).free
    if capacity_bytes + reserve_bytes > free:
        raise PreflightError(
            f"cache.disk.capacity {format_bytes(capacity_bytes)} and a reserve of {format_bytes(reserve_bytes)} exceed"
            f" the {format_bytes(free)} free at {path}; lower it, or name another cache.disk.path"
        )
