"""Makes a run's device and its I/O trace before the cells are measured, and ends both after them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from harness.blockio.devices import HOLDING, check_creatable, create, left
from harness.collectors.bpf import BpfTrace, check_traceable
from harness.collectors.host import mount_of
from harness.engines import ENGINES
from harness.engines.base import Engine
from harness.errors import DeviceError, TracingError
from harness.experiment.read import Cell
from harness.experiment.storage import DeviceSettings
from harness.processes.child import Child, child_environment
from harness.records import IoTrace, Resolved
from harness.results.folder import RunFolder, new_trace_folder, write_io_trace
from harness.results.manifest import DeviceEntry

# Engines get 15 s before they are killed, and the file system is in use until then.
_HOLDER_GRACE_S = 60.0


@contextlib.asynccontextmanager
async def run_device(cells: Sequence[Cell], engine: str, folder: RunFolder) -> AsyncIterator[list[Cell]]:
    """Makes the device that the cells ask for, and yields the cells with their disk tier on it.

    A process of its own removes the device at the end, even after a SIGKILL of this process. An engine that models its
    device gets its cells unchanged. Raises DeviceError.
    """
    spec = _wanted(cells[0], engine)
    if spec is None:
        yield list(cells)
        return
    name = f"run-{re.sub('[^a-z0-9]+', '-', folder.path.name.lower())[-40:]}-{os.getpid()}"
    log = folder.path / "logs" / "device.log"
    argv = [sys.executable, "-m", "harness.blockio.devices", name]
    holder = Child("device holder", argv, log=log, env=child_environment({}), grace_s=_HOLDER_GRACE_S)

    async def holds() -> bool:
        return HOLDING in holder.last_lines()

    holder.start()
    try:
        await holder.wait_until(holds, 60, "see `harness doctor`")
        # The device's server has the highest priority: on one of the engine's cores it would stop the engine.
        cores = ENGINES[engine].cores(cells[0].experiment).client
        device = await asyncio.to_thread(create, name, spec, cores)
        entry = msgspec.convert(msgspec.to_builtins(device, enc_hook=str), DeviceEntry)
        for cell in cells:
            folder.manifest.cell(cell.key).device = entry
        folder.save_manifest()
        yield [_on(cell, device.mount) for cell in cells]
    finally:
        await asyncio.shield(holder.stop())
        if name in left():
            print(f"harness: device {name} is still in use; later: harness device destroy {name}", file=sys.stderr)


def _on(cell: Cell, mount: Path) -> Cell:
    experiment = cell.experiment
    assert experiment.cache.disk is not None
    disk = experiment.cache.disk.model_copy(update={"path": str(mount)})
    cache = experiment.cache.model_copy(update={"disk": disk})
    return msgspec.structs.replace(cell, experiment=experiment.model_copy(update={"cache": cache}))


@contextlib.asynccontextmanager
async def run_trace(
    cells: Sequence[Cell], engine: Engine, resolved: Resolved, folder: RunFolder
) -> AsyncIterator[None]:
    """Traces the disk tier's I/O inside the block, where the experiment asks for it. Raises TracingError."""
    experiment = cells[0].experiment
    if not _traced(cells[0], engine.name):
        yield
        return
    path, pids = ENGINES[engine.name].disk_path(experiment, folder.path), resolved.io_pids
    if not pids:
        raise TracingError(f"storage.trace: engine {engine.name} names no process whose I/O is the disk's; remove it")
    device = device_number(path)
    target = new_trace_folder(folder.path)
    trace = BpfTrace(target, device_number=device, pids=pids)
    await trace.start()
    started_s = engine.now_s()
    zero_ns = trace.zero_ns(engine.now_s)
    try:
        yield
    finally:
        ended_s = engine.now_s()
        lost = await asyncio.shield(trace.stop())
        about = IoTrace(
            cells=tuple(cell.key for cell in cells), attempt=len(folder.manifest.attempts) - 1, path=str(path),
            device_number=device, pids=pids, zero_ns=zero_ns, started_s=started_s, ended_s=ended_s, lost_events=lost,
        )  # fmt: skip
        write_io_trace(target, about)


def device_number(path: Path) -> int:
    """The block device below a path, as the kernel's events name it. Raises TracingError."""
    mount = mount_of(path)
    source = Path(mount[0] if mount else "")
    if not source.is_block_device():
        raise TracingError(f"storage.trace: {path} is on {source}, no block device; name a cache.disk.path on one")
    number = source.stat().st_rdev
    block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    whole = (block.parent if (block / "partition").exists() else block) / "dev"
    major, minor = map(int, whole.read_text().split(":"))
    return major << 20 | minor


def check_run_storage(cell: Cell, engine: str) -> None:
    """Refuses storage settings that the engine would ignore or that this machine cannot serve; nothing has started.

    Raises DeviceError and TracingError.
    """
    storage, disk = cell.experiment.storage, ENGINES[engine].disk(cell.experiment)
    if storage is None:
        return
    if storage.device is not None and disk.moves == "none":
        raise DeviceError(f"storage.device: --engine {engine} would not use it: {disk.why}")
    if storage.trace and disk.moves != "real":
        raise TracingError(f"storage.trace: --engine {engine} moves no bytes that a trace would see: {disk.why}")
    if (spec := _wanted(cell, engine)) is not None:
        check_creatable(spec)
    if storage.trace:
        check_traceable()


def _traced(cell: Cell, engine: str) -> bool:
    storage = cell.experiment.storage
    return storage is not None and storage.trace and ENGINES[engine].disk(cell.experiment).moves == "real"


def _wanted(cell: Cell, engine: str) -> DeviceSettings | None:
    """The device that a run of this cell makes; None for an engine that moves no real bytes."""
    storage = cell.experiment.storage
    return storage.device if storage and ENGINES[engine].disk(cell.experiment).moves == "real" else None
