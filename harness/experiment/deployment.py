"""How many engines serve the load, what routes it among them, and which tiers they share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from harness.experiment.fields import FROM_LIST, Strict

# Where these keys stood before: in engines.sim.
MOVED_KEYS = ("instances", "routing", "shared")


class Deployment(Strict):
    """instances: engines of the same kind behind one router.

    routing: how the router chooses, see traces/routing.py. shared: tiers that the instances have in common. `cache`
    gives the size of each instance's own tiers, and of each shared tier.
    """

    instances: Annotated[int, Field(ge=1, le=100_000)] = 1
    routing: Literal["round-robin", "least-loaded", "prefix-aware"] = "round-robin"
    shared: Annotated[tuple[Literal["cpu", "disk"], ...], FROM_LIST] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Deployment:
        if len(set(self.shared)) != len(self.shared):
            raise ValueError("shared names a tier twice; name each once")
        return self


def upgraded(config: dict[str, Any]) -> dict[str, Any]:
    """A kept configuration as today's Experiment has it. Older manifests hold MOVED_KEYS in engines.sim."""
    engines = config.get("engines") or {}
    sim = engines.get("sim") or {}
    moved = {key: sim[key] for key in MOVED_KEYS if key in sim}
    if not moved:
        return config
    kept = {key: value for key, value in sim.items() if key not in moved}
    deployment = moved | (config.get("deployment") or {})
    return config | {"deployment": deployment, "engines": engines | {"sim": kept}}
