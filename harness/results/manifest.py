"""The manifest of a run: what was asked, on which machine, with which versions, and how each cell ended.

    manifest = read_manifest(folder)
    manifest.cells[0].resolved.gpu_blocks        # what the engine said of itself
    manifest.cells[0].cache.cpu                  # what the experiment asked for

Nothing else knows the file's keys, of this schema or of an older one.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from pydantic import TypeAdapter, ValidationError

from harness.errors import ResultsError
from harness.experiment.cache import Cache
from harness.experiment.model import Experiment
from harness.experiment.storage import Storage
from harness.experiment.workloads import Workload
from harness.records import CellRecord, Origin, Resolved, TraceOrigin
from harness.results.provenance import Git, Host

# History of the schema. `_upgraded` brings an older manifest to this one.
# 1: a free dictionary. A cell's resolved sizes had `details`, which held scheduler, eviction, cluster, store and more.
#    Manifests kept as evidence had a cell's cache, workload and storage in place of its whole config.
# 2: these structs; each former detail is a field of Resolved.
SCHEMA = 2

RunStatus = Literal["started", "complete", "failed"]
CellStatus = Literal["waiting", "started", "complete"]
_Section = TypeVar("_Section")
_WORKLOAD: TypeAdapter[Workload] = TypeAdapter(Workload)
_CACHE, _STORAGE, _EXPERIMENT = TypeAdapter(Cache), TypeAdapter(Storage), TypeAdapter(Experiment)
# What schema 1 called a detail that has another name, or another place, now.
_STORE_DETAILS = {"storage_io": "io", "storage_page_cache": "page_cache", "storage_slot_bytes": "slot_bytes"}


class Attempt(msgspec.Struct, kw_only=True):
    """One process that worked on the run. ended_at None: it is at work, or was killed. Times are UTC."""

    started_at: str
    ended_at: str | None = None
    pid: int


class DeviceEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The reference device that a cell was measured on. Only limits, file system and size are kept as evidence."""

    limits: dict[str, float]
    file_system: str
    size_bytes: int
    name: str | None = None
    mount: str | None = None
    loop: str | None = None
    backing: str | None = None
    made_by_pid: int | None = None


class CellEntry(msgspec.Struct, kw_only=True, dict=True):
    """One cell. config: the experiment as it was written; the properties below read it.

    resolved None: no engine has started for this cell. start_s: what the one that measured it took until it was ready.
    """

    key: str
    overrides: dict[str, Any] = {}
    status: CellStatus = "waiting"
    config: dict[str, Any] = {}
    resolved: Resolved | None = None
    start_s: float | None = None
    trace: TraceOrigin | None = None
    device: DeviceEntry | None = None
    record: CellRecord | None = None

    def ask_trials(self, number: int) -> None:
        """So many trials are asked of the cell from now on, whatever its experiment says."""
        self.config["measure"]["trials"] = number

    @cached_property
    def experiment(self) -> Experiment:
        """The whole experiment. Raises ResultsError where the manifest keeps no config, or only some of it."""
        return self._read(_EXPERIMENT, self.config)

    @property
    def model(self) -> str | None:
        return self.config.get("model")

    @property
    def workload_kind(self) -> str | None:
        """Also of a workload that this version cannot read."""
        return (self.config.get("workload") or {}).get("kind")

    @cached_property
    def workload(self) -> Workload | None:
        """None here and below: the config has no such section. Raises ResultsError where it cannot be read."""
        return self._section(_WORKLOAD, "workload")

    @cached_property
    def cache(self) -> Cache | None:
        return self._section(_CACHE, "cache")

    @cached_property
    def storage(self) -> Storage | None:
        return self._section(_STORAGE, "storage")

    @property
    def device_bytes_per_s(self) -> float | None:
        """How fast the reference device may be read; None without one, or without a limit."""
        device = self.storage.device if self.storage else None
        return None if device is None else device.read_bandwidth or device.bandwidth

    @property
    def disk_file_system(self) -> str | None:
        """The file system below the disk tier: of the reference device, else as the engine has found it."""
        device = self.storage.device if self.storage else None
        found = self.resolved.disk_file_system if self.resolved else None
        return found if device is None else device.file_system

    def _section(self, kind: TypeAdapter[_Section], name: str) -> _Section | None:
        content = self.config.get(name)
        return None if content is None else self._read(kind, content)

    def _read(self, kind: TypeAdapter[_Section], content: Any) -> _Section:
        try:
            return kind.validate_json(msgspec.json.encode(content), context={"resolved": True})
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "config"
            raise ResultsError(
                f"cell {self.key}: its config cannot be read ({place}: {first['msg']}); use the commit that the"
                " manifest names"
            ) from None


class Manifest(msgspec.Struct, kw_only=True):
    """A run. error: why it failed. versions: of the harness and its libraries; an engine's are in its Resolved."""

    schema: int = SCHEMA
    run_id: str
    name: str
    status: RunStatus
    error: str | None = None
    engine: str
    experiment: Origin = Origin()
    command: str | None = None
    created_at: str | None = None
    finished_at: str | None = None
    seed: int | None = None
    git: Git = Git()
    host: Host = Host()
    versions: dict[str, str] = {}
    attempts: list[Attempt] = []
    cells: list[CellEntry] = []

    def cell(self, key: str) -> CellEntry:
        return next(cell for cell in self.cells if cell.key == key)


def encode_manifest(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """Raises ResultsError where the folder is not a run's."""
    path = folder / "manifest.json"
    if not folder.exists():
        raise ResultsError(f"{folder}: no such folder; `harness list runs` shows the runs that are here")
    if not folder.is_dir():
        raise ResultsError(f"{folder}: is a file; name the run's folder, e.g. {folder.parent}")
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        kept = next((name for name in ("io.md", "validation.md") if (folder / name).exists()), None)
        cure = (
            f"it is kept evidence: read {folder / kept}" if kept else "name a run's folder, as `harness run` printed it"
        )
        raise ResultsError(f"{folder}: holds no manifest.json; {cure}") from None
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ResultsError(f"{path}: cannot be read ({error}); make the run again") from None
    return manifest_of(content, str(path), folder.name)


def read_kept_manifests(path: Path) -> dict[str, Manifest]:
    """The manifests of a validation that was kept as evidence, by run. Raises ResultsError."""
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, Any]])
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ResultsError(f"{path}: cannot be read ({error}); restore the file") from None
    return {run: manifest_of(each, f"{path}: {run}", run) for run, each in content.items()}


def manifest_of(content: dict[str, Any], where: str, run_id: str) -> Manifest:
    """The manifest of decoded JSON, of this schema or an older one. Raises ResultsError that names `where`."""
    schema = content.get("schema")
    if schema not in range(1, SCHEMA + 1):
        raise ResultsError(f"{where}: has schema {schema}, this version reads 1 to {SCHEMA}; use the version it names")
    try:
        return msgspec.convert(_upgraded(content, run_id) if schema == 1 else content, Manifest)
    except msgspec.ValidationError as error:
        raise ResultsError(f"{where}: is no manifest of schema {schema} ({error}); restore the file") from None


def _upgraded(content: dict[str, Any], run_id: str) -> dict[str, Any]:
    """Schema 1 as schema 2. Facts that a run did not keep are left out, and so take their defaults."""
    known = {key: value for key, value in content.items() if value is not None}
    known = {"run_id": run_id, "engine": "unknown engine", "status": "started"} | known
    cells = [_upgraded_cell(cell) for cell in known.get("cells", [])]
    return {"name": known["run_id"]} | known | {"schema": SCHEMA, "cells": cells}


def _upgraded_cell(cell: dict[str, Any]) -> dict[str, Any]:
    known = {key: value for key, value in cell.items() if value is not None}
    kept = {key: known.pop(key) for key in ("cache", "workload", "storage") if key in known}
    known.setdefault("config", kept)
    if "resolved" in known:
        known["resolved"] = _upgraded_resolved(known["resolved"])
    return known


def _upgraded_resolved(resolved: dict[str, Any]) -> dict[str, Any]:
    details = {key: value for key, value in (resolved.get("details") or {}).items() if value is not None}
    store = {new: details.pop(old, None) for old, new in _STORE_DETAILS.items()}
    fields = {key: value for key, value in resolved.items() if key != "details"} | details
    return fields | ({"store": store} if store["io"] is not None else {})
