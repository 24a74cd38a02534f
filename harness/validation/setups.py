"""What a point was measured on: settings, resolved sizes, versions and machine; and in what two of them differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from harness.errors import ResultsError
from harness.records import Resolved
from harness.results.manifest import CellEntry, Manifest
from harness.results.provenance import is_simulated

# Of an experiment, what is no part of the set-up: its name, the load, how it is sampled, and other engines' sections.
_NO_SETTING = ("name", "description", "workload", "measure", "engines")
# Where a server answers or an interpreter lies: two runs of one set-up differ here.
_PLACES = ("attach", "url", "python", "start_timeout")
# Resolved sizes that only repeat a setting, by that setting.
_REPEATS = {
    "resolved.chunk_tokens": "cache.chunk_tokens",
    "resolved.block_tokens": "cache.block_tokens",
    "resolved.cpu_bytes": "cache.cpu",
    "resolved.gpu_bytes": "cache.gpu",
    "resolved.gpu_blocks": "cache.gpu",
    "resolved.pool_bytes": "cache.pool",
    "resolved.disk_bytes": "cache.disk.capacity",
}
_RESOLVED = (
    "gpu_bytes", "cpu_bytes", "pool_bytes", "disk_bytes", "gpu_blocks", "block_tokens", "chunk_tokens",
    "kv_bytes_per_token", "scheduler", "eviction", "cluster", "store", "disk_file_system", "disk_device", "connector",
    "accelerator", "versions",
)  # fmt: skip
_HOST = ("cpu", "cores", "memory_bytes", "kernel", "gpus")
# Differences in these leave the question 'are the two equal?' as it is: the same set-up before and after a change.
_BEFORE_AND_AFTER = ("seed", "resolved.versions", "resolved.disk_device", "harness", "host.memory_bytes")


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One key that two set-ups have unlike values of. None: not set, or not reported."""

    key: str
    reference: Any
    candidate: Any

    @property
    def of_setup(self) -> bool:
        """Whether it makes the two unlike set-ups, rather than the same one before and after a change."""
        return not any(self.key == key or self.key.startswith(f"{key}.") for key in _BEFORE_AND_AFTER)


def setup_of(manifest: Manifest, cell: CellEntry) -> dict[str, Any]:
    """All that a cell was measured on, as plain values. A simulation's own machine is in none of its figures."""
    try:
        config = cell.experiment.model_dump(mode="json")
    except ResultsError:
        config = cell.config
    own = (config.get("engines") or {}).get(manifest.engine) or {}
    found = {key: value for key, value in config.items() if key not in _NO_SETTING} | {"engine": manifest.engine}
    found["engines"] = {manifest.engine: {key: value for key, value in own.items() if key not in _PLACES}}
    resolved = msgspec.to_builtins(cell.resolved or Resolved())
    found["resolved"] = {key: resolved[key] for key in _RESOLVED}
    found["harness"] = {
        "version": manifest.versions.get("kv-harness"),
        "commit": (manifest.git.commit or "")[:12] or None,
    }
    if not is_simulated(manifest.engine):
        host = msgspec.to_builtins(manifest.host)
        found["host"] = {key: host[key] for key in _HOST}
    return found


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Settings first. What one side does not know (None among resolved sizes) is no difference."""
    found = {each.key: each for each in _unlike(ours, theirs, "")}
    return tuple(
        each
        for key, each in found.items()
        if not (key.startswith("resolved.") and None in (each.reference, each.candidate))
        and not (key in _REPEATS and any(k == _REPEATS[key] or _REPEATS[key].startswith(f"{k}.") for k in found))
    )


def _unlike(ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str) -> Iterator[Difference]:
    for key in dict.fromkeys([*ours, *theirs]):
        left, right = ours.get(key), theirs.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            yield from _unlike(left, right, f"{prefix}{key}.")
        elif left != right:
            yield Difference(key=f"{prefix}{key}", reference=left, candidate=right)
