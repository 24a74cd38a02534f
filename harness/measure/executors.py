"""Where a sweep's computed cells are measured: processes of this machine, or a Ray cluster.

    executor = chosen("local:4", "sim", cells)

Only what is computed from a model goes there: its rows do not depend on where it is computed. A real engine, or a real
device, has its machine to itself.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from harness.engines import ENGINES
from harness.engines.kind import EngineName
from harness.errors import ConfigError
from harness.experiment.read import Cell
from harness.measure.group import repeats
from harness.measure.workers import Executor

_MOST_WORKERS = 256


def chosen(on: str, engine: EngineName, cells: Sequence[Cell]) -> Executor:
    """The executor that --on names, none of it started. Raises ConfigError."""
    kind, colon, rest = on.partition(":")
    if kind == "local" and rest.isdecimal() and 1 <= int(rest) <= _MOST_WORKERS:
        from harness.measure.local_workers import LocalWorkers

        made: Executor = LocalWorkers(on, int(rest))
    elif kind == "ray" and bool(rest) == bool(colon):
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(f"--on {on}: Ray is not installed; run pip install 'kv-harness[ray]', or use local:N")
        from harness.measure.on_ray import OnRay

        made = OnRay(on, on if rest.startswith("//") else rest or None)
    else:
        raise ConfigError(
            f"--on {on}: names no workers; use local:N with N from 1 to {_MOST_WORKERS}, ray, or ray:ADDRESS"
        )
    _check(on, engine, cells)
    return made


def _check(on: str, engine: EngineName, cells: Sequence[Cell]) -> None:
    if not ENGINES[engine].simulated:
        can = " or ".join(name for name, kind in ENGINES.items() if kind.simulated)
        raise ConfigError(f"--on {on}: spreads what is simulated, and {engine} is real; leave --on out, or use {can}")
    for cell in cells:
        if not repeats(cell.experiment, engine):
            raise ConfigError(
                f"--on {on}: cell {cell.key} moves bytes on this machine's devices, which workers would share; leave"
                " --on out, or set engines.sim.mode to model"
            )
