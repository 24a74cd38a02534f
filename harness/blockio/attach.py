"""What stands behind `harness device` and `harness io`, and what a run does to have its device."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from harness.blockio.devices import HOLDING, check, create, destroy, devices, left
from harness.collectors.bpf import BpfTrace
from harness.collectors.bpf import check as check_trace
from harness.collectors.host import mount_of
from harness.engines.base import Engine
from harness.errors import DeviceError, TracingError
from harness.experiment.read import Cell
from harness.experiment.storage import Device as DeviceSpec
from harness.experiment.units import format_bytes
from harness.processes.child import Child, child_environment
from harness.records import IoTrace, Resolved
from harness.results.folder import RunFolder, new_trace_folder, write_trace
from harness.results.manifest import DeviceEntry

# Engines get 15 s before they are killed, and the file system is in use until then.
_HOLDER_GRACE_S = 60.0


@contextlib.asynccontextmanager
async def run_device(cells: Sequence[Cell], engine: str, folder: RunFolder) -> AsyncIterator[list[Cell]]:
    """The cells as they are measured: with the disk tier on the device that they ask for, made for as long as this.

    A process of its own removes the device at the end, also after SIGKILL of this one. Where devices are modelled, none
    is made. Raises DeviceError.
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
        # A device works on nobody's core: its server goes before everything else, and would go before the engine.
        cores = cells[0].experiment.engines.cores(engine).client
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
    """Traces the disk tier's I/O meanwhile, where the experiment asks for it. Raises TracingError."""
    experiment = cells[0].experiment
    if not _traced(cells[0], engine.name):
        yield
        return
    assert experiment.cache.disk is not None
    path = Path(experiment.cache.disk.path) if experiment.cache.disk.path else folder.path
    # The simulator's mode storage does its I/O in this process.
    pids = resolved.io_pids or ((os.getpid(),) if engine.name == "sim" else ())
    device = device_number(path)
    target = new_trace_folder(folder.path)
    trace = BpfTrace(target, device_number=device, pids=pids)
    await trace.start()
    started_s = engine.now_s()
    zero_ns = trace.zero_ns(started_s)
    try:
        yield
    finally:
        ended_s = engine.now_s()
        lost = await asyncio.shield(trace.stop())
        about = IoTrace(
            cells=tuple(cell.key for cell in cells), attempt=len(folder.manifest.attempts) - 1, path=str(path),
            device_number=device, pids=pids, zero_ns=zero_ns, started_s=started_s, ended_s=ended_s, lost_events=lost,
        )  # fmt: skip
        write_trace(target, about)


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
    """Before anything starts. Raises DeviceError and TracingError."""
    if (spec := _wanted(cell, engine)) is not None:
        check(spec)
    if _traced(cell, engine):
        check_trace()


def _traced(cell: Cell, engine: str) -> bool:
    storage = cell.experiment.storage
    return storage is not None and storage.trace and _moves_bytes(cell, engine)


def _wanted(cell: Cell, engine: str) -> DeviceSpec | None:
    """The device that a run of this cell would have made: engines that move real bytes have real devices."""
    storage = cell.experiment.storage
    return storage.device if storage and _moves_bytes(cell, engine) else None


def _moves_bytes(cell: Cell, engine: str) -> bool:
    simulated = cell.experiment.engines.sim
    return engine == "vllm" or (engine == "sim" and simulated.mode == "storage" and simulated.storage.device == "file")


def create_device(name: str, settings: dict[str, Any]) -> int:
    """Makes a device that stays until it is destroyed; prints where it is; returns the exit code."""
    try:
        spec = DeviceSpec.model_validate({key: value for key, value in settings.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = "".join(f"--{str(part).replace('_', '-')}: " for part in first["loc"])
        raise DeviceError(f"{option}{first.get('ctx', {}).get('error', first['msg'])}") from None
    device = create(name, spec)
    print(f"{device.mount}  {device.file_system} on {device.loop}, {format_bytes(device.size_bytes)}")
    return 0


def list_devices() -> int:
    """Prints all devices, one a line; returns the exit code."""
    for device in devices():
        limits = ", ".join(f"{key} {value:g}" for key, value in device.limits.items() if value)
        state = device.loop or "broken: destroy it"
        print(f"{device.name:24} {device.file_system:6} {format_bytes(device.size_bytes):>8}  {state}  {limits}")
        print(f"{'':24} {device.mount}")
    return 0


def destroy_devices(name: str | None, everything: bool) -> int:
    """Removes one device, or all that are there; returns the exit code."""
    if (name is None) == (not everything):
        raise DeviceError("name one device, or say --all")
    refused = []
    for each in left() if name is None else [name]:
        try:
            destroy(each)
            print(f"{each}: removed")
        except DeviceError as error:
            refused.append(error)
    if refused:
        raise refused[0]
    return 0
